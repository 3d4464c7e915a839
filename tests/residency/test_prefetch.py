"""Prefetch: who is expected, who may arrive, and what becomes of a guess, right or wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from torch import nn

from omni_components import (
    InvariantError,
    OffloadPolicy,
    PolicyError,
    ResidencyLedger,
    TransferError,
    UnknownComponentError,
    offload,
)
from omni_components.residency.book import Book, State
from omni_components.residency.checks import problems
from omni_components.residency.events import Cause, EventKind
from omni_components.residency.order import Order
from omni_components.residency.switch import Switch
from omni_components.residency.threads import ThreadStack
from omni_components.testing import SimulatedAccelerator
from omni_components.testing.machine import NESTING, RecordingMachine
from omni_components.testing.movers import Fault, RecordingMover
from omni_components.testing.plugin import require_simulated_accelerator
from omni_components.testing.strategies import component_sets
from omni_components.testing.subjects import RecordingSubject, Subject
from omni_components.transfer.ahead import Ahead
from omni_components.transfer.arena import Arena
from omni_components.transfer.device import AcceleratorBackend
from tests.residency.arena import ACTIVATIONS, ArenaMachine, ArenaSubject
from tests.residency.interrupts import interrupt_everywhere
from tests.residency.rigs import Actor, Rig, component, edges, until, waiting

pytestmark = pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")


# --- who is expected --------------------------------------------------------------------------------------------


def order_after(came: str, *declared: str) -> Order:
    order = Order(declared)
    for name in came:
        order.note(name)
    return order


def test_the_order_is_what_followed_the_last_time() -> None:
    """Requests of an encoder, a reasoner and a generator: the first of the next follows the last of this one."""
    assert order_after("erg").guesses() == ()
    assert order_after("erge").guesses() == ("r",)
    assert order_after("erger").guesses() == ("g",)
    assert order_after("ergerg").guesses() == ("e",)


def test_the_two_last_ones_tell_what_the_last_one_cannot() -> None:
    came = "abacabac"
    assert order_after(came).guesses() == ("a",)
    assert order_after(came + "a").guesses() == ("b",)
    assert order_after(came + "aba").guesses() == ("c",)


def test_nothing_is_guessed_after_a_surprise_until_it_has_come_twice() -> None:
    assert order_after("ababaca").guesses() == ()
    assert order_after("ababacaba").guesses() == ("c",)


def test_a_declared_order_begins_again_at_its_end_and_skips_nobody() -> None:
    assert order_after("", "a", "b", "c").guesses() == ()
    assert order_after("a", "a", "b", "c").guesses() == ("b", "c")
    assert order_after("ab", "a", "b", "c").guesses() == ("c", "a")
    assert order_after("abc", "a", "b", "c").guesses() == ("a", "b")
    assert order_after("x", "a", "b", "c").guesses() == ()


@pytest.mark.parametrize("order", ["ab", ("a",), ("a", "a"), ("a", 1), ()])
def test_an_order_that_is_none(order: Any) -> None:
    with pytest.raises(PolicyError, match="prefetch"):
        OffloadPolicy(prefetch=order)


# --- over numbers -----------------------------------------------------------------------------------------------


def run(rig: Rig, *names: str) -> None:
    for name in names:
        with rig.ledger.scope(name):
            pass


def learned(names: str = "abc", **policy: Any) -> Rig:
    """A rig that has seen ``names`` once and is at rest."""
    rig = Rig(prefetch=True, **policy)
    run(rig, *names)
    rig.ledger.release()
    rig.mover.calls.clear()
    return rig


def row(rig: Rig, name: str) -> Any:
    return rig.ledger.history.totals[name]


def test_prefetch_is_off_unless_asked_for() -> None:
    """I1: without it nobody arrives, whatever was learned."""
    rig = Rig()
    run(rig, *"abcabc")
    assert rig.ledger.arriving is None
    assert "prefetch" not in {call.verb for call in rig.mover.calls}
    assert rig.ledger.predicted_peak == 10


def test_the_next_one_arrives_while_the_present_one_computes() -> None:
    """I1, I2, I8: one active, one arriving; the scope that opens finds its bytes there."""
    rig = learned()
    with rig.ledger.scope("a"):
        assert (rig.ledger.arriving, rig.present, rig.ledger.device_bytes) == ("b", {"a"}, 20)
        assert rig.ledger.state("b") is State.ARRIVING
        rig.ledger.audit()
    with rig.ledger.scope("b"):
        assert (rig.ledger.arriving, rig.present, rig.ledger.device_bytes) == ("c", {"b"}, 20)
    load = [one for one in rig.ledger.history if one.component == "b" and one.kind is EventKind.LOAD][-2:]
    assert [(one.cause, one.bytes) for one in load] == [(Cause.PREFETCH, 10), (Cause.SCOPE, 0)]
    assert rig.ledger.predicted_peak == 20
    assert (row(rig, "b").loads, row(rig, "b").prefetched, row(rig, "b").bytes_in) == (2, 1, 20)


def test_fifty_calls_of_the_generator_and_a_release_do_not_disturb_the_order() -> None:
    """And whoever arrives for the next request goes on arriving."""
    rig = learned()
    for _ in range(3):
        run(rig, "a", "b", *"c" * 50)
        rig.ledger.release()
        assert (rig.ledger.arriving, rig.present) == ("a", set())
        rig.sound()
    assert sum(row(rig, name).prefetch_wasted for name in "abc") == 0
    assert sum(row(rig, name).prefetched for name in "abc") == 9


def test_a_declared_order_needs_no_request_to_learn_from() -> None:
    rig = Rig(prefetch=("a", "b", "c"))
    for name, following in ("ab", "bc", "ca"):
        run(rig, name)
        assert rig.ledger.arriving == following
    rig.sound()


def test_a_declared_order_passes_over_those_that_are_there() -> None:
    rig = Rig("abc", edges("ac bc"), prefetch=("a", "b", "c"))
    rig.ledger.load("b")
    rig.ledger.load("a")
    assert rig.ledger.arriving == "c"


def test_a_wrong_guess_costs_its_copy_and_is_counted() -> None:
    """I8: its bytes are given back before anything else is loaded."""
    rig = learned()
    rig.mover.capacity = 20
    run(rig, "a")
    rig.mover.calls.clear()
    run(rig, "c")
    assert [(call.verb, call.name) for call in rig.mover.calls if call.verb != "touch"][:3] == [
        ("drop", "b"),
        ("evict", "a"),
        ("load", "c"),
    ]
    assert (row(rig, "b").prefetch_wasted, row(rig, "b").bytes_wasted, row(rig, "b").loads) == (1, 10, 1)
    assert rig.ledger.state("b") is State.HOST
    rig.sound()


def test_no_guess_where_the_budget_does_not_hold_both() -> None:
    """I8: the limit is the policy's."""
    tight = learned(device_memory=19)
    run(tight, "a")
    assert (tight.ledger.arriving, tight.ledger.predicted_peak) == (None, 19)
    enough = learned(device_memory=20)
    run(enough, "a")
    assert (enough.ledger.arriving, enough.ledger.predicted_peak) == ("b", 20)


