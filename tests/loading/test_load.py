"""What ``load_components`` gives equals what ``from_pretrained`` gives; I5, I7 and I8 hold from the first load on."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, DiffusionPipeline, StableDiffusionPipeline, WanPipeline
from safetensors.torch import load_file, save_file

from omni_components import ModelError, PolicyError, ResidencyWarning, WeightsError, load_components, offload
from omni_components.loading import load as loading
from tests.diffusers import tiny

LINUX = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="mapped files are recognised on Linux only"
)
MAKERS = [
    tiny.wan,
    tiny.stable_diffusion_3,
    tiny.stable_diffusion_xl,
    tiny.stable_diffusion_control_net,
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Each pipeline as a sharded folder, with a blank in its path."""
    made = {}

    def folder(maker):
        if maker not in made:
            made[maker] = tmp_path_factory.mktemp("a pipeline")
            maker().save_pretrained(made[maker], max_shard_size="1MB")
        return str(made[maker])

    return folder


@pytest.fixture
def copied(folders, tmp_path):
    """A folder of its own that a test may spoil."""
    return Path(shutil.copytree(folders(tiny.stable_diffusion_control_net), tmp_path / "copy"))


def theirs(folder, **asked):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tiny.quiet(DiffusionPipeline.from_pretrained(folder, **asked))


def ours(folder, **asked):
    return tiny.quiet(load_components(folder, **asked))


def modules(pipe):
    return {name: one for name, one in pipe.components.items() if isinstance(one, torch.nn.Module)}


def values(module):
    found = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return dict(found)


def config(module):
    return module.config.to_dict() if hasattr(module.config, "to_dict") else dict(module.config)


def assert_equal(one, other):
    assert type(one) is type(other)
    assert dict(one.config) == dict(other.config)
    assert modules(one).keys() == modules(other).keys()
    for name, module in modules(one).items():
        twin = modules(other)[name]
        assert type(module) is type(twin)
        assert config(module) == config(twin)
        assert module.training == twin.training
        mine, right = values(module), values(twin)
        assert list(mine) == list(right)
        for path, tensor in mine.items():
            assert isinstance(tensor, torch.nn.Parameter) is isinstance(right[path], torch.nn.Parameter), path
            assert (tensor.dtype, tensor.requires_grad) == (right[path].dtype, right[path].requires_grad), (
                path
            )
            assert torch.equal(tensor, right[path]), path
            assert type(tensor) is type(right[path]), path


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("maker", MAKERS, ids=lambda one: one.__name__)
def test_a_tensor_a_type_or_a_setting_other_than_from_pretraineds(folders, maker, dtype):
    """I7: every parameter and buffer, persistent or not."""
    folder = folders(maker)
    asked = {} if dtype is None else {"torch_dtype": dtype}
    assert_equal(ours(folder, dtype=dtype), theirs(folder, **asked))


@pytest.mark.parametrize("maker", MAKERS, ids=lambda one: one.__name__)
def test_a_model_that_is_loaded_a_second_time_while_the_pipeline_is_put_together(folders, maker, monkeypatch):
    """Optional components, such as Wan's transformers, among them: what was filled is what the pipeline has."""
    filled = []
    plain = loading.fill
    monkeypatch.setattr(
        loading, "fill", lambda model, *more, **how: filled.append(model) or plain(model, *more, **how)
    )
    pipe = ours(folders(maker))
    assert {id(one) for one in modules(pipe).values()} == {id(one) for one in filled}


def test_a_dtype_for_each_component(folders):
    folder = folders(tiny.wan)
    table = {"transformer": torch.float16, "default": torch.bfloat16}
    assert_equal(ours(folder, dtype=table), theirs(folder, torch_dtype=table))


@LINUX
@pytest.mark.parametrize("masters", ["pinned", "mapped"])
def test_an_offloaded_pipeline_that_computes_other_values_or_races(folders, sim, masters):
    """I1, I5, I8: two pinned slabs carry mapped weights; the device reads no slab that is being filled."""
    folder = folders(tiny.wan)
    asked = {"height": 16, "width": 16, "num_frames": 5, "num_inference_steps": 2, "output_type": "pt"}
    outputs = []
    for pipe in (theirs(folder), ours(folder, masters=masters)):
        with offload(pipe, sim.device, masters=masters) as handle:
            outputs.append(pipe("a", **asked, generator=tiny.seeded()).frames.cpu())
            handle.ledger.audit()
            facts = handle.report().facts
        assert sim.races == []
    assert torch.equal(*outputs)
    assert (facts.mapped_bytes > 0) is (masters == "mapped")


