"""One pipeline, two drivers: vLLM-Omni's model-level backend drives ours unchanged, and ours drives theirs."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from omni_components import Offload, OmniOffloadMixin, declares_components, offload
from omni_components.attach.mixin import HANDLE
from omni_components.testing import SimulatedAccelerator

WIDTH = 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


class Lists(nn.Module):
    """What both frameworks read."""

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vae"]
    _resident_modules: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.text_encoder, self.transformer, self.vae = Net(), Net(), Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.text_encoder(x)
        for _ in range(3):
            x = self.transformer(x)
        out: torch.Tensor = self.vae(x)
        return out


class Ours(OmniOffloadMixin, Lists):
    """A pipeline of this library: the mixin brings the pair of methods."""


class Theirs(Lists):
    """A pipeline as vLLM-Omni's models write it: the lists, and a pair of its own for what they cannot say."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    def enable_omni_model_cpu_offload(
        self,
        *,
        device: torch.device,
        pin_memory: bool,
        use_hsdp: bool,
        offload_components: frozenset[str] | None = None,
    ) -> None:
        self.seen.append(
            {"device": device, "pin_memory": pin_memory, "offload_components": offload_components}
        )
        self.to(device)

    def disable_omni_model_cpu_offload(self) -> None:
        self.to("cpu")


def backend(offloader: Any, sim: SimulatedAccelerator, **fields: Any) -> Any:
    from vllm_omni.diffusion.offloader.config import OffloadStrategy  # theirs, from the wheel

    config = offloader.OffloadConfig(strategy=OffloadStrategy.MODEL_LEVEL, **fields)
    return offloader.ModelLevelOffloadBackend(config, sim.device)


def wanted(sim: SimulatedAccelerator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))
    return x, Lists().to(sim.device)(x.to(sim.device)).cpu()


def test_their_backend_drives_a_pipeline_of_ours_unchanged(offloader: Any, sim: SimulatedAccelerator) -> None:
    """It finds the pair by their protocol, enables it, and everything after is this library's: I1, I5, I7."""
    x, expected = wanted(sim)
    pipeline = Ours()
    assert isinstance(pipeline, offloader.SupportsModelCpuOffload)
    driver = backend(offloader, sim)
    driver.enable(pipeline)
    handle = vars(pipeline)[HANDLE]
    assert isinstance(handle, Offload)
    sim.reset()
    assert torch.equal(pipeline(x).cpu(), expected)
    handle.ledger.audit()
    assert sim.stats().d2h_bytes == expected.numel() * expected.element_size()  # the result, no weight
    driver.disable()
    assert not handle.enabled
    assert all(one.device.type == "cpu" for one in pipeline.parameters())
    assert torch.equal(pipeline(x), Lists()(x))


def test_their_selector_reaches_the_policy(offloader: Any, sim: SimulatedAccelerator) -> None:
    pipeline = Ours()
    driver = backend(offloader, sim, components=frozenset({"text_encoder", "dit"}), pin_cpu_memory=False)
    driver.enable(pipeline)
    handle = vars(pipeline)[HANDLE]
    assert handle.policy.offload_components == frozenset({"encoder", "dit"})
    assert not handle.policy.pin_memory
    driver.disable()


def test_an_error_while_their_backend_enables_leaves_nothing(
    offloader: Any, sim: SimulatedAccelerator
) -> None:
    """I6: it calls our disable() while handling our error, which must find nothing to do."""
    sim.capacity = 16
    pipeline = Ours()
    driver = backend(offloader, sim)
    with pytest.raises(Exception, match="vae"):
        driver.enable(pipeline)
    assert not driver.enabled
    assert HANDLE not in vars(pipeline)
    assert not any(one._forward_pre_hooks for one in pipeline.modules())


def test_ours_drives_a_pipeline_with_their_lists(offloader: Any, sim: SimulatedAccelerator) -> None:
    """No base class of ours is needed, and nothing of theirs runs: I1, I5, I7."""
    x, expected = wanted(sim)
    pipeline = type("TheirPipeline", (Lists, offloader.ComponentDiscovery), {})()
    assert declares_components(pipeline)
    with offload(pipeline, sim.device) as handle:
        sim.reset()
        for _ in range(2):
            assert torch.equal(pipeline(x).cpu(), expected)
        assert sim.stats().d2h_bytes == 2 * expected.numel() * expected.element_size()  # results, no weights
        handle.ledger.audit()


def test_ours_delegates_to_a_pair_of_theirs(offloader: Any, sim: SimulatedAccelerator) -> None:
    x, expected = wanted(sim)
    pipeline = Theirs()
    with offload(pipeline, sim.device, pin_memory=False, offload_components={"dit"}):
        assert pipeline.seen == [
            {"device": sim.device, "pin_memory": False, "offload_components": frozenset({"dit"})}
        ]
        assert torch.equal(pipeline(x.to(sim.device)).cpu(), expected)
    assert all(one.device.type == "cpu" for one in pipeline.parameters())
