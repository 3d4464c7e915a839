"""What commands write and show: files that cannot be written, the bar over the steps, the report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.progress import Progress

    from ..report.report import ResidencyReport


@contextmanager
def write_errors(out: Path, others: str = " and its timeline") -> Iterator[None]:
    """What the system says about a file it cannot write, in words that tell what to do.

    Args:
        out: What ``--out`` says.
        others: What is written with it, for the sentence about files that cannot be written.

    Raises:
        typer.BadParameter: In place of the system's error.
    """
    try:
        yield
    except OSError as error:
        raise typer.BadParameter(_cannot_write(out, others, error), param_hint="--out") from error


def refuse_no_place(path: Path, option: str) -> None:
    """Refuse a name at which no file can be.

    Raises:
        typer.BadParameter: It says what to do.
    """
    problem = _no_place(path)
    if problem is not None:
        raise typer.BadParameter(problem, param_hint=option)


def _no_place(path: Path) -> str | None:
    folder = path.parent
    if os.path.isdir(path):
        return f"'{path}' is a folder; choose a file name."
    if not os.path.exists(folder):
        return f"there is no folder '{folder}'; create it first, or choose another."
    if not os.path.isdir(folder):
        return f"'{folder}' is not a folder; choose another."
    return None


def _cannot_write(out: Path, others: str, error: OSError) -> str:
    problem = _no_place(out)
    if problem is not None:
        return problem
    return f"'{out}'{others} cannot be written ({error.strerror or error}); choose another file."


def step_bar(title: str) -> Progress:
    """A bar over the denoising steps, on stderr; nothing where that is no terminal."""
    # Imported here: --help need not wait for it.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)


@contextmanager
def loading_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar over the bytes of weights, on stderr; nothing where that is no terminal.

    Yields:
        What is to be called with the bytes that are there, and the bytes in all.
    """
    # Imported here: --help need not wait for it.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeElapsedColumn(),
    )
    progress = Progress(*columns, console=console, disable=not console.is_terminal)
    task = progress.add_task(title, total=None)

    def told(done: int, total: int) -> None:
        progress.start()  # not before: what is fetched first has the hub's own bars
        progress.update(task, completed=done, total=total)

    try:
        yield told
    finally:
        progress.stop()


def show_report(report: ResidencyReport) -> None:
    """The report as a table, on stdout."""
    from rich.console import Console  # imported here: --help need not wait for it

    console = Console(highlight=False)
    if console.is_terminal:
        console.print(report)
    else:
        typer.echo(str(report))  # a file has no width to fold names into


def show_files(**files: Path | None) -> None:
    """The files that were written, a line each."""
    written = {name: path for name, path in files.items() if path is not None}
    width = max(map(len, written)) + 1
    for name, path in written.items():
        # Not through rich: it would break a long path in two, and take brackets in it for markup.
        typer.echo(f"{name + ':':{width}} {path}")
