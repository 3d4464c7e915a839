"""What the ledger hands on, word for word: tensors and streams to its mover, causes and seconds to its history."""

from __future__ import annotations

import random
import threading
import time
from itertools import combinations
from typing import Any

import pytest

from omni_components import InvariantError, ScopeError, TransferError
from omni_components.residency.book import Book, State
from omni_components.residency.events import Cause, EventKind
from omni_components.residency.graph import peak_bytes, peak_with_one_arriving
from tests.residency.rigs import Actor, Rig, edges, until

# --- handed on ------------------------------------------------------------------------------------------------


def test_the_history_keeps_as_many_events_as_the_policy_says() -> None:
    rig = Rig("ab", history=3)
    for name in "abab":
        rig.ledger.load(name)
    assert len(tuple(rig.ledger.history)) == 3


def test_a_tensor_that_is_asked_about_is_the_one_that_the_mover_looks_at() -> None:
    rig, asked = Rig("a"), object()
    seen: list[Any] = []
    rig.mover.is_current = lambda tensor: seen.append(tensor) or True  # type: ignore[func-returns-value]
    assert rig.ledger.is_current(asked) is True
    assert seen == [asked]


def test_work_goes_on_with_the_stream_that_it_began_with_after_a_rival_inside() -> None:
    """The outer scope's component comes back; whoever enqueued on another stream must wait for it."""
    rig = Rig("ab")
    touched: list[tuple[str, Any]] = []
    tokens = iter(["first", "second", "third", "fourth"])

    def touch(name: str, stream: Any = None) -> Any:
        touched.append((name, stream))
        return next(tokens) if stream is None else stream

    rig.mover.touch = touch  # type: ignore[method-assign]
    with rig.ledger.scope("a") as waited, rig.ledger.scope("a") as quick:
        assert (waited.work, quick.work) == ("first", "second")
        touched.clear()
        with pytest.warns(UserWarning, match="costs two more switches"), rig.ledger.scope("b"):
            pass
        assert touched == [("b", None), ("a", "first"), ("a", "second")]
        assert rig.ledger._local.stack.lost is False  # nothing is missing any more


def test_what_comes_back_after_a_failure_came_for_the_reason_of_the_one_that_failed() -> None:
    rig = Rig("ab")
    with rig.ledger.scope("a"):
        rig.mover.fail("load", "b")
        with (
            pytest.warns(UserWarning, match="costs two more switches"),
            pytest.raises(TransferError),
            rig.ledger.scope("b", cause=Cause.ENTRY_POINT),
        ):
            pytest.fail("the body must not run")
        last = tuple(rig.ledger.history)[-1]
        assert (last.kind, last.component, last.cause) == (EventKind.LOAD, "a", Cause.ENTRY_POINT)


def test_a_scope_left_too_early_is_told_the_innermost_that_is_open() -> None:
    rig = Rig("abc", edges(""))
    scopes = [rig.ledger.scope(name) for name in "abc"]
    for one in scopes:
        one.__enter__()
    with pytest.raises(ScopeError, match="a scope of 'c' was opened inside it"):
        scopes[0].__exit__(None, None, None)
    for one in reversed(scopes):
        one.__exit__(None, None, None)
    rig.sound()


# --- copies made ahead ----------------------------------------------------------------------------------------


def ahead() -> Rig:
    """a and b exclude each other and come in turn; c excludes nobody."""
    return Rig("abc", edges("ab"), prefetch=("a", "b"))


def test_whoever_was_expected_gives_its_bytes_up_when_another_comes_that_is_no_rival() -> None:
    rig = ahead()
    rig.ledger.load("a")
    assert rig.ledger.state("b") is State.ARRIVING
    rig.ledger.load("c")
    assert rig.ledger.history.totals["b"].prefetch_wasted == 1
    assert rig.present == {"a", "c"}


def test_a_copy_made_ahead_and_its_end_are_events_with_the_time_they_took() -> None:
    rig = ahead()
    rig.mover.pause = lambda: time.sleep(0.02)
    drop = rig.mover.drop
    rig.mover.drop = lambda name: (time.sleep(0.02), drop(name))[1]  # type: ignore[method-assign,func-returns-value]
    rig.ledger.load("a")
    made = tuple(rig.ledger.history)[-1]
    assert (made.kind, made.component, made.cause) == (EventKind.LOAD, "b", Cause.PREFETCH)
    rig.ledger.load("c")
    given_up = next(one for one in tuple(rig.ledger.history) if one.kind is EventKind.EVICT)
    assert (given_up.component, given_up.cause) == ("b", Cause.PREFETCH)
    assert given_up.seconds >= 0.02


