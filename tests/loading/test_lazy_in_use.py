"""Lazily loaded weights, and those that wait for their second load, among what people do with a pipeline."""

from __future__ import annotations

import functools
import itertools
import shutil
import sys
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusionPipeline, WanTransformer3DModel
from peft import LoraConfig
from torch import nn

from omni_components import WeightsError, load_components, offload
from omni_components.components.unread import Source, Unread
from omni_components.loading.deferred import Plan
from omni_components.transfer import masters
from tests.diffusers import tiny

ASKED = {"height": 16, "width": 16, "num_inference_steps": 2, "output_type": "pt"}
LINUX = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="mapped files are recognised on Linux only"
)
ORDER = ("text_encoder", "unet")
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Its text encoder has position ids besides its weights: they are in a slab of their own from the first."""
    made = tmp_path_factory.mktemp("sd")
    tiny.stable_diffusion().save_pretrained(made)
    return made


def ours(folder, dtype, **asked):
    return tiny.quiet(load_components(folder, dtype=dtype, **({"lazy": True} | asked)))


def run(pipe):
    return pipe("a", **ASKED, generator=tiny.seeded()).images.cpu()


def unread(module):
    return [one for one in module.parameters() if type(one) is Unread]


# --- copied ahead -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arena", ["fit", "keep"])
def test_weights_that_a_copy_made_ahead_did_not_have(folder, sim, arena):
    """I5: what is read and pinned by the load itself was not in the copy, and is not taken for copied."""
    pipe = ours(folder, BF16)
    with offload(pipe, sim.device, prefetch=ORDER, arena=arena, device_memory=1 << 30) as handle:
        for name in ("unet", "text_encoder"):
            with handle.scope(name):
                found = [one.cpu() for one in getattr(pipe, name).parameters()]
            plain = getattr(ours(folder, BF16, lazy=False), name)
            assert all(map(torch.equal, found, plain.parameters()))
    assert sim.races == []


@LINUX
def test_pages_that_are_never_pinned_since_others_are_copied_ahead(folder, sim):
    """Its position ids are pinned, and could go ahead each time: its weights would stay in their file for good."""
    pipe = ours(folder, None)
    with offload(pipe, sim.device, prefetch=ORDER, device_memory=1 << 30) as handle:
        for _ in range(3):
            for name in ORDER:
                with handle.scope(name):
                    pass
        ahead = [one.component for one in handle.events if one.cause == "prefetch" and one.bytes > 1000]
        assert handle.report().facts.mapped_bytes == sum(
            one.numel() * one.element_size() for one in pipe.vae.parameters()
        )
    assert set(ahead) == set(ORDER)


# --- copied while it is read ------------------------------------------------------------------------------------


@pytest.fixture
def small_slabs(monkeypatch):
    """So that the components here have several."""
    monkeypatch.setattr(masters, "SLAB_BYTES", 16 << 10)


def test_a_slab_that_waits_for_the_next_to_be_read(folder, sim, small_slabs, monkeypatch):
    """Each is on its way before the next is read; I5: and all of it arrives."""
    order = []
    pipe = ours(folder, BF16)
    fill, send = Plan.fill, torch.Tensor.copy_

    def filled(plan, target, told):
        order.append("read")
        fill(plan, target, told)

    def sent(target, source, *asked, **more):
        if target.device.type == "sim":
            order.append("sent")
        return send(target, source, *asked, **more)

    monkeypatch.setattr(Plan, "fill", filled)
    monkeypatch.setattr(torch.Tensor, "copy_", sent)
    with offload(pipe, sim.device) as handle, handle.scope("text_encoder"):
        found = [one.cpu() for one in pipe.text_encoder.parameters()]
        slabs = len(handle.ledger.mover.cargo("text_encoder").home.slabs)
    monkeypatch.undo()
    runs = [kind for kind, _ in itertools.groupby(order)]
    assert runs.count("sent") > 2
    assert slabs > 2
    plain = ours(folder, BF16, lazy=False).text_encoder
    assert all(map(torch.equal, found, plain.parameters()))
    assert sim.races == []


def test_a_read_that_fails_while_copies_of_the_rest_are_under_way(folder, sim, small_slabs, monkeypatch):
    """I6, I7: all of it is on the host then, and the next load goes on where this one ended."""
    pipe = ours(folder, BF16)
    fill, read = Plan.fill, []

    def fails_in_the_middle(plan, target, told):
        if len(read) == 12:
            raise WeightsError("text_encoder", "file", None, "cannot be read.", "Try again.")
        read.append(plan)
        fill(plan, target, told)

    with offload(pipe, sim.device) as handle:
        monkeypatch.setattr(Plan, "fill", fails_in_the_middle)
        with pytest.raises(WeightsError), handle.scope("text_encoder"):
            pass
        handle.ledger.check()
        handle.ledger.audit()
        assert {one.device.type for one in pipe.text_encoder.parameters()} == {"cpu"}
        assert len(unread(pipe.text_encoder)) > 0
        monkeypatch.undo()
        with handle.scope("text_encoder"):
            found = [one.cpu() for one in pipe.text_encoder.parameters()]
    plain = ours(folder, BF16, lazy=False).text_encoder
    assert all(map(torch.equal, found, plain.parameters()))
    assert sim.races == []


# --- what may be pinned -----------------------------------------------------------------------------------------


@LINUX
@pytest.mark.parametrize("limit", ["none", "the weights alone"])
def test_pages_that_are_copied_into_memory_which_may_not_be_pinned(folder, sim, limit):
    """I8: then they stay where they are, at no cost; nothing becomes pageable."""
    pipe = ours(folder, None)
    modules = (pipe.text_encoder, pipe.unet, pipe.vae)
    weights = sum(one.numel() * one.element_size() for module in modules for one in module.parameters())
    asked = {"pin_memory": False} if limit == "none" else {"pinned_limit": weights + (3 << 20)}
    with offload(pipe, sim.device, **asked) as handle:
        outputs = [run(pipe) for _ in range(3)]
        facts = handle.report().facts
    assert facts.pageable_bytes < 1000
    assert facts.mapped_bytes > 1000
    assert facts.pinned_bytes <= asked.get("pinned_limit", 0)
    assert all(torch.equal(one, outputs[0]) for one in outputs)


@LINUX
def test_staging_that_keeps_its_share_of_the_limit(folder, sim):
    """What was given back may be pinned again, by an offload that joins the ledger."""
    first = ours(folder, None)
    with offload(first, sim.device) as handle:
        for _ in range(2):
            run(first)
        staging = handle.ledger.mover.staging
        assert staging is not None
        assert staging.slabs == ()
        assert staging._budget.taken == handle.report().facts.pinned_bytes


@LINUX
def test_files_of_a_pipeline_that_joins_pass_through_staging_too(folder, sim, tmp_path):
    """Its files were not there when the first one's were looked for."""
    with offload(ours(folder, None), sim.device) as handle:
        second = ours(shutil.copytree(folder, tmp_path / "second"), None)
        with offload(second, sim.device, ledger=handle.ledger):
            staging = handle.ledger.mover.staging
            assert all(one.data_ptr() in staging._mappings for one in second.unet.parameters())