def test_masters_that_are_copied_when_offload_is_enabled(folders, sim):
    """The slabs that the loader filled are the masters: no weight moves, at the second enabling neither."""
    sim.reset()
    pipe = ours(folders(tiny.stable_diffusion_xl), masters="pinned")
    stats = sim.stats()
    assert (stats.allocations, stats.h2d_copies, stats.pinned) == (0, 0, 0)  # loading touches no device
    names = [one for one in modules(pipe) if one != "vae"]
    before = {name: [one.data_ptr() for one in modules(pipe)[name].parameters()] for name in names}
    for _ in range(2):
        with offload(pipe, sim.device):
            after = {name: [one.data_ptr() for one in modules(pipe)[name].parameters()] for name in names}
            assert after == before


@LINUX
def test_mapped_weights_with_small_staging_slabs(folders, sim, monkeypatch):
    """I7: slabs far smaller than a tensor, filled many times; what arrives is what is in the file."""
    monkeypatch.setattr("omni_components.attach.fleet.STAGING_BYTES", 8192)
    pipe = ours(folders(tiny.stable_diffusion_control_net), masters="mapped")
    right = {name: one.clone() for name, one in pipe.unet.state_dict().items()}
    with offload(pipe, sim.device, masters="mapped") as handle, handle.scope("unet"):
        found = {name: one.cpu() for name, one in pipe.unet.state_dict().items()}
        assert handle.report().facts.pinned_bytes < 1 << 20
    assert all(torch.equal(one, right[name]) for name, one in found.items())
    assert sim.races == []


