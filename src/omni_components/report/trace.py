"""A history as a Chrome trace: opens in https://ui.perfetto.dev and in ``chrome://tracing``.

The format: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..residency.events import Cause, EventKind
from .files import written_whole
from .spans import ends_at, spans, starts_at

if TYPE_CHECKING:
    from .report import ResidencyReport

RECORD, VERSION = "omni_components", 1
_PROCESS = 1
_BYTES_TRACK = 0  # components have the tracks from 1 up
_INSTANTS = (EventKind.WRITE_BACK, EventKind.ADOPT, EventKind.ROLLBACK)


def write_trace(report: ResidencyReport, path: Path | str) -> None:
    """Write a history as Chrome trace JSON; no half-written file is left.

    Args:
        report: What happened.
        path: The file; its name commonly ends in ``.json``.

    Raises:
        OSError: The file cannot be written.
    """
    with written_whole(Path(path)) as (draft,):
        draft.write_text(json.dumps(chrome_trace(report)), encoding="utf-8")


def chrome_trace(report: ResidencyReport) -> dict[str, Any]:
    """The trace as plain values: one track per component, and one for the bytes on the device.

    A stay is a complete event with its load and its eviction inside it; what was written back, adopted or rolled
    back is an instant event; a wait is an asynchronous one, since waits of several threads may overlap; device
    bytes are a counter. Times are microseconds since the first event.
    """
    tracer = _Tracer(report)
    timed = [*tracer.stays(), *tracer.moments(), *tracer.waits(), *tracer.counters()]
    # Each track in the order of time; where two begin at once, the one that lasts longer holds the other.
    timed.sort(key=lambda one: (one["tid"], one["ts"], -one.get("dur", 0.0)))
    return {
        "traceEvents": [*tracer.names(), *timed],
        "displayTimeUnit": "ms",
        "otherData": {
            "device": report.device,
            "peak_bytes": report.peak_bytes,
            "predicted_peak": report.predicted_peak,
            # Viewers show or ignore it; `omni-components report` reads the history back from it, exactly.
            RECORD: {"version": VERSION, **report.to_dict()},
        },
    }


class _Tracer:
    """The events of one report, kind by kind."""

    def __init__(self, report: ResidencyReport) -> None:
        self._report = report
        self._events = report.events
        self._origin = starts_at(report.events)
        names = dict.fromkeys([*(row.name for row in report.rows), *(one.component for one in self._events)])
        self._tracks = {name: index for index, name in enumerate(names, start=_BYTES_TRACK + 1)}

    def names(self) -> Iterator[dict[str, Any]]:
        """What the viewer calls the tracks, and their order."""
        title = f"omni_components on {self._report.device}"
        yield self._event("M", "process_name", _BYTES_TRACK, args={"name": title})
        tracks = {"device memory": _BYTES_TRACK, **self._tracks}
        for name, track in tracks.items():
            yield self._event("M", "thread_name", track, args={"name": name})
            yield self._event("M", "thread_sort_index", track, args={"sort_index": track})

    def stays(self) -> Iterator[dict[str, Any]]:
        """Who was there from when to when, each with its load and its eviction."""
        sizes: dict[tuple[str, float], int] = {}
        ahead: dict[str, int] = {}
        for one in (event for event in self._events if event.kind is EventKind.LOAD):
            sizes[one.component, one.at] = one.bytes + ahead.pop(one.component, 0)
            if one.cause is Cause.PREFETCH:
                ahead[one.component] = one.bytes
        for stay in spans(self._events, until=self._report.taken_at):
            track = self._tracks[stay.component]
            cause = "before the record" if stay.cause is None else str(stay.cause)
            yield self._complete(stay.component, track, stay.start, stay.end, cause=cause)
            if stay.cause is not None:
                size = sizes[stay.component, stay.ready]
                yield self._complete("load", track, stay.start, stay.ready, bytes=size)
        for event in self._events:
            if event.kind is EventKind.EVICT:
                track = self._tracks[event.component]
                yield self._complete(
                    "evict", track, event.at - event.seconds, event.at, cause=str(event.cause)
                )

    def moments(self) -> Iterator[dict[str, Any]]:
        """What happened at one time, on the track of whom it happened to."""
        for event in self._events:
            if event.kind in _INSTANTS:
                args = {"cause": str(event.cause), "bytes": event.bytes}
                track = self._tracks[event.component]
                yield self._event("i", str(event.kind), track, event.at, s="t", args=args)

    def waits(self) -> Iterator[dict[str, Any]]:
        """Threads that waited for a component's turn."""
        for number, event in enumerate(self._events):
            if event.kind is EventKind.WAIT:
                track = self._tracks[event.component]
                for phase, at in (("b", event.at - event.seconds), ("e", event.at)):
                    yield self._event(phase, "wait", track, at, cat="wait", id=number)

    def counters(self) -> Iterator[dict[str, Any]]:
        """Device bytes: reserved from the start of a load to the end of an eviction."""
        held = 0
        for event in self._events:
            if event.kind in (EventKind.LOAD, EventKind.EVICT):
                held = event.device_bytes
                at = event.at - event.seconds if event.kind is EventKind.LOAD else event.at
                yield self._counter(at, held)
        if self._events:
            yield self._counter(ends_at(self._events, self._report.taken_at), held)

    def _counter(self, at: float, held: int) -> dict[str, Any]:
        return self._event("C", "device bytes", _BYTES_TRACK, at, args={"bytes": held})

    def _complete(self, name: str, track: int, start: float, end: float, **args: Any) -> dict[str, Any]:
        length = max(0, self._nanoseconds(end) - self._nanoseconds(start))
        return self._event("X", name, track, start, dur=length / 1000, args=args)

    def _event(
        self, phase: str, name: str, track: int, at: float | None = None, **more: Any
    ) -> dict[str, Any]:
        time = 0 if at is None else self._nanoseconds(at)
        return {"ph": phase, "name": name, "pid": _PROCESS, "tid": track, "ts": time / 1000, **more}

    def _nanoseconds(self, at: float) -> int:
        # Whole ones, so that what ends together also ends together in the file.
        return max(0, round((at - self._origin) * 1e9))
