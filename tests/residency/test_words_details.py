"""What the ledger says: texts, events and defaults that a user sees."""

from __future__ import annotations

import time
from typing import Any

import pytest

from omni_components import (
    BudgetError,
    InvariantError,
    OffloadPolicy,
    OwnershipError,
    ResidencyLedger,
    ResidencyTimeoutError,
    ResidencyWarning,
    ScopeError,
    UnknownComponentError,
)
from omni_components.residency.book import LEGAL, Book, Entry, State
from omni_components.residency.events import Cause, EventKind, ResidencyEvent
from omni_components.residency.scope import OffloadScope
from omni_components.testing.movers import RecordingMover
from tests.residency.rigs import Actor, Rig, component, edges, everyone, until, waiting


def told(rig: Rig) -> list[tuple[str, str, str, int, int]]:
    """The events, without the clock."""
    return [
        (str(one.kind), one.component, str(one.cause), one.bytes, one.device_bytes)
        for one in rig.ledger.history
    ]


# --- events -----------------------------------------------------------------------------------------------------


def test_each_transition_is_an_event_with_its_cause_bytes_and_what_is_held_then() -> None:
    """I8."""
    rig = Rig("ab")
    with rig.ledger.scope("a", cause=Cause.ENTRY_POINT):
        rig.mover.write("a", 3)
    with rig.ledger.scope("b"):
        pass
    rig.ledger.release()
    rig.ledger.load("a")
    rig.ledger.retire(["a"])
    assert told(rig) == [
        ("enable", "a", "manual", 0, 0),
        ("enable", "b", "manual", 0, 0),
        ("load", "a", "entry_point", 10, 10),
        ("write_back", "a", "scope", 10, 0),
        ("evict", "a", "scope", 0, 0),
        ("load", "b", "scope", 10, 10),
        ("evict", "b", "release", 0, 0),
        ("load", "a", "manual", 10, 10),
        ("evict", "a", "manual", 0, 0),
        ("disable", "a", "manual", 0, 0),
    ]
    assert rig.ledger.history.peak == rig.ledger.history.predicted == 10


@pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")
def test_what_comes_back_comes_for_the_cause_of_the_scope_that_displaced_it() -> None:
    rig = Rig("ab")
    with rig.ledger.scope("a"), rig.ledger.scope("b", cause=Cause.HOOK):
        pass
    assert told(rig)[3:] == [
        ("evict", "a", "hook", 0, 0),
        ("load", "b", "hook", 10, 10),
        ("evict", "b", "hook", 0, 0),
        ("load", "a", "hook", 10, 10),
    ]


def test_a_move_that_failed_is_an_event() -> None:
    """I6."""
    rig = Rig("ab")
    rig.mover.fail("load", "a", error=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt), rig.ledger.scope("a", cause=Cause.HOOK):
        pass
    assert told(rig)[2:] == [("rollback", "a", "hook", 0, 0)]


def test_seconds_are_those_since_the_move_began_and_the_time_is_when_it_ended() -> None:
    rig = Rig("a")
    rig.mover.pause = lambda: time.sleep(0.02)
    begin = time.perf_counter()
    rig.ledger.load("a")
    end = time.perf_counter()
    enabled, loaded = rig.ledger.history
    assert 0.02 <= loaded.seconds <= end - begin
    assert begin <= loaded.at <= end
    assert enabled.seconds == 0.0
    assert enabled.at <= begin


def test_a_wait_is_an_event_of_the_one_who_waited() -> None:
    rig = Rig("ab")
    with rig.ledger.scope("a"):
        other = Actor().begin(lambda: rig.ledger.scope("b", cause=Cause.HOOK).__enter__())
        until(waiting(rig))
        time.sleep(0.02)
    other.end()
    (wait,) = (one for one in rig.ledger.history if one.kind is EventKind.WAIT)
    assert (wait.component, wait.cause, wait.bytes) == ("b", Cause.HOOK, 0)
    assert 0.02 <= wait.seconds < 10


