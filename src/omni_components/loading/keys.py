"""Stored names against a model's own: what is missing, what nobody asked for, what has another shape."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from ..errors import ResidencyWarning, WeightsError, nearest

_SHOWN = 5


def refuse_missing(component: str, folder: str, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Raise if the files lack a tensor of the model.

    Raises:
        WeightsError: It names them, and the stored names that look most like the first.
    """
    if not missing:
        return
    close = nearest(missing[0], unexpected)
    problem = f"lacks {len(missing)} of its tensors: {shown(missing)}."
    if close:
        problem += f" Nearest of those it has and the model does not: {', '.join(close)}."
    advice = (
        "The files are of another model or release: check config.json beside them, or download both again."
    )
    raise WeightsError(component, folder, missing[0], problem, advice)


def warn_unexpected(component: str, folder: str, unexpected: Sequence[str]) -> None:
    """Say that some stored tensors have no place in the model; it works without them."""
    if unexpected:
        text = f"weights of {component!r}: {folder!r} has {len(unexpected)} tensors that the model does not: "
        warnings.warn(text + f"{shown(unexpected)}. They are left out.", ResidencyWarning, stacklevel=2)


def refuse_shape(component: str, file: str, name: str, stored: Iterable[int], wanted: Iterable[int]) -> None:
    """Raise if a stored tensor has another shape than the model's.

    Raises:
        WeightsError: It names both.
    """
    stored, wanted = tuple(stored), tuple(wanted)
    if stored != wanted:
        problem = f"has shape {stored}; the model has {wanted}."
        raise WeightsError(component, file, name, problem, "Check that config.json belongs to these weights.")


def shown(names: Sequence[str]) -> str:
    """A few of many names."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
