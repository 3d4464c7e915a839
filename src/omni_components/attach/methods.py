"""Methods wrapped on the instance: entry points besides ``forward``, and advice where a plain method fails."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..components.recipes import ENTRY_POINTS
from ..errors import AbsentComponentError, DeclarationError, nearest
from ..residency.book import State
from ..residency.events import Cause
from ..residency.ledger import ResidencyLedger
from .hooks import moved

_FRAMEWORK = (
    "torch.",
    "transformers.modeling_utils",
    "transformers.generation",
    "diffusers.models.modeling_utils",
)


class WrappedMethod:
    """Stands in for a bound method in its instance's ``__dict__``; keeps its name, docs and signature.

    A copy of the module, or the pipeline, gets its own plain method.
    """

    def __init__(self, module: Any, name: str) -> None:
        self._module = module
        self._name = name
        self._previous = module.__dict__.get(name)
        self._original: Callable[..., Any] = getattr(module, name)
        functools.update_wrapper(self, self._original)
        self.__signature__ = inspect.signature(self._original)

    def attach(self) -> None:
        """Put it on the instance."""
        self._module.__dict__[self._name] = self

    def detach(self) -> None:
        """Restore what was there, unless someone has put a wrapper of their own on top. Idempotent."""
        if self._module.__dict__.get(self._name) is not self:
            return  # another wrapper holds this one: called through, it does nothing once the scope is gone
        if self._previous is None:
            del self._module.__dict__[self._name]
        else:
            self._module.__dict__[self._name] = self._previous

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The original method."""
        return self._original(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return plain_method(memo.get(id(self._module), self._module), self._name)

    def __reduce__(self) -> Any:
        return plain_method, (self._module, self._name)


def plain_method(module: Any, name: str) -> Any:
    """A module's, or a pipeline's, own method, whatever its instance carries."""
    return getattr(type(module), name).__get__(module)


class EntryPoint(WrappedMethod):
    """A method that opens its component's scope, and moves its inputs as a hook does."""

    def __init__(
        self, module: nn.Module, name: str, ledger: ResidencyLedger, component: str, device: torch.device
    ):
        super().__init__(module, name)
        self._ledger: ResidencyLedger | None = ledger
        self._component = component
        self._device = device

    def detach(self) -> None:
        """Restore the method; a wrapper that others still hold calls it plainly."""
        super().detach()
        self._ledger = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The original method inside a scope."""
        if self._ledger is None:
            return self._original(*args, **kwargs)
        with self._ledger.scope(self._component, cause=Cause.ENTRY_POINT):
            args, kwargs = moved((args, kwargs), self._device)
            return self._original(*args, **kwargs)


class TakesInputs(WrappedMethod):
    """A method of a whole target: its tensor arguments are moved to the device; whoever computes opens scopes."""

    def __init__(self, target: Any, name: str, device: torch.device) -> None:
        super().__init__(target, name)
        self._device: torch.device | None = device

    def detach(self) -> None:
        """Restore the method; a wrapper that others still hold calls it plainly."""
        super().detach()
        self._device = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The original method with its arguments where it computes."""
        if self._device is not None:
            args, kwargs = moved((args, kwargs), self._device)
        return self._original(*args, **kwargs)


class Advised(WrappedMethod):
    """A method that is no entry point: if it fails because its component is away, the error says so."""

    def __init__(
        self, module: nn.Module, name: str, ledger: ResidencyLedger, component: str, device: torch.device
    ):
        super().__init__(module, name)
        self._ledger = ledger
        self._component = component
        self._device = device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The original method; a device mismatch while its component is away is explained."""
        try:
            return self._original(*args, **kwargs)
        except RuntimeError as error:
            if not _is_device_mismatch(error) or self._present():
                raise
            raise AbsentComponentError(
                self._component, self._name, self._ledger.present, str(self._device)
            ) from error

    def _present(self) -> bool:
        known = any(one.name == self._component for one in self._ledger.components)
        return not known or self._ledger.state(self._component) is State.DEVICE


def _is_device_mismatch(error: RuntimeError) -> bool:
    text = str(error)
    return "same device" in text or ("Input type" in text and "weight type" in text)


def entry_points(module: nn.Module, declared: tuple[str, ...], component: str) -> list[str]:
    """The methods of a module that open its scope: the declared ones, and the usual ones it has.

    Raises:
        DeclarationError: A declared method does not exist.
    """
    for name in declared:
        if not callable(getattr(module, name, None)):
            known = [one for one in dir(type(module)) if not one.startswith("_")]
            advice = f"The nearest are: {', '.join(nearest(name, known)) or 'none'}."
            raise DeclarationError(component, f"{type(module).__name__} has no method {name!r}.", advice)
    usual = [name for name in ENTRY_POINTS if callable(getattr(type(module), name, None))]
    return list(dict.fromkeys([*declared, *usual]))


def other_methods(module: nn.Module) -> Iterator[str]:
    """Public methods that a module's author wrote, not the framework."""
    seen: set[str] = set()
    for cls in type(module).__mro__:
        if cls is nn.Module:
            return
        if not issubclass(cls, nn.Module) or cls.__module__.startswith(_FRAMEWORK):
            continue
        for name, value in vars(cls).items():
            inherited = hasattr(nn.Module, name) or name.startswith("_") or name in seen
            if not inherited and inspect.isfunction(value):
                seen.add(name)
                yield name
