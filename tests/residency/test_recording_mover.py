"""The recording mover is an oracle of its own: it raises, and remembers, whatever a ledger may not ask for."""

from __future__ import annotations

import threading

import pytest

from omni_components import TransferError
from omni_components.testing.movers import Fault, FaultPlan, RecordingMover, RuleBroken
from tests.residency.rigs import edges


@pytest.fixture
def mover() -> RecordingMover:
    return RecordingMover({"a": 10, "b": 20, "c": 30}, edges("ab"))


def test_a_load_beside_a_rival_is_forbidden(mover: RecordingMover) -> None:
    """I1."""
    mover.load("a")
    with pytest.raises(RuleBroken, match="'b' was loaded while its rival 'a' was on the device"):
        mover.load("b")
    assert not mover.present("b")
    assert len(mover.violations) == 1
    mover.load("c")
    assert mover.peak == 40


def test_a_load_beside_a_rival_that_is_just_leaving_is_forbidden() -> None:
    """I1: EVICTING counts; two moves at a time are forbidden besides."""
    mover = RecordingMover({"a": 1, "b": 1})
    mover.load("a")

    def interfere() -> None:
        mover.pause = lambda: None
        with pytest.raises(RuleBroken, match="the load of 'b' during the evict of 'a'"):
            mover.load("b")

    mover.pause = interfere
    mover.evict("a")
    assert len(mover.violations) == 1


@pytest.mark.parametrize(
    ("calls", "problem"),
    [
        (["load a", "load a"], "loaded twice"),
        (["evict a"], "was evicted while it was on the host"),
        (["touch a"], "a scope of 'a' opened while it was on the host"),
        (["load nobody"], "which nobody registered"),
        (["load a", "forget a"], "was forgotten while it was on the device"),
    ],
)
def test_a_call_that_cannot_be_right_is_forbidden(
    mover: RecordingMover, calls: list[str], problem: str
) -> None:
    """I2, I5."""
    *before, last = (call.split() for call in calls)
    for verb, name in before:
        getattr(mover, verb)(name)
    with pytest.raises(RuleBroken, match=problem):
        getattr(mover, last[0])(last[1])


def test_more_bytes_than_the_device_has_are_forbidden() -> None:
    """I8."""
    mover = RecordingMover({"a": 10, "b": 20}, edges(""), capacity=25)
    mover.load("a")
    with pytest.raises(RuleBroken, match="30 bytes on a device of 25"):
        mover.load("b")


@pytest.mark.parametrize("when", ["before", "inside", "after"])
def test_a_fault_strikes_once_at_its_move(mover: RecordingMover, when: str) -> None:
    """I6: whole on one side, and ``present`` says on which."""
    mover.write("a", 5)
    mover.fail("load", "a", after=1, when=when)  # type: ignore[arg-type]
    mover.load("a")
    mover.write("a", 6)
    mover.evict("a")
    with pytest.raises(TransferError):
        mover.load("a")
    assert mover.present("a") is (when == "after")
    assert mover.read("a") == 6
    assert mover.audit({"a": when == "after"}) == []


@pytest.mark.parametrize("when", ["before", "inside", "after"])
def test_a_fault_in_an_eviction_loses_nothing(mover: RecordingMover, when: str) -> None:
    """I7."""
    mover.load("a")
    mover.write("a", 6)
    mover.fail("evict", when=when, error=KeyboardInterrupt)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt, match="injected into the evict of 'a'"):
        mover.evict("a")
    assert mover.present("a") is (when != "after")
    assert mover.read("a") == 6


def test_what_is_written_on_the_device_goes_home_once(mover: RecordingMover) -> None:
    """I7."""
    mover.load("a")
    assert mover.evict("a").written_back == 0
    mover.load("a")
    mover.write("a", 3)
    assert mover.evict("a").written_back == 10
    assert mover.read("a") == 3


def test_an_audit_tells_what_is_elsewhere(mover: RecordingMover) -> None:
    """I5."""
    mover.load("a")
    assert mover.audit({"a": False, "b": True}) == ["'a' is on the device", "'b' is not on the device"]


def test_calls_are_written_down_with_their_thread(mover: RecordingMover) -> None:
    thread = threading.Thread(target=lambda: mover.load("a"), name="loader")
    thread.start()
    thread.join()
    assert [(call.verb, call.name, call.thread) for call in mover.calls] == [("load", "a", "loader")]
    assert mover.moves() == [("load", "a")]


def test_a_plan_with_two_faults_of_one_move_strikes_one_after_the_other() -> None:
    plan = FaultPlan()
    first, second = Fault(verb="load", name="a"), Fault(verb="load")
    plan.arm(first)
    plan.arm(second)
    assert plan.strike("evict", "a") is None
    assert plan.strike("load", "a") is first
    assert plan.strike("load", "b") is second
    assert len(plan) == 0