def test_an_edit_that_was_copied_home_is_an_event() -> None:
    rig = Rig("a")
    begin = time.perf_counter() - 5
    rig.ledger.note_saved("a", 7, begin)
    last: ResidencyEvent = list(rig.ledger.history)[-1]
    assert (last.kind, last.component, last.cause, last.bytes) == (
        EventKind.WRITE_BACK,
        "a",
        Cause.MANUAL,
        7,
    )
    assert 5 <= last.seconds < 60


def test_adopting_sends_the_unpinned_home_and_brings_the_residents_back() -> None:
    rig = Rig("abc", edges(""))
    rig.mover.register("vae", 5)
    rig.ledger.admit([component("vae", 5, resident=True)], lambda one, other: False)
    for name in ("a", "vae"):
        rig.ledger.load(name)
    with rig.ledger.scope("c"):
        rig.moves()
        rig.ledger.adopt()
        assert rig.moves() == "-a -vae +vae"
        assert rig.present == {"c", "vae"}
    assert {one.cause for one in list(rig.ledger.history)[-3:]} == {Cause.MANUAL}


# --- names, defaults --------------------------------------------------------------------------------------------


def test_a_ledger_says_whose_it_is() -> None:
    mover = RecordingMover({})
    assert (ResidencyLedger(mover).owner, ResidencyLedger(mover).policy) == ("this ledger", OffloadPolicy())
    with pytest.raises(UnknownComponentError, match="not declared by this ledger; declared: nothing"):
        ResidencyLedger(mover).scope("a")
    assert ResidencyLedger(mover).attachment is None


def test_a_scope_shows_its_component_and_whether_it_is_open() -> None:
    rig = Rig("a")
    scope = rig.ledger.scope("a")
    seen = [repr(scope)]
    with scope as entered:
        assert entered is scope
        seen.append(repr(scope))
    seen.append(repr(scope))
    assert seen == [f"<OffloadScope 'a', {state}>" for state in ("new", "open", "closed")]


def test_a_new_scope_has_done_nothing() -> None:
    rig = Rig("a", timeout=3)
    scope = rig.ledger.scope("a")
    assert (scope.name, scope.cause, scope.timeout) == ("a", Cause.SCOPE, 3)
    assert rig.ledger.scope("a", timeout=0).timeout == 0
    assert (scope.used, scope.displaced, scope.stack, scope.call, scope.work) == (
        False,
        False,
        None,
        None,
        None,
    )
    assert OffloadScope(rig.ledger, "a", Cause.HOOK).timeout is None


def test_components_are_told_in_the_order_of_declaration() -> None:
    rig = Rig("cab", edges("ca"))
    assert [one.name for one in rig.ledger.components] == ["c", "a", "b"]
    assert (rig.ledger.rivals("c"), rig.ledger.rivals("a"), rig.ledger.rivals("b")) == (("a",), ("c",), ())
    assert rig.ledger.state("a") is State.HOST
    assert rig.ledger.size("a") == 10


def test_a_prediction_is_kept_when_what_it_was_made_for_has_gone() -> None:
    rig = Rig("ab", edges(""))
    rig.ledger.retire(["a"])
    rig.mover.register("c", 1)
    rig.ledger.admit([component("c", 1)], rig.conflict)
    assert (rig.ledger.history.predicted, rig.ledger.predicted_peak) == (20, 11)


def test_the_warning_of_nested_rivals_in_full() -> None:
    rig = Rig("ab")
    with rig.ledger.scope("a"), pytest.warns(ResidencyWarning) as caught, rig.ledger.scope("b"):
        pass
    assert [str(one.message) for one in caught] == [
        "'b' runs inside a scope of its rival 'a': each such pass costs two more switches. "
        "Close the outer scope first where the order allows it."
    ]


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["ab", "ca", "cc"])
def test_a_name_that_is_taken_admits_nobody(names: str) -> None:
    """I3, I6."""
    rig = Rig("a")
    with pytest.raises(OwnershipError) as caught:
        rig.ledger.admit([component(name) for name in names], rig.conflict)
    taken = "c" if names == "cc" else "a"
    assert str(caught.value) == (
        f"'{taken}' belongs to the test and is claimed by a second component. Give the components different names."
    )
    assert [one.name for one in rig.ledger.components] == ["a"]
    assert len(rig.ledger.history) == 1


