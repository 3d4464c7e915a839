"""Random phases in up to three threads against the model: over numbers, over the real mover, over a pipeline."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from torch import nn

from omni_components import InvariantError, SplitModel
from omni_components.testing.machine import PipelineMachine, RecordingMachine
from omni_components.testing.plugin import require_simulated_accelerator
from tests.residency.arena import ArenaMachine, Tally
from tests.residency.mutants import LEDGER

pytestmark = pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")


def scaled(share: float, **fields: Any) -> settings:
    """The profile in force, with a share of its examples: a step on a device costs more than one on numbers."""
    return settings(max_examples=max(5, int(settings().max_examples * share)), **fields)


def test_random_phases_over_numbers_are_what_the_model_says() -> None:
    """I1, I2, I4 to I8."""
    run_state_machine_as_test(RecordingMachine, settings=scaled(2))


# Steps that a run must have made; what it did make is counted, and printed (``pytest -rP``).
LEAST_STEPS = {"default": 500, "ci": 2_000, "nightly": 200_000}


class Tallied(ArenaMachine):
    tally = Tally()


def test_random_phases_over_the_real_mover_are_what_the_model_says() -> None:
    """I1 to I8 with late copies: results bit for bit the resident run's, no race, no byte above the predicted peak."""
    require_simulated_accelerator()
    start = time.perf_counter()
    run_state_machine_as_test(Tallied, settings=scaled(1.2))
    tally, profile = Tallied.tally, settings.get_current_profile_name()
    print(f"{profile}: {tally}, {time.perf_counter() - start:.0f} s")
    assert tally.races == 0
    assert tally.steps >= LEAST_STEPS.get(profile, 0)


# --- as a user would --------------------------------------------------------------------------------------------


class Backbone(SplitModel):
    """Two parts, interleaved."""

    _offload_components: ClassVar[dict[str, list[str]]] = {
        "reasoner": ["layers.*.one"],
        "generator": ["layers.*.two"],
    }

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"one": nn.Linear(8, 8), "two": nn.Linear(8, 8)}) for _ in range(2)
        )


class Pipeline(nn.Module):
    """What a project would point the machine at."""

    _dit_modules: ClassVar[list[str]] = ["backbone"]
    _encoder_modules: ClassVar[list[str]] = ["text", "image"]
    _vae_modules: ClassVar[list[str]] = ["vae"]
    _resident_modules: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = Backbone()
        self.text, self.image, self.vae = (nn.Linear(8, 8) for _ in range(3))


class MyMachine(PipelineMachine):
    def make_pipeline(self) -> nn.Module:
        return Pipeline()


class MyMachineOnTheAccelerator(MyMachine):
    simulated: ClassVar[dict[str, str]] = {"capacity": "64KiB"}


@pytest.mark.parametrize("machine", [MyMachine, MyMachineOnTheAccelerator])
def test_a_project_points_the_machine_at_its_pipeline(machine: type[PipelineMachine]) -> None:
    """I1, I2, I4 to I8 for a pipeline with encoders, a split model and a VAE, in a few lines."""
    if machine.simulated:
        require_simulated_accelerator()
    run_state_machine_as_test(machine, settings=scaled(0.2))


# --- a ledger broken on purpose ---------------------------------------------------------------------------------

SHOWN = ("evicts_after_loading", "forgets_rollback", "drops_a_pin", "ignores_one_conflict")


@pytest.mark.parametrize("name", SHOWN)
def test_a_ledger_broken_on_purpose_fails_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The four that must be seen in every run; all others: ``pytest -m mutant``."""
    next(one for one in LEDGER if one.name == name).apply(monkeypatch)
    with pytest.raises((AssertionError, InvariantError)):
        run_state_machine_as_test(
            RecordingMachine,
            settings=settings(
                max_examples=500, phases=[Phase.generate], report_multiple_bugs=False, derandomize=True
            ),
        )
