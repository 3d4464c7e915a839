"""Who takes turns: policy auto where everything fits, exclusive VAEs, exclusive encoders; end to end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from omni_components import OffloadPolicy, PolicyError, SplitModel, offload
from omni_components.demo import DemoPipeline
from omni_components.testing import SimulatedAccelerator
from omni_components.testing.plugin import require_simulated_accelerator

LAYER = 32 * 32 * 4 + 256  # device bytes of one
X = torch.linspace(-1, 1, 64).reshape(2, 32)


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(count)))


class Backbone(SplitModel):
    _offload_components: ClassVar[dict[str, list[str]]] = {"reasoner": ["reason"], "generator": ["generate"]}

    def __init__(self) -> None:
        super().__init__()
        self.reason, self.generate = layers(2), layers(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self._offload_context("reasoner"):
            x = self.reason(x)
        with self._offload_context("generator"):
            return self.generate(x)  # type: ignore[no-any-return]


class Pipeline(nn.Module):
    """Two encoders of 3 and 2 layers, a backbone of 2 and 4, a VAE of 3: 14 in all."""

    _dit_modules: ClassVar[list[str]] = ["backbone"]
    _encoder_modules: ClassVar[list[str]] = ["text", "image"]
    _vae_modules: ClassVar[list[str]] = ["vae"]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.text, self.image, self.vae = layers(3), layers(2), layers(3)
        self.backbone = Backbone()

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.vae(self.backbone(self.image(self.text(x))))
        return made


@pytest.fixture
def sim() -> Iterator[SimulatedAccelerator]:
    require_simulated_accelerator()
    with SimulatedAccelerator("8MiB") as accelerator:
        yield accelerator
        assert accelerator.races == []


def serve(pipe: Pipeline, handle: Any, x: torch.Tensor = X) -> None:
    """Two requests, from host inputs unless told otherwise, bit for bit the resident run's."""
    wanted = Pipeline()(X)
    for _ in range(2):
        assert torch.equal(pipe(x).cpu(), wanted)
        handle.ledger.audit()
        handle.release()


def loads(handle: Any) -> dict[str, int]:
    return {row.name: row.loads for row in handle.report().rows}


# --- policy auto ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", [{"policy": "auto"}, {"policy": OffloadPolicy(mode="auto")}, {"mode": "auto"}]
)
def test_c08_what_fits_with_headroom_stays_and_it_is_said(sim: SimulatedAccelerator, how: Any) -> None:
    """I8: everything is resident, nothing ever moves again, and the calls are what they were."""
    pipe = Pipeline()
    with offload(pipe, sim.device, **how) as handle:
        assert all(one.resident for one in handle.components)
        serve(pipe, handle)
        report = handle.report()
        assert set(loads(handle).values()) == {1}
        assert report.peak_bytes == report.predicted_peak == 14 * LAYER
        (note,) = report.notes
        assert "everything is resident" in note
        assert "59.5 KiB" in note
        assert "20% of it left for activations" in note
        assert note in str(report)
        with handle.scope("reasoner"):
            assert set(handle.ledger.present) == {one.name for one in handle.components}
    assert all(one.device.type == "cpu" for one in pipe.parameters())


@pytest.mark.parametrize(("capacity", "stays"), [(1.26, True), (1.24, False)])
def test_c08_headroom_is_a_fifth_of_what_is_free(
    sim: SimulatedAccelerator, capacity: float, stays: bool
) -> None:
    sim.capacity = int(14 * LAYER * capacity)
    pipe = Pipeline()
    with offload(pipe, sim.device, policy="auto") as handle:
        assert all(one.resident for one in handle.components) is stays
        assert ("everything is resident" in handle.report().notes[0]) is stays
        assert ("components take turns" in handle.report().notes[0]) is not stays


@pytest.mark.parametrize("missing", [0, 1])
def test_c08_device_memory_is_what_may_be_used_and_needs_no_headroom(
    sim: SimulatedAccelerator, missing: int
) -> None:
    pipe = Pipeline()
    limit = 14 * LAYER - missing
    with offload(pipe, sim.device, policy="auto", device_memory=limit) as handle:
        assert all(one.resident for one in handle.components) is not bool(missing)
        serve(pipe, handle)
        assert handle.report().peak_bytes <= limit


