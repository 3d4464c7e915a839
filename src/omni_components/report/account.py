"""Where the time of a report went."""

from __future__ import annotations

from dataclasses import dataclass

from .report import ResidencyReport
from .spans import Span, ends_at, spans, starts_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Seconds of one component.

    Attributes:
        component: Who.
        loading: Its loads, as long as somebody waited for them.
        ahead: From the start of a copy made ahead until it was asked for, or gone: hidden behind others' computing.
        loaded: On the device and ready, computing or not: the history does not tell these apart.
        waiting: Threads that waited for its turn; of several threads, the sum.
    """

    component: str
    loading: float
    ahead: float
    loaded: float
    waiting: float


def shares(report: ResidencyReport) -> list[Share]:
    """Seconds by component, in the order of the table."""
    stays: dict[str, list[Span]] = {row.name: [] for row in report.rows}
    for one in spans(report.events, until=report.taken_at):
        stays.setdefault(one.component, []).append(one)
    return [
        Share(
            component=row.name,
            loading=sum(one.ready - one.asked for one in stays[row.name]),
            ahead=sum((one.asked if one.wanted else one.end) - one.start for one in stays[row.name]),
            loaded=sum(one.end - one.ready for one in stays[row.name] if one.wanted),
            waiting=row.waited,
        )
        for row in report.rows
    ]


def idle(report: ResidencyReport) -> tuple[float, float]:
    """Seconds in which no component that takes turns was on the device, and seconds in all."""
    residents = {row.name for row in report.rows if row.resident}
    start = reached = starts_at(report.events)
    end = ends_at(report.events, report.taken_at)
    empty = 0.0
    for one in spans(report.events, until=report.taken_at):
        if one.component not in residents:
            empty += max(0.0, one.start - reached)
            reached = max(reached, one.end)
    return empty + max(0.0, end - reached), end - start
