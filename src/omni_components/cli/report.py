"""``omni-components report``: a trace as table, pictures and page, and beside its plan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .checks import wrong_input
from .output import show_files, show_report, write_errors

if TYPE_CHECKING:
    from ..report.compare import Comparison
    from ..report.report import ResidencyReport

_FILE = "FILE"
_SUFFIXES = {"png": (".png",), "svg": (".svg",), "html": (".html", ".htm")}


def report(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="What run --trace has written.")],
    png: Annotated[Path | None, typer.Option(metavar=_FILE, help="Write the timeline as PNG.")] = None,
    svg: Annotated[Path | None, typer.Option(metavar=_FILE, help="Write the timeline as SVG.")] = None,
    html: Annotated[Path | None, typer.Option(metavar=_FILE, help="Write one page with all of it.")] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="PLAN.json", help="What plan --json printed, to compare.")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Requests in the trace, for --plan; default: as recorded."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Say what moved in a run, where the time went, what thrashed, and how a plan compares with it.

    Example: omni-components report trace.json --html report.html
    """
    files = _Files(png=png, svg=svg, html=html)
    files.check(trace, plan)
    if requests is not None and plan is None:
        raise typer.BadParameter("it multiplies a plan; give --plan, too.", param_hint="--requests")
    # Imported here: --help need not wait for torch.
    from ..report.lines import plan_lines, thrash_lines, time_lines
    from ..report.read import read_trace

    with wrong_input("TRACE"):
        found = read_trace(trace)
    compared = None if plan is None else _compared(found, plan, requests)
    lines = [*time_lines(found), *thrash_lines(found)]
    planned = [] if compared is None else list(plan_lines(compared))
    files.write(found, lines, planned)
    if as_json:
        typer.echo(json.dumps(_facts(found, compared), indent=2))
        return
    show_report(found)
    for line in (*lines, *planned):
        typer.echo(line)
    if files.named:
        show_files(**files.named)


def _compared(found: ResidencyReport, plan: Path, requests: int | None) -> Comparison:
    from ..report.compare import HOW, compare  # imported here, as above
    from ..report.read import read_json

    with wrong_input("--plan"):
        return compare(found, read_json(plan, HOW), str(plan), requests)


def _facts(found: ResidencyReport, compared: Comparison | None) -> dict[str, Any]:
    from ..report.account import idle, shares  # imported here, as above

    empty, whole = idle(found)
    time = {"seconds": whole, "idle": empty, "components": [asdict(one) for one in shares(found)]}
    return {**found.to_dict(), "time": time, "plan": asdict(compared) if compared else None}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """What is written; what is ``None`` is not."""

    png: Path | None
    svg: Path | None
    html: Path | None

    @property
    def named(self) -> dict[str, Path]:
        """Those that are written, by their options."""
        files = {"png": self.png, "svg": self.svg, "html": self.html}
        return {option: path for option, path in files.items() if path is not None}

    def check(self, trace: Path, plan: Path | None) -> None:
        """Refuse names that say something else, and those that would write over what is read, or each other.

        Raises:
            typer.BadParameter: Nothing was read or written.
        """
        taken = {trace: "the trace", **({plan: "the plan"} if plan is not None else {})}
        for option, path in self.named.items():
            _check_suffix(option, path)
            same = next((what for other, what in taken.items() if _same(path, other)), None)
            if same is not None:
                raise typer.BadParameter(
                    f"'{path}' is {same}; choose another name.", param_hint=f"--{option}"
                )
            taken[path] = f"written by --{option}"

    def write(self, found: ResidencyReport, lines: list[str], planned: list[str]) -> None:
        """Write them, each whole or not at all."""
        for option, path in self.named.items():
            with _told(option, path):
                if option == "html":
                    from ..report.html import write_html  # imported here, as above

                    write_html(found, path, lines, planned=planned)
                else:
                    from ..report.timeline import draw_timeline  # imported here: matplotlib comes with it

                    draw_timeline(found, path)


def _check_suffix(option: str, path: Path) -> None:
    suffix = path.suffix.lower()
    if suffix in _SUFFIXES[option]:
        return
    meant = next((other for other, suffixes in _SUFFIXES.items() if suffix in suffixes), None)
    advice = f"; did you mean --{meant}?" if meant else "."
    text = f"'{path}' does not end in {' or '.join(_SUFFIXES[option])}{advice}"
    raise typer.BadParameter(text, param_hint=f"--{option}")


def _same(one: Path, other: Path) -> bool:
    if one.exists() and other.exists():
        return one.samefile(other)  # also by a link
    return one.resolve() == other.resolve()


@contextmanager
def _told(option: str, path: Path) -> Iterator[None]:
    """As ``write_errors``, under the option's own name."""
    try:
        with write_errors(path, ""):
            yield
    except typer.BadParameter as error:
        raise typer.BadParameter(error.message, param_hint=f"--{option}") from error