def test_what_exactly_fits_beside_the_residents_is_admitted_and_a_byte_more_is_not() -> None:
    """I8."""
    rig = Rig("", device_memory=15)
    vae, clip = component("vae", 3, resident=True), component("clip", 2, resident=True)
    rig.ledger.admit([vae, clip, component("a", 10), component("b", 10)], rig.conflict)
    with pytest.raises(BudgetError) as caught:
        rig.ledger.admit([component("c", 11)], rig.conflict)
    error = caught.value
    assert (error.component, error.wanted, error.capacity, error.residents) == ("c", 11, 15, 5)
    assert error.names == ("vae", "clip")
    with pytest.raises(BudgetError):  # a resident counts for those that come with it
        rig.ledger.admit([component("d", 10), component("text", 1, resident=True)], rig.conflict)
    assert len(rig.ledger.components) == 4


def test_a_scope_left_by_the_wrong_thread_names_both_and_says_what_to_do() -> None:
    rig = Rig("a")
    scope = rig.ledger.scope("a")
    with scope:
        with pytest.raises(ScopeError) as caught:
            Actor("thief").begin(lambda: scope.__exit__(None, None, None)).end()
        assert caught.value.component == "a"
        assert str(caught.value) == (
            "scope of 'a': thread MainThread opened it, thief tried to leave it. "
            "Use scopes only in `with` statements: the innermost closes first, in the thread that opened it."
        )


def test_misuse_of_one_scope_is_told_in_full() -> None:
    rig = Rig("ab", edges(""))
    scope = rig.ledger.scope("a")
    with pytest.raises(ScopeError, match=r"^scope of 'a': it is not open\. Use scopes only in `with`"):
        scope.__exit__(None, None, None)
    with scope, rig.ledger.scope("b"):
        with pytest.raises(ScopeError) as caught:
            scope.__exit__(None, None, None)
        assert str(caught.value).startswith(
            "scope of 'a': a scope of 'b' was opened inside it and is still open. Use scopes only"
        )
    with pytest.raises(ScopeError) as caught, scope:
        pass
    assert str(caught.value) == (
        "scope of 'a': it was entered before; a scope is single-use. Ask for a new scope."
    )


def test_loading_ahead_inside_the_scope_of_a_rival_is_refused_by_name() -> None:
    """I4."""
    rig = Rig("ab")
    with rig.ledger.scope("a"):
        with pytest.raises(ScopeError) as caught:
            rig.ledger.load("b")
        assert caught.value.component == "b"
        assert caught.value.problem == "it cannot be loaded ahead inside the scope of its rival 'a'."
        rig.ledger.load("a")
        rig.sound(a=1)


def test_retiring_what_is_open_is_refused_by_name() -> None:
    """I4, I6: nobody has been sent home."""
    rig = Rig("abc", edges(""))
    rig.ledger.load("a")
    with rig.ledger.scope("b"):
        rig.moves()
        with pytest.raises(ScopeError) as caught:
            rig.ledger.retire(["a", "b"])
        assert str(caught.value) == (
            "scope of 'b': offload cannot be disabled while it is open. Leave the scope first."
        )
        assert rig.moves() == ""
        rig.sound(b=1)


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (lambda rig: rig.ledger.load("b"), "b"),
        (lambda rig: rig.ledger.release(), "*"),
        (lambda rig: rig.ledger.scope("b").__enter__(), "b"),
    ],
)
def test_a_mover_that_asks_its_ledger_is_refused_not_locked_out(act: Any, name: str) -> None:
    rig = Rig("ab", edges(""))
    rig.mover.pause = lambda: act(rig)
    with pytest.raises(ScopeError) as caught:
        rig.ledger.load("a")
    assert str(caught.value) == (
        f"scope of {name!r}: it was asked for while this thread moves bytes. This is a bug: report it."
    )
    rig.mover.pause = lambda: None
    rig.sound()


