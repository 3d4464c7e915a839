"""Errors as a person at a terminal wants them: one line on stderr that says what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import typer
import typer.core

from ..errors import OmniComponentsError
from .checks import shortened

PROGRAM = "omni-components"
WRONG_INPUT, FAILED, INTERRUPTED = 2, 1, 130  # 130 = 128 + SIGINT, as shells report it
_HELP = f"See '{PROGRAM} --help'."

# Newer versions of typer carry a click of their own: the base of its own error is right in all of them.
_UsageError: Any = typer.BadParameter.__bases__[0]


class OneLineErrors(typer.core.TyperGroup):
    """Commands whose errors are one line, without usage text and traceback; wrong input exits with 2."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run; with ``standalone_mode`` it ends in ``SystemExit``, as scripts and typer's test runner expect."""
        run = partial(super().main, args, prog_name, complete_var, False, windows_expand_args, **extra)
        if not standalone_mode:
            return run()
        sys.exit(_status_of(run))


def _status_of(run: Callable[[], Any]) -> int:
    """The exit status of a run, after its error is told."""
    try:
        result = run()
    except _UsageError as error:
        _reword(error)
        _say(error.format_message(), advice="" if isinstance(error, typer.BadParameter) else _HELP)
        return WRONG_INPUT
    except OmniComponentsError as error:
        _say(str(error))
        return FAILED
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted")
        return INTERRUPTED
    if result == INTERRUPTED:  # typer makes the exit status of an interrupt
        _say("interrupted")
    return result if isinstance(result, int) else 0


def _reword(error: Any) -> None:
    """Say what is wrong with a number as older versions of typer do: newer ones quote pydantic, without the value."""
    problems = getattr(error.__cause__, "errors", None)
    if not isinstance(error, typer.BadParameter) or problems is None:
        return
    first = problems()[0]
    words = _NUMBERS.get(first["type"])
    if words is not None:
        error.message = words.format(shortened(first["input"]), **first.get("ctx", {}))


_NUMBERS = {
    "int_parsing": "'{}' is not a valid integer.",
    "int_parsing_size": "'{}' is not a valid integer.",
    "float_parsing": "'{}' is not a valid number.",
    "greater_than_equal": "{} is not possible; choose {ge} or more.",
    "less_than_equal": "{} is not possible; choose {le} or less.",
}


def _say(message: str, advice: str = "") -> None:
    # One line, whatever it is made of: a driver's message may have many.
    typer.echo(f"{PROGRAM}: {' '.join(f'{message} {advice}'.split())}", err=True)
