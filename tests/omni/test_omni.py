"""Faults of ``Omni``: weights that go to the device at once, arguments swallowed, results that lie."""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import pickle

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image

from omni_components import ModelError, Omni, OmniOutput, PolicyError, TransferError
from omni_components.demo import DemoPipeline

SMALL = {"num_inference_steps": 2, "height": 32, "width": 32, "output_type": "pt"}
VIDEO = {**SMALL, "num_frames": 5}
LEFT = 4096  # a scheduler keeps its time steps where the pipeline computed


def weights(pipeline) -> int:
    modules = [one for one in pipeline.components.values() if isinstance(one, torch.nn.Module)]
    tensors = [tensor for one in modules for tensor in (*one.parameters(), *one.buffers())]
    return sum({one.data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


# --- what it gives --------------------------------------------------------------------------------------


def test_the_demos_picture_is_the_pipelines_own():
    with Omni("demo", enable_cpu_offload=True, device="cpu") as omni:
        output = omni.generate("a bold 7", seed=5, steps=3)
    expected = DemoPipeline.from_pretrained()("a bold 7", steps=3, seed=5).images[0]
    assert output.images[0].tobytes() == expected.tobytes()
    assert (output.seed, output.frames, output.audio, output.sample_rate) == (5, None, None, None)
    assert output.seconds > 0


def test_a_folders_picture_is_the_same_with_offload_and_all_resident_on_less_memory(picture_folder, sim):
    """I1, I8: equal outputs; the run that takes turns fits where the resident one does not."""
    with Omni(picture_folder, device=sim.device) as omni:
        assert omni.handle is None
        total = weights(omni.pipeline)
        assert sim.stats().allocated >= total
        resident = omni.generate("a lighthouse", seed=3, **SMALL)
        assert omni.report().rows == ()
    assert sim.stats().allocated < LEFT
    del omni
    gc.collect()
    sim.reset()
    with Omni(picture_folder, enable_cpu_offload=True, device=sim.device) as omni:
        assert sim.stats().peak < LEFT  # loading went to the host only
        offloaded = omni.generate("a lighthouse", seed=3, **SMALL)
        omni.handle.ledger.audit()
        rows = {row.name: row.loads for row in omni.report().rows}
        assert sim.stats().d2h_bytes < total // 10
    peak = sim.stats().peak
    assert torch.equal(resident.images, offloaded.images)
    assert offloaded.images.device.type == "cpu"
    assert rows == {"text_encoder": 1, "unet": 1, "vae": 1}
    assert peak < total
    sim.capacity = peak
    with pytest.raises(torch.OutOfMemoryError):
        Omni(picture_folder, device=sim.device)


def test_a_batch_gives_a_picture_for_each_prompt_and_one_seed_each(picture_folder):
    with Omni(picture_folder, enable_cpu_offload=True, device="cpu") as omni:
        both = omni.generate(["one", "two"], seed=[1, 2], **SMALL)
        alone = omni.generate("two", seed=2, **SMALL)
    assert both.images.shape == (2, 3, 32, 32)
    assert both.seed == (1, 2)
    torch.testing.assert_close(both.images[1], alone.images[0], rtol=1e-4, atol=1e-4)


def test_a_seed_that_nobody_gave_is_in_the_output_and_gives_the_same_again():
    with Omni("demo", device="cpu") as omni:
        first, other = omni.generate("one", steps=1), omni.generate("one", steps=1)
        again = omni.generate("one", steps=1, seed=first.seed)
    assert first.seed != other.seed
    assert again.images[0].tobytes() == first.images[0].tobytes()


def test_frames_of_a_video_come_back_on_the_host(video_folder, sim):
    with Omni(video_folder, enable_cpu_offload=True, device=sim.device) as omni:
        steps = []
        output = omni.generate("a boat", seed=1, on_step=lambda *one: steps.append(one), **VIDEO)
    assert output.images is None
    assert output.frames.shape[:2] == (1, 5)
    assert output.frames.device.type == "cpu"
    assert steps == [(1, 2), (2, 2)]
    assert sim.stats().allocated < LEFT


def test_a_pipelines_own_generator_is_taken_and_no_seed_is_claimed(picture_folder):
    with Omni(picture_folder, device="cpu") as omni:
        mine = omni.generate("x", generator=torch.Generator("cpu").manual_seed(4), **SMALL)
        same = omni.generate("x", seed=4, **SMALL)
        with pytest.raises(PolicyError, match="seed= or generator="):
            omni.generate("x", seed=4, generator=torch.Generator("cpu"), **SMALL)
    assert mine.seed is None
    assert torch.equal(mine.images, same.images)


def test_noise_is_drawn_on_the_host_wherever_it_computes(picture_folder, sim, monkeypatch):
    real, drawn = StableDiffusionPipeline.__call__, []

    @functools.wraps(real)
    def watched(*args, generator, **options):
        drawn.append(generator)
        return real(*args, generator=generator, **options)

    monkeypatch.setattr(StableDiffusionPipeline, "__call__", watched)
    with Omni(picture_folder, enable_cpu_offload=True, device=sim.device) as omni:
        omni.generate("x", seed=9, **SMALL)
    assert [(one.device.type, one.initial_seed()) for one in drawn] == [("cpu", 9)]


def test_a_dtype_by_name_is_the_weights(picture_folder):
    with Omni(str(picture_folder), dtype="bfloat16", device="cpu") as omni:
        assert {one.dtype for one in omni.pipeline.unet.parameters()} == {torch.bfloat16}


def test_output_types_of_the_pipeline_are_given_as_they_are(picture_folder):
    with Omni(picture_folder, device="cpu") as omni:
        pil = omni.generate("x", seed=1, **{**SMALL, "output_type": "pil"})
        array = omni.generate("x", seed=1, **{**SMALL, "output_type": "np"})
    assert isinstance(pil.images[0], Image.Image)
    assert isinstance(array.images, np.ndarray)


def test_an_output_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        OmniOutput(seed=1).seed = 2


# --- arguments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("stepz", "steps"), ("sead", "seed"), ("guidance", "guidance_scale"), ("promt", "prompt")],
)
def test_an_unknown_sampling_argument_is_refused_with_the_nearest_name(wrong, right):
    with (
        Omni("demo", device="cpu") as omni,
        pytest.raises(PolicyError, match=rf"\b{right}\b.*instead of '{wrong}'"),
    ):
        omni.generate("one", **{wrong: 1})


def test_an_argument_that_a_pipeline_would_swallow_in_its_kwargs_is_refused(picture_folder):
    with Omni(picture_folder, device="cpu") as omni:
        assert "kwargs" in omni._arguments.parameters
        with pytest.raises(PolicyError, match="one of num_inference_steps"):
            omni.generate("x", num_inference_step=2)
        with pytest.raises(PolicyError, match="return_dict"):
            omni.generate("x", return_dict=False)


@pytest.mark.parametrize(
    ("wrong", "right"), [("vea", "vae"), ("devise", "device"), ("enable_cpu_ofload", "enable_cpu_offload")]
)
def test_an_unknown_policy_field_is_refused_before_anything_is_loaded(wrong, right, monkeypatch):
    monkeypatch.setattr(DemoPipeline, "from_pretrained", None)
    with pytest.raises(PolicyError, match=rf"\b{right}\b.*instead of '{wrong}'"):
        Omni("demo", enable_cpu_offload=True, **{wrong: "exclusive"})


def test_a_policy_field_without_offload_is_refused_not_ignored():
    with pytest.raises(PolicyError, match="enable_cpu_offload=True"):
        Omni("demo", vae="exclusive")


def test_a_policy_field_reaches_the_ledger():
    with Omni("demo", enable_cpu_offload=True, device="cpu", vae="exclusive") as omni:
        assert omni.handle.policy.vae == "exclusive"
        assert all(not row.resident for row in omni.report().rows)


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, True, "7", [1, 2], []])
def test_a_seed_that_the_pipeline_cannot_take_is_refused(seed):
    with Omni("demo", device="cpu") as omni, pytest.raises(PolicyError, match="seed="):
        omni.generate("one", seed=seed)