# --- what becomes of one ----------------------------------------------------------------------------------------


def promised(value=1.0):
    return Source().promise(
        torch.zeros(2), nn.Parameter(torch.zeros(2), requires_grad=False), lambda one: one.fill_(value)
    )


def test_a_parameter_made_of_one_that_is_unread():
    made = nn.Parameter(promised(), requires_grad=False)
    assert type(made) is nn.Parameter
    assert made.eq(1.0).all()
    assert type(promised().detach()) is torch.Tensor


def test_a_parameter_replaced_by_one_of_its_class():
    """accelerate's ``set_module_tensor_to_device`` does so."""
    old = promised()
    made = type(old)(torch.ones(2), requires_grad=False)
    assert type(made) is nn.Parameter
    assert not made.requires_grad


def test_another_thread_that_finds_one_half_way_to_a_parameter():
    """At each line of the change it is a parameter, and as long as it is unread it says where its values are."""
    tensor, faults = promised(), []

    def line(frame, event, argument):
        if not isinstance(tensor, nn.Parameter) or (type(tensor) is Unread and "source" not in vars(tensor)):
            faults.append(frame.f_lineno)
        return line

    sys.settrace(lambda frame, event, argument: line if frame.f_code is Source.read.__code__ else None)
    try:
        tensor.source.read()
    finally:
        sys.settrace(None)
    assert faults == []
    assert type(tensor) is nn.Parameter
    assert vars(tensor) == {}


