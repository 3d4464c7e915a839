"""KeyboardInterrupt at every step of the ledger and of a move: I1 to I7 hold, and the next request is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from omni_components import ScopeError
from tests.residency.interrupts import Interrupter
from tests.residency.rigs import Rig, component

pytestmark = pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")

Scenario = Callable[[Rig], None]


def one_scope(rig: Rig) -> None:
    with rig.ledger.scope("a"):
        pass


def the_same_twice(rig: Rig) -> None:
    with rig.ledger.scope("a"), rig.ledger.scope("a"):
        pass


def a_switch(rig: Rig) -> None:
    for name in "aba":
        with rig.ledger.scope(name):
            pass


def nested_rivals(rig: Rig) -> None:
    with rig.ledger.scope("a"):
        with rig.ledger.scope("b"), rig.ledger.scope("c"):
            pass
        assert rig.present == {"a"}


def caught_in_the_outer_body(rig: Rig) -> None:
    """The outer body goes on: it has its component, or knows that it was lost."""
    with rig.ledger.scope("a"):
        try:
            with rig.ledger.scope("b"):
                pass
        except KeyboardInterrupt:
            rig.ledger.audit()
            assert rig.present == {"a"} or rig.ledger._local.stack.lost
        with rig.ledger.scope("a"):
            assert rig.present == {"a"}
        rig.ledger.audit()


def by_hand(rig: Rig) -> None:
    rig.ledger.load("a")
    rig.ledger.load("b")
    rig.ledger.release()
    rig.ledger.audit()


def declared_and_retired(rig: Rig) -> None:
    rig.ledger.load("c")
    rig.ledger.retire(["c"])
    rig.mover.register("d", 10)
    rig.ledger.admit([component("d")], rig.conflict)


SCENARIOS = [
    one_scope,
    the_same_twice,
    a_switch,
    nested_rivals,
    caught_in_the_outer_body,
    by_hand,
    declared_and_retired,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_an_interrupt_at_any_place_of_the_ledger_leaves_it_true_and_usable(scenario: Scenario) -> None:
    """I1 to I6, I8: no pin, no turn, no lock is left behind, wherever the interrupt came."""
    count = 0
    while True:
        rig = Rig()
        interrupter = Interrupter(count)
        try:
            with interrupter:
                scenario(rig)
        except KeyboardInterrupt:
            assert interrupter.place
        if not interrupter.place:
            break
        try:
            usable(rig)
        except BaseException as error:
            raise AssertionError(f"after an interrupt at {interrupter.place}") from error
        count += 1
    assert count > 50  # it did look everywhere


def usable(rig: Rig) -> None:
    rig.sound()
    for name in "ab":
        with rig.ledger.scope(name, timeout=0):
            assert name in rig.present
    rig.ledger.release()
    assert rig.present == set()
    rig.sound()


@pytest.mark.parametrize("verb", ["load", "evict"])
@pytest.mark.parametrize("when", ["before", "inside", "after"])
@pytest.mark.parametrize("after", range(4))
def test_an_interrupt_at_each_move_of_nested_switches(verb: str, when: str, after: int) -> None:
    """I1 to I7: before the move, half way, or when it has just ended; at each move of the run in turn."""
    rig = Rig()
    rig.mover.write("a", 3)
    rig.mover.fail(verb, after=after, when=when, error=KeyboardInterrupt)  # type: ignore[arg-type]
    interrupted = False
    try:
        with rig.ledger.scope("a"):
            rig.mover.write("a", 4)
            with rig.ledger.scope("b"):
                pass
            assert rig.present == {"a"}
        with rig.ledger.scope("c"):
            pass
        rig.ledger.release()
    except KeyboardInterrupt:
        interrupted = True
    assert interrupted == (after < len([1 for one, _ in rig.mover.moves() if one == verb]))
    assert rig.mover.read("a") in (3, 4)
    rig.mover.faults.clear()
    usable(rig)


def test_an_interrupt_while_waiting_for_a_turn_leaves_the_queue() -> None:
    """I4: with the real lock and a real signal."""
    import signal
    import threading

    from tests.residency.rigs import Actor, until, waiting

    rig = Rig()
    inside, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with rig.ledger.scope("a"):
            inside.set()
            assert let_go.wait(10)

    holder = Actor("holder").begin(hold)
    assert inside.wait(10)

    def interrupt() -> None:
        until(waiting(rig))
        signal.raise_signal(signal.SIGINT)

    sender = Actor("sender").begin(interrupt)
    with pytest.raises(KeyboardInterrupt), rig.ledger.scope("b", timeout=10):
        pass
    sender.end()
    assert rig.ledger._turns.waiters == []
    let_go.set()
    holder.end()
    usable(rig)


def test_a_scope_whose_exit_was_interrupted_is_closed_all_the_same() -> None:
    """I4: the interrupt comes when the ledger is about to be told; nobody would close it later."""
    rig = Rig()
    leave = rig.ledger.leave
    calls = []

    def interrupted_at_first(scope: object) -> None:
        calls.append(scope)
        if len(calls) == 1:
            raise KeyboardInterrupt
        leave(scope)  # type: ignore[arg-type]

    rig.ledger.leave = interrupted_at_first  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt), rig.ledger.scope("a"):
        pass
    rig.sound()


def test_a_refused_exit_is_not_tried_again() -> None:
    """I4: only an interrupt is; a ScopeError is the user's to solve."""
    rig = Rig()
    outer = rig.ledger.scope("a")
    outer.__enter__()
    with rig.ledger.scope("a"), pytest.raises(ScopeError):
        outer.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    rig.sound()