def test_a_seed_for_a_pipeline_that_takes_none_is_refused_not_ignored(monkeypatch):
    real = DemoPipeline.__call__

    def seedless(self, prompt, *, steps=1):
        return real(self, prompt, steps=steps)

    monkeypatch.setattr(DemoPipeline, "__call__", seedless)
    with Omni("demo", device="cpu") as omni:
        assert omni.generate("one", steps=1).seed is None
        with pytest.raises(PolicyError, match="instead of 'seed'"):
            omni.generate("one", seed=1)


@pytest.mark.parametrize("prompt", [[], 7, ["one", 2], b"one"])
def test_a_prompt_that_is_no_text_is_refused(prompt):
    with Omni("demo", device="cpu") as omni, pytest.raises((PolicyError, TypeError)):
        omni.generate(prompt)


@pytest.mark.parametrize("dtype", ["float8", "int8", torch.int8, "bf16"])
def test_a_dtype_that_no_pipeline_computes_in_is_refused(dtype):
    with pytest.raises(PolicyError, match="float32, bfloat16, float16"):
        Omni("demo", dtype=dtype)


def test_the_demo_in_half_precision_is_refused():
    with pytest.raises(PolicyError, match="the demo computes in float32"):
        Omni("demo", dtype="bfloat16")


def test_a_second_step_callback_is_refused_not_dropped(picture_folder):
    with Omni(picture_folder, device="cpu") as omni, pytest.raises(PolicyError, match="on_step= or"):
        omni.generate("x", on_step=print, callback_on_step_end=lambda *_: {}, **SMALL)