@pytest.mark.parametrize(
    "said", [{"vae": "exclusive"}, {"offload_components": {"dit"}}, {"exclusive_encoders": True}]
)
def test_c08_what_a_field_says_of_taking_turns_goes_before_it(sim: SimulatedAccelerator, said: Any) -> None:
    pipe = Pipeline()
    with offload(pipe, sim.device, policy="auto", **said) as handle:
        serve(pipe, handle, X.to(sim.device))  # encoders that the policy keeps resident have no hooks
        assert loads(handle)["generator"] == 2
        assert next(iter(said)) in handle.report().notes[0]


def test_c08_without_auto_everything_that_fits_takes_turns_all_the_same(sim: SimulatedAccelerator) -> None:
    pipe = Pipeline()
    with offload(pipe, sim.device) as handle:
        serve(pipe, handle)
        assert loads(handle)["generator"] == 2
        assert handle.report().notes == ()


def test_c08_a_device_that_does_not_tell_its_free_memory() -> None:
    pipe = Pipeline()
    with offload(pipe, "cpu", policy="auto") as handle:
        serve(pipe, handle)
        assert not all(one.resident for one in handle.components)
        assert "does not tell its free memory" in handle.report().notes[0]


def test_a_word_that_is_no_policy() -> None:
    with pytest.raises(PolicyError, match="mode='autto'"):
        offload(Pipeline(), "cpu", policy="autto")  # type: ignore[arg-type]


# --- exclusive VAE, exclusive encoders --------------------------------------------------------------------------

PLANS = [  # fields, predicted peak in layers, rivals of the VAE, rivals of an encoder
    ({}, 5 + 3, 0, 2),
    ({"vae": "exclusive"}, 5, 4, 3),
    ({"exclusive_encoders": True}, 4 + 3, 0, 3),
    ({"vae": "exclusive", "exclusive_encoders": True}, 4, 4, 4),
]


@pytest.mark.parametrize(("fields", "peak", "of_vae", "of_encoder"), PLANS)
def test_a_pipeline_runs_in_the_predicted_peak_of_its_plan(
    sim: SimulatedAccelerator, fields: Any, peak: int, of_vae: int, of_encoder: int
) -> None:
    """I1, I8: the conflicts are what the fields say, and no more room is needed than was predicted."""
    pipe = Pipeline()
    with offload(pipe, sim.device, **fields) as handle:
        assert len(handle.ledger.rivals("vae")) == of_vae
        assert len(handle.ledger.rivals("text")) == of_encoder
        assert handle.ledger.predicted_peak == peak * LAYER
        sim.capacity = sim.stats().allocated + (peak - 3 * (of_vae == 0)) * LAYER + 4096
        serve(pipe, handle)
        report = handle.report()
        assert report.peak_bytes == report.predicted_peak == peak * LAYER
        assert loads(handle)["vae"] == (2 if of_vae else 1)


@pytest.mark.parametrize("fields", [{"vae": "exclusive"}, {"exclusive_encoders": True, "vae": "exclusive"}])
def test_exclusive_ones_arrive_ahead_as_others_do(sim: SimulatedAccelerator, fields: Any) -> None:
    """I1, I8 with prefetch: one active, one arriving, within the peak that counts both."""
    pipe = Pipeline()
    with offload(pipe, sim.device, prefetch=True, **fields) as handle:
        serve(pipe, handle)
        serve(pipe, handle)
        report = handle.report()
        assert next(row for row in report.rows if row.name == "vae").prefetched == 3
        assert report.peak_bytes <= report.predicted_peak
        assert sum(row.prefetch_wasted for row in report.rows) == 0


@pytest.mark.parametrize(
    "fields", [{"vae": "exclusive"}, {"prefetch": True, "vae": "exclusive"}, {"mode": "auto"}]
)
def test_the_demo_draws_the_same_picture_whoever_takes_turns(sim: SimulatedAccelerator, fields: Any) -> None:
    """I1, I7, I8: it finds out where it computes although its VAE is away."""
    pipe = DemoPipeline.from_pretrained()
    wanted = pipe("seven", steps=2).ink
    with offload(pipe, sim.device, **fields) as handle:
        for _ in range(3):
            assert torch.allclose(pipe("seven", steps=2).ink, wanted, atol=1e-4)
            handle.ledger.audit()
            handle.release()
        assert handle.report().peak_bytes <= handle.report().predicted_peak
