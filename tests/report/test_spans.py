"""Faults of reading a history: stays that overlap, bytes that do not add up, histories cut short."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_components.report.spans import EARLIER, layers, spans
from omni_components.residency.events import Cause, EventKind, ResidencyEvent

from .histories import ledger_of, use

SIZES = {"A": 100, "B": 30, "C": 7, "vae": 5}


def event(kind: str, component: str, at: float, *, seconds: float = 0.0, held: int = 0, cause: str = "scope"):
    return ResidencyEvent(
        kind=EventKind(kind),
        component=component,
        cause=Cause(cause),
        seconds=seconds,
        at=at,
        device_bytes=held,
    )


def short(found):
    return [(one.component, one.start, one.ready, one.end, one.cause and str(one.cause)) for one in found]


HISTORY = [
    event("enable", "A", 1.0),
    event("load", "vae", 3.0, seconds=1.0, held=5, cause="manual"),
    event("load", "A", 5.0, seconds=0.5, held=105, cause="hook"),
    event("write_back", "A", 7.0),
    event("evict", "A", 7.0, seconds=0.1, held=5),
    event("rollback", "B", 7.5, seconds=0.2, held=5),
    event("wait", "B", 8.0, seconds=0.3, held=5),
    event("load", "B", 9.0, seconds=0.25, held=35),
]


def test_a_stay_begins_with_its_load_and_ends_with_its_eviction():
    assert short(spans(HISTORY)) == [
        ("vae", 2.0, 3.0, 9.0, "manual"),
        ("A", 4.5, 5.0, 7.0, "hook"),
        ("B", 8.75, 9.0, 9.0, "scope"),
    ]


def test_who_is_still_there_stays_to_the_end_of_the_record():
    ends = {one.component: one.end for one in spans(HISTORY, until=12.0)}
    assert ends == {"vae": 12.0, "A": 7.0, "B": 12.0}


def test_a_record_never_ends_before_its_last_event():
    assert max(one.end for one in spans(HISTORY, until=2.0)) == 9.0


def test_no_events_are_no_spans_and_no_layers():
    assert spans([]) == []
    assert layers([]) == []


def test_an_eviction_without_its_load_began_before_the_record():
    cut = HISTORY[3:]
    assert short(spans(cut))[0] == ("A", 7.0 - 0.1, 7.0 - 0.1, 7.0, None)


def test_a_second_eviction_without_its_load_begins_after_the_first_stay():
    """An interrupt right after a load can cost its event: the stay is drawn, never over the one before."""
    found = spans([event("load", "A", 1.0, held=1), event("evict", "A", 2.0), event("evict", "A", 5.0)])
    assert short(found) == [("A", 1.0, 1.0, 2.0, "scope"), ("A", 2.0, 2.0, 5.0, None)]


def test_layers_pile_up_in_the_order_asked_for_and_reserve_from_the_start_of_a_load():
    found = layers(HISTORY, order=["vae", "B", "A"])
    assert [(one.component, one.start, one.end, one.low, one.high) for one in found] == [
        ("A", 4.5, 7.0, 5, 105),
        ("vae", 2.0, 9.0, 0, 5),
        ("B", 8.75, 9.0, 5, 35),
    ]


def test_bytes_from_before_the_record_lie_at_the_bottom():
    cut = [
        event("evict", "A", 2.0, held=40),
        event("load", "B", 3.0, held=70),
        event("evict", "B", 4.0, held=40),
    ]
    found = layers(cut, until=5.0)
    assert [(one.component, one.start, one.end, one.low, one.high) for one in found] == [
        ("B", 3.0, 4.0, 40, 70),
        (EARLIER, 2.0, 5.0, 0, 40),
    ]


def test_a_component_that_has_grown_is_drawn_at_its_new_size():
    grown = [event("load", "A", 1.0, held=10), event("evict", "A", 2.0), event("load", "A", 3.0, held=16)]
    assert [one.high for one in layers(grown)] == [10, 16]


PHASES = st.lists(st.sampled_from(["A", "B", "C", "release", "fail"]), max_size=30)


@settings(max_examples=60, deadline=None)
@given(PHASES, st.sampled_from([4, 9, 100_000]))
def test_in_any_history_rivals_never_overlap_and_bytes_add_up(phases, kept):
    """I1, I8: the picture is made of these, so it cannot show two rivals at once or bytes that were not held."""
    ledger = ledger_of(SIZES, residents=["vae"], history=kept)
    for phase in phases:
        if phase == "release":
            ledger.release()
        elif phase == "fail":
            ledger.release()
            ledger.mover.broken.add("C")
            with pytest.raises(RuntimeError):
                use(ledger, "C")
        else:
            use(ledger, phase)
    events = list(ledger.history)
    rivals = [one for one in spans(events) if one.component != "vae"]
    for one, other in itertools.pairwise(rivals):
        assert one.start <= one.ready <= one.end <= other.start
    pile = layers(events, order=["vae"])
    for before, after in itertools.pairwise(events):
        now = (before.at + (after.at - after.seconds)) / 2
        held = sum(one.high - one.low for one in pile if one.start <= now < one.end)
        known = any(one.kind in (EventKind.LOAD, EventKind.EVICT) and one.at <= before.at for one in events)
        assert held == (before.device_bytes if known else 0)
