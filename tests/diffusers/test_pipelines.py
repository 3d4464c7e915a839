"""Real diffusers pipelines through ``offload(pipe, device)``: same pictures, less room, no byte too many."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from omni_components.residency.events import EventKind
from omni_components.testing import SimulatedAccelerator
from omni_components.testing.plugin import require_simulated_accelerator
from tests.diffusers import tiny
from tests.diffusers.runs import Case, Comparison, compare, expected_loads

SIZE = {"height": 16, "width": 16}
TEXT = {"prompt": "a lighthouse", "num_inference_steps": 3, **SIZE}
CASES = {
    "wan, two transformers": Case(
        build=tiny.wan,
        arguments={**TEXT, "num_inference_steps": 4, "num_frames": 5, "max_sequence_length": 16},
    ),
    "sd3, guided": Case(
        build=tiny.stable_diffusion_3,
        arguments={**TEXT, "max_sequence_length": 16},
        together=frozenset({"text_encoder", "text_encoder_2", "text_encoder_3"}),
    ),
    "sd3": Case(
        build=tiny.stable_diffusion_3,
        arguments={**TEXT, "max_sequence_length": 16, "guidance_scale": 1.0},
        together=frozenset({"text_encoder", "text_encoder_2", "text_encoder_3"}),
    ),
    "sd3, guided, a large encoder": Case(
        build=partial(tiny.stable_diffusion_3, layers=9),
        arguments={**TEXT, "max_sequence_length": 16},
        stays=frozenset({("text_encoder_3", "text_encoder"), ("text_encoder_3", "text_encoder_2")}),
    ),
    "sdxl": Case(
        build=tiny.stable_diffusion_xl,
        arguments=TEXT,
        together=frozenset({"text_encoder", "text_encoder_2"}),
    ),
    "sd, safety checker": Case(
        build=tiny.stable_diffusion_checked, arguments=TEXT, resident=frozenset({"safety_checker"})
    ),
    "sd, controlnet": Case(
        build=tiny.stable_diffusion_control_net,
        arguments={**TEXT, "image": torch.rand(1, 3, 16, 16, generator=tiny.seeded())},
        alongside=frozenset({"controlnet"}),
    ),
}
# Each swapped component once per request, guidance included, save where the room of the largest is not enough:
# this encoder is the largest itself, so that it stays, and the other two are asked in turn, for each prompt anew.
GOES_BACK = {"sd3, guided, a large encoder"}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def compared(case: str) -> Comparison:
    """Once per case, since the tests below only look at it."""
    require_simulated_accelerator()
    with SimulatedAccelerator() as sim:
        comparison = compare(CASES[case], sim)
        assert sim.races == []
    return comparison


def test_two_requests_give_what_the_resident_run_gives(compared: Comparison) -> None:
    """I7: the masters give back exactly the weights, request after request."""
    for ours, resident in zip(compared.ours.outputs, compared.resident.outputs, strict=True):
        assert torch.isfinite(resident).all()
        assert torch.equal(ours, resident)
    assert not torch.equal(compared.resident.outputs[0], torch.zeros_like(compared.resident.outputs[0]))


def test_it_runs_where_the_resident_run_is_out_of_memory(compared: Comparison) -> None:
    """I8: ours had the capacity that the resident run needs more than."""
    assert not compared.resident_fits
    assert compared.ours.peak <= compared.capacity < compared.resident.peak


def test_the_peak_is_never_above_that_of_diffusers_own_offload(compared: Comparison) -> None:
    assert compared.ours.peak <= compared.theirs.peak


def test_what_is_loaded_is_what_has_to_be(case: str, compared: Comparison) -> None:
    """I1, I2: the loads are those of an oracle that watched the resident run's calls."""
    loads = [event for event in compared.ours.events if event.kind is EventKind.LOAD]
    at_enable = [event.component for event in loads if event.component in CASES[case].resident]
    per_request = expected_loads(CASES[case], compared.uses)
    assert [event.component for event in loads] == [*at_enable, *per_request, *per_request]
    assert len(at_enable) == len(CASES[case].resident)
    once = sorted(set(compared.weights) - CASES[case].resident)
    assert (sorted(per_request) == once) is (case not in GOES_BACK)


def test_the_link_carries_the_weights_of_each_load_and_nothing_else(case: str, compared: Comparison) -> None:
    """Not a byte more than the resident run's own copies and the weights that had to be loaded."""
    loads = [event for event in compared.ours.events if event.kind is EventKind.LOAD]
    assert [event.bytes for event in loads] == [compared.weights[event.component] for event in loads]
    swapped = sum(event.bytes for event in loads if event.component not in CASES[case].resident)
    assert compared.ours.sent - compared.resident.sent == swapped


def test_no_weight_travels_back_to_the_host(compared: Comparison) -> None:
    assert not [event for event in compared.ours.events if event.kind is EventKind.WRITE_BACK]
    assert compared.ours.returned == compared.resident.returned
    assert compared.theirs.returned > compared.resident.returned  # the measure would see it


def test_after_a_request_nothing_swappable_is_on_the_device(case: str, compared: Comparison) -> None:
    """C06."""
    assert [set(present) for present in compared.ours.present] == [CASES[case].resident] * 2
