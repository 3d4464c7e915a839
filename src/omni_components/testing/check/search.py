"""Where a tensor is held that is no parameter and no buffer: attributes, containers in them, closures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import torch
from torch import nn

_DEPTH = 3  # how far containers on a module are looked into


@dataclass(frozen=True, slots=True)
class Owned:
    """A tensor with its name.

    Attributes:
        kind: Whose it is: a component's, an undeclared module's, a plain attribute, a closure's, a local variable.
        path: What it is called.
        component: Of a component's.
        dim: Dimensions of the registered tensor, whatever view of it was used.
    """

    kind: Literal["component", "module", "attribute", "closure", "local", "unknown"]
    path: str
    component: str = ""
    dim: int = 0


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie in one storage."""
    if one is other:
        return True
    if one.layout is not torch.strided or one.device != other.device or not (one.numel() and other.numel()):
        return False
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def search(value: Any, path: str, tensor: torch.Tensor, depth: int = _DEPTH) -> Iterator[Owned]:
    """The tensor in an attribute's value: itself, in a container, in a dataclass, in a closure."""
    if isinstance(value, torch.Tensor):
        if same_memory(value, tensor):
            yield Owned("attribute", path, dim=value.dim())
    elif depth == 0 or isinstance(value, nn.Module):
        return
    elif isinstance(value, Mapping):
        for key, one in list(value.items()):
            yield from search(one, f"{path}[{key!r}]", tensor, depth - 1)
    elif isinstance(value, (list, tuple)):
        for index, one in enumerate(value):
            yield from search(one, f"{path}[{index}]", tensor, depth - 1)
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from search(getattr(value, one.name, None), f"{path}.{one.name}", tensor, depth - 1)
    elif callable(value) and any(same_memory(one, tensor) for one in cells(value)):
        yield Owned("closure", f"{variable(value, tensor)} in the closure of {path}")


def functions(holder: Any) -> Iterator[tuple[str, Any]]:
    """The methods of an object's classes that close over something."""
    for cls in type(holder).__mro__:
        if cls is nn.Module or cls is object:
            return
        for name, value in vars(cls).items():
            if callable(value) and getattr(value, "__closure__", None):
                yield name, value


def cells(function: Any) -> list[torch.Tensor]:
    """The tensors that a function closes over."""
    found = []
    for cell in getattr(function, "__closure__", None) or ():
        try:
            value = cell.cell_contents
        except ValueError:
            continue  # not filled yet
        if isinstance(value, torch.Tensor):
            found.append(value)
    return found


def variable(function: Any, tensor: torch.Tensor) -> str:
    """What a function calls the tensor that it closes over."""
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__, strict=True):
        if isinstance(cell.cell_contents, torch.Tensor) and same_memory(cell.cell_contents, tensor):
            return str(name)
    return "a tensor"


def described(tensor: torch.Tensor) -> str:
    """A tensor without a name, in words."""
    return f"a tensor {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
