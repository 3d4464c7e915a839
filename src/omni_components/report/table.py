"""The report as a table, for a terminal (rich) or as plain text (ASCII, to paste into an issue)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..errors import format_bytes

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from .report import ComponentRow, ResidencyReport

BINDINGS = {
    "data": "the tensors stay the same objects (.data = crosses)",
    "slots": "modules hold one tensor object per side (slots are rebound)",
}
NOTHING = "no components are recorded: the target keeps its own offload"
THRASH = (
    "thrash: {one} and {other} took the device from each other: {reloads} reloads, {size} moved again. "
    "Finish the work of one before the other starts; end each request with handle.release()."
)

AHEAD = "prefetch: {copied} copied ahead, {wasted} of them for nothing ({size}); {failed} failed"


def as_text(report: ResidencyReport) -> str:
    """The table and the lines below it as plain text."""
    # Imported here: `import omni_components` must not pay for rich.
    from io import StringIO

    from rich.console import Console

    # Wide enough for any name: whoever prints this may not have a terminal at all.
    # And in a notebook it is text all the same.
    console = Console(file=StringIO(), width=10_000, color_system=None, force_jupyter=False)
    console.print(as_rich(report, ascii_only=True))
    assert isinstance(console.file, StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def as_rich(report: ResidencyReport, *, ascii_only: bool = False) -> Group:
    """The table and the lines below it for ``rich.print``."""
    # Imported here for the same reason.
    from rich.console import Group
    from rich.text import Text

    lines = [Text(line, style=style) for line, style in _lines(report)]
    return Group(_table(report, ascii_only=ascii_only), *lines) if report.rows else Group(*lines)


def _table(report: ResidencyReport, *, ascii_only: bool) -> Table:
    # Imported here for the same reason.
    from rich.box import SIMPLE, Box
    from rich.table import Table
    from rich.text import Text

    plain = Box("    \n    \n -- \n    \n    \n -- \n    \n    \n", ascii=True)
    table = Table(box=plain if ascii_only else SIMPLE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.show_footer = True
    for heading, total in _columns(report):
        table.add_column(heading, total, justify="right", no_wrap=True)
    for column in table.columns[:2]:  # names may fold in a narrow terminal, numbers may not
        column.justify, column.no_wrap, column.overflow = "left", False, "fold"
    for row in report.rows:
        style = "dim" if row.resident else ""
        table.add_row(*(Text(cell, style=style) for cell in _cells(row, waited=_waited(report))))
    return table


def _columns(report: ResidencyReport) -> Iterator[tuple[str, str]]:
    """Heading and total of each column."""
    rows = report.rows
    yield "component", "total"
    yield "role", ""
    yield "bytes", ""
    yield "loads", str(sum(row.loads for row in rows))
    yield "evictions", str(sum(row.evictions for row in rows))
    yield "seconds", _seconds(sum(row.seconds for row in rows))
    yield "bytes in", format_bytes(sum(row.bytes_in for row in rows))
    yield "out", format_bytes(sum(row.bytes_out for row in rows))
    if _waited(report):
        yield "waited", _seconds(sum(row.waited for row in rows))


def _cells(row: ComponentRow, *, waited: bool) -> list[str]:
    cells = [
        row.name,
        f"{row.role} *" if row.resident else row.role,
        format_bytes(row.bytes),
        str(row.loads),
        str(row.evictions),
        _seconds(row.seconds),
        format_bytes(row.bytes_in),
        format_bytes(row.bytes_out),
    ]
    return [*cells, _seconds(row.waited)] if waited else cells


def _lines(report: ResidencyReport) -> Iterator[tuple[str, str]]:
    """What stands below the table: text and style."""
    if not report.rows:
        yield f"device {report.device}: {NOTHING}", ""
        return
    facts = report.facts
    if any(row.resident for row in report.rows):
        yield "* resident: on the device all the time", "dim"
    peak, predicted = format_bytes(report.peak_bytes), format_bytes(report.predicted_peak)
    yield f"device {report.device}: peak {peak}, predicted at most {predicted}", "bold"
    yield (
        f"masters on the host: {format_bytes(facts.pinned_bytes)} pinned, {format_bytes(facts.pageable_bytes)} "
        f"pageable, {format_bytes(facts.mapped_bytes)} mapped from files",
        "",
    )
    yield BINDINGS.get(facts.binding, f"tensors cross by {facts.binding}"), ""
    copied = sum(row.prefetched for row in report.rows)
    failed = sum(row.prefetch_failed for row in report.rows)
    if copied or failed:
        wasted = sum(row.prefetch_wasted for row in report.rows)
        size = format_bytes(sum(row.bytes_wasted for row in report.rows))
        yield AHEAD.format(copied=copied, wasted=wasted, size=size, failed=failed), ""
    for note in report.notes:
        yield note, ""
    for one in report.thrash:
        size = format_bytes(one.bytes)
        yield THRASH.format(one=one.pair[0], other=one.pair[1], reloads=one.reloads, size=size), "bold yellow"


def _waited(report: ResidencyReport) -> bool:
    """Whether someone waited for a turn: only then is there a column for it, as terminals are narrow."""
    return any(row.waited for row in report.rows)


def _seconds(seconds: float) -> str:
    return f"{seconds:.4f}"