def test_a_timeout_says_how_long_it_waited_and_for_whom() -> None:
    rig = Rig("abc", edges("ab bc"))
    with rig.ledger.scope("a"), rig.ledger.scope("a"), rig.ledger.scope("c"):
        actor = Actor().begin(lambda: rig.ledger.load("b", timeout=0.05))
        with pytest.raises(ResidencyTimeoutError) as caught:
            actor.end()
    error = caught.value
    assert (error.component, error.seconds) == ("b", 0.05)
    assert error.holders == ("'a' in thread MainThread", "'c' in thread MainThread")
    rig.sound()


def test_a_timeout_of_the_policy_holds_for_a_load_and_a_scope_can_say_otherwise() -> None:
    rig = Rig("ab", timeout=0.05)
    with rig.ledger.scope("a"):
        begin = time.monotonic()
        with pytest.raises(ResidencyTimeoutError):
            Actor().begin(lambda: rig.ledger.load("b")).end(5)
        assert time.monotonic() - begin < 0.4  # it need not wait for the next look
        with pytest.raises(ResidencyTimeoutError, match="within 0 s"):
            Actor().begin(lambda: rig.ledger.load("b", timeout=0)).end(5)


def test_an_audit_tells_each_difference() -> None:
    """I5."""
    rig = Rig("abc", edges(""))
    rig.ledger.load("a")
    rig.ledger.load("b")
    for name in "ab":
        rig.mover.evict(name)
    with pytest.raises(InvariantError) as caught:
        rig.ledger.audit()
    assert (caught.value.invariant, caught.value.problem) == (
        "I5 truth",
        "'a' is not on the device; 'b' is not on the device",
    )


# --- the book ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", list(State))
@pytest.mark.parametrize("target", list(State))
def test_only_the_transitions_of_the_table_are_legal(start: State, target: State) -> None:
    """I6, I8: bytes are reserved with the first step and given back with the last."""
    book, entry = Book("a test", None), Entry(component("a"), 10, start)
    book.held = held = 100
    if (start, target) not in LEGAL:
        with pytest.raises(InvariantError) as caught:
            book.step(entry, target)
        assert str(caught.value).startswith(
            f"I6 rest is broken: 'a' cannot go from {start.name} to {target.name}. "
        )
        assert (entry.state, book.held) == (start, held)
        return
    book.step(entry, target)
    change = 10 * ((target is not State.HOST) - (start is not State.HOST))
    assert (entry.state, book.held) == (target, held + change)


def test_the_table_of_transitions() -> None:
    names = "HA AL AH HL LD LH DE EH ED"
    assert {one.name[0] + other.name[0] for one, other in LEGAL} == set(names.split())


@pytest.mark.parametrize("state", list(State))
def test_a_component_that_grows_counts_where_it_holds_device_bytes(state: State) -> None:
    """I8."""
    book, entry = Book("a test", None), Entry(component("a"), 10, state)
    book.held = 100
    book.resize(entry, 13)
    assert (entry.bytes, book.held) == (13, 100 if state is State.HOST else 103)


def test_conflicts_that_both_sides_tell_are_entered_once() -> None:
    book = Book("a test", None)
    book.admit([component("a"), component("b")], lambda one, other: True)
    book.admit([component("c")], lambda one, other: True)
    assert {name: [one.name for one in entry.rivals] for name, entry in book.entries.items()} == {
        "a": ["b", "c"],
        "b": ["a", "c"],
        "c": ["a", "b"],
    }


def test_a_conflict_told_by_one_side_only_is_one_for_both() -> None:
    book = Book("a test", None)
    book.admit([component("a"), component("b")], lambda one, other: (one.name, other.name) == ("b", "a"))
    assert [[one.name for one in book[name].rivals] for name in "ab"] == [["b"], ["a"]]


def test_a_component_that_is_struck_out_is_nobodys_rival_even_if_struck_twice() -> None:
    book = Book("a test", None)
    book.admit([component(name) for name in "abc"], lambda one, other: everyone(one.name, other.name))
    gone = book["a"]
    book.strike([gone])
    book.strike(iter([gone]))
    assert (list(book.entries), gone.rivals) == (["b", "c"], [])
    assert [[one.name for one in book[name].rivals] for name in "bc"] == [["c"], ["b"]]
