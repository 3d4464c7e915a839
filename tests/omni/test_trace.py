"""Faults of the trace: events that the viewers cannot read, tracks that go back in time, bytes that lie."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_components import Omni
from omni_components.report.report import ResidencyReport
from omni_components.report.spans import spans
from omni_components.report.trace import chrome_trace, write_trace
from omni_components.residency.events import Cause, EventKind, ResidencyEvent
from tests.report.histories import ledger_of, report_of, use

# What the format asks for beside the keys of all; M and C have their values in args.
REQUIRED = {"X": {"dur"}, "i": {"s"}, "C": {"args"}, "M": {"args"}, "b": {"id", "cat"}, "e": {"id", "cat"}}


def check_schema(trace: dict) -> None:
    """What ``chrome://tracing`` and Perfetto ask of a file."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    for event in trace["traceEvents"]:
        assert {"ph", "ts", "pid", "tid", "name"} <= event.keys()
        assert event.keys() >= REQUIRED[event["ph"]]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0
    for track in by_track(trace).values():
        times = [event["ts"] for event in track]
        assert times == sorted(times)
        check_nesting([event for event in track if event["ph"] == "X"])


def check_nesting(slices: list[dict]) -> None:
    """Complete events of one track lie apart or one inside the other; else a viewer drops some."""
    open_until: list[float] = []
    for one in slices:
        end = one["ts"] + one["dur"]
        while open_until and open_until[-1] <= one["ts"] + 1e-6:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + 1e-6
        open_until.append(end)


def by_track(trace: dict) -> dict[int, list[dict]]:
    tracks = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] != "M":
            tracks[event["tid"]].append(event)
    return tracks


def names(trace: dict) -> dict[int, str]:
    return {one["tid"]: one["args"]["name"] for one in trace["traceEvents"] if one["name"] == "thread_name"}


def of(trace: dict, phase: str, name: str) -> list[dict]:
    return [one for one in trace["traceEvents"] if (one["ph"], one["name"]) == (phase, name)]


def test_a_real_run_has_a_track_per_component_with_its_stay_and_its_load(sim):
    with Omni("demo", enable_cpu_offload=True) as omni:
        omni.generate("one", steps=1)
    report = omni.report()
    trace = chrome_trace(report)
    check_schema(trace)
    tracks = {name: track for track, name in names(trace).items()}
    assert set(tracks) == {"device memory", "text_encoder", "reasoner", "generator", "vae"}
    for name in ("text_encoder", "reasoner", "generator", "vae"):
        (stay,) = of(trace, "X", name)
        (load,) = [one for one in of(trace, "X", "load") if one["tid"] == stay["tid"]]
        assert stay["tid"] == tracks[name]
        assert load["ts"] == stay["ts"]
        row = next(one for one in report.rows if one.name == name)
        assert load["args"]["bytes"] == row.bytes_in
    assert max(one["args"]["bytes"] for one in of(trace, "C", "device bytes")) == report.peak_bytes
    assert trace["otherData"]["peak_bytes"] == report.peak_bytes


def event(kind: str, component: str, at: float, *, seconds: float = 0.0, size: int = 0, held: int = 0):
    return ResidencyEvent(
        kind=EventKind(kind),
        component=component,
        cause=Cause.SCOPE,
        seconds=seconds,
        bytes=size,
        at=at,
        device_bytes=held,
    )


def report(*events: ResidencyEvent, until: float = 0.0) -> ResidencyReport:
    from dataclasses import replace

    return replace(ResidencyReport.empty("sim:0"), events=events, taken_at=until)


def test_what_was_written_back_and_what_was_rolled_back_are_instants_on_their_tracks():
    trace = chrome_trace(
        report(
            event("load", "A", 2.0, seconds=1.0, size=10, held=10),
            event("write_back", "A", 3.0, size=4, held=10),
            event("evict", "A", 3.5, seconds=0.5),
            event("rollback", "B", 4.0),
            event("adopt", "A", 5.0, size=1),
        )
    )
    check_schema(trace)
    tracks = {name: track for track, name in names(trace).items()}
    instants = [one for one in trace["traceEvents"] if one["ph"] == "i"]
    assert [(one["name"], one["tid"], one["ts"], one["args"]["bytes"]) for one in instants] == [
        ("write_back", tracks["A"], 2e6, 4),
        ("adopt", tracks["A"], 4e6, 1),
        ("rollback", tracks["B"], 3e6, 0),
    ]


def test_waits_of_two_threads_may_overlap():
    trace = chrome_trace(
        report(event("wait", "A", 2.0, seconds=1.5), event("wait", "A", 2.5, seconds=1.5), until=3.0)
    )
    check_schema(trace)
    assert [(one["ph"], one["ts"]) for one in by_track(trace)[1]] == [
        ("b", 0.0),
        ("b", 0.5e6),
        ("e", 1.5e6),
        ("e", 2.0e6),
    ]
    assert len({one["id"] for one in by_track(trace)[1]}) == 2


def test_device_bytes_are_reserved_from_the_start_of_a_load_to_the_end_of_an_eviction():
    trace = chrome_trace(
        report(
            event("load", "A", 2.0, seconds=1.0, held=10),
            event("evict", "A", 4.0, seconds=1.0, held=0),
            event("load", "B", 5.0, seconds=0.5, held=7),
            until=6.0,
        )
    )
    counted = [(one["ts"], one["args"]["bytes"]) for one in of(trace, "C", "device bytes")]
    assert counted == [(0.0, 10), (3e6, 0), (3.5e6, 7), (5e6, 7)]


def test_a_report_without_events_is_still_a_trace():
    check_schema(chrome_trace(ResidencyReport.empty("cpu")))


def test_a_trace_that_cannot_be_written_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "trace.json"
    file.write_text("old")
    monkeypatch.setattr("json.dumps", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_trace(ResidencyReport.empty("cpu"), file)
    assert [one.name for one in tmp_path.iterdir()] == ["trace.json"]
    assert file.read_text() == "old"


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(["A", "B", "C", "release", "fail"]), max_size=25),
    st.sampled_from([4, 9, 10_000]),
)
def test_in_any_history_the_trace_is_valid_and_rivals_never_overlap(phases, kept):
    """I1, I8, also where the oldest events are forgotten."""
    ledger = ledger_of({"A": 100, "B": 30, "C": 7, "vae": 5}, residents=["vae"], history=kept)
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
    made = report_of(ledger)
    trace = chrome_trace(made)
    check_schema(trace)
    stays = sorted(
        (one["ts"], one["ts"] + one["dur"])
        for one in trace["traceEvents"]
        if one["ph"] == "X" and one["name"] in "ABC"
    )
    assert len(stays) == len([one for one in spans(made.events) if one.component != "vae"])
    assert all(before[1] <= after[0] + 1e-6 for before, after in itertools.pairwise(stays))
