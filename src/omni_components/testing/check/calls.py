"""Calls of a target's modules, noted during the resident run, to be repeated in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...components.area import Area, resolve
from .outputs import Flat, captured, difference
from .targets import modules, placed, sow

_PER_COMPONENT = 6  # calls that are kept: enough to reach its first, its last and some between
_SIMPLE = (bool, int, float, str, bytes, type(None), torch.dtype, torch.Size)


@dataclass(frozen=True, slots=True)
class NotedCall:
    """One call of a module: what went in, on the host, and what came out."""

    component: str
    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Flat


def callables(handle: Any, target: Any) -> dict[str, list[str]]:
    """The paths of modules that compute with each component, those at its top first.

    Args:
        handle: The target's offload.
        target: The target.
    """
    paths = {id(module): path for path, module in modules(target).items()}
    found: dict[str, list[str]] = {}
    fleet: Any = handle.ledger.attachment
    for name, attached in fleet.attached.items():
        area = attached.found.area
        tops = [module for _, module in attached.found.called]
        if isinstance(area, Area) and not tops:
            tops = [one for path in area.paths if isinstance(one := resolve(area.root, path), nn.Module)]
        below = [one for _, one in area.modules()] if isinstance(area, Area) else []
        leaves = [one for one in below if not one._modules and (one._parameters or one._buffers)]
        listed = [paths[id(one)] for one in [*tops, *leaves] if id(one) in paths and _has_forward(one)]
        found[name] = list(dict.fromkeys(listed))
    return found


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


class CallRecorder:
    """Notes the first call of some modules of a target.

    Args:
        target: The resident target.
        watched: Paths of its modules by component.
    """

    def __init__(self, target: Any, watched: dict[str, list[str]]) -> None:
        self._modules = modules(target)
        self._component = {path: name for name, paths in watched.items() for path in paths}
        self._pending: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._noted: dict[str, NotedCall] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note calls inside the block."""
        handles: list[Any] = []
        for path in self._component:
            if path in self._modules:
                handles += self._hooks(path, self._modules[path])
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def repeatable(self, seed: int, device: torch.device) -> dict[str, list[NotedCall]]:
        """The noted calls that give the same when they are made alone, by component, a few of each."""
        found: dict[str, list[NotedCall]] = {}
        for call in self._noted.values():
            try:
                again = captured(made(self._modules[call.path], call, seed, device))
            except Exception:
                continue  # it needs more than its arguments
            if difference(again, call.output) is None:
                found.setdefault(call.component, []).append(call)
        return {name: _some(calls) for name, calls in found.items()}

    def _hooks(self, path: str, module: nn.Module) -> list[Any]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if path not in self._noted and _is_simple((args, kwargs)):
                self._pending[path] = placed(args, _HOST), placed(kwargs, _HOST)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = self._pending.pop(path, None)
            if given is not None and path not in self._noted:
                name = self._component[path]
                self._noted[path] = NotedCall(name, path, *given, captured(output))

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]


def made(module: Callable[..., Any], call: NotedCall, seed: int, device: torch.device) -> Any:
    """Make a noted call."""
    args, kwargs = placed(call.args, device), placed(call.kwargs, device)
    sow(seed)
    return module(*args, **kwargs)


_HOST = torch.device("cpu")


def _some(calls: list[NotedCall]) -> list[NotedCall]:
    if len(calls) <= _PER_COMPONENT:
        return calls
    step = (len(calls) - 1) / (_PER_COMPONENT - 1)
    return [calls[round(index * step)] for index in range(_PER_COMPONENT)]


def _is_simple(value: Any) -> bool:
    """Whether arguments can be kept: tensors, numbers and texts, in tuples, lists and dicts."""
    if type(value) in (tuple, list):
        return all(map(_is_simple, value))
    if type(value) is dict:
        return all(map(_is_simple, value.values()))
    return isinstance(value, (torch.Tensor, *_SIMPLE))
