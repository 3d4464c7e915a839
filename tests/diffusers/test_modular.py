"""Modular diffusers: a ``ModularPipeline``, and a ``ComponentsManager`` whose strategy a ledger serves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.sweep.families.stable_diffusion_xl import xl
from diffusers import ComponentsManager
from diffusers.modular_pipelines.stable_diffusion_xl import StableDiffusionXLAutoBlocks

from omni_components import BudgetError, DeclarationError, LedgerStrategy, offload
from omni_components.testing import SimulatedAccelerator


def built(manager: ComponentsManager | None = None) -> Any:
    """Stable Diffusion XL from blocks, with the same weights every time."""
    torch.manual_seed(0)
    parts = {name: one for name, one in xl().items() if name != "add_watermarker"}
    pipeline = StableDiffusionXLAutoBlocks().init_pipeline(components_manager=manager)
    pipeline.update_components(**parts)
    for one in pipeline.components.values():
        if isinstance(one, torch.nn.Module):
            one.eval()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def picture(pipeline: Any) -> torch.Tensor:
    image = pipeline(
        prompt="a lighthouse",
        height=32,
        width=32,
        num_inference_steps=2,
        generator=torch.Generator("cpu").manual_seed(7),
        output_type="pt",
        output="images",
    )
    return torch.stack(list(image)).cpu()


@pytest.fixture
def wanted(sim: SimulatedAccelerator) -> torch.Tensor:
    resident = built()
    resident.to(sim.device)
    return picture(resident)


@pytest.mark.parametrize("through", ["pipeline", "manager"])
def test_offload_gives_the_resident_picture_and_moves_nothing_back(
    sim: SimulatedAccelerator, wanted: torch.Tensor, through: str
) -> None:
    """I1, I2, I5, I7."""
    manager = ComponentsManager()
    pipeline = built(manager)
    with offload(manager if through == "manager" else pipeline, sim.device) as handle:
        for _ in range(2):
            assert torch.equal(picture(pipeline), wanted)
            handle.release()
        handle.ledger.audit()
        assert {one.name for one in handle.components} == {"unet", "vae", "text_encoder", "text_encoder_2"}
        assert not any(event.bytes for event in handle.events if event.kind == "write_back")
    assert not sim.races


def test_the_strategy_of_a_manager_is_served_by_a_ledger(
    sim: SimulatedAccelerator, wanted: torch.Tensor
) -> None:
    """I1, I4, I5, I8: the manager asks, the ledger answers and keeps the history."""
    manager = ComponentsManager()
    pipeline = built(manager)
    strategy = LedgerStrategy()
    manager.enable_auto_cpu_offload(device=sim.device, offload_strategy=strategy)
    for _ in range(2):
        assert torch.equal(picture(pipeline), wanted)
        strategy.ledger.audit()
    came = [event.component.rpartition("_")[0] for event in strategy.ledger.history if event.kind == "load"]
    assert came[:4] == ["text_encoder", "text_encoder_2", "unet", "vae"]
    assert len(strategy.ledger.present) == 1
    assert strategy.ledger.history.peak <= strategy.ledger.predicted_peak
    manager.disable_auto_cpu_offload()
    assert all(one.device.type == "cpu" for one in pipeline.unet.parameters())


def test_a_ledger_that_serves_again_starts_from_what_is_there(
    sim: SimulatedAccelerator, wanted: torch.Tensor
) -> None:
    """I5: the manager was switched off and on, and moved its models without asking."""
    manager = ComponentsManager()
    pipeline = built(manager)
    strategy = LedgerStrategy()
    for _ in range(2):
        manager.enable_auto_cpu_offload(device=sim.device, offload_strategy=strategy)
        assert torch.equal(picture(pipeline), wanted)
        strategy.ledger.audit()
        manager.disable_auto_cpu_offload()


def test_a_model_beyond_the_budget_is_refused_before_anything_moves(sim: SimulatedAccelerator) -> None:
    """I8."""
    manager = ComponentsManager()
    pipeline = built(manager)
    manager.enable_auto_cpu_offload(device=sim.device, offload_strategy=LedgerStrategy(device_memory=1 << 16))
    with pytest.raises(BudgetError, match="text_encoder"):
        picture(pipeline)
    assert sim.stats().h2d_bytes < 1 << 16


def test_offload_of_a_manager_that_offloads_already_is_refused(sim: SimulatedAccelerator) -> None:
    manager = ComponentsManager()
    built(manager)
    manager.enable_auto_cpu_offload(device=sim.device, offload_strategy=LedgerStrategy())
    with pytest.raises(DeclarationError, match="offload hook of accelerate"):
        offload(manager, sim.device)
