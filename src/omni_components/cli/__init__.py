"""The command line: ``omni-components demo``, ``run``, ``plan``, ``report``, ``doctor`` and ``serve``.

What is heavy (the demo, rich, matplotlib) is imported inside the commands, so that ``--help`` need not wait for it.
"""

from __future__ import annotations

from typing import Annotated

import typer

from .demo import demo
from .doctor import doctor
from .one_line import PROGRAM, OneLineErrors
from .plan import plan
from .report import report
from .run import run
from .serve import serve

app = typer.Typer(
    name=PROGRAM,
    cls=OneLineErrors,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # imported here: other commands do not need it

        typer.echo(f"{PROGRAM} {version(PROGRAM)}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Exclusive parts of a pipeline take turns on the accelerator: one at a time, provably.

    Example: omni-components demo three one four
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for command in (demo, run, plan, report, doctor, serve):
    app.command()(command)


def main() -> None:
    """The console script."""
    app(prog_name=PROGRAM)
