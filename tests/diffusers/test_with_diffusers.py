"""Our offload beside what diffusers itself does to a pipeline: sharing, saving, moving, other offloads."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diffusers import (
    DDPMPipeline,
    DDPMScheduler,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
    UNet2DModel,
)

from omni_components import DeclarationError, Offload, OwnershipError, Role, offload
from omni_components.residency.events import EventKind
from omni_components.testing import SimulatedAccelerator
from tests.diffusers import tiny
from tests.diffusers.runs import modules
from tests.diffusers.test_entry_points import img2img


def text2img(pipeline: Any) -> torch.Tensor:
    arguments = {"prompt": "a cat", "num_inference_steps": 2, "height": 16, "width": 16, "output_type": "pt"}
    return pipeline(**arguments, generator=tiny.seeded())[0].cpu()


@pytest.fixture
def expected(sim: SimulatedAccelerator) -> torch.Tensor:
    result = text2img(tiny.stable_diffusion().to(sim.device))
    gc.collect()
    return result


# --- sharing ---------------------------------------------------------------------------------------------


def test_pipelines_that_share_components_share_a_ledger(
    sim: SimulatedAccelerator, expected: torch.Tensor
) -> None:
    """I1, I3: one owner for each shared module, whichever pipeline uses it, until the last is disabled."""
    first = tiny.stable_diffusion()
    plain = img2img(tiny.quiet(StableDiffusionImg2ImgPipeline.from_pipe(first).to(sim.device)))
    first.to("cpu")
    with offload(first, sim.device) as one:
        second = tiny.quiet(StableDiffusionImg2ImgPipeline.from_pipe(first))
        with pytest.raises(OwnershipError, match="share its ledger"):
            offload(second, sim.device)
        other = offload(second, sim.device, ledger=one.ledger)
        assert other.components == one.components
        assert torch.equal(img2img(second), plain)
        assert torch.equal(text2img(first), expected)
        assert one.ledger.present == ()
        one.ledger.audit()
    assert second._execution_device == sim.device
    assert torch.equal(img2img(second), plain)
    assert other.ledger.present == ()
    other.disable()
    assert untouched(first)
    assert untouched(second)


def untouched(pipeline: Any) -> bool:
    kept = ("maybe_free_model_hooks", "to", "remove_all_hooks", "enable_model_cpu_offload")
    hooks = [
        one for _, module in modules(pipeline) for one in (*module._forward_hooks, *module._forward_pre_hooks)
    ]
    marks = [name for name, module in modules(pipeline) if hasattr(module, "_hf_hook")]
    return not hooks and not marks and not set(kept) & set(vars(pipeline))


# --- other offloads --------------------------------------------------------------------------------------


def test_an_offload_of_accelerate_that_is_on_is_refused_until_it_is_off(
    sim: SimulatedAccelerator, expected: torch.Tensor
) -> None:
    """I3: two owners would move the same weights."""
    pipeline = tiny.stable_diffusion()
    pipeline.enable_model_cpu_offload(device=sim.device)
    with pytest.raises(DeclarationError, match="remove_all_hooks"):
        offload(pipeline, sim.device)
    pipeline.remove_all_hooks()
    with offload(pipeline, sim.device):
        assert torch.equal(text2img(pipeline), expected)


def test_a_sequential_offload_that_is_on_is_refused(sim: SimulatedAccelerator) -> None:
    pipeline = tiny.stable_diffusion()
    pipeline.enable_sequential_cpu_offload(device=sim.device)
    with pytest.raises(DeclarationError, match="AlignDevicesHook"):
        offload(pipeline, sim.device)


def test_a_group_offload_that_is_on_is_refused(sim: SimulatedAccelerator) -> None:
    pipeline = tiny.stable_diffusion()
    pipeline.unet.enable_group_offload(sim.device, offload_type="leaf_level")
    with pytest.raises(DeclarationError, match="'unet' has diffusers' group offloading on"):
        offload(pipeline, sim.device)


@pytest.mark.parametrize(
    "enable", ["enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload"]
)
def test_another_offload_after_ours_is_refused_and_ours_goes_on(
    sim: SimulatedAccelerator, expected: torch.Tensor, enable: str
) -> None:
    pipeline = tiny.stable_diffusion()
    with offload(pipeline, sim.device):
        with pytest.raises(DeclarationError, match=r"disable\(\)"):
            getattr(pipeline, enable)(device=sim.device)
        assert torch.equal(text2img(pipeline), expected)
    assert getattr(pipeline, enable).__func__ is getattr(StableDiffusionPipeline, enable)


def test_remove_all_hooks_leaves_our_offload_whole(sim: SimulatedAccelerator, expected: torch.Tensor) -> None:
    """I2: the pipeline still knows where it computes, and components still come when they are called."""
    pipeline = tiny.stable_diffusion()
    with offload(pipeline, sim.device) as handle:
        pipeline.remove_all_hooks()
        assert pipeline._execution_device == sim.device
        assert torch.equal(text2img(pipeline), expected)
        assert handle.ledger.present == ()
    assert untouched(pipeline)


# --- moving ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loaded", [None, "text_encoder", "unet"])
@pytest.mark.parametrize("where", ["device", "cpu"])
def test_to_is_adopted_at_once(
    sim: SimulatedAccelerator, expected: torch.Tensor, where: str, loaded: str | None
) -> None:
    """I5, I8: what ``to`` has put on the device makes room again, and what it took from there comes back."""
    pipeline = tiny.stable_diffusion()
    with offload(pipeline, sim.device) as handle:
        if loaded is not None:
            handle.load(loaded)
        pipeline.to(sim.device if where == "device" else "cpu")
        assert sim.stats().allocated == 0
        handle.ledger.audit()
        for _ in range(2):
            assert torch.equal(text2img(pipeline), expected)
        handle.ledger.audit()
        assert handle.ledger.present == ()


def test_to_without_room_for_all_leaves_the_offload_whole(
    sim: SimulatedAccelerator, expected: torch.Tensor
) -> None:
    """I6: half of the components were on the device when memory ran out."""
    pipeline = tiny.stable_diffusion()
    with offload(pipeline, sim.device) as handle:
        sim.capacity = "20MiB"
        with pytest.raises(torch.OutOfMemoryError):
            pipeline.to(sim.device)
        assert sim.stats().allocated == 0
        handle.ledger.audit()
        assert torch.equal(text2img(pipeline), expected)


def test_a_resident_component_that_to_took_to_the_host_comes_back(sim: SimulatedAccelerator) -> None:
    """I5: nothing ever switches a resident, so that nothing else would adopt it."""
    resident = text2img(tiny.stable_diffusion_checked().to(sim.device))
    pipeline = tiny.stable_diffusion_checked()
    with offload(pipeline, sim.device) as handle:
        pipeline.to("cpu")
        assert handle.ledger.present == ("safety_checker",)
        assert pipeline.safety_checker.concept_embeds.device == sim.device
        assert torch.equal(text2img(pipeline), resident)
        handle.ledger.audit()


def test_another_dtype_is_adopted(sim: SimulatedAccelerator) -> None:
    """I7: the masters are the converted weights from then on."""
    expected = text2img(tiny.stable_diffusion().to(dtype=torch.float64).to(sim.device))
    pipeline = tiny.stable_diffusion()
    with offload(pipeline, sim.device) as handle:
        before = handle.ledger.size("unet")
        handle.load("unet")
        pipeline.to(dtype=torch.float64)
        assert torch.equal(text2img(pipeline), expected)
        assert handle.ledger.size("unet") > 1.9 * before
        handle.ledger.audit()


# --- saving and copying ----------------------------------------------------------------------------------


def test_save_pretrained_writes_the_same_bytes_in_every_residency_state(
    sim: SimulatedAccelerator, tmp_path: Path
) -> None:
    """C30, I7."""
    pipeline = tiny.stable_diffusion()
    before = saved(pipeline, tmp_path / "before")
    with offload(pipeline, sim.device) as handle:
        assert saved(pipeline, tmp_path / "enabled") == before
        for component in handle.components:
            handle.load(component.name)
            assert saved(pipeline, tmp_path / component.name) == before
    assert saved(pipeline, tmp_path / "after") == before


def saved(pipeline: Any, folder: Path) -> dict[str, bytes]:
    pipeline.save_pretrained(folder)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_copy_is_not_offloaded_and_leaves_the_original_alone(
    sim: SimulatedAccelerator, expected: torch.Tensor
) -> None:
    pipeline = tiny.stable_diffusion()
    with offload(pipeline, sim.device) as handle:
        handle.load("unet")
        twin = copy.deepcopy(pipeline)
        events = len(handle.events)
        assert torch.equal(text2img(twin.to(sim.device)), expected)
        assert handle.ledger.present == ("unet",)
        assert len(handle.events) == events
        assert torch.equal(text2img(pipeline), expected)


# --- declaring -------------------------------------------------------------------------------------------


class Listed(StableDiffusionPipeline):
    """A diffusers pipeline that declares its components."""

    _dit_modules: ClassVar[list[str]] = ["unet"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vae"]


class Excluding(StableDiffusionPipeline):
    """One that excludes a member of its own sequence, as Kandinsky's combined pipelines do."""

    _exclude_from_cpu_offload: ClassVar[list[str]] = ["vae"]


