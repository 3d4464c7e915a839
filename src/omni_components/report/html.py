"""The report as one page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from ..errors import format_bytes
from .files import written_whole
from .report import ResidencyReport
from .spans import Span, ends_at, spans, starts_at

_STYLE = """
:root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;
padding:0 1rem}table{border-collapse:collapse;width:100%}th,td{padding:.25rem .6rem;text-align:right;
border-bottom:1px solid #8884}th:first-child,td:first-child{text-align:left;overflow-wrap:anywhere}
svg{width:100%;height:auto}text{fill:currentColor;font:12px system-ui,sans-serif}
.stay{fill:#0072B2}.loading{fill:#56B4E9}.stay:hover,.loading:hover{opacity:.7}pre{white-space:pre-wrap}
"""
_LEFT, _WIDTH, _LANE = 180, 1000, 28
_HEADINGS = ("component", "role", "bytes", "loads", "evictions", "seconds", "bytes in", "bytes out")


def write_html(report: ResidencyReport, path: Path | str, lines: Sequence[str] = ()) -> None:
    """Write the page; no half-written file is left.

    Args:
        report: What happened.
        path: The file.
        lines: What is said below the table.

    Raises:
        OSError: The file cannot be written.
    """
    with written_whole(Path(path)) as (draft,):
        draft.write_text(as_html(report, lines), encoding="utf-8")


def as_html(report: ResidencyReport, lines: Sequence[str] = ()) -> str:
    """The page: the timeline as SVG, whose bars tell their facts when pointed at, and the table."""
    peaks = f"peak {format_bytes(report.peak_bytes)}, predicted at most {format_bytes(report.predicted_peak)}"
    title = escape(f"omni_components on {report.device}")
    # The policy lets nothing in from elsewhere, whatever a name may hold.
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style></head><body><h1>{title}</h1>'
        f"<p>{escape(peaks)}</p>{_timeline(report)}{_table(report)}"
        f"<pre>{escape(chr(10).join(lines))}</pre></body></html>\n"
    )


def _timeline(report: ResidencyReport) -> str:
    stays = spans(report.events, until=report.taken_at)
    lanes = {name: at for at, name in enumerate(dict.fromkeys(one.component for one in stays))}
    start, end = starts_at(report.events), ends_at(report.events, report.taken_at)
    scale = (_WIDTH - _LEFT) / max(end - start, 1e-9)
    names = [f'<text x="0" y="{at * _LANE + 18}">{escape(name[:24])}</text>' for name, at in lanes.items()]
    bars = [_bars(one, lanes[one.component] * _LANE, start, scale) for one in stays]
    label = f"Who was on the device when, {end - start:.4f} s"
    box = f"0 0 {_WIDTH} {max(len(lanes), 1) * _LANE}"
    return f'<svg viewBox="{box}" role="img" aria-label="{label}">{"".join([*names, *bars])}</svg>'


def _bars(stay: Span, top: int, origin: float, scale: float) -> str:
    cause = "before the record" if stay.cause is None else stay.cause
    begin = f"{stay.start - origin:.4f} s"
    told = f"{stay.component}: from {begin}, loaded in {stay.ready - stay.start:.4f} s, " + (
        f"there {stay.end - stay.ready:.4f} s ({cause})"
    )
    parts = (("loading", stay.start, stay.ready), ("stay", stay.ready, stay.end))
    return "".join(
        f'<rect class="{kind}" x="{_LEFT + (low - origin) * scale:.3f}" y="{top + 4}" height="{_LANE - 8}" '
        f'width="{max((high - low) * scale, 0.5):.3f}"><title>{escape(told)}</title></rect>'
        for kind, low, high in parts
    )


def _table(report: ResidencyReport) -> str:
    heads = "".join(f'<th scope="col">{one}</th>' for one in _HEADINGS)
    rows = []
    for row in report.rows:
        cells = (row.role, format_bytes(row.bytes), row.loads, row.evictions, f"{row.seconds:.4f}")
        links = (format_bytes(row.bytes_in), format_bytes(row.bytes_out))
        rest = "".join(f"<td>{escape(str(one))}</td>" for one in (*cells, *links))
        rows.append(f'<tr><th scope="row">{escape(row.name)}</th>{rest}</tr>')
    caption = "<caption>What moved, and what it cost</caption>"
    return f"<table>{caption}<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
