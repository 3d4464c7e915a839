"""A switch that is cleared first, fails, or is interrupted when it was done already: what is written down."""

from __future__ import annotations

import sys
import time

import pytest

from omni_components import TransferError
from omni_components.protocols import Moved
from omni_components.residency.book import Entry, State
from omni_components.residency.events import Cause, EventKind
from tests.residency.rigs import Rig, component, edges


def clearing() -> Rig:
    """``z`` sends a, b and c home, though it conflicts with nobody."""
    rig = Rig("abc", edges(""))
    rig.mover.register("z", 10)
    rig.mover.conflicts = edges("")
    rig.ledger.admit([component("z", clears=frozenset({"a", "b", "c", "gone"}))], lambda one, other: False)
    return rig


def test_those_that_a_component_clears_go_home_before_it_comes_and_stay_away() -> None:
    rig = clearing()
    rig.ledger.load("b")
    rig.ledger.load("a")
    rig.moves()
    with rig.ledger.scope("z", cause=Cause.HOOK):
        assert rig.present == {"z"}
    assert rig.moves() == "-a -b +z"
    assert {one.cause for one in list(rig.ledger.history)[-3:]} == {Cause.HOOK}
    rig.sound()


def test_those_that_a_component_clears_go_home_when_it_is_there_already() -> None:
    rig = clearing()
    rig.ledger.load("z")
    rig.ledger.load("a")
    assert rig.present == {"a", "z"}
    with rig.ledger.scope("z"):
        assert rig.present == {"z"}
    rig.sound()


def test_what_is_in_use_is_not_cleared() -> None:
    """I4."""
    rig = clearing()
    rig.ledger.load("b")
    with rig.ledger.scope("a"), rig.ledger.scope("z"):
        assert rig.present == {"a", "z"}
        rig.sound(a=1, z=1)


def test_a_failed_move_is_an_event_with_the_time_it_took() -> None:
    rig = Rig("ab")
    rig.mover.pause = lambda: time.sleep(0.02)
    rig.mover.fail("load", "a", when="inside")
    with pytest.raises(TransferError):
        rig.ledger.load("a")
    last = list(rig.ledger.history)[-1]
    assert (last.kind, last.component, last.cause) == (EventKind.ROLLBACK, "a", Cause.MANUAL)
    assert 0.02 <= last.seconds < 5


def test_what_was_copied_ahead_of_a_load_that_failed_is_given_back() -> None:
    """I6, I8: else the next guess would find the room taken."""
    rig = Rig("ab", prefetch=("a", "b"))
    rig.ledger.load("a")
    assert rig.ledger.arriving == "b"
    rig.mover.fail("load", "b")
    with pytest.raises(TransferError):
        rig.ledger.load("b")
    assert rig.mover._freight["b"].ahead is None
    assert rig.ledger.history.totals["b"].prefetch_wasted == 1
    assert rig.present == set()
    rig.ledger.load("a")
    assert rig.ledger.arriving == "b"
    rig.sound()


def test_a_mover_is_not_asked_to_give_back_what_was_never_copied_ahead() -> None:
    """A mover of someone's own, used without prefetch, need not know how."""
    rig = Rig("ab")
    rig.mover.drop = None  # type: ignore[method-assign, assignment]
    rig.mover.fail("load", "a")
    with pytest.raises(TransferError):
        rig.ledger.load("a")
    rig.ledger.load("a")
    rig.mover.fail("evict", "a")
    with pytest.raises(TransferError):
        rig.ledger.load("b")
    rig.sound()


def test_the_arena_is_given_back_only_on_request() -> None:
    rig = Rig("a")
    for asked in (False, True):
        rig.mover.calls.clear()
        rig.ledger.release(free_arena=asked)
        assert [call.verb for call in rig.mover.calls] == ["release_arena"] * asked


def test_what_a_move_found_is_told_in_events_and_counted_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """I8: the component has another size from then on."""
    rig = Rig("a")
    moved = Moved(bytes=3, written_back=4, adopted=1, size=12, recopied=True)
    monkeypatch.setattr(rig.mover, "load", lambda name: moved)
    rig.ledger.load("a")
    monkeypatch.undo()
    assert [(one.kind, one.cause, one.bytes, one.device_bytes) for one in rig.ledger.history][1:] == [
        (EventKind.EVICT, Cause.PREFETCH, 0, 12),
        (EventKind.ADOPT, Cause.MANUAL, 0, 12),
        (EventKind.WRITE_BACK, Cause.MANUAL, 4, 12),
        (EventKind.LOAD, Cause.MANUAL, 3, 12),
    ]
    assert rig.ledger.size("a") == 12
    assert {one.component for one in rig.ledger.history} == {"a"}


def test_the_scope_of_a_call_is_the_innermost_that_a_hook_opened_for_it() -> None:
    rig = Rig("ab", edges(""))
    names = ("a", "a", "b")
    scopes = [rig.ledger.scope(name, cause=Cause.HOOK) for name in names]
    for scope in scopes:
        scope.__enter__()
    assert rig.ledger.scope_of_call("a", None) is scopes[1]
    assert rig.ledger.scope_of_call("b", None) is scopes[2]
    with rig.ledger.scope("a"):
        assert rig.ledger.scope_of_call("a", None) is scopes[1]
    assert rig.ledger.scope_of_call("a", sys._getframe()) is None
    for scope in reversed(scopes):
        scope.__exit__(None, None, None)
    assert rig.ledger.scope_of_call("a", None) is None


@pytest.mark.parametrize("target", [State.DEVICE, State.HOST])
def test_a_move_that_is_interrupted_when_it_was_done_is_counted(
    target: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I5, I6: the component is where it was to go, and the history says so."""
    rig = Rig("a")
    if target is State.HOST:
        rig.ledger.load("a")
    step = rig.ledger._switch._step

    def interrupted(entry: Entry, state: State) -> None:
        step(entry, state)
        if state is target:
            raise KeyboardInterrupt

    monkeypatch.setattr(rig.ledger._switch, "_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rig.ledger.load("a") if target is State.DEVICE else rig.ledger.release()
    last = list(rig.ledger.history)[-1]
    assert last.kind is (EventKind.LOAD if target is State.DEVICE else EventKind.EVICT)
    assert last.bytes == (10 if target is State.DEVICE else 0)
    assert rig.ledger.state("a") is target
    rig.sound()