# --- who uses them ----------------------------------------------------------------------------------------------


def test_native_code_on_the_host_that_sees_zeros(folder):
    """With the host as the execution device nothing has to travel, and still a load reads the component."""
    pipe = ours(folder, BF16)
    with offload(pipe, "cpu") as handle:
        assert unread(pipe.unet)
        with handle.scope("unet"):
            assert unread(pipe.unet) == []
        assert unread(pipe.text_encoder)


def test_compiled_code_that_sees_zeros():
    source, module = Source(), nn.Linear(4, 4)
    plain = [one.detach().clone() for one in (module.weight, module.bias)]
    for name, value in zip(("weight", "bias"), plain, strict=True):
        like = module._parameters[name]
        module._parameters[name] = source.promise(
            torch.zeros_like(value), like, lambda one, value=value: one.copy_(value)
        )
    torch._dynamo.reset()
    x = torch.randn(2, 4)
    assert torch.equal(
        torch.compile(module, backend="aot_eager")(x), nn.functional.linear(x, plain[0], plain[1])
    )


def adapt(pipe):
    torch.manual_seed(5)
    pipe.unet.add_adapter(
        LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights="gaussian"), "style"
    )
    for name, one in pipe.unet.named_parameters():
        if "lora_B" in name:
            one.data.normal_(0, 0.5)
    pipe.unet.eval()


@pytest.mark.parametrize("dtype", [BF16, None])
@pytest.mark.parametrize("after", [0, 1])
def test_an_adapter_before_the_first_load_or_between_two(folder, sim, dtype, after):
    """I5, I7: added, merged, taken back and removed, while its weights are read, mapped or about to be pinned."""
    steps = (
        lambda pipe: adapt(pipe),
        lambda pipe: pipe.fuse_lora(adapter_names=["style"]),
        lambda pipe: pipe.unfuse_lora(),
        lambda pipe: pipe.unload_lora_weights(),
    )
    plain, pipe = ours(folder, dtype, lazy=False), ours(folder, dtype)
    with offload(pipe, sim.device) as handle:
        for _ in range(after):
            run(pipe)
        for step in steps:
            step(plain)
            step(pipe)
            assert torch.equal(run(pipe), run(plain))
        handle.ledger.audit()


# --- classes ----------------------------------------------------------------------------------------------------


def test_an_optional_component_that_the_common_base_loads_twice(tmp_path, monkeypatch):
    tiny.wan().save_pretrained(tmp_path)
    plain, made = WanTransformer3DModel.__init__, []

    @functools.wraps(plain)
    def init(self, *args, **options):
        made.append(self)
        plain(self, *args, **options)

    monkeypatch.setattr(WanTransformer3DModel, "__init__", init)
    load_components(DiffusionPipeline, tmp_path, lazy=True, dtype=BF16)
    assert len(made) == 2


def test_the_common_base_as_the_class(folder):
    assert type(load_components(DiffusionPipeline, folder)) is StableDiffusionPipeline