def test_the_mover_is_asked_about_the_room_of_the_one_that_is_expected() -> None:
    rig = ahead()
    asked: list[str] = []
    rig.mover.has_room_ahead = lambda name: asked.append(name) or False  # type: ignore[method-assign,func-returns-value]
    rig.ledger.load("a")
    assert asked == ["b"]
    assert rig.ledger.state("b") is State.HOST


def test_bytes_that_cannot_be_given_back_are_nobodys_error() -> None:
    rig = ahead()
    rig.ledger.load("a")

    def fails(name: str) -> None:
        raise RuntimeError("no")

    rig.mover.drop = fails  # type: ignore[method-assign]
    rig.ledger.load("c")
    assert rig.ledger.state("b") is State.HOST


# --- turns ----------------------------------------------------------------------------------------------------


def test_one_thread_moves_at_a_time_even_for_strangers_who_need_nothing_moved() -> None:
    rig = Rig("abc", edges("ab"))
    rig.ledger.load("c")
    go, inside = threading.Event(), threading.Event()

    def pause() -> None:
        inside.set()
        assert go.wait(10)

    rig.mover.pause = pause
    first = Actor("first").begin(lambda: rig.ledger.load("a"))
    until(inside.is_set)
    second = Actor("second").begin(lambda: rig.ledger.load("c"))  # there already
    until(lambda: len(rig.ledger._turns.waiters) == 1)
    assert second.busy
    go.set()
    first.end()
    second.end()
    rig.sound()


def test_a_component_that_was_replaced_while_somebody_waited_for_it() -> None:
    rig = Rig("ab")
    held = rig.ledger.scope("b")
    held.__enter__()
    late = Actor("late").begin(lambda: rig.ledger.load("a"))
    until(lambda: len(rig.ledger._turns.waiters) == 1)
    with rig.ledger._mutex:
        rig.ledger._book.strike([rig.ledger._book["a"]])
    rig.ledger.admit(list(Rig("a").ledger.components), lambda one, other: False)
    held.__exit__(None, None, None)
    with pytest.raises(ScopeError) as caught:
        late.end()
    assert caught.value.problem == "its component was replaced meanwhile."
    assert caught.value.advice == "Ask for a new scope."


# --- the book -------------------------------------------------------------------------------------------------


def test_a_book_lets_nobody_arrive_unless_it_is_told_so() -> None:
    assert Book("the test", None).ahead is False


def test_reaping_says_whether_a_scope_was_closed() -> None:
    rig = Rig("a")
    book = rig.ledger._book
    assert book.reap() is False
    Actor().begin(lambda: rig.ledger.scope("a").__enter__()).end()
    assert book.reap() is True
    assert book.reap() is False
    with rig.ledger.scope("a"):
        assert book.reap() is False


def test_an_audit_looks_at_the_book_before_the_tensors() -> None:
    rig = Rig("a")
    rig.ledger._book.held += 1
    with pytest.raises(InvariantError, match="I8"):
        rig.ledger.audit()


# --- the graph ------------------------------------------------------------------------------------------------


def by_trying_all(sizes: dict[str, int], rivals: dict[str, list[str]]) -> int:
    free = [
        chosen
        for count in range(len(sizes) + 1)
        for chosen in combinations(sizes, count)
        if not any(one in rivals.get(other, ()) for one in chosen for other in chosen)
    ]
    return max(sum(sizes[name] for name in chosen) for chosen in free)


def test_the_heaviest_set_is_what_trying_all_of_them_finds() -> None:
    """I8: over 300 random graphs of up to 9 components."""
    draw = random.Random(0)
    for _ in range(300):
        names = "abcdefghi"[: draw.randint(1, 9)]
        sizes = {name: draw.choice([0, 1, 2, 3, 5, 8, 13, 40]) for name in names}
        rivals: dict[str, list[str]] = {name: [] for name in names}
        density = draw.random()
        for one, other in combinations(names, 2):
            if draw.random() < density:
                rivals[one].append(other)
                rivals[other].append(one)
        wanted = by_trying_all(sizes, rivals)
        assert peak_bytes(sizes, rivals) == wanted, (sizes, rivals)
        more = max(
            by_trying_all(
                sizes, {k: [] if k == name else [v for v in vs if v != name] for k, vs in rivals.items()}
            )
            for name in names
        )
        assert peak_with_one_arriving(sizes, rivals) == more, (sizes, rivals)


def test_a_component_without_an_entry_among_the_rivals_has_none() -> None:
    assert peak_bytes({"a": 2, "b": 3}, {"a": ["gone"]}) == 5
