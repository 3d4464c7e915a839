"""Options that several commands take, checked before any weight is read."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from ..errors import ModelError, PolicyError

if TYPE_CHECKING:
    import torch

MOST_STEPS = 1000
MOST_SEED = 2**63 - 1  # what a torch generator takes
MOST_FRAMES = 100_000
_SIZE = re.compile(r"([1-9][0-9]{0,4})[xX]([1-9][0-9]{0,4})")
_SHOWN = 40  # characters of a value in a message
_IN_OPTIONS = (  # what the libraries say in Python's words
    ("pass 'local_files_only=False' as input", "leave out --local-files-only"),
    ("local_files_only", "--local-files-only"),
)


def check_steps(steps: int) -> None:
    """Refuse what no sampler does.

    Raises:
        typer.BadParameter: It says what to choose.
    """
    _check_range(steps, 1, MOST_STEPS, "--steps", " (16 to 32 are good)")


def check_seed(seed: int) -> None:
    """Refuse what no generator takes.

    Raises:
        typer.BadParameter: It says what to choose.
    """
    _check_range(seed, 0, MOST_SEED, "--seed")


def check_frames(frames: int) -> None:
    """Refuse what no video has, and no tensor can.

    Raises:
        typer.BadParameter: It says what to choose.
    """
    _check_range(frames, 1, MOST_FRAMES, "--frames")


def _check_range(value: int, least: int, most: int, option: str, advice: str = "") -> None:
    if not least <= value <= most:
        text = f"{shortened(value)} is not possible; choose {least} to {most}{advice}."
        raise typer.BadParameter(text, param_hint=option)


def check_model(model: str) -> None:
    """Refuse what neither a file nor the hub can be called.

    Raises:
        typer.BadParameter: It says what to give.
    """
    if not model:
        text = "it is empty; give a folder of a diffusers pipeline, a hub id, or demo."
        raise typer.BadParameter(text, param_hint="MODEL")
    try:
        os.stat(model)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise typer.BadParameter(
                f"'{shortened(model)}' is too long for a name.", param_hint="MODEL"
            ) from error
    except ValueError:
        return  # no name of a file; who looks for the model says so


def check_dtype(model: str, dtype: str | None) -> None:
    """Refuse types that weights are not kept in.

    Raises:
        typer.BadParameter: It says what to choose.
    """
    from ..omni import DEMO, DTYPES  # imported here: --help need not wait for torch

    if dtype is not None and dtype not in DTYPES:
        text = f"'{shortened(dtype)}' is not possible; choose one of {', '.join(DTYPES)}, or leave it out."
        raise typer.BadParameter(text, param_hint="--dtype")
    if model == DEMO and dtype not in (None, "float32"):
        text = f"'{dtype}' is not possible: the demo computes in float32; leave it out."
        raise typer.BadParameter(text, param_hint="--dtype")


def check_amount(amount: str | None, option: str) -> None:
    """Refuse what is too long for a number; what else is wrong with it, who reads it says.

    Raises:
        typer.BadParameter: It names the option.
    """
    if amount is not None and len(amount) > _SHOWN:
        raise typer.BadParameter(f"'{shortened(amount)}' is too long for a number.", param_hint=option)


def checked_size(size: str, option: str, example: str) -> tuple[int, int]:
    """Width and height in pixels.

    Raises:
        typer.BadParameter: It shows how to write them.
    """
    found = _SIZE.fullmatch(size)
    if found is None:
        text = f"'{shortened(size)}' is no size; write width x height in pixels, such as {example}."
        raise typer.BadParameter(text, param_hint=option)
    return int(found[1]), int(found[2])


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
def wrong_input(read: str = "MODEL") -> Iterator[None]:
    """What is not there or cannot be read, and a value that cannot be, as errors that name the option.

    Args:
        read: The argument or option that says what is read.

    Raises:
        typer.BadParameter: In place of the library's error.
    """
    try:
        yield
    except ModelError as error:
        text = str(error)
        for python, option in _IN_OPTIONS:
            text = text.replace(python, option)
        raise typer.BadParameter(text, param_hint=read) from error
    except PolicyError as error:
        text = f"{error.value} is not possible; choose {error.choices}."
        raise typer.BadParameter(text, param_hint=f"--{error.field.replace('_', '-')}") from error


def shortened(value: object) -> str:
    """Not too much of a value, for a message."""
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
