"""Turns with a crew: who waits for whom, step by step; the same run every time, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from omni_components import ResidencyDeadlockError, ResidencyTimeoutError
from omni_components.residency.scope import OffloadScope
from omni_components.testing.crew import Crew, CrewStuck, Outcome
from tests.residency.rigs import Rig, edges

pytestmark = pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")


class Stage:
    """A rig whose threads ``1`` to ``4`` enter and leave as told."""

    def __init__(self, names: str, conflicts: str) -> None:
        self.rig = Rig(names.split(), _long_edges(conflicts))
        self.crew = Crew(("t1", "t2", "t3", "t4"), patience=10)
        self.crew.take_over(self.rig.ledger)
        self._open: dict[str, list[OffloadScope]] = {}

    def enter(self, thread: str, name: str, **options: Any) -> dict[str, Outcome]:
        scope = self.rig.ledger.scope(name, **options)

        def act() -> None:
            scope.__enter__()
            self._open.setdefault(thread, []).append(scope)

        return self.do(thread, act)

    def leave(self, thread: str) -> dict[str, Outcome]:
        scope = self._open[thread].pop()
        return self.do(thread, lambda: scope.__exit__(None, None, None))

    def do(self, thread: str, act: Callable[[], None]) -> dict[str, Outcome]:
        return self.crew.run(**{thread: act})

    @property
    def waiting(self) -> tuple[str, ...]:
        return self.crew.waiting


def _long_edges(text: str) -> Callable[[str, str], bool]:
    pairs = {frozenset(pair.split("-")) for pair in text.split()}
    return lambda one, other: frozenset((one, other)) in pairs


@pytest.fixture
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    stage = Stage(*request.param)
    yield stage
    stage.crew.dismiss()


def declared(names: str, conflicts: str) -> Any:
    return pytest.mark.parametrize("stage", [(names, conflicts)], indirect=True, ids=[""])


@declared("a b c", "a-b b-c a-c")
def test_waiters_go_one_by_one_in_the_order_they_came(stage: Stage) -> None:
    stage.enter("t1", "a")
    assert stage.enter("t2", "b") == {}
    assert stage.enter("t3", "c") == {}
    assert stage.waiting == ("t2", "t3")
    assert set(stage.leave("t1")) == {"t1", "t2"}
    assert stage.rig.present == {"b"}
    assert set(stage.leave("t2")) == {"t2", "t3"}
    stage.leave("t3")
    stage.rig.sound()


@declared("a b x", "a-b b-x")
def test_two_waiters_that_do_not_conflict_go_together(stage: Stage) -> None:
    stage.enter("t1", "b")
    stage.enter("t2", "a")
    stage.enter("t3", "x")
    assert set(stage.leave("t1")) == {"t1", "t2", "t3"}
    assert stage.rig.present == {"a", "x"}


@declared("a b", "a-b")
def test_the_last_sharer_that_leaves_lets_the_waiter_go(stage: Stage) -> None:
    stage.enter("t1", "a")
    stage.enter("t2", "a")
    stage.enter("t3", "b")
    assert set(stage.leave("t1")) == {"t1"}
    assert set(stage.leave("t2")) == {"t2", "t3"}


@declared("a b c", "a-b b-c")
def test_a_sharer_of_something_else_is_not_held_up(stage: Stage) -> None:
    """``c`` conflicts with the waiter's ``b``, so it queues; a second ``a``, which is there, queues too."""
    stage.enter("t1", "a")
    stage.enter("t2", "b")
    assert stage.enter("t3", "c") == {}
    assert stage.enter("t4", "a") == {}
    assert set(stage.leave("t1")) == {"t1", "t2"}
    assert set(stage.leave("t2")) == {"t2", "t3", "t4"}


@declared("a b", "a-b")
def test_a_timeout_of_zero_leaves_the_queue_as_it_was(stage: Stage) -> None:
    stage.enter("t1", "a")
    outcome = stage.enter("t2", "b", timeout=0)["t2"]
    assert type(outcome.error) is ResidencyTimeoutError
    assert set(stage.enter("t3", "a")) == {"t3"}  # nobody is queued before it


