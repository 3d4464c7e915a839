"""The suite catches each fault made on purpose; without one it passes (see ``test_property.py``)."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from omni_components import OmniComponentsError
from omni_components.testing.machine import RecordingMachine
from omni_components.testing.plugin import require_simulated_accelerator
from tests.residency import test_arena, test_turns
from tests.residency.arena import ArenaMachine
from tests.residency.mutants import LEDGER, MOVER, TURNS, Mutant

pytestmark = [
    pytest.mark.mutant,
    pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning"),
]

# What the suite says of a fault. Anything else (a TypeError, say) would be a fault of the mutant itself.
CAUGHT = (AssertionError, OmniComponentsError)


def hunt(examples: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=50,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


class Hunting(RecordingMachine):
    patience = 5.0


class HuntingArena(ArenaMachine):
    patience = 5.0


def ids(mutant: Mutant) -> str:
    return f"{mutant.breaks}-{mutant.name}"


@pytest.mark.parametrize("mutant", [*LEDGER, *TURNS], ids=ids)
def test_the_machine_over_numbers_catches(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises(CAUGHT):
        run_state_machine_as_test(Hunting, settings=hunt(1500))


@pytest.mark.parametrize("mutant", MOVER, ids=ids)
def test_the_machine_over_the_real_mover_catches(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    require_simulated_accelerator()
    mutant.apply(monkeypatch)
    with pytest.raises(CAUGHT):
        run_state_machine_as_test(HuntingArena, settings=hunt(300))


assert test_arena
assert test_turns
