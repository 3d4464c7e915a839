"""``omni-components report``: a trace as table, pictures and page, and beside its plan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .output import show_files, show_report, write_errors

if TYPE_CHECKING:
    from ..report.account import Figure
    from ..report.report import ResidencyReport

_FILE = "FILE"


def report(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="What run --trace has written.")],
    png: Annotated[Path | None, typer.Option(metavar=_FILE, help="Write the timeline as PNG.")] = None,
    svg: Annotated[Path | None, typer.Option(metavar=_FILE, help="Write the timeline as SVG.")] = None,
    html: Annotated[Path | None, typer.Option(metavar=_FILE, help="Write one page with all of it.")] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="PLAN.json", help="What plan --json printed, to compare.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Say what moved in a run, where the time went, what thrashed, and how a plan compares with it.

    Example: omni-components report trace.json --html report.html
    """
    # Imported here: --help need not wait for torch.
    from ..report.account import compare, idle, shares
    from ..report.read import read_json, read_trace

    _check_suffixes(png, svg)
    found = read_trace(trace)
    policy = ""
    figures: list[Figure] = []
    if plan is not None:
        advice = "Make one with: omni-components plan MODEL --json > PLAN.json."
        policy, figures = compare(found, read_json(plan, advice), str(plan))
    lines = [*_time_lines(found), *_thrash_lines(found), *_plan_lines(policy, figures)]
    _write(found, lines, png=png, svg=svg, html=html)
    if as_json:
        empty, whole = idle(found)
        time = {"seconds": whole, "idle": empty, "components": [asdict(one) for one in shares(found)]}
        compared = {"policy": policy, "figures": [asdict(one) for one in figures]} if plan else None
        typer.echo(json.dumps({**found.to_dict(), "time": time, "plan": compared}, indent=2))
        return
    show_report(found)
    for line in lines:
        typer.echo(line)
    if png or svg or html:
        show_files(png=png, svg=svg, html=html)


def _check_suffixes(png: Path | None, svg: Path | None) -> None:
    for suffix, path in ((".png", png), (".svg", svg)):
        if path is not None and path.suffix.lower() != suffix:
            raise typer.BadParameter(f"'{path}' does not end in {suffix}.", param_hint=f"--{suffix[1:]}")


def _write(
    found: ResidencyReport, lines: list[str], *, png: Path | None, svg: Path | None, html: Path | None
) -> None:
    for path in (png, svg):
        if path is not None:
            from ..report.timeline import draw_timeline  # imported here: matplotlib comes with it

            with _told(path):
                draw_timeline(found, path)
    if html is not None:
        from ..report.html import write_html  # imported here, as above

        with _told(html):
            write_html(found, html, lines)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """As ``write_errors``, under the option's own name."""
    try:
        with write_errors(path, ""):
            yield
    except typer.BadParameter as error:
        raise typer.BadParameter(error.message, param_hint=f"--{path.suffix[1:]}") from error


def _time_lines(found: ResidencyReport) -> Iterator[str]:
    from ..report.account import idle, shares  # imported here, as above

    empty, whole = idle(found)
    yield f"where {whole:.4f} s went; for {empty:.4f} s nothing that takes turns was on the device:"
    for one in shares(found):
        waited = f", waited {one.waiting:.4f} s" if one.waiting else ""
        yield f"  {one.component}: loading {one.loading:.4f} s, on the device {one.loaded:.4f} s{waited}"


def _thrash_lines(found: ResidencyReport) -> Iterator[str]:
    from ..errors import format_bytes  # imported here, as above

    for one in found.thrash:
        first, second = one.pair
        yield (
            f"avoidable: {format_bytes(one.bytes)} in {one.reloads} reloads, if all work of {first} came before "
            f"that of {second}, or if both stayed (needs device memory for the two)"
        )


def _plan_lines(policy: str, figures: list[Figure]) -> Iterator[str]:
    if figures:
        yield f"planned for one request under '{policy}', and what was:"
    for one in figures:
        if one.planned is None or one.real is None:
            yield f"  {one.what}: {'not planned' if one.planned is None else 'planned, but not there'}"
            continue
        apart = "equal" if one.planned == one.real else f"{one.real - one.planned:+.6g}"
        yield f"  {one.what}: {one.planned:.12g} planned, {one.real:.12g} real ({apart})"