def test_no_guess_where_the_mover_has_no_room() -> None:
    rig = learned()
    rig.mover.room_ahead = False
    run(rig, "a")
    assert rig.ledger.arriving is None
    rig.sound()


def test_one_arrives_at_a_time() -> None:
    """I1: a component that excludes nobody may be asked for meanwhile; who arrives goes on if it stays the next."""
    rig = learned()
    run(rig, "a")
    with rig.ledger.scope("a"):
        pass  # there already: no second guess
    assert [call.name for call in rig.mover.calls if call.verb == "prefetch"] == ["b"]


def test_those_who_wait_go_before_a_guess() -> None:
    """First come, first served: while somebody waits, nothing is copied ahead."""
    rig = Rig("abc", prefetch=("a", "b", "c"))
    other = Actor()
    scope = rig.ledger.scope("a")
    rig.mover.pause = lambda: until(waiting(rig)) if not rig.mover.present("a") else None
    asked = other.begin(lambda: run(rig, "c")) if False else None
    assert asked is None
    rig.mover.pause = lambda: None
    with scope:
        rig.mover.pause = lambda: None
        other.begin(lambda: run(rig, "c"))
        until(waiting(rig))
        rig.ledger.load("a")  # in turn: it is there, and "c" waits
        assert [call.name for call in rig.mover.calls if call.verb == "prefetch"] == ["b"]
    other.end()
    rig.sound()


@pytest.mark.parametrize("free_arena", [False, True])
def test_release_lets_it_arrive_unless_the_arena_is_given_back(free_arena: bool) -> None:
    rig = learned()
    run(rig, "a")
    rig.ledger.release(free_arena=free_arena)
    assert rig.ledger.arriving == (None if free_arena else "b")
    assert rig.ledger.device_bytes == (0 if free_arena else 10)
    rig.sound()


def test_one_that_arrives_can_be_retired_and_is_home_then() -> None:
    rig = learned()
    run(rig, "a")
    rig.ledger.retire(["b"])
    assert rig.ledger.arriving is None
    assert row(rig, "b").prefetch_wasted == 1
    rig.mover.forget("b")
    rig.sound()
    run(rig, *"acac")  # its name is still in what was learned
    rig.sound()


def test_adopting_gives_up_what_arrives() -> None:
    rig = learned()
    run(rig, "a")
    rig.ledger.adopt()
    assert (rig.ledger.arriving, rig.present) == (None, set())
    rig.sound()


def test_loading_by_hand_looks_ahead_too_and_finds_what_has_arrived() -> None:
    rig = learned()
    rig.ledger.load("a")
    assert rig.ledger.arriving == "b"
    rig.ledger.load("b")
    assert (rig.ledger.arriving, rig.present) == ("c", {"b"})
    rig.sound()