def test_bytes_that_are_not_told(folders):
    told = []
    ours(folders(tiny.wan), on_bytes=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[0][0] == 0
    assert told[-1][0] == told[-1][1] > 1 << 20


@LINUX
def test_mapped_weights_that_have_to_be_converted_are_told_of(folders):
    with pytest.warns(ResidencyWarning, match="have to be converted"):
        ours(folders(tiny.wan), dtype=torch.bfloat16, masters="mapped")


@LINUX
@pytest.mark.parametrize("found", ["before it is built", "while it is built", "converted"])
def test_a_warning_names_the_line_of_whoever_loads(folders, monkeypatch, found):
    """Not one in here, of which its reader cannot do anything."""
    asked = {"dtype": torch.bfloat16, "masters": "mapped"} if found == "converted" else {}
    if found == "before it is built":
        monkeypatch.setattr(loading, "_exotic", lambda kind, folder: "as asked")
    elif found == "while it is built":
        monkeypatch.setattr(loading, "stranded", lambda model: ["a.weight"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tiny.quiet(load_components(folders(tiny.wan), **asked))
    told = [one for one in caught if issubclass(one.category, ResidencyWarning)]
    assert told
    assert {one.filename for one in told} == {__file__}


# --- folders of other kinds -------------------------------------------------------------------------------


def test_a_folder_of_one_model(folders):
    folder = f"{folders(tiny.stable_diffusion_control_net)}/vae"
    found, right = load_components(folder), AutoencoderKL.from_pretrained(folder)
    assert all(torch.equal(one, right.state_dict()[name]) for name, one in found.state_dict().items())
    assert type(load_components(AutoencoderKL, folder)) is AutoencoderKL


def test_a_class_and_a_component_that_is_given(folders):
    given = AutoencoderKL.from_pretrained(f"{folders(tiny.stable_diffusion_control_net)}/vae")
    pipe = load_components(StableDiffusionPipeline, folders(tiny.stable_diffusion_control_net), vae=given)
    assert type(pipe) is StableDiffusionPipeline
    assert pipe.vae is given


def test_a_variant(tmp_path):
    tiny.stable_diffusion().to(torch.float16).save_pretrained(tmp_path, variant="fp16")
    pipe = ours(str(tmp_path), variant="fp16", dtype=torch.float16)
    assert_equal(pipe, theirs(str(tmp_path), variant="fp16", torch_dtype=torch.float16))
    with pytest.raises(WeightsError, match="variant 'bf16'"):
        load_components(tmp_path, variant="bf16")
    with pytest.raises(WeightsError, match="pass the variant="):
        load_components(tmp_path)


def test_links_into_a_cache_of_blobs(copied):
    """As the hub's cache lays out a snapshot."""
    blobs = copied.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(copied.rglob("*.safetensors"))):
        target = blobs / f"{number:040x}"
        file.rename(target)
        file.symlink_to(os.path.relpath(target, file.parent))
    assert_equal(ours(str(copied)), theirs(str(copied)))


@LINUX
def test_files_that_may_only_be_read(copied):
    for file in copied.rglob("*.safetensors"):
        file.chmod(0o444)
    pipe = ours(str(copied), masters="mapped")
    with torch.no_grad():
        before = {name: one.clone() for name, one in pipe.vae.state_dict().items()}
        for one in pipe.vae.parameters():
            one.fill_(1.0)
    again = ours(str(copied)).vae.state_dict()
    assert all(torch.equal(one, again[name]) for name, one in before.items())


# --- faults -------------------------------------------------------------------------------------------------


def rewritten(folder: Path, change) -> Path:
    """One of the VAE's shards with other tensors, and its index to match."""
    index = next((folder / "vae").glob("*.index.json"))
    facts = json.loads(index.read_text())
    file = index.parent / sorted(set(facts["weight_map"].values()))[0]
    tensors = change(load_file(file))
    facts["weight_map"] = {k: v for k, v in facts["weight_map"].items() if v != file.name}
    facts["weight_map"] |= dict.fromkeys(tensors, file.name)
    save_file(tensors, file)
    index.write_text(json.dumps(facts))
    return file


def test_a_missing_tensor_is_named_with_the_nearest(copied):
    def misspelt(tensors):
        name = sorted(tensors)[0]
        return {
            **{k: v for k, v in tensors.items() if k != name},
            name.replace("weight", "wieght").replace("bias", "bais"): tensors[name],
        }

    rewritten(copied, misspelt)
    with pytest.raises(WeightsError, match=r"lacks 1 of its tensors.*Nearest") as caught:
        load_components(copied)
    assert caught.value.component == "vae"


def test_a_tensor_that_the_model_does_not_have_is_told_of(copied):
    rewritten(copied, lambda tensors: {**tensors, "nobody.weight": torch.ones(2)})
    with pytest.warns(ResidencyWarning, match="nobody.weight"):
        load_components(copied)


def test_another_shape(copied):
    file = rewritten(
        copied,
        lambda tensors: {
            k: v[:1].clone() if i == 0 else v for i, (k, v) in enumerate(sorted(tensors.items()))
        },
    )
    with pytest.raises(WeightsError, match="has shape") as caught:
        load_components(copied)
    assert caught.value.file == str(file)
    assert caught.value.tensor is not None


def test_a_truncated_shard_of_a_text_encoder(copied):
    file = sorted((copied / "text_encoder").glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightsError, match="truncated") as caught:
        load_components(copied)
    assert (caught.value.component, caught.value.file) == ("text_encoder", str(file))
    assert caught.value.tensor is not None


def test_a_text_encoder_without_one_of_its_tensors(copied):
    folder = copied / "text_encoder"
    index = next(folder.glob("*.index.json"))
    state = {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}
    gone = next(name for name in state if name.endswith("fc1.weight"))
    index.unlink()
    save_file({k: v for k, v in state.items() if k != gone}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match="lacks 1 of its tensors"):
        load_components(copied)


def test_a_component_that_asks_for_quantisation_is_left_to_its_own_loader(copied):
    path = copied / "vae" / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "nobodys"}})
    )
    with (
        pytest.warns(ResidencyWarning, match="'vae' is loaded by its own"),
        pytest.raises(ValueError, match="nobodys"),
    ):
        load_components(copied)


def test_a_folder_without_any_model(tmp_path):
    with pytest.raises(ModelError, match=r"without model_index.json or config.json"):
        load_components(tmp_path)
    with pytest.raises(ModelError, match="neither a folder here nor"):
        load_components(tmp_path / "gone")


def test_arguments_that_are_not_possible(tmp_path):
    for wrong in ({"masters": "warm"}, {"folder": tmp_path}):
        with pytest.raises(PolicyError):
            load_components(tmp_path, **wrong)
    with pytest.raises(PolicyError, match="WanPipeline"):
        load_components(WanPipeline)
