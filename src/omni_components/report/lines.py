"""What is said of a report below its table, as text: where the time went, what thrashed, and a plan beside it."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import format_bytes
from .account import idle, shares
from .compare import Comparison, Figure, RequestFigures
from .report import ResidencyReport

_MOST = 10  # requests that are told one by one


def time_lines(report: ResidencyReport) -> Iterator[str]:
    """Where the time went."""
    empty, whole = idle(report)
    yield f"where {whole:.4f} s went; for {empty:.4f} s nothing that takes turns was on the device:"
    for one in shares(report):
        parts = [f"loading {one.loading:.4f} s", f"on the device {one.loaded:.4f} s"]
        if one.ahead:
            parts.insert(1, f"copied ahead in {one.ahead:.4f} s that nobody waited for")
        if one.waiting:
            parts.append(f"waited {one.waiting:.4f} s")
        yield f"  {one.component}: {', '.join(parts)}"


def thrash_lines(report: ResidencyReport) -> Iterator[str]:
    """What was moved for nothing, and what would have avoided it."""
    for one in report.thrash:
        first, second = one.pair
        yield (
            f"avoidable: {format_bytes(one.bytes)} in {one.reloads} reloads, if all work of {first} came before "
            f"that of {second}, or if both stayed (needs device memory for the two)"
        )


def plan_lines(found: Comparison) -> Iterator[str]:
    """A plan beside the run."""
    times = "one request" if found.requests == 1 else f"{found.requests} requests"
    counted = "" if found.counted else " (not recorded how many there were: --requests says it)"
    yield f"planned for {times} under '{found.option}', and what was{counted}:"
    yield from (f"  {_figure(one)}" for one in found.figures)
    yield "  load seconds are the link's in the plan, and the host's in the run, as long as somebody waited"
    if not found.recorded:
        yield f"  '{found.option}' is a guess from what moved: this trace does not tell its policy"
    for name, value in found.apart.items():
        yield f"  it was run with {name}={value!r}, which the plan has no option for"
    if found.requests > 1 and found.each:
        yield from _requests(found)


def _figure(one: Figure) -> str:
    if one.planned is None or one.real is None:
        return f"{one.what}: {'not planned' if one.planned is None else 'planned, but not there'}"
    apart = one.real - one.planned
    told = "equal" if not apart else f"{apart:+.4f}" if isinstance(apart, float) else f"{apart:+}"
    return f"{one.what}: {_number(one.planned)} planned, {_number(one.real)} real ({told})"


def _number(value: float) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _requests(found: Comparison) -> Iterator[str]:
    unlike = found.unlike
    alike = len(found.each) - len(unlike)
    yield f"  of {len(found.each)} requests looked at one by one, {alike} moved what was planned"
    yield from (f"  {_request(one)}" for one in unlike[:_MOST])
    if len(unlike) > _MOST:
        yield f"  and {len(unlike) - _MOST} more that did not: --json tells all"


def _request(one: RequestFigures) -> str:
    size = format_bytes(one.link_bytes)
    return f"request {one.number}: {one.loads} loads, {size}, waited {one.load_seconds:.4f} of {one.seconds:.4f} s"
