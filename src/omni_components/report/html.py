"""The report as one page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from ..errors import format_bytes
from .account import idle
from .files import written_whole
from .report import ComponentRow, ResidencyReport
from .svg import timeline

# The colours of the timeline picture, and lighter ones of the same hues on a dark page.
_STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1d2127;--soft:#5d6570;--line:#d9dde3;
--resident:#b8bcc2;--c0:#0072b2;--c1:#e69f00;--c2:#009e73;--c3:#cc79a7;--c4:#56b4e9;--c5:#d55e00}
@media(prefers-color-scheme:dark){:root{--page:#14171b;--card:#1d2127;--ink:#e8eaed;--soft:#9aa3af;--line:#343a43;
--resident:#5b626c;--c0:#4aa3dc;--c1:#f0b440;--c2:#2fbf96;--c3:#dc98bf;--c4:#8accf2;--c5:#f0803c}}
*{box-sizing:border-box}
body{margin:0;padding:2rem 1.25rem;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:68rem;margin:0 auto}
h1{font-size:1.5rem;line-height:1.25;margin:0 0 .25rem;overflow-wrap:anywhere}
h2{font-size:1rem;margin:0 0 .75rem}
.sub{color:var(--soft);margin:0 0 1.25rem}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:1rem 1.25rem;margin:0 0 1rem}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:1rem;margin:0 0 1rem}
dl div{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:.6rem 1rem}
dt{color:var(--soft);font-size:.8rem}
dd{margin:0;font-size:1.3rem;font-weight:600;font-variant-numeric:tabular-nums}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.35rem .6rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child,th:nth-child(2),td:nth-child(2){text-align:left}
tbody th{font-weight:600;white-space:normal;overflow-wrap:anywhere}
thead th{color:var(--soft);font-size:.8rem;font-weight:600}
tfoot td,tfoot th{border-bottom:0;font-weight:600}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--ink);font:12.5px system-ui,sans-serif}
svg .tick,svg .axis,.legend{fill:var(--soft);color:var(--soft);font-size:11.5px}
svg .name{font-weight:600}
.grid{stroke:var(--line);stroke-width:1}
.limit{stroke:var(--ink);stroke-width:1.2;stroke-dasharray:5 4}
svg .limit-name{font-size:11.5px;paint-order:stroke;stroke:var(--card);stroke-width:4px;stroke-linejoin:round}
.c0{--own:var(--c0)}.c1{--own:var(--c1)}.c2{--own:var(--c2)}.c3{--own:var(--c3)}.c4{--own:var(--c4)}
.c5{--own:var(--c5)}.resident{--own:var(--resident)}
.stay,.bytes{fill:var(--own)}
.bytes{stroke:var(--card);stroke-width:.5}
.loading{fill:color-mix(in srgb,var(--own) 45%,var(--card))}
.ahead{fill:color-mix(in srgb,var(--own) 18%,var(--card));stroke:var(--own);stroke-width:.8;stroke-dasharray:3 2}
rect:hover{opacity:.75}
.legend{display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;margin:.5rem 0 0;font-size:.8rem}
.legend i{display:inline-block;width:1.1em;height:.75em;margin-right:.4em;border-radius:2px;border:1px solid #0000}
.legend .stay{background:var(--c0)}
.legend .loading{background:color-mix(in srgb,var(--c0) 45%,var(--card))}
.legend .ahead{background:color-mix(in srgb,var(--c0) 18%,var(--card));border:1px dashed var(--c0)}
.legend .resident{background:var(--resident)}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.6 ui-monospace,monospace}
"""
_HEADINGS = ("component", "role", "bytes", "loads", "evictions", "seconds", "bytes in", "bytes out")


def write_html(
    report: ResidencyReport, path: Path | str, lines: Sequence[str] = (), *, planned: Sequence[str] = ()
) -> None:
    """Write the page; no half-written file is left.

    Args:
        report: What happened.
        path: The file.
        lines: What is said below the table.
        planned: What is said of a plan beside it.

    Raises:
        OSError: The file cannot be written.
    """
    with written_whole(Path(path)) as (draft,):
        draft.write_text(as_html(report, lines, planned=planned), encoding="utf-8")


def as_html(report: ResidencyReport, lines: Sequence[str] = (), *, planned: Sequence[str] = ()) -> str:
    """The page: figures, the timeline as SVG, the table, and what is said below it."""
    title = escape(f"omni_components on {report.device}")
    # The policy lets nothing in from elsewhere, whatever a name may hold.
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    parts = [*_pictured(report), *_said("Where the time went", lines), *_said("Beside its plan", planned)]
    said = "".join(f"<section><h2>{head}</h2>{body}</section>" for head, body in parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><title>{title}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style></head><body><main><h1>{title}</h1>'
        f'<p class="sub">Exclusive components took turns on the device; this is what it cost.</p>'
        f"<dl>{''.join(_figures(report))}</dl>{said}</main></body></html>\n"
    )


def _figures(report: ResidencyReport) -> Iterator[str]:
    empty, whole = idle(report)
    told = {
        "peak": format_bytes(report.peak_bytes),
        "predicted peak": format_bytes(report.predicted_peak),
        "over the link": format_bytes(sum(row.bytes_in + row.bytes_out for row in report.rows)),
        "loads": str(sum(row.loads for row in report.rows)),
        "seconds": f"{whole:.3f}",
        "seconds idle": f"{empty:.3f}",
    }
    for name, value in told.items():
        yield f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>"


def _pictured(report: ResidencyReport) -> Iterator[tuple[str, str]]:
    drawn = timeline(report)
    if drawn:
        yield "Who was on the device, and when", f"{drawn}{_legend(report)}"
    yield "What moved, and what it cost", f'<div class="wide">{_table(report)}</div>'


def _said(head: str, lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    if lines:
        yield head, f"<pre>{escape(chr(10).join(lines))}</pre>"


def _legend(report: ResidencyReport) -> str:
    names = {"stay": "on the device", "loading": "loading, while somebody waits"}
    if any(row.prefetched for row in report.rows):
        names["ahead"] = "copied ahead, while another computes"
    if any(row.resident for row in report.rows):
        names["resident"] = "resident: never swapped"
    told = "".join(f'<span><i class="{kind}"></i>{name}</span>' for kind, name in names.items())
    return f'<p class="legend">{told}</p>'


def _table(report: ResidencyReport) -> str:
    heads = "".join(f'<th scope="col">{one}</th>' for one in _HEADINGS)
    body = "".join(_row(row) for row in report.rows)
    rows = report.rows
    sums = (
        "",
        "",
        sum(row.loads for row in rows),
        sum(row.evictions for row in rows),
        f"{sum(row.seconds for row in rows):.4f}",
        format_bytes(sum(row.bytes_in for row in rows)),
        format_bytes(sum(row.bytes_out for row in rows)),
    )
    foot = f'<tr><th scope="row">total</th>{_cells(sums)}</tr>'
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody><tfoot>{foot}</tfoot></table>"


def _row(row: ComponentRow) -> str:
    role = f"{row.role}, resident" if row.resident else row.role
    facts = (role, format_bytes(row.bytes), row.loads, row.evictions, f"{row.seconds:.4f}")
    links = (format_bytes(row.bytes_in), format_bytes(row.bytes_out))
    return f'<tr><th scope="row">{escape(row.name)}</th>{_cells((*facts, *links))}</tr>'


def _cells(values: Sequence[object]) -> str:
    return "".join(f"<td>{escape(str(one))}</td>" for one in values)
