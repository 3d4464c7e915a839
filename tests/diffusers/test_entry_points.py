"""Components that a pipeline uses by another method than ``forward``, and with inputs left on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    LEditsPPPipelineStableDiffusionXL,
    StableDiffusionImg2ImgPipeline,
)
from diffusers.utils.torch_utils import get_module_execution_device
from PIL import Image

from omni_components import offload
from omni_components.residency.events import Cause, EventKind
from omni_components.testing import SimulatedAccelerator
from tests.diffusers import tiny
from tests.diffusers.runs import modules

PICTURE = torch.rand(1, 3, 16, 16, generator=tiny.seeded())


def img2img(pipeline: Any) -> torch.Tensor:
    arguments = {"prompt": "a cat", "image": PICTURE, "num_inference_steps": 4, "output_type": "pt"}
    return pipeline(**arguments, generator=tiny.seeded())[0].cpu()


def test_an_image_to_image_pipeline_encodes_before_it_denoises(sim: SimulatedAccelerator) -> None:
    """I1, I2: its VAE comes once, by ``encode``, and stays for ``decode``, as with diffusers' own offload."""
    parts = dict(tiny.stable_diffusion().components)
    resident = tiny.quiet(StableDiffusionImg2ImgPipeline(**parts, requires_safety_checker=False))
    expected = img2img(resident.to(sim.device))
    resident.to("cpu")
    with offload(resident, sim.device) as handle:
        assert torch.equal(img2img(resident), expected)
        handle.ledger.audit()
        loads = [(one.component, one.cause) for one in handle.events if one.kind is EventKind.LOAD]
    assert loads == [
        ("text_encoder", Cause.HOOK),
        ("vae", Cause.ENTRY_POINT),
        ("unet", Cause.HOOK),
    ]


def test_the_vae_may_be_called_directly_with_inputs_on_the_host(sim: SimulatedAccelerator) -> None:
    """I2, and C28's choice: inputs are moved, positional and keyword alike, each time."""
    pipeline = tiny.stable_diffusion()
    plain = pipeline.vae.encode
    with offload(pipeline, sim.device) as handle:
        for _ in range(2):
            latents = pipeline.vae.encode(PICTURE).latent_dist.mode()
            picture = pipeline.vae.decode(z=latents.cpu()).sample
            assert {latents.device, picture.device} == {sim.device}
        assert handle.ledger.present == ("vae",)
        assert handle.ledger.history.totals["vae"].loads == 1
    assert pipeline.vae.encode == plain
    assert "encode" not in vars(pipeline.vae)


# diffusers' scheduler makes arrays of tensors in a way that NumPy 2 is leaving behind.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_pipeline_that_puts_its_image_where_the_weights_rest(sim: SimulatedAccelerator) -> None:
    """LEdits++ asks ``self.device``, the host under offload; diffusers' own offload fails on it."""
    picture = Image.fromarray((np.arange(32 * 32 * 3) % 255).astype("uint8").reshape(32, 32, 3))

    def edit(pipeline: Any) -> torch.Tensor:
        pipeline.invert(image=picture, num_inversion_steps=4, skip=0.2, generator=tiny.seeded())
        call = {"editing_prompt": ["a cat"], "edit_threshold": 0.9, "output_type": "np"}
        return torch.from_numpy(pipeline(**call).images)

    expected = edit(ledits().to(sim.device))
    pipeline = ledits()
    with offload(pipeline, sim.device) as handle:
        assert torch.equal(edit(pipeline), expected)
        assert handle.ledger.present == ()
        handle.ledger.audit()


def ledits() -> LEditsPPPipelineStableDiffusionXL:
    parts = dict(tiny.stable_diffusion_xl().components)
    parts["scheduler"] = DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++", solver_order=2)
    return tiny.quiet(LEditsPPPipelineStableDiffusionXL(**parts, add_watermarker=False))


@pytest.mark.parametrize("build", [tiny.wan, tiny.stable_diffusion_3, tiny.stable_diffusion_checked])
def test_the_execution_device_is_the_device_in_every_residency_state(
    sim: SimulatedAccelerator, build: Any
) -> None:
    """C27, by each of the two questions that diffusers' files ask."""
    pipeline = build()

    def answers() -> set[torch.device]:
        return {
            pipeline._execution_device,
            *(get_module_execution_device(one) for _, one in modules(pipeline)),
        }

    with offload(pipeline, sim.device) as handle:
        assert answers() == {handle.execution_device} == {sim.device}
        for component in handle.components:
            handle.load(component.name)
            assert answers() == {sim.device}
            with handle.scope(component.name):
                assert answers() == {sim.device}
        handle.release()
        assert answers() == {sim.device}
    assert answers() == {torch.device("cpu")}


def test_a_request_that_skips_its_last_stage_still_ends_with_everything_at_home(
    sim: SimulatedAccelerator,
) -> None:
    """C06: with ``output_type="latent"`` no VAE evicts the transformer."""
    pipeline = tiny.wan()
    with offload(pipeline, sim.device) as handle:
        call = {"prompt": "a cat", "num_inference_steps": 2, "height": 16, "width": 16, "num_frames": 5}
        pipeline(**call, max_sequence_length=16, output_type="latent", generator=tiny.seeded())
        assert handle.ledger.present == ()
        assert handle.ledger.history.totals["vae"].loads == 0
        handle.ledger.audit()
