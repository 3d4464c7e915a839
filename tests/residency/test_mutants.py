"""The suite catches each fault made on purpose; without one it passes (see ``test_property.py``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from omni_components import InvariantError
from omni_components.testing.machine import RecordingMachine
from omni_components.testing.plugin import require_simulated_accelerator
from tests.residency.arena import ArenaMachine
from tests.residency.mutants import LEDGER, MOVER, TURNS, Mutant
from tests.residency.mutants_attach import DISCOVERY, HOOKS, MEMORY, SCOPES

pytestmark = pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")

# The faults that every run shows; the others are hunted by `pytest -m mutant`.
ALWAYS = {
    "evicts_after_loading",
    "forgets_rollback",
    "drops_a_pin",
    "ignores_one_conflict",
    "restores_late",
    "forgets_the_write_back",
}

EVERYTHING = [*LEDGER, *TURNS, *MOVER, *HOOKS, *DISCOVERY, *MEMORY, *SCOPES]

# What the suite says of a fault. Anything else (a TypeError, say) would be a fault of the mutant itself.
CAUGHT = (AssertionError, InvariantError)


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


def cases(table: list[Mutant], *, named: bool) -> list[ParameterSet]:
    """The mutants that random phases meet soon, or those that have a test of their own."""
    return [
        pytest.param(
            one, id=f"{one.breaks}-{one.name}", marks=() if one.name in ALWAYS else pytest.mark.mutant
        )
        for one in table
        if bool(one.named) is named
    ]


@pytest.mark.parametrize("mutant", cases([*LEDGER, *TURNS], named=False))
def test_the_machine_over_numbers_catches(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises(CAUGHT):
        run_state_machine_as_test(Hunting, settings=hunt(1500))


@pytest.mark.parametrize("mutant", cases(MOVER, named=False))
def test_the_machine_over_the_real_mover_catches(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    require_simulated_accelerator()
    mutant.apply(monkeypatch)
    with pytest.raises(CAUGHT):
        run_state_machine_as_test(HuntingArena, settings=hunt(300))


@pytest.mark.parametrize("mutant", cases(EVERYTHING, named=True))
def test_the_named_test_catches(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes as the code is, in every run; here it must fail, and not because the mutant itself is wrong."""
    mutant.apply(monkeypatch)
    verdict = Verdict()
    code = pytest.main([mutant.named, *IN_PROCESS], plugins=[verdict])
    assert code is pytest.ExitCode.TESTS_FAILED, f"{mutant.named}: {code!r}"
    assert verdict.errors
    assert not {TypeError, NameError, AttributeError} & set(verdict.errors), verdict.errors


IN_PROCESS = (
    "-q",
    "-x",
    "-m",
    "",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:faulthandler",
    "--capture=no",
    "--tb=line",
)


class Verdict:
    """What the tests of a run inside this one failed with."""

    def __init__(self) -> None:
        self.errors: list[type[BaseException]] = []

    def pytest_exception_interact(self, call: pytest.CallInfo[Any]) -> None:
        assert call.excinfo is not None
        self.errors.append(call.excinfo.type)


def test_each_invariant_has_its_mutants() -> None:
    """The table is the list of what the suite is known to catch."""
    assert len(EVERYTHING) == len({mutant.name for mutant in EVERYTHING})
    for number in range(1, 9):
        assert sum(1 for mutant in EVERYTHING if mutant.breaks == f"I{number}") >= 3, f"I{number}"


def table() -> str:
    """The faults by what they break, as ``docs/proof.md`` shows them."""
    lines = ["| breaks | faults | which |", "|---|--:|---|"]
    for breaks in sorted({one.breaks for one in EVERYTHING}):
        names = [one.name.replace("_", " ") for one in EVERYTHING if one.breaks == breaks]
        lines.append(f"| {breaks} | {len(names)} | {'; '.join(names)} |")
    return "\n".join(lines)


def test_the_documented_table_is_this_one() -> None:
    page = Path(__file__).parents[2] / "docs" / "proof.md"
    assert table() in page.read_text(), f"{page} should have:\n\n{table()}"
    assert f"{len(EVERYTHING)} faults" in page.read_text()
