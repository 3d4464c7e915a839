"""What a request gave, flat and on the host, and how two of them differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import GeneratorType
from typing import Any

import torch

from ...components.wrappers import leaves

Flat = dict[str, Any]
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)


def captured(value: Any) -> Flat:
    """Every leaf of nested outputs by its path, tensors as copies on the host.

    Tuples, lists, dicts, dataclasses (``ModelOutput`` among them), PIL images, arrays, generators.
    """
    found: Flat = {}
    for path, leaf in _flat(value, "output", set()):
        found[path] = leaf
    return found


def _flat(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        for name, leaf in leaves(value, path):
            yield name, leaf.detach().cpu().clone()
    elif isinstance(value, _PLAIN):
        yield path, value
    elif id(value) in seen:
        return  # a ring
    else:
        yield from _inside(value, path, seen | {id(value)})


def _inside(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        items: Any = ((f"{path}[{key!r}]", one) for key, one in value.items())
    elif isinstance(value, (list, tuple, GeneratorType)):
        items = ((f"{path}[{index}]", one) for index, one in enumerate(value))
    elif hasattr(value, "__array_interface__"):  # an array, or a picture of PIL
        import numpy

        array = numpy.asarray(value)
        yield path, array.tolist() if array.dtype == object else torch.from_numpy(array.copy())
        return
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        items = ((f"{path}.{one.name}", getattr(value, one.name, None)) for one in fields)
    elif "__eq__" in {name for cls in type(value).__mro__[:-1] for name in vars(cls)}:
        yield path, value
        return
    else:
        items = ((f"{path}.{name}", one) for name, one in getattr(value, "__dict__", {}).items())
        yield path, type(value)
    for name, one in items:
        yield from _flat(one, name, seen)


def difference(mine: Flat, theirs: Flat) -> str | None:
    """The first difference in words; ``None`` if all is equal bit for bit, NaN at the same place included."""
    for path in theirs:
        if path not in mine:
            return f"{path} is missing"
        words = _differs(mine[path], theirs[path])
        if words is not None:
            return f"{path} {words}"
    extra = next((path for path in mine if path not in theirs), None)
    return None if extra is None else f"{extra} is there, and was not without offload"


def _differs(mine: Any, theirs: Any) -> str | None:
    if not isinstance(theirs, torch.Tensor) or not isinstance(mine, torch.Tensor):
        same = type(mine) is type(theirs) and (bool(mine == theirs) or mine is theirs or mine != mine)
        return None if same else f"is {mine!r:.60} instead of {theirs!r:.60}"
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        return f"is {_shape(mine)} instead of {_shape(theirs)}"
    if same_bits(mine, theirs):
        return None
    wrong = (
        ~((mine == theirs) | (mine.isnan() & theirs.isnan())) if mine.is_floating_point() else mine != theirs
    )
    count = int(wrong.sum())
    if count == 0:
        return None
    nans = int((mine.isnan() & ~theirs.isnan()).sum()) if mine.is_floating_point() else 0
    gap = (mine[wrong].to(torch.complex128) - theirs[wrong].to(torch.complex128)).abs()
    shown = f"{nans} of them are NaN" if nans else f"by {float(gap.max()):.2g} at most"
    return f"differs in {count} of {mine.numel()} elements, {shown}"


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def same_bits(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two host tensors of one shape and type have the same bits."""
    return torch.equal(_bytes(mine), _bytes(theirs))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def with_nan(flat: Flat) -> list[str]:
    """The paths of tensors that have a NaN."""
    tensors = ((path, one) for path, one in flat.items() if isinstance(one, torch.Tensor))
    return [path for path, one in tensors if one.is_floating_point() and bool(one.isnan().any())]
