"""Glue between a module's call and a scope: one pre-hook and one post-hook per component, nothing else.

Inputs on another device are moved to the execution device, positional and keyword alike, as accelerate does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from ..residency.events import Cause
from ..residency.ledger import ResidencyLedger

_CALL = nn.Module._call_impl.__code__


class CallHook:
    """Opens a component's scope before a module's forward, and closes it after.

    The post-hook is an ``always_call`` hook: it runs when forward raises, and also when a pre-hook raised
    before ours ran. It does not run on ``KeyboardInterrupt``. So each scope is tied to the frame of its call:
    the post-hook closes the scope of its own call or none, and the ledger reaps scopes whose call has ended.
    """

    def __init__(self, ledger: ResidencyLedger, name: str, device: torch.device) -> None:
        self._ledger = ledger
        self._name = name
        self._device = device
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def attach(self, module: nn.Module) -> None:
        """Put the two hooks on a module."""
        pre, post = _Hook(self._before), _Hook(self._after)
        self._handles = [
            module.register_forward_pre_hook(pre, prepend=True, with_kwargs=True),
            module.register_forward_hook(post, always_call=True),
        ]

    def detach(self) -> None:
        """Take them off. Idempotent."""
        while self._handles:
            self._handles.pop().remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        scope = self._ledger.scope(self._name, cause=Cause.HOOK)
        scope.call = _calling_frame()
        self._ledger.enter(scope)
        return moved((args, kwargs), self._device)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        scope = self._ledger.scope_of_call(self._name, _calling_frame())
        if scope is not None:
            self._ledger.leave(scope)


class _Hook:
    """A callable that a copied or pickled module carries along without effect."""

    def __init__(self, act: Callable[..., Any]) -> None:
        # torch.compile must not trace what moves memory; without it a compiled call would skip the scope.
        self._act = torch.compiler.disable(act) if "torch._dynamo" in sys.modules else act  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any) -> Any:
        return self._act(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return without_effect

    def __reduce__(self) -> Any:
        return _plain, ()


def without_effect(*args: Any) -> None:
    """What is left of a hook in a copy of its module."""


def _plain() -> Callable[..., None]:
    return without_effect


def _calling_frame() -> FrameType | None:
    """The frame of the module call that runs the hook: hooks are called from it, or from a closure inside it."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(4):
        if frame is None or frame.f_code is _CALL:
            return frame
        frame = frame.f_back
    return None


def moved(value: Any, device: torch.device) -> Any:
    """The same arguments with every tensor in tuples, lists and dicts on ``device``; unchanged if all are.

    Args:
        value: Arguments of any shape.
        device: Where.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device)
    if kind is tuple or kind is list:
        items = [moved(one, device) for one in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else kind(items)
    if kind is dict:
        changed = {key: moved(one, device) for key, one in value.items()}
        return value if all(changed[key] is value[key] for key in value) else changed
    return value