@declared("a b x y", "a-b x-y")
def test_a_ring_is_refused_to_the_one_who_would_close_it(stage: Stage) -> None:
    stage.enter("t1", "a")
    stage.enter("t2", "x")
    assert stage.enter("t1", "y") == {}
    outcome = stage.enter("t2", "b")["t2"]
    assert type(outcome.error) is ResidencyDeadlockError
    assert stage.waiting == ("t1",)
    assert set(stage.leave("t2")) == {"t1", "t2"}


@declared("a b c d e f", "a-d b-e c-f")
def test_a_ring_of_three_is_refused_to_the_one_who_would_close_it(stage: Stage) -> None:
    for thread, name in (("t1", "a"), ("t2", "b"), ("t3", "c")):
        stage.enter(thread, name)
    assert stage.enter("t1", "e") == {}
    assert stage.enter("t2", "f") == {}
    outcomes = stage.enter("t3", "d")
    assert "t3" in outcomes, "it waits for ever"
    assert type(outcomes["t3"].error) is ResidencyDeadlockError
    assert set(stage.leave("t3")) == {"t3", "t2"}


@declared("p q x r1 r2 r3", "p-x q-x r1-q r2-p r2-r3")
def test_a_ring_that_a_third_thread_closes_around_two_waiters_is_refused_too(stage: Stage) -> None:
    """Neither waiter closed it: what the third brought back for its own use is what the second holds.

    t2 comes back from ``x`` and waits for ``q``, which t1 excludes; its ``p`` is still out, so that t1 may wait
    for ``r2``. Then t3 brings ``p`` in: now t1 waits for t2's ``p``.
    """
    for name in ("p", "q", "x"):
        stage.enter("t2", name)
    stage.enter("t1", "r1")
    stage.enter("t3", "r3")
    assert stage.enter("t1", "r2") == {}
    assert stage.leave("t2") == {}
    outcomes = stage.do("t3", lambda: stage.rig.ledger.load("p"))
    assert outcomes["t3"].error is None
    assert "t1" in outcomes, "it waits for ever"
    assert type(outcomes["t1"].error) is ResidencyDeadlockError
    stage.leave("t3")
    assert stage.waiting == ("t2",)
    stage.leave("t1")
    assert stage.waiting == ()
    assert stage.rig.present >= {"p", "q"}
    stage.leave("t2")
    stage.leave("t2")
    stage.rig.sound()


@declared("a x b y", "a-x a-b x-y")
def test_a_pin_below_a_rival_of_its_own_thread_does_not_block_others(stage: Stage) -> None:
    """t1: ``x``, in it ``a`` (its rival), in it ``b`` (a's rival). With ``a`` out, t2 brings ``x`` back and leaves.

    ``x`` is on the device with t1's pin, but t1 needs it only when ``a`` has closed: ``y`` may have its place.
    """
    for name in ("x", "a", "b"):
        stage.enter("t1", name)
    assert set(stage.enter("t2", "x")) == {"t2"}
    stage.leave("t2")
    assert "x" in stage.rig.present
    assert set(stage.enter("t3", "y")) == {"t3"}
    assert stage.rig.present == {"b", "y"}
    stage.rig.ledger.check()
    stage.leave("t3")
    for present in ("a", "x"):
        stage.leave("t1")
        assert present in stage.rig.present
    stage.leave("t1")
    stage.rig.sound()


@declared("a b", "a-b")
def test_a_restore_goes_before_waiters(stage: Stage) -> None:
    """I2: the outer component is brought back before a stranger's rival gets its turn."""
    stage.enter("t1", "a")
    stage.enter("t1", "b")
    assert stage.enter("t2", "a") == {}
    assert set(stage.leave("t1")) == {"t1", "t2"}  # both want a
    stage.leave("t2")
    stage.leave("t1")
    stage.rig.sound()


def test_a_crew_tells_that_a_thread_hangs() -> None:
    """The crew's own check: it must not wait for ever itself."""
    import threading

    gate = threading.Event()
    crew = Crew(("t1",), patience=0.05)
    with pytest.raises(CrewStuck):
        crew.run(t1=lambda: gate.wait(10))
    gate.set()
    crew.dismiss()


def test_edges_are_read_both_ways() -> None:
    assert edges("ab")("b", "a")
    assert not edges("ab")("a", "c")
