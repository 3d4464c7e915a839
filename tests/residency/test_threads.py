"""Scopes in several threads: turns, sharing, timeouts, rings, threads that die; with real threads and locks."""

from __future__ import annotations

import pickle
import random
import threading
import time

import pytest

from omni_components import (
    ResidencyDeadlockError,
    ResidencyTimeoutError,
    ScopeError,
    UnknownComponentError,
)
from omni_components.residency.events import EventKind
from tests.residency.rigs import Actor, Rig, edges, until, waiting


class Held:
    """A scope that another thread holds open until told."""

    def __init__(self, rig: Rig, name: str, thread: str = "holder") -> None:
        self._let_go = threading.Event()
        self._inside = threading.Event()
        self.actor = Actor(thread).begin(lambda: self._hold(rig, name))
        assert self._inside.wait(10)

    def _hold(self, rig: Rig, name: str) -> None:
        with rig.ledger.scope(name):
            self._inside.set()
            assert self._let_go.wait(30)

    def let_go(self) -> None:
        self._let_go.set()
        self.actor.end()


def use(rig: Rig, name: str, log: list[str] | None = None, **options: float) -> None:
    with rig.ledger.scope(name, **options):
        assert name in rig.present
        if log is not None:
            log.append(name)


# --- a rival held by another thread ---------------------------------------------------------------------------


def test_a_rival_held_by_another_thread_is_waited_for() -> None:
    """I1, I4."""
    rig = Rig()
    held = Held(rig, "a")
    other = Actor().begin(lambda: use(rig, "b"))
    until(waiting(rig))
    assert rig.present == {"a"}
    assert other.busy
    held.let_go()
    other.end()
    assert rig.moves() == "+a -a +b"
    rig.sound()
    waits = [one for one in rig.ledger.history if one.kind is EventKind.WAIT]
    assert [one.component for one in waits] == ["b"]
    assert rig.ledger.history.totals["b"].waited > 0


def test_first_come_first_served() -> None:
    """I4: three waiters for three rivals go in the order in which they came."""
    rig = Rig("abcd")
    log: list[str] = []
    held = Held(rig, "a")
    actors = []
    for count, name in enumerate("cbd", start=1):
        actors.append(Actor(name).begin(lambda name=name: use(rig, name, log)))
        until(waiting(rig, count))
    held.let_go()
    for actor in actors:
        actor.end()
    assert log == ["c", "b", "d"]
    rig.sound()


def test_a_newcomer_does_not_share_past_a_rival_that_waits() -> None:
    """First come, first served: a stream of users of ``a`` must not keep ``b`` out for ever."""
    rig = Rig()
    log: list[str] = []
    held = Held(rig, "a")
    first = Actor("first").begin(lambda: use(rig, "b", log))
    until(waiting(rig))
    second = Actor("second").begin(lambda: use(rig, "a", log))
    until(waiting(rig, 2))
    assert second.busy
    held.let_go()
    first.end()
    second.end()
    assert log == ["b", "a"]


def test_the_holder_itself_may_nest_its_component_past_a_rival_that_waits() -> None:
    """The waiter waits for this very thread: queueing behind it would be a ring."""
    rig = Rig()
    with rig.ledger.scope("a"):
        other = Actor().begin(lambda: use(rig, "b"))
        until(waiting(rig))
        with rig.ledger.scope("a", timeout=5):
            rig.ledger.check()
    other.end()
    rig.sound()


def test_waiters_for_things_that_do_not_conflict_do_not_wait_for_each_other() -> None:
    rig = Rig("abxy", edges("ab xy"))
    held = Held(rig, "a")
    blocked = Actor("blocked").begin(lambda: use(rig, "b"))
    until(waiting(rig))
    Actor("free").begin(lambda: use(rig, "x")).end()
    assert blocked.busy
    held.let_go()
    blocked.end()


def test_same_component_held_by_another_thread_is_shared() -> None:
    """I4: pins + 1, no transfer."""
    rig = Rig()
    held = Held(rig, "a")
    rig.moves()
    with rig.ledger.scope("a", timeout=1):
        rig.sound(a=2)
    held.let_go()
    assert rig.moves() == ""
    rig.sound()