# --- models that are not there --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "nowhere", "./no/where", "/no/where", "a/b/c", "x y/z", "../x", "-/-"])
def test_a_name_that_can_be_no_model_is_refused(folder, name):
    with pytest.raises(ModelError, match="neither a folder here"):
        Omni(name)


def test_a_folder_of_something_else_is_refused_with_how_to_make_a_right_one(folder):
    os.makedirs("some/thing")
    with pytest.raises(ModelError, match="save_pretrained"):
        Omni("some/thing")


def test_a_broken_folder_is_one_error_with_its_cause(folder):
    os.makedirs("broken")
    with open("broken/model_index.json", "w") as file:
        file.write("{not json")
    with pytest.raises(ModelError, match="could not be loaded") as caught:
        Omni("broken")
    assert caught.value.__cause__ is not None
    assert "\n" not in str(caught.value)


def test_a_hub_id_that_is_not_in_the_cache_says_how_to_fetch_it():
    with pytest.raises(ModelError, match="without local_files_only, or pass a folder") as caught:
        Omni("nobody/nothing", local_files_only=True)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.model) == (str(caught.value), "nobody/nothing")


def test_a_hub_that_cannot_be_reached_says_what_to_do(monkeypatch):
    from diffusers import DiffusionPipeline

    def unreachable(source, *, local_files_only, **_):
        assert (source, local_files_only) == ("nobody/nothing", False)
        raise OSError("Name or service\nnot known")

    monkeypatch.setattr(DiffusionPipeline, "download", unreachable)
    with pytest.raises(ModelError, match=r"service not known.*hf download nobody/nothing") as caught:
        Omni("nobody/nothing")
    assert "\n" not in str(caught.value)


# --- its end --------------------------------------------------------------------------------------------


def test_the_end_of_the_block_gives_the_device_back_and_keeps_the_report(sim):
    with Omni("demo", enable_cpu_offload=True) as omni:
        omni.generate("one", steps=1)
        assert sim.stats().allocated > 0
    assert sim.stats().allocated == 0
    assert {row.name: row.loads for row in omni.report().rows}["generator"] == 1
    with pytest.raises(ModelError, match="is closed"):
        omni.generate("one")
    omni.close()  # idempotent
    assert "closed" in repr(omni)


def test_an_error_in_the_block_goes_on_untouched_and_the_device_is_free(sim):
    with pytest.raises(ZeroDivisionError), Omni("demo", enable_cpu_offload=True) as omni:
        omni.generate("one", steps=1, on_step=lambda *_: 1 / 0)
    assert sim.stats().allocated == 0
    assert not omni.handle.enabled


def test_a_device_without_room_leaves_omni_usable(sim):
    """I6."""
    with Omni("demo", enable_cpu_offload=True) as omni:
        sim.capacity = "1MiB"
        with pytest.raises(TransferError):
            omni.generate("one", steps=1)
        sim.capacity = None
        assert omni.generate("one", steps=1).images[0].size == (128, 128)
        omni.handle.ledger.audit()
