"""A tensor that is not there yet: what a library does to it while it builds a model is done when it is read.

Libraries rename, cast, merge and split what they load. A ``Deferred`` goes through all that as a tensor on the
meta device, at no cost in memory, and notes the steps; filling a master then takes them, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from .files import Entry, Progress


class NotDeferrable(TypeError):
    """Somebody wants the values themselves: the component's own loader must give them."""


class Plan:
    """How the values come to be: bytes of a file in one or more element types, or steps on other plans.

    Args:
        entry: The tensor in a file, for one that is only cast on its way.
        casts: Element types it goes through, beginning with the file's.
        compute: Its values from nothing, for any other.
    """

    def __init__(
        self,
        entry: Entry | None,
        casts: tuple[torch.dtype, ...] = (),
        compute: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        self.entry, self.casts, self.compute = entry, casts, compute

    def mapped(self) -> torch.Tensor | None:
        """The values where they are in the file, if nothing has to be done to them."""
        return self.entry.mapped() if self.entry is not None and len(self.casts) == 1 else None

    def fill(self, target: torch.Tensor, told: Progress) -> None:
        """Write the values to contiguous host memory of their element type."""
        if self.entry is None or len(self.casts) > 2:
            target.copy_(self.values(told))
        elif len(self.casts) == 2:
            self.entry.convert(target, told)
        elif target.numel():
            self.entry.read(target.view(-1).view(torch.uint8), told)

    def values(self, told: Progress) -> torch.Tensor:
        """The values in memory of their own."""
        if self.entry is None:
            assert self.compute is not None
            return self.compute()
        found = torch.empty(self.entry.shape, dtype=self.entry.dtype)
        if found.numel():
            self.entry.read(found.view(-1).view(torch.uint8), told)
        for dtype in self.casts[1:]:
            found = found.to(dtype)
        return found


class Deferred(torch.Tensor):
    """A tensor on the meta device with a plan."""

    plan: Plan

    @staticmethod
    def of(entry: Entry) -> Deferred:
        """A stored tensor."""
        shell = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        return _with_plan(shell, Plan(entry, (entry.dtype,)))

    @staticmethod
    def zeros(shape: torch.Size, dtype: torch.dtype) -> Deferred:
        """A tensor that is stored nowhere."""
        shell = torch.empty(shape, dtype=dtype, device="meta")
        return _with_plan(shell, _computed(partial(torch.zeros, shape, dtype=dtype)))

    def parameter(self, requires_grad: bool) -> Deferred:
        """The same as a parameter, as ``nn.Parameter`` would make it, which takes ten times as long over it."""
        made = _with_plan(self, self.plan)
        with torch._C.DisableTorchFunctionSubclass():
            made.requires_grad_(requires_grad)
        made._is_param = True  # what isinstance(_, nn.Parameter) looks for
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do it to the shell, and note it for the values."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__set__" or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_"):
            raise NotDeferrable(f"{name} writes to a tensor that has not been read")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*_on_meta(args), **_on_meta(kwargs))
        if args and result is args[0]:
            return result
        if isinstance(result, torch.Tensor):
            return _noted(func, args, kwargs, result)
        if isinstance(result, (tuple, list)) and any(isinstance(one, torch.Tensor) for one in result):
            return type(result)(
                _with_plan(one, _computed(partial(_one_of, func, args, kwargs, i)))
                for i, one in enumerate(result)
            )
        return result


_CASTING = ("to", "float", "half", "bfloat16", "double")
# Steps that leave the values as they are, if shape and element type stay.
_PASSING = (*_CASTING, "detach", "contiguous", "clone", "view", "reshape")


def _noted(func: Any, args: Any, kwargs: Any, result: torch.Tensor) -> torch.Tensor:
    first, name = args[0] if args else None, func.__name__
    if isinstance(first, Deferred) and first.plan.entry is not None and first.shape == result.shape:
        plan = first.plan
        whole = name == "__getitem__" and args[1] is Ellipsis  # how transformers asks for all of a tensor
        if first.dtype == result.dtype and (whole or name in _PASSING):
            return _with_plan(result, plan)
        if name in _CASTING:
            return _with_plan(result, Plan(plan.entry, (*plan.casts, result.dtype)))
    return _with_plan(result, _computed(lambda: _replay(func, args, kwargs)))


def facts_of(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    """Shape and element type, without going through the steps that a ``Deferred`` notes."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.shape, tensor.dtype


def _computed(compute: Callable[[], torch.Tensor]) -> Plan:
    return Plan(None, (), compute)


def _with_plan(shell: torch.Tensor, plan: Plan) -> Deferred:
    with torch._C.DisableTorchFunctionSubclass():
        made: Deferred = shell.detach().as_subclass(Deferred)
        made.requires_grad_(shell.requires_grad and made.is_floating_point())
    made.plan = plan
    return made


def _replay(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*_in_memory(args), **_in_memory(kwargs))


def _one_of(func: Any, args: Any, kwargs: Any, index: int) -> torch.Tensor:
    found: torch.Tensor = _replay(func, args, kwargs)[index]
    return found


def _in_memory(tree: Any) -> Any:
    def value(one: Any) -> Any:
        return one.plan.values(_silent) if isinstance(one, Deferred) else one

    return tree_map(value, tree)


def _silent(count: int) -> None:
    """A step on several tensors: the bar moves when it is done."""


def _on_meta(tree: Any) -> Any:
    """The same arguments with every device replaced: the shells stay where they are."""

    def there(one: Any) -> Any:
        is_device = isinstance(one, torch.device) or (isinstance(one, str) and one.partition(":")[0] == "cpu")
        return torch.device("meta") if is_device else one

    flat = tree.values() if isinstance(tree, dict) else tree
    return tree_map(there, tree) if any(isinstance(one, (torch.device, str)) for one in flat) else tree