def test_the_last_of_the_sharers_lets_the_rival_in() -> None:
    """I4: one of two pins is not enough."""
    rig = Rig()
    one, two = Held(rig, "a", "one"), Held(rig, "a", "two")
    other = Actor().begin(lambda: use(rig, "b"))
    until(waiting(rig))
    one.let_go()
    time.sleep(0.05)
    assert other.busy
    assert rig.present == {"a"}
    two.let_go()
    other.end()


def test_release_keeps_what_another_thread_uses() -> None:
    """I4."""
    rig = Rig("abc", edges("ab"))
    rig.ledger.load("c")
    held = Held(rig, "a")
    rig.ledger.release()
    assert rig.present == {"a"}
    held.let_go()
    rig.ledger.release()
    assert rig.present == set()


def test_a_manual_load_waits_its_turn_too() -> None:
    """I4."""
    rig = Rig()
    held = Held(rig, "a")
    with pytest.raises(ResidencyTimeoutError):
        rig.ledger.load("b", timeout=0.01)
    other = Actor().begin(lambda: rig.ledger.load("b"))
    until(waiting(rig))
    held.let_go()
    other.end()
    assert rig.present == {"b"}


def test_a_scope_on_a_present_component_opens_while_bytes_of_a_stranger_travel() -> None:
    """The mutex is not held during a move."""
    rig = Rig("abx", edges("ab"))
    rig.ledger.load("x")
    halfway, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        halfway.set()
        assert go_on.wait(10)

    rig.mover.pause = pause
    other = Actor().begin(lambda: rig.ledger.load("a"))
    assert halfway.wait(10)
    with rig.ledger.scope("x", timeout=1):
        assert other.busy
        rig.ledger.check()  # while somebody moves
    go_on.set()
    other.end()
    rig.sound()


def test_a_scope_does_not_open_on_a_component_that_is_about_to_leave() -> None:
    """I2, I4: another thread has begun to evict it."""
    rig = Rig()
    rig.ledger.load("a")
    halfway, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        halfway.set()
        assert go_on.wait(10)

    rig.mover.pause = pause
    mover = Actor("mover").begin(lambda: rig.ledger.load("b"))
    assert halfway.wait(10)
    user = Actor("user").begin(lambda: use(rig, "a"))
    until(waiting(rig))
    go_on.set()
    mover.end()
    user.end()
    rig.sound()


# --- timeouts -------------------------------------------------------------------------------------------------