def test_an_outer_component_arrives_while_its_rival_is_nested() -> None:
    """I2, I4: it is back before the outer body resumes, and its bytes are there already."""
    rig = Rig(prefetch=True)
    for _ in range(3):
        with rig.ledger.scope("a"):
            run(rig, "b")
            assert rig.present == {"a"}
    with rig.ledger.scope("a"):
        with rig.ledger.scope("b"):
            assert rig.ledger.arriving == "a"
            rig.ledger.audit()
        assert rig.present == {"a"}
    rig.sound()


def test_another_thread_need_not_wait_for_a_suspended_component_that_arrives() -> None:
    """I4: it has no place to give, whether on the host or on its way."""
    rig = Rig(prefetch=True)
    for _ in range(3):
        with rig.ledger.scope("a"):
            run(rig, "b")
    with rig.ledger.scope("a"), rig.ledger.scope("b"):
        assert rig.ledger.state("a") is State.ARRIVING
        Actor().begin(lambda: run(rig, "b")).end()
    rig.sound()


@pytest.mark.parametrize("when", ["before", "inside", "after"])
def test_a_prefetch_that_fails_is_nobodys_error(when: Any) -> None:
    """I6: it is counted, and the component is loaded when its scope opens."""
    rig = learned()
    rig.mover.fail("prefetch", "b", when=when)
    run(rig, "a")
    assert (rig.ledger.arriving, row(rig, "b").prefetch_failed, row(rig, "b").prefetched) == (None, 1, 0)
    rig.sound()
    run(rig, "b")
    assert row(rig, "b").bytes_in == 20
    rig.sound()


@pytest.mark.parametrize("when", ["before", "inside", "after"])
def test_an_interrupt_of_a_prefetch_is_the_users_and_leaves_nothing(when: Any) -> None:
    """I4, I6, I8."""
    rig = learned()
    rig.mover.fail("prefetch", "b", when=when, error=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        run(rig, "a")
    assert (rig.ledger.arriving, rig.present, rig.ledger.device_bytes) == (None, {"a"}, 10)
    rig.sound()


@pytest.mark.parametrize("when", ["before", "inside", "after"])
def test_a_load_that_fails_although_its_bytes_had_come_leaves_it_whole(when: Any) -> None:
    """I6, I8: what was copied ahead is given back with the rest."""
    rig = learned()
    run(rig, "a")
    rig.mover.fail("load", "b", when=when)
    with pytest.raises(TransferError):
        run(rig, "b")
    assert rig.present == ({"b"} if when == "after" else set())
    assert rig.ledger.device_bytes == 10 * len(rig.present)
    rig.sound()
    run(rig, *"abc")
    rig.sound()


def test_a_master_that_changes_while_it_is_copied_is_copied_again() -> None:
    """I7: and the first copy was for nothing."""
    rig = learned()
    run(rig, "a")
    rig.mover.write("b", 7)
    with rig.ledger.scope("b"):
        assert rig.mover.read("b") == 7
    assert (row(rig, "b").prefetch_wasted, row(rig, "b").bytes_in) == (1, 30)
    rig.sound()


def test_an_interrupt_at_any_place_with_prefetch_leaves_the_ledger_true_and_usable() -> None:
    """I1 to I8."""
    rigs: list[Rig] = []

    def act() -> Any:
        rigs.append(learned())
        rig = rigs[-1]

        def requests() -> None:
            run(rig, *"ab")
            run(rig, "a")  # a wrong guess
            rig.ledger.release(free_arena=True)

        return requests

    def afterwards(place: str) -> None:
        rig = rigs[-1]
        try:
            rig.sound()
            run(rig, *"abc")
            rig.ledger.release(free_arena=True)
            rig.sound()
            assert (rig.present, rig.ledger.device_bytes) == (set(), 0)
        except BaseException as error:
            raise AssertionError(f"after an interrupt at {place}") from error

    assert interrupt_everywhere(act, afterwards) > 100


# --- what check() says of a book that is untrue -----------------------------------------------------------------


def found_in(book: Book) -> set[str]:
    from omni_components.residency.turns import Turns

    return {invariant for invariant, _ in problems(book, Turns(), ThreadStack())}


def a_book(capacity: int | None = None, *, ahead: bool) -> Book:
    book = Book("the test", capacity, ahead=ahead)
    book.admit([component(name) for name in "abc"], lambda one, other: True)
    return book


def test_check_allows_one_to_arrive_and_no_more() -> None:
    """I1: as strict as ever without prefetch."""
    with_prefetch, without = a_book(ahead=True), a_book(ahead=False)
    for book in (with_prefetch, without):
        book.step(book["a"], State.LOADING)
        book.step(book["a"], State.DEVICE)
        book.step(book["b"], State.ARRIVING)
    assert found_in(with_prefetch) == set()
    assert "I1 exclusion" in found_in(without)
    with_prefetch.step(with_prefetch["c"], State.ARRIVING)
    assert "I1 exclusion" in found_in(with_prefetch)


def test_check_wants_both_within_the_budget() -> None:
    """I8."""
    book = a_book(15, ahead=True)
    book.step(book["a"], State.LOADING)
    book.step(book["a"], State.DEVICE)
    assert found_in(book) == set()
    book.step(book["b"], State.ARRIVING)
    assert "I8 accounting" in found_in(book)
