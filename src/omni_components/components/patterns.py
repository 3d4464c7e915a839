"""Parts by pattern: dotted paths below a model in which ``*`` stands for one segment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from ..errors import ComponentNotFoundError, DeclarationError
from .area import Area, FixedArea
from .tensors import Slot


def matches(model: nn.Module, pattern: str) -> list[str]:
    """The concrete paths of modules, parameters and buffers that a pattern names, in order."""
    return [path for path, _ in _walk(model, pattern.split("."))]


def parts_of(model: nn.Module, declared: Mapping[str, Sequence[str]], owner: str) -> dict[str, Area]:
    """The parts of a model, checked as a partition.

    Args:
        model: The split model.
        declared: Patterns per part.
        owner: What the model is called in messages.

    Raises:
        DeclarationError: No part, a part without a pattern, or a tensor in two parts.
        ComponentNotFoundError: A pattern that matches nothing.
    """
    if len(declared) < 2:
        names = ", ".join(declared) or "none"
        raise DeclarationError(owner, f"declares {len(declared)} part ({names}).", "Two or more take turns.")
    areas = {}
    claimed: dict[tuple[int, str], tuple[str, str]] = {}
    for part, patterns in declared.items():
        if isinstance(patterns, str) or not patterns:
            raise DeclarationError(owner, f"part {part!r} has no list of patterns.", "Give it at least one.")
        paths = [path for pattern in patterns for path in _found(model, pattern, owner)]
        areas[part] = Area(model, dict.fromkeys(paths))
        _claim(part, areas[part], claimed, owner)
    return areas


def _claim(part: str, area: Area, claimed: dict[tuple[int, str], tuple[str, str]], owner: str) -> None:
    for slot in area.slots():
        other, path = claimed.setdefault((id(slot.module), slot.name), (part, slot.path))
        if other != part:
            problem = f"{path!r} is in two parts, {other!r} and {part!r}."
            raise DeclarationError(
                owner, problem, "Narrow one of their patterns; a tensor in no part is resident."
            )


def _found(model: nn.Module, pattern: str, owner: str) -> list[str]:
    found = matches(model, pattern)
    if not found:
        raise ComponentNotFoundError(owner, pattern, *_where_it_broke(model, pattern))
    return found


def _where_it_broke(model: nn.Module, pattern: str) -> tuple[str, list[str]]:
    segments = pattern.split(".")
    for length in range(1, len(segments) + 1):
        if not list(_walk(model, segments[:length])):
            parents = list(_walk(model, segments[: length - 1])) if length > 1 else [("", model)]
            known = [
                name
                for _, parent in parents[:1]
                if isinstance(parent, nn.Module)
                for name, _ in _children(parent)
            ]
            return segments[length - 1], known
    return segments[-1], []


def _walk(root: nn.Module, segments: Sequence[str]) -> Iterator[tuple[str, nn.Module | torch.Tensor]]:
    found: list[tuple[str, nn.Module | torch.Tensor]] = [("", root)]
    for segment in segments:
        found = [
            (f"{path}.{name}" if path else name, child)
            for path, parent in found
            if isinstance(parent, nn.Module)
            for name, child in _children(parent)
            if segment in ("*", name)
        ]
    yield from found


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module | torch.Tensor]]:
    tables: tuple[Mapping[str, nn.Module | torch.Tensor | None], ...] = (
        module._modules,
        module._parameters,
        module._buffers,
    )
    for table in tables:
        yield from ((name, child) for name, child in table.items() if child is not None)


def rest_of(model: nn.Module, areas: Iterable[Area | FixedArea], prefix: str) -> list[Slot]:
    """The slots of a model that are in no part, or in no component: they stay on the device."""
    claimed = {(id(slot.module), slot.name) for area in areas for slot in area.slots()}
    everything = Area(model, [""], prefix).slots()
    return [slot for slot in everything if (id(slot.module), slot.name) not in claimed]