def test_a_turn_that_does_not_come_in_time_says_who_holds_it() -> None:
    """I6: nothing moved."""
    rig = Rig()
    held = Held(rig, "a", "render-7")
    rig.moves()
    begin = time.monotonic()
    with pytest.raises(ResidencyTimeoutError) as caught, rig.ledger.scope("b", timeout=0.05):
        pass
    assert 0.04 < time.monotonic() - begin < 5
    text = str(caught.value)
    assert "'b' did not get its turn within 0.05 s; held by 'a' in thread render-7" in text
    assert "Raise timeout=" in text
    assert isinstance(caught.value, TimeoutError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == text
    assert rig.moves() == ""
    held.let_go()
    rig.sound()


def test_a_timeout_of_zero_does_not_wait() -> None:
    rig = Rig()
    held = Held(rig, "a")
    begin = time.monotonic()
    with pytest.raises(ResidencyTimeoutError), rig.ledger.scope("b", timeout=0):
        pass
    assert time.monotonic() - begin < 0.5
    held.let_go()


def test_the_timeout_of_the_policy_holds_where_the_scope_has_none() -> None:
    rig = Rig(timeout=0.01)
    held = Held(rig, "a")
    with pytest.raises(ResidencyTimeoutError), rig.ledger.scope("b"):
        pass
    with pytest.raises(ResidencyTimeoutError):
        rig.ledger.load("b")
    held.let_go()


def test_a_waiter_that_gives_up_lets_those_behind_it_go_on() -> None:
    """A newcomer queued behind a rival's waiter; that one gives up, and ``a`` can be shared again."""
    rig = Rig()
    held = Held(rig, "a")
    gives_up = Actor("gives up").begin(lambda: use(rig, "b", timeout=0.2))
    until(waiting(rig))
    behind = Actor("behind").begin(lambda: use(rig, "a", timeout=10))
    until(waiting(rig, 2))
    with pytest.raises(ResidencyTimeoutError):
        gives_up.end()
    behind.end(2)
    held.let_go()
    rig.sound()


# --- rings ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")
def test_two_threads_that_would_wait_for_each_other_are_told_at_once() -> None:
    """I4, I6: both components are free of each other, but each thread wants the other's rival."""
    rig = Rig("abxy", edges("ab xy"))
    begin = time.monotonic()
    with rig.ledger.scope("a"):
        inside, done = threading.Event(), threading.Event()

        def other() -> None:
            with rig.ledger.scope("x"):
                inside.set()
                use(rig, "b")
                done.set()

        actor = Actor("other").begin(other)
        assert inside.wait(10)
        until(waiting(rig))
        with pytest.raises(ResidencyDeadlockError) as caught, rig.ledger.scope("y"):
            pass
        assert time.monotonic() - begin < 1.0
        rig.ledger.check()
        assert rig.present == {"a", "x"}
    assert "waiting for 'y' would never end" in str(caught.value)
    assert "MainThread (waits for 'y') -> other (waits for 'b') -> MainThread" in str(caught.value)
    assert "same order in every thread" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    actor.end()
    assert done.is_set()
    rig.sound()


@pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")
def test_a_ring_of_three_threads_is_told_at_once() -> None:
    rig = Rig("abcdef", edges("ad be cf"))
    inside = {name: threading.Event() for name in "bc"}

    def hold(mine: str, then: str) -> None:
        with rig.ledger.scope(mine):
            inside[mine].set()
            use(rig, then)

    with rig.ledger.scope("a"):
        one = Actor("one").begin(lambda: hold("b", "d"))  # waits for main
        assert inside["b"].wait(10)
        until(waiting(rig, 1))
        two = Actor("two").begin(lambda: hold("c", "e"))  # waits for one
        assert inside["c"].wait(10)
        until(waiting(rig, 2))
        with pytest.raises(ResidencyDeadlockError) as caught, rig.ledger.scope("f"):
            pass
    assert len(caught.value.ring) == 4
    one.end()
    two.end()
    rig.sound()


@pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")
def test_an_earlier_waiter_that_waits_for_this_thread_does_not_come_first() -> None:
    """Else the queue itself would close a ring: it waits for ``a`` here, and stands before ``y``'s user."""
    rig = Rig("abxy", edges("ab xy bx by"))
    with rig.ledger.scope("a"):
        other = Actor().begin(lambda: use(rig, "b"))
        until(waiting(rig))
        with rig.ledger.scope(
            "y", timeout=5
        ):  # a rival of b, which came first, but only this thread can help b
            rig.ledger.check()
    other.end()
    rig.sound()


@pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")
def test_a_displaced_component_makes_no_ring() -> None:
    """It is on the host: a thread that wants its rival need not wait for it."""
    rig = Rig("abx", edges("ab ax"))
    with rig.ledger.scope("a"), rig.ledger.scope("b"):
        Actor().begin(lambda: use(rig, "x")).end(5)  # conflicts with a, which b has displaced
    rig.sound()


@pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")
def test_a_displaced_component_comes_back_after_a_stranger_has_left_its_place() -> None:
    """I2: leaving ``b`` waits for ``x``, which another thread took while ``a`` was out."""
    rig = Rig("abx", edges("ab ax"))
    with rig.ledger.scope("a"):
        with rig.ledger.scope("b"):
            held = Held(rig, "x")
            threading.Timer(0.05, held._let_go.set).start()
        assert rig.present == {"a"}
        held.let_go()
    rig.sound()


@pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")
def test_two_threads_in_the_same_component_and_one_nests_a_rival() -> None:
    """I4: it waits until the other has left; then its own pin is displaced."""
    rig = Rig()
    held = Held(rig, "a")
    with rig.ledger.scope("a"):
        threading.Timer(0.05, held._let_go.set).start()
        with rig.ledger.scope("b", timeout=10):
            assert rig.present == {"b"}
        assert rig.present == {"a"}
    held.let_go()
    rig.sound()


# --- other threads, misuse, death -----------------------------------------------------------------------------


def test_a_scope_left_by_another_thread_is_refused_and_stays_open() -> None:
    """I4."""
    rig = Rig()
    scope = rig.ledger.scope("a")
    with scope:
        actor = Actor("thief").begin(lambda: scope.__exit__(None, None, None))
        with pytest.raises(ScopeError, match="thread MainThread opened it, thief tried to leave it"):
            actor.end()
        rig.sound(a=1)
    rig.sound()


def test_the_pins_of_a_thread_that_has_died_are_taken_off() -> None:
    """I4: nobody else could."""
    rig = Rig()
    Actor().begin(lambda: rig.ledger.scope("a").__enter__()).end()
    assert rig.ledger.pins("a") == 0
    with rig.ledger.scope("b", timeout=5):
        rig.sound(b=1)


def test_who_waits_for_a_thread_that_dies_goes_on_soon() -> None:
    """The dying thread tells nobody: the waiter looks by itself."""
    rig = Rig()
    entered, may_die = threading.Event(), threading.Event()

    def die() -> None:
        rig.ledger.scope("a").__enter__()
        entered.set()
        assert may_die.wait(10)

    dying = Actor("dying").begin(die)
    assert entered.wait(10)
    other = Actor().begin(lambda: use(rig, "b"))
    until(waiting(rig))
    may_die.set()
    dying.end()
    other.end(5)
    rig.sound()


def test_who_waits_for_a_component_that_is_retired_is_told() -> None:
    """I5, I6, I8: it must not be brought in when it is nobody's any more."""
    rig = Rig()
    held = Held(rig, "b")
    other = Actor().begin(lambda: use(rig, "a"))
    until(waiting(rig))
    rig.ledger.retire(["a"])
    rig.mover.forget("a")
    with pytest.raises(UnknownComponentError):
        other.end(5)
    held.let_go()
    assert rig.present == {"b"}
    rig.sound()


def test_who_waits_for_a_component_that_was_replaced_is_told() -> None:
    """I5: the name is there again, but it is another component."""
    from tests.residency.rigs import component

    rig = Rig()
    held = Held(rig, "b")
    other = Actor().begin(lambda: use(rig, "a"))
    until(waiting(rig))
    with rig.ledger._mutex:  # so that the waiter wakes after both
        rig.ledger._book.strike([rig.ledger._book["a"]])
        rig.ledger._book.admit([component("a")], rig.conflict)
        rig.ledger._gate.changed.notify_all()
    with pytest.raises(ScopeError, match="replaced meanwhile"):
        other.end(5)
    held.let_go()
    rig.sound()


def test_two_threads_retire_the_same_component() -> None:
    rig = Rig("abc")
    gate = threading.Barrier(2)

    def retire() -> None:
        gate.wait(10)
        try:
            rig.ledger.retire(["a"])
        except UnknownComponentError:
            pass  # the other was faster

    actors = [Actor(str(count)).begin(retire) for count in range(2)]
    for actor in actors:
        actor.end()
    assert [one.name for one in rig.ledger.components] == ["b", "c"]
    rig.mover.forget("a")
    rig.sound()


# --- load -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")
def test_eight_threads_with_random_requests_end_and_keep_the_invariant() -> None:
    """I1, I2, I4, I6, I8; rings are refused, never slept in."""
    rig = Rig("abcxyz", edges("ab bc ac xy yz xz ax"))
    refused = []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(60):
            try:
                with rig.ledger.scope(choose.choice("abcxyz")) as outer:
                    assert outer.name in rig.ledger.present
                    if choose.random() < 0.4:
                        with rig.ledger.scope(choose.choice("abcxyz")) as inner:
                            assert rig.mover.present(inner.name)
                    assert rig.mover.present(outer.name)
                if choose.random() < 0.1:
                    rig.ledger.release()
            except ResidencyDeadlockError as error:
                refused.append(error)

    actors = [Actor(f"worker {seed}").begin(lambda seed=seed: work(seed)) for seed in range(8)]
    for actor in actors:
        actor.end(60)
    rig.sound()
    assert rig.mover.peak <= rig.ledger.predicted_peak
