"""Merges of adapters (PEFT's ``merge`` and ``unmerge``), which leave no trace in a weight, get one.

They compute on ``weight.data``, and that moves no version counter: the mover would take the weight on the device for
unchanged and throw the merge away with it. So these two methods are wrapped on each adapter layer of an offloaded
model, those that come later included, and tell autograd that the weights below them were written. No switch costs
more for it. Imports nothing of PEFT: a layer of it can only be there once PEFT is.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from .methods import WrappedMethod

_METHODS = ("merge", "unmerge")


class Merging(WrappedMethod):
    """``merge`` or ``unmerge`` of an adapter layer; the layer's base weights count as written after it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The original method; also what it has done before it raised leaves its trace."""
        try:
            return self._original(*args, **kwargs)
        finally:
            _leave_trace(self._module)


class MergeWatch:
    """Wraps the adapter layers of the modules it follows, and of whatever is put below them later.

    Modules tell of new children through a hook of torch that all modules share; it is there only while this is.
    """

    def __init__(self) -> None:
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._wrapped: weakref.WeakSet[Merging] = weakref.WeakSet()
        self._remove: Callable[[], Any] | None = None

    def follow(self, modules: Iterable[nn.Module]) -> None:
        """Watch modules; those that are followed already may come again."""
        if self._remove is None:
            self._remove = weakref.finalize(self, _registered_with(weakref.ref(self)).remove)
        for module in modules:
            self._modules.add(module)
            if _is_adapter_layer(module):
                self._wrap(module)

    def stop(self) -> None:
        """Restore the methods and take the hook off. Idempotent."""
        for wrapper in list(self._wrapped):
            wrapper.detach()
        self._wrapped.clear()
        self._modules.clear()
        if self._remove is not None:
            self._remove()
            self._remove = None

    def registered(self, parent: nn.Module, child: nn.Module | None) -> None:
        """A module was given a child."""
        if child is not None and parent in self._modules:
            self.follow(child.modules())

    def _wrap(self, layer: nn.Module) -> None:
        for name in _METHODS:
            if not isinstance(layer.__dict__.get(name), Merging):
                wrapper = Merging(layer, name)
                wrapper.attach()
                self._wrapped.add(wrapper)


def _registered_with(watch: weakref.ref[MergeWatch]) -> torch.utils.hooks.RemovableHandle:
    def tell(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        alive = watch()
        if alive is not None:
            alive.registered(parent, child)

    return register_module_module_registration_hook(tell)


def _is_adapter_layer(module: nn.Module) -> bool:
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and isinstance(module, tuners.BaseTunerLayer) and hasattr(module, _METHODS[0])


def _leave_trace(layer: Any) -> None:
    base = layer.get_base_layer()
    for tensor in (*base.parameters(), *base.buffers()):
        if (
            not tensor.is_inference()
        ):  # those have no version counter; the mover puts normal ones in their place
            torch.autograd.graph.increment_version(tensor)
