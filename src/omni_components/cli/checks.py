"""Options that several commands take, checked before any weight is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from ..errors import ModelError, PolicyError

if TYPE_CHECKING:
    import torch

MOST_STEPS = 1000
MOST_SEED = 2**63 - 1  # what a torch generator takes


def check_steps(steps: int) -> None:
    """Refuse what no sampler does.

    Raises:
        typer.BadParameter: It says what to choose.
    """
    if not 1 <= steps <= MOST_STEPS:
        text = f"{steps} steps are not possible; choose 1 to {MOST_STEPS} (16 to 32 are good)."
        raise typer.BadParameter(text, param_hint="--steps")


def check_seed(seed: int) -> None:
    """Refuse what no generator takes.

    Raises:
        typer.BadParameter: It says what to choose.
    """
    if not 0 <= seed <= MOST_SEED:
        raise typer.BadParameter(f"{seed} is not possible; choose 0 to {MOST_SEED}.", param_hint="--seed")


def checked_device(device: str | None) -> torch.device:
    """Where it computes.

    Raises:
        typer.BadParameter: There is no such device here; it names those that are.
    """
    from ..transfer.device import resolve_device  # imported here: --help need not wait for torch

    try:
        return resolve_device(device)
    except PolicyError as error:
        text = f"{error.value} is not possible here; choose {error.choices}."
        raise typer.BadParameter(text, param_hint="--device") from error


@contextmanager
def wrong_input() -> Iterator[None]:
    """A model that is not there, and a value that cannot be, as errors that name the option.

    Raises:
        typer.BadParameter: In place of the library's error.
    """
    try:
        yield
    except ModelError as error:
        raise typer.BadParameter(str(error), param_hint="MODEL") from error
    except PolicyError as error:
        text = f"{error.value} is not possible; choose {error.choices}."
        raise typer.BadParameter(text, param_hint=f"--{error.field.replace('_', '-')}") from error
