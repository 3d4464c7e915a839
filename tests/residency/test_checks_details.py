"""``check()`` finds each lie in a book, and says which: the checks are run over books that are wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from omni_components import InvariantError
from omni_components.residency.book import Entry, State
from omni_components.residency.turns import Waiter
from tests.residency.rigs import Actor, Rig, edges


def entries(rig: Rig) -> dict[str, Entry]:
    return rig.ledger._book.entries


def finding(rig: Rig) -> tuple[str, str]:
    with pytest.raises(InvariantError) as caught:
        rig.ledger.check()
    return caught.value.invariant, caught.value.problem


@pytest.mark.parametrize("one", [State.LOADING, State.DEVICE, State.EVICTING])
@pytest.mark.parametrize("other", [State.LOADING, State.DEVICE, State.EVICTING])
def test_two_rivals_off_the_host_are_found(one: State, other: State) -> None:
    """I1."""
    rig = Rig("abc", edges("bc"))
    entries(rig)["b"].state, entries(rig)["c"].state = one, other
    assert finding(rig) == ("I1 exclusion", "'b' and 'c' are both off the host")


def test_a_component_that_arrives_without_prefetch_is_found() -> None:
    """I1."""
    rig = Rig("ab")
    entries(rig)["a"].state = State.ARRIVING
    assert finding(rig) == ("I1 exclusion", "'a' arrive, 0 may")


def test_two_components_that_arrive_are_found() -> None:
    """I1: with prefetch one may."""
    rig = Rig("ab", prefetch=True)
    for entry in entries(rig).values():
        entry.state = State.ARRIVING
    assert finding(rig) == ("I1 exclusion", "'a', 'b' arrive, 1 may")


def test_a_component_that_is_missing_in_its_scope_is_found() -> None:
    """I2: in another thread too."""
    rig = Rig("a")
    with rig.ledger.scope("a"):
        rig.ledger._book.step(entries(rig)["a"], State.EVICTING)
        rig.ledger._book.step(entries(rig)["a"], State.HOST)
        text = "thread MainThread is inside a scope of 'a', which is not there"
        assert finding(rig) == ("I2 presence", text)
        actor = Actor("other").begin(rig.ledger.check)
        with pytest.raises(InvariantError, match=text):
            actor.end()


def test_a_thread_that_is_missing_something_does_not_hide_another_one() -> None:
    """I2: the first thread waits, or has got its error; the second one's body runs without its component."""
    rig = Rig("ab", edges(""))
    with rig.ledger.scope("a"):

        def enter() -> None:
            with rig.ledger.scope("b"):
                for entry in entries(rig).values():
                    rig.ledger._book.step(entry, State.EVICTING)
                    rig.ledger._book.step(entry, State.HOST)
                main = rig.ledger._book.stacks()[0]
                rig.ledger._turns.waiters.append(Waiter(main, None))
                with pytest.raises(InvariantError, match="thread second is inside a scope of 'b'"):
                    rig.ledger.check()
                rig.ledger._turns.waiters.clear()
                main.lost = True
                with pytest.raises(InvariantError, match="thread second is inside a scope of 'b'"):
                    rig.ledger.check()
                main.lost = False

        Actor("second").begin(enter).end()


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda scope, entry: entry.scopes.clear(), "0 pins, 1 open scopes"),
        (lambda scope, entry: entry.scopes.append(scope), "2 pins, 1 open scopes"),
        (lambda scope, entry: scope.stack.scopes.append(scope), "1 pins, 2 open scopes"),
    ],
    ids=["a pin is lost", "a pin too many", "a scope too many"],
)
def test_pins_that_are_not_the_open_scopes_are_found(spoil: Callable[..., None], text: str) -> None:
    """I4."""
    rig = Rig("a")
    scope = rig.ledger.scope("a")
    scope.__enter__()
    spoil(scope, entries(rig)["a"])
    assert finding(rig) == ("I4 pins", text)


@pytest.mark.parametrize("state", [State.LOADING, State.EVICTING])
def test_a_component_half_moved_while_nobody_moves_is_found(state: State) -> None:
    """I6; a thread that moves is between two states."""
    rig = Rig("a")
    entries(rig)["a"].state = state
    rig.ledger._book.held = 10
    rig.ledger._turns.moving = Waiter(rig.ledger._local.stack, None)
    rig.ledger.check()
    rig.ledger._turns.moving = None
    assert finding(rig) == ("I6 rest", f"'a' is {state.name} while nobody moves it")


def test_bytes_that_do_not_add_up_are_found() -> None:
    """I8."""
    rig = Rig("a")
    rig.ledger._book.held = 7
    assert finding(rig) == ("I8 accounting", "7 bytes in the book, 0 by component")


def test_more_bytes_than_predicted_are_found() -> None:
    """I8: exactly the peak is right."""
    rig = Rig("ab")
    rig.ledger.load("a")
    rig.ledger.check()
    one = entries(rig)["a"]
    one.state, entries(rig)["b"].state = State.HOST, State.DEVICE
    rig.ledger._book.resize(entries(rig)["b"], 11)
    rig.ledger.check()
    rig.ledger._book.predicted_peak = lambda: 10  # type: ignore[method-assign]
    assert finding(rig) == ("I8 accounting", "11 bytes on the device, 10 predicted at most")


def test_an_arriving_component_beyond_the_limit_is_found() -> None:
    """I8: with it, exactly the limit is right."""
    rig = Rig("ab", prefetch=True, device_memory=20)
    rig.ledger.load("a")
    entries(rig)["b"].state = State.ARRIVING
    rig.ledger._book.held = 20
    rig.ledger.check()
    rig.ledger._book.capacity = 19
    assert finding(rig) == ("I8 accounting", "'b' arrives: 20 bytes of 19")
