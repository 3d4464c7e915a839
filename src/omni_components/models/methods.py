"""Methods of diffusers' classes in a subclass of ours: their signatures, and something done after them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def signed(original: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Give a function the signature of another: diffusers inspects it, and the types in it."""

    def sign(function: _Function) -> _Function:
        function.__wrapped__ = original  # type: ignore[attr-defined]
        function.__annotations__ = original.__annotations__
        return function

    return sign


def followed(original: Callable[..., Any], then: Callable[[Any], None]) -> Callable[..., Any]:
    """A method, after which something is done with its object, however it ends."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            then(self)

    return method
