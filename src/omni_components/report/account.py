"""Where the time of a report went, and how a plan's figures compare with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ModelError
from .report import ResidencyReport
from .spans import ends_at, spans, starts_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Seconds of one component.

    Attributes:
        component: Who.
        loading: Its loads, from their start until it was ready.
        loaded: On the device and ready, computing or not: the history does not tell these apart.
        waiting: Threads that waited for its turn; of several threads, the sum.
    """

    component: str
    loading: float
    loaded: float
    waiting: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One planned figure beside what was; ``None`` is not planned, or not there."""

    what: str
    planned: float | None
    real: float | None


def shares(report: ResidencyReport) -> list[Share]:
    """Seconds by component, in the order of the table."""
    stays = spans(report.events, until=report.taken_at)
    return [
        Share(
            component=row.name,
            loading=sum(one.ready - one.start for one in stays if one.component == row.name),
            loaded=sum(one.end - one.ready for one in stays if one.component == row.name),
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


def compare(report: ResidencyReport, plan: Any, source: str) -> tuple[str, list[Figure]]:
    """The policy of the plan that was run, and its figures beside the real ones, residents' loads left out.

    Raises:
        ModelError: It is no plan.
    """
    try:
        option = _option(report, {str(one["name"]): one for one in plan["options"]})
        swapped = [row for row in report.rows if not row.resident]
        figures = [
            Figure(what="peak bytes", planned=int(option["device_peak"]), real=report.peak_bytes),
            Figure(what="loads", planned=int(option["loads"]), real=sum(row.loads for row in swapped)),
            Figure(
                what="link bytes", planned=int(option["link_bytes"]), real=sum(r.bytes_in for r in swapped)
            ),
            Figure(
                what="load seconds (planned: of the link; real: of the host)",
                planned=float(option["link_seconds"]),
                real=sum(one.loading for one in shares(report) if one.component in {r.name for r in swapped}),
            ),
        ]
        planned = {str(one["name"]): int(one["bytes"]) for one in plan["components"]}
    except (KeyError, TypeError, ValueError) as error:
        advice = "Make one with: omni-components plan MODEL --json > PLAN.json."
        raise ModelError(source, "is not a plan.", advice) from error
    real = {row.name: row.bytes for row in report.rows}
    figures += [
        Figure(what=f"bytes of {name}", planned=planned.get(name), real=real.get(name))
        for name in dict.fromkeys([*planned, *real])
    ]
    return str(option["name"]), figures


def _option(report: ResidencyReport, options: Mapping[str, Any]) -> Any:
    if report.facts.mapped_bytes and "mapped" in options:
        return options["mapped"]
    exclusive = any(row.role == "vae" and not row.resident for row in report.rows)
    return options["exclusive VAE" if exclusive and "exclusive VAE" in options else "model level"]
