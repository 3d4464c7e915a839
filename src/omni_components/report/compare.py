"""A plan's figures beside what was.

A plan is for one request, and apart from that for the first one, whose weights may come from the pages of files. Loads,
link bytes and seconds are those of the first and of as many more as were run, and each request whose events are kept is
looked at by itself; peak and sizes do not depend on how many there were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ModelError
from ..policy import OffloadPolicy
from ..residency.events import EventKind
from .report import ResidencyReport, plain_policy
from .spans import spans, starts_at

HOW = "Make one with: omni-components plan MODEL --json > PLAN.json."
# The fields of a policy on which who is where, and when, depends.
_DECISIVE = ("vae", "exclusive_encoders", "offload_components", "prefetch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One planned figure beside what was; ``None`` is not planned, or not there."""

    what: str
    planned: float | None
    real: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFigures:
    """What one request moved, residents left out.

    Attributes:
        number: From 1 up, as they were answered.
        seconds: From the call to what it gave.
        loads: How often components were loaded meanwhile.
        link_bytes: Bytes towards the device for them, copied ahead or not.
        load_seconds: Host time of the loads that somebody waited for.
    """

    number: int
    seconds: float
    loads: int
    link_bytes: int
    load_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A plan and a run.

    Attributes:
        option: The name of the plan's option that is compared.
        recorded: The run's policy is known; else the option is a guess from what moved.
        apart: Fields of the run's policy that the plan has no option for, with their values.
        requests: How many were planned for.
        counted: Their number is known; else one is assumed.
        figures: Of the whole run.
        each: Of every request whose events are kept.
        planned: Loads and link bytes of the first request, and of each later one.
    """

    option: str
    recorded: bool
    apart: Mapping[str, Any]
    requests: int
    counted: bool
    figures: tuple[Figure, ...]
    each: tuple[RequestFigures, ...]
    planned: tuple[tuple[int, int], tuple[int, int]]

    @property
    def unlike(self) -> tuple[RequestFigures, ...]:
        """The requests whose loads or link bytes are not the plan's."""
        first, later = self.planned
        return tuple(
            one for one in self.each if (one.loads, one.link_bytes) != (first if one.number == 1 else later)
        )


def compare(report: ResidencyReport, plan: Any, source: str, requests: int | None = None) -> Comparison:
    """A plan's figures beside the run's, residents' loads left out.

    Args:
        report: The run.
        plan: What ``plan --json`` printed, or ``Plan.to_dict()``.
        source: What to call it in an error.
        requests: How many were run; ``None`` takes the recorded number, or one.

    Raises:
        ModelError: It is no plan.
    """
    known = requests or len(report.requests)
    count = known or 1
    try:
        option = _option(report, {str(one["name"]): one for one in plan["options"]})
        figures = (*_moved(report, option, count), *_sizes(report, plan["components"]))
        return Comparison(
            option=str(option["name"]),
            recorded=report.policy is not None,
            apart=_apart(report.policy, str(option["name"])),
            requests=count,
            counted=bool(known),
            figures=figures,
            each=each_request(report),
            planned=(_one(_first(option)), _one(option)),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(source, "is not a plan.", HOW) from error


def each_request(report: ResidencyReport) -> tuple[RequestFigures, ...]:
    """What each request moved, as far back as the history goes."""
    residents = {row.name for row in report.rows if row.resident}
    loads = [one for one in report.events if one.kind is EventKind.LOAD and one.component not in residents]
    stays = [one for one in spans(report.events, until=report.taken_at) if one.component not in residents]
    asked_for = [one for one in stays if one.cause is not None and one.wanted]
    found = []
    for number, one in enumerate(report.requests, start=1):
        if one.start < starts_at(report.events):
            continue  # what it moved first may be forgotten
        here = [stay for stay in asked_for if one.start <= stay.ready <= one.end]
        found.append(
            RequestFigures(
                number=number,
                seconds=one.end - one.start,
                loads=len(here),
                link_bytes=sum(event.bytes for event in loads if one.start <= event.at <= one.end),
                load_seconds=sum(stay.ready - stay.asked for stay in here),
            )
        )
    return tuple(found)


def _moved(report: ResidencyReport, option: Any, count: int) -> tuple[Figure, ...]:
    swapped = [row for row in report.rows if not row.resident]
    names = {row.name for row in swapped}
    stays = spans(report.events, until=report.taken_at)
    waited = sum(one.ready - one.asked for one in stays if one.component in names)
    first = _first(option)

    def planned(what: str) -> Any:
        return first[what] + option[what] * (count - 1)

    bytes_in = sum(row.bytes_in for row in swapped)
    return (
        Figure(what="peak bytes", planned=int(option["device_peak"]), real=report.peak_bytes),
        Figure(what="loads", planned=int(planned("loads")), real=sum(row.loads for row in swapped)),
        Figure(what="link bytes", planned=int(planned("link_bytes")), real=bytes_in),
        Figure(what="load seconds", planned=float(planned("link_seconds")), real=waited),
    )


def _first(option: Any) -> Any:
    """Plans from before the first request was told apart have none of their own."""
    return option.get("first", option)


def _one(request: Any) -> tuple[int, int]:
    return int(request["loads"]), int(request["link_bytes"])


def _sizes(report: ResidencyReport, components: Any) -> tuple[Figure, ...]:
    planned = {str(one["name"]): int(one["bytes"]) for one in components}
    real = {row.name: row.bytes for row in report.rows}
    return tuple(
        Figure(what=f"bytes of {name}", planned=planned.get(name), real=real.get(name))
        for name in dict.fromkeys([*planned, *real])
    )


# --- which of the plan's policies was run ---------------------------------------------------------------------


def _option(report: ResidencyReport, options: Mapping[str, Any]) -> Any:
    """By the recorded policy; what that leaves to the machine (``mode``), by the facts."""
    if report.rows and all(row.resident for row in report.rows) and "all resident" in options:
        return options["all resident"]
    if report.policy is not None:
        exclusive = report.policy["vae"] == "exclusive"
    else:  # a guess: the VAEs of a diffusers pipeline without lists take turns by themselves
        exclusive = any(row.role == "vae" and not row.resident for row in report.rows)
    # The VAE first: it makes a difference to the peak, and where the masters are does not.
    if report.policy is not None:
        masters = report.policy["masters"]
    else:
        masters = "mapped" if report.facts.mapped_bytes > 0 else "auto"
    wanted = (("exclusive VAE", exclusive), (masters, True))
    return options[next((name for name, yes in wanted if yes and name in options), "model level")]


def _apart(policy: Mapping[str, Any] | None, option: str) -> dict[str, Any]:
    usual = plain_policy(OffloadPolicy())
    planned_for = "vae" if option == "exclusive VAE" else None
    return {
        name: value
        for name, value in (policy or {}).items()
        if name in _DECISIVE and name != planned_for and value != usual[name]
    }
