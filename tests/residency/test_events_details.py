"""Events: their names, what a history keeps, what the totals count, who listens."""

from __future__ import annotations

import pytest

from omni_components.residency.events import Cause, EventKind, History, ResidencyEvent, Totals


def event(kind: EventKind, cause: Cause = Cause.SCOPE, name: str = "a", **facts: float) -> ResidencyEvent:
    return ResidencyEvent(kind=kind, component=name, cause=cause, **facts)  # type: ignore[arg-type]


def counted(*events: ResidencyEvent) -> Totals:
    history = History(100)
    for one in events:
        history.record(one)
    return history.totals["a"]


def test_kinds_and_causes_are_written_as_the_design_names_them() -> None:
    kinds = "load evict write_back adopt rollback wait enable disable"
    causes = "scope hook entry_point manual prefetch release"
    assert [str(kind) for kind in EventKind] == kinds.split()
    assert [str(cause) for cause in Cause] == causes.split()
    assert [cause.name.lower() for cause in Cause] == causes.split()
    assert [kind.name.lower() for kind in EventKind] == kinds.split()


def test_an_event_of_which_nothing_else_is_known_has_cost_nothing() -> None:
    one = event(EventKind.ENABLE)
    assert (one.bytes, one.seconds, one.at, one.device_bytes) == (0, 0.0, 0.0, 0)
    assert isinstance(one.seconds, float)
    assert isinstance(one.at, float)


def test_totals_start_at_nothing() -> None:
    assert counted(event(EventKind.ENABLE, Cause.MANUAL, seconds=5.0)) == Totals(
        0, 0, 0, 0, 0.0, 0.0, 0, 0, 0, 0
    )


def test_each_kind_of_event_counts_where_it_belongs() -> None:
    """Twice each, so that a count that is set shows as well as one that is not added to."""
    load, evict, back, wait, adopt = (
        event(EventKind.LOAD, bytes=10, seconds=1.0),
        event(EventKind.EVICT, seconds=2.0),
        event(EventKind.WRITE_BACK, bytes=4, seconds=3.0),
        event(EventKind.WAIT, seconds=100.0),
        event(EventKind.ADOPT, seconds=4.0),
    )
    assert counted(load, load) == Totals(loads=2, bytes_in=20, seconds=2.0)
    assert counted(evict, evict) == Totals(evictions=2, seconds=4.0)
    assert counted(back, back) == Totals(bytes_out=8, seconds=6.0)
    assert counted(wait, wait) == Totals(waited=200.0)
    assert counted(adopt, adopt) == Totals(seconds=8.0)


def test_copies_made_ahead_are_counted_apart_from_loads() -> None:
    ahead = event(EventKind.LOAD, Cause.PREFETCH, bytes=10, seconds=1.0)
    used = event(EventKind.LOAD, Cause.SCOPE, seconds=0.5)
    dropped = event(EventKind.EVICT, Cause.PREFETCH)
    failed = event(EventKind.ROLLBACK, Cause.PREFETCH)
    rolled_back = event(EventKind.ROLLBACK)
    assert counted(ahead, used, ahead) == Totals(loads=1, bytes_in=20, prefetched=2, seconds=2.5)
    assert counted(ahead, used, dropped) == Totals(loads=1, bytes_in=10, prefetched=1, seconds=1.5)
    wasted = Totals(prefetched=2, prefetch_wasted=2, bytes_in=20, bytes_wasted=20, seconds=2.0)
    assert counted(ahead, dropped, ahead, dropped, dropped) == wasted
    assert counted(ahead, rolled_back, ahead, rolled_back) == wasted
    assert counted(failed, failed) == Totals(prefetch_failed=2)


def test_components_are_counted_apart() -> None:
    history = History(10)
    history.record(event(EventKind.LOAD, name="a", bytes=1))
    history.record(event(EventKind.LOAD, name="b", bytes=2))
    assert [history.totals[name].bytes_in for name in "ab"] == [1, 2]


def test_a_full_history_forgets_the_oldest_event_and_no_total() -> None:
    history = History(2)
    assert (history.peak, history.predicted, len(history), list(history)) == (0, 0, 0, [])
    events = [event(EventKind.LOAD, bytes=1, device_bytes=held) for held in (5, 9, 7)]
    for one in events:
        history.record(one)
    assert list(history) == events[1:]
    assert len(history) == 2
    assert history.totals["a"].loads == 3
    assert history.peak == 9


def test_events_may_come_while_somebody_goes_through_them() -> None:
    history = History(4)
    history.record(event(EventKind.LOAD))
    for one in history:
        history.record(one)
    assert len(history) == 2


def test_a_listener_hears_each_event_until_it_stops() -> None:
    history, heard, also = History(4), list[ResidencyEvent](), list[ResidencyEvent]()
    stop = history.listen(heard.append)
    stop_also = history.listen(also.append)
    first, second, third = event(EventKind.LOAD), event(EventKind.EVICT), event(EventKind.ADOPT)
    history.record(first)
    stop()
    history.record(second)
    stop()
    stop_also()
    history.record(third)
    assert heard == [first]
    assert also == [first, second]


@pytest.mark.parametrize("name", ["kind", "component", "cause", "bytes", "seconds", "at", "device_bytes"])
def test_an_event_cannot_be_changed(name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(event(EventKind.LOAD), name, 1)
