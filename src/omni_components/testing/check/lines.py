"""Whose line it was: the innermost line of source that its author can change."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

_PACKAGE = Path(__file__).parents[2]
_TORCH = str(Path(torch.__file__).parent)
# Ours, too, but written as a user would: their lines are what is asked for.
_USERS = (str(_PACKAGE / "demo"), str(_PACKAGE / "models"))


def is_machinery(filename: str) -> bool:
    """Whether a file is torch's or this package's own, or no file at all."""
    if filename.startswith(_USERS):
        return False
    return filename.startswith(("<", _TORCH, str(_PACKAGE)))


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the author's code."""
    while frame is not None and is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def line_of(frame: FrameType | None) -> str:
    """``file:line`` of a frame."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def function_of(frame: FrameType | None) -> str:
    """The function of a frame."""
    return frame.f_code.co_name if frame is not None else ""


def by_mover(frame: FrameType | None) -> bool:
    """Whether the weights are being moved, or attached, right now: then any touch of them is in order."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(str(_PACKAGE / "transfer")):
            return True
        frame = frame.f_back
    return False


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of the author's code, the innermost first."""
    while frame is not None:
        if not is_machinery(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def raised_at(error: BaseException) -> tuple[str, str]:
    """``file:line`` and function of the author's code where an error came from; of its cause if it has one."""
    while error.__cause__ is not None:
        error = error.__cause__
    for summary in reversed(traceback.extract_tb(error.__traceback__)):
        if not is_machinery(summary.filename):
            return f"{summary.filename}:{summary.lineno}", summary.name
    return "", ""