def test_a_pipeline_with_lists_follows_them(sim: SimulatedAccelerator, expected: torch.Tensor) -> None:
    """Its VAE stays; its sequence is not asked."""
    pipeline = tiny.quiet(Listed(**tiny.stable_diffusion().components, requires_safety_checker=False))
    with offload(pipeline, sim.device) as handle:
        assert handle.ledger.present == ("vae",)
        assert torch.equal(text2img(pipeline), expected)
        assert handle.ledger.present == ("vae",)
        assert loads(handle) == ["vae", "text_encoder", "unet"]


def test_what_is_excluded_but_in_the_sequence_takes_turns(sim: SimulatedAccelerator) -> None:
    """diffusers' own offload swaps it too: kept, it would raise the peak above theirs."""
    pipeline = tiny.quiet(Excluding(**tiny.stable_diffusion().components, requires_safety_checker=False))
    with offload(pipeline, sim.device) as handle:
        text2img(pipeline)
        assert loads(handle) == ["text_encoder", "unet", "vae"]
        assert handle.ledger.present == ()


def test_roles_are_told_by_the_components_names(sim: SimulatedAccelerator) -> None:
    with offload(tiny.stable_diffusion_checked(), sim.device) as handle:
        roles = {one.name: one.role for one in handle.components}
    assert roles == {
        "text_encoder": Role.ENCODER,
        "unet": Role.DIT,
        "vae": Role.VAE,
        "safety_checker": Role.RESIDENT,
    }


def test_the_only_component_of_a_pipeline_goes_home_at_the_end_of_its_call(sim: SimulatedAccelerator) -> None:
    """There is nobody to take turns with, but between requests the device is free: never a silent no-op."""
    blocks = {"down_block_types": ["DownBlock2D"], "up_block_types": ["UpBlock2D"]}
    unet = UNet2DModel(sample_size=8, block_out_channels=[32], norm_num_groups=8, **blocks)
    pipeline = tiny.quiet(DDPMPipeline(unet, DDPMScheduler()))
    with offload(pipeline, sim.device) as handle:
        pipeline(num_inference_steps=2, generator=tiny.seeded())
        assert loads(handle) == ["unet"]
        assert handle.ledger.present == ()


def loads(handle: Offload) -> list[str]:
    return [event.component for event in handle.events if event.kind is EventKind.LOAD]
