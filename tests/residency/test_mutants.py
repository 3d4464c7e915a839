"""The suite catches each fault made on purpose; without one it passes (see ``test_property.py``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import pytest
from _pytest.mark.structures import ParameterSet
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from omni_components import InvariantError
from omni_components.testing.machine import RecordingMachine
from omni_components.testing.plugin import require_simulated_accelerator
from tests.residency import test_arena, test_scopes, test_turns
from tests.residency.arena import ArenaMachine
from tests.residency.mutants import LEDGER, MOVER, TURNS, Mutant

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


@pytest.mark.parametrize("mutant", cases([*LEDGER, *TURNS, *MOVER], named=True))
def test_the_named_test_catches(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    home = next(one for one in (test_scopes, test_turns, test_arena) if hasattr(one, mutant.named))
    run = partial(RUNNERS[home], getattr(home, mutant.named))
    run()  # it passes as the code is
    mutant.apply(monkeypatch)
    with pytest.raises(CAUGHT):
        run()


def with_its_stage(test: Callable[..., None]) -> None:
    """Run a test of ``test_turns`` on the stage that it declares."""
    (shape,) = (mark.args[1][0] for mark in test.pytestmark if mark.name == "parametrize")  # type: ignore[attr-defined]
    stage = test_turns.Stage(*shape)
    try:
        test(stage)
    finally:
        stage.crew.dismiss()


def with_three(test: Callable[..., None]) -> None:
    """Run a test of ``test_arena``, with its three rivals where it asks for them."""
    require_simulated_accelerator()
    if not inspect.signature(test).parameters:
        test()
        return
    three = test_arena.subject("abc", "ab bc ac")
    try:
        test(three)
    finally:
        three.close()


def as_it_is(test: Callable[..., None]) -> None:
    test()


RUNNERS = {test_scopes: as_it_is, test_turns: with_its_stage, test_arena: with_three}


def test_each_invariant_has_its_mutants() -> None:
    """The table is the list of what the suite is known to catch."""
    table = [*LEDGER, *TURNS, *MOVER]
    assert len(table) == len({mutant.name for mutant in table})
    for number in range(1, 9):
        assert sum(1 for mutant in table if mutant.breaks == f"I{number}") >= 3, f"I{number}"
