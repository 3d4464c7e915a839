"""Glue between a module's call and a scope: one pre-hook and one post-hook per component, nothing else.

Inputs on another device are moved to the execution device, positional and keyword alike, as accelerate does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..residency.events import Cause
from ..residency.ledger import ResidencyLedger
from ..residency.scope import OffloadScope

_CALL = nn.Module._call_impl.__code__
_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncompiled(function: _Function) -> _Function:
    """Keep a function, and all it calls, out of ``torch.compile``'s graphs: it moves memory.

    What ``torch.compiler.disable`` does, without its import of the compiler (a second and a half) and without
    its wrapper at each call.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "it moves weights"  # type: ignore[attr-defined]
    try:
        compiler = torch._C._dynamo.eval_frame
        skip = compiler._FrameAction.SKIP
        compiler.set_code_exec_strategy(function.__code__, compiler._FrameExecStrategy(skip, skip))
    except AttributeError:
        return torch.compiler.disable(function)  # type: ignore[no-untyped-call, no-any-return]
    return function


def forget_compiled() -> None:
    """Drop compiled code, once per enabling: what was compiled before would run past the new hooks in silence.

    Its guards do not ask for hooks (``skip_nnmodule_hook_guards``). Switches never make any code anew.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


# A compiled split model opens its scopes in the midst of its graphs. (The scope's own file imports no torch.)
for _function in (OffloadScope.__enter__, OffloadScope.__exit__):
    uncompiled(_function)

_HOOK = Cause.HOOK  # asked for at every call; on the class it is looked up slower


class CallHook:
    """Opens a component's scope before a module's forward, and closes it after.

    The post-hook is an ``always_call`` hook: it runs when forward raises, and also when a pre-hook raised
    before ours ran. It does not run on ``KeyboardInterrupt``. So each scope is tied to the frame of its call:
    the post-hook closes the scope of its own call or none, and the ledger reaps scopes whose call has ended.

    A copied or pickled module carries along a hook without ledger, which has no effect.
    """

    def __init__(self, ledger: ResidencyLedger | None, name: str, device: torch.device) -> None:
        self._ledger = ledger
        self._name = name
        self._device = device
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def attach(self, module: nn.Module) -> None:
        """Put the two hooks on a module."""
        self._handles = [
            module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
            module.register_forward_hook(self._after, always_call=True),
        ]

    def detach(self) -> None:
        """Take them off. Idempotent."""
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()

    @uncompiled
    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ledger = self._ledger
        if ledger is None:
            return None  # a copy's
        scope = ledger.scope(self._name, cause=_HOOK)
        frame = sys._getframe(2)
        scope.call = frame if frame.f_code is _CALL else _calling_frame()
        ledger.enter(scope)
        if _all_on(self._device, args) and (not kwargs or _all_on(self._device, kwargs.values())):
            return None  # the usual case: the arguments stay as they are
        return moved((args, kwargs), self._device)

    @uncompiled
    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        ledger = self._ledger
        if ledger is None:
            return  # a copy's
        frame = sys._getframe(2)
        scope = ledger.scope_of_call(self._name, frame if frame.f_code is _CALL else _calling_frame())
        if scope is not None:
            ledger.leave(scope)

    def __deepcopy__(self, memo: dict[int, Any]) -> CallHook:
        return _without_effect()

    def __reduce__(self) -> Any:
        return _without_effect, ()


def _without_effect() -> CallHook:
    return CallHook(None, "", torch.device("cpu"))


def _calling_frame() -> FrameType | None:
    """The frame of the module call that runs the hook.

    torch calls hooks from a closure inside it, which the hooks themselves look at first. After an error it
    calls them from the frame itself, and compiled code puts frames of its own in between.
    """
    frame: FrameType | None = sys._getframe(2)
    for _ in range(12):
        if frame is None or frame.f_code is _CALL:
            return frame
        frame = frame.f_back
    return None


def _all_on(device: torch.device, values: Iterable[Any]) -> bool:
    """Whether no value has to move; a container is not looked into and counts as if it had."""
    for value in values:
        if isinstance(value, Tensor):
            if value.device != device:
                return False
        elif type(value) in _CONTAINERS:
            return False
    return True


_CONTAINERS = frozenset({tuple, list, dict})


def moved(value: Any, device: torch.device) -> Any:
    """The same arguments with every tensor in tuples, lists and dicts on ``device``; unchanged if all are.

    Args:
        value: Arguments of any shape.
        device: Where.
    """
    kind = type(value)
    if isinstance(value, Tensor):
        return value if value.device == device else value.to(device)
    if kind is tuple or kind is list:
        items = [moved(one, device) for one in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else kind(items)
    if kind is dict:
        changed = {key: moved(one, device) for key, one in value.items()}
        return value if all(changed[key] is value[key] for key in value) else changed
    return value
