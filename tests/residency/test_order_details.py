"""Who comes next: the declared order goes round, a learned one has to have come twice after a surprise."""

from __future__ import annotations

from omni_components.residency.events import Cause, EventKind
from omni_components.residency.graph import peak_bytes, peak_with_one_arriving
from omni_components.residency.order import Order
from tests.residency.rigs import Rig, component, edges


def after(order: Order, names: str) -> tuple[str, ...]:
    for name in names:
        order.note(name)
    return order.guesses()


def test_a_declared_order_begins_again_at_its_end() -> None:
    order = Order("abc")
    assert after(order, "") == ()
    assert after(order, "a") == ("b", "c")
    assert after(order, "b") == ("c", "a")
    assert after(order, "c") == ("a", "b")
    assert after(order, "x") == ()  # outside the order
    assert after(order, "a") == ("b", "c")


def test_a_learned_order_guesses_what_followed_the_last_time() -> None:
    assert after(Order(), "") == ()
    assert after(Order(), "a") == ()
    assert after(Order(), "ab") == ()
    assert after(Order(), "aba") == ("b",)
    assert after(Order(), "abab") == ("a",)


def test_the_two_that_came_last_tell_more_than_the_last_one() -> None:
    """a, b, a, c: what follows a depends on what was before it."""
    assert after(Order(), "abacabac") == ("a",)
    assert after(Order(), "abacabaca") == ("b",)
    assert after(Order(), "abacabacaba") == ("c",)


def test_after_a_surprise_nothing_is_guessed_until_the_same_has_come_twice() -> None:
    order = Order()
    assert after(order, "abaca") == ()
    assert after(order, "c") == ("a",)


def rigged(**policy: object) -> Rig:
    return Rig("abc", prefetch=("a", "b", "c"), **policy)


def test_the_component_that_comes_next_arrives_beside_the_present_one_and_is_no_new_copy() -> None:
    """I1: one active, one arriving; I8."""
    rig = rigged()
    rig.ledger.load("a")
    assert rig.ledger.arriving == "b"
    assert rig.present == {"a"}
    assert rig.ledger.device_bytes == 20
    rig.sound()
    with rig.ledger.scope("b"):
        assert (rig.present, rig.ledger.arriving) == ({"b"}, "c")
        rig.sound(b=1)
    totals = rig.ledger.history.totals
    assert [totals[name].prefetched for name in "abc"] == [0, 1, 1]
    assert [totals[name].prefetch_wasted for name in "abc"] == [0, 0, 0]


def test_the_wrong_guess_goes_before_anything_else_is_loaded() -> None:
    """I8: its bytes may be needed."""
    rig = rigged()
    rig.ledger.load("a")
    rig.ledger.load("c")
    assert (rig.present, rig.ledger.arriving) == ({"c"}, "a")
    assert rig.ledger.history.totals["b"].prefetch_wasted == 1
    rig.sound()


def test_nothing_arrives_without_room_in_the_limit_or_on_the_device() -> None:
    """I8."""
    exact, short, full = rigged(device_memory=20), rigged(device_memory=19), rigged()
    full.mover.room_ahead = False
    for rig in (exact, short, full):
        rig.ledger.load("a")
        rig.sound()
    assert [rig.ledger.arriving for rig in (exact, short, full)] == ["b", None, None]
    assert [rig.ledger.predicted_peak for rig in (exact, short, full)] == [20, 19, 20]


def test_a_guess_that_fails_is_an_event_and_no_error() -> None:
    """I6."""
    rig = rigged()
    rig.mover.fail("prefetch", "b")
    rig.ledger.load("a")
    assert (rig.present, rig.ledger.arriving) == ({"a"}, None)
    assert rig.ledger.history.totals["b"].prefetch_failed == 1
    last = list(rig.ledger.history)[-1]
    assert (last.kind, last.component, last.cause) == (EventKind.ROLLBACK, "b", Cause.PREFETCH)
    rig.sound()


def test_a_release_lets_the_arriving_component_arrive_unless_the_arena_goes_too() -> None:
    rig = rigged()
    rig.ledger.load("a")
    rig.ledger.release()
    assert (rig.present, rig.ledger.arriving, rig.ledger.device_bytes) == (set(), "b", 10)
    rig.ledger.release(free_arena=True)
    assert (rig.present, rig.ledger.arriving, rig.ledger.device_bytes) == (set(), None, 0)
    last = list(rig.ledger.history)[-1]
    assert (last.kind, last.component, last.cause) == (EventKind.EVICT, "b", Cause.PREFETCH)
    rig.sound()


def test_residents_are_no_step_in_the_order() -> None:
    rig = Rig("ab", edges("ab"), prefetch=True)
    rig.mover.register("vae", 5)
    rig.ledger.admit([component("vae", 5, resident=True)], lambda one, other: False)
    for _ in range(2):
        for name in "ab":
            rig.ledger.load(name)
            rig.ledger.release()
            rig.ledger.adopt()
    assert rig.ledger.present == ("vae",)
    rig.ledger.load("a")
    assert rig.ledger.arriving == "b"


def test_learning_needs_prefetch() -> None:
    rig = Rig("ab")
    for name in "ababab":
        rig.ledger.load(name)
        assert rig.ledger.arriving is None


def test_the_peak_with_one_arriving_counts_one_rival_more() -> None:
    """I8."""
    rivals = {"a": ["b", "c"], "b": ["a", "c"], "c": ["a", "b"], "d": []}
    sizes = {"a": 5, "b": 7, "c": 3, "d": 100}
    assert peak_bytes(sizes, rivals) == 107
    assert peak_with_one_arriving(sizes, rivals) == 112
    assert peak_with_one_arriving({}, {}) == 0
