"""From a dotted path to the modules that it names."""

from __future__ import annotations

import inspect
from functools import cached_property
from typing import Any

from torch import nn

from ..errors import ComponentNotFoundError, DeclarationError

MISSING = object()  # what an attribute is that is not there; None is one that is


def unwrapped(module: Any) -> Any:
    """The module inside a ``torch.compile`` wrapper, for naming and weights."""
    while isinstance(module, nn.Module) and isinstance(module._modules.get("_orig_mod"), nn.Module):
        module = module._modules["_orig_mod"]
    return module


def modules_at(target: Any, path: str, owner: str) -> list[tuple[str, nn.Module]]:
    """The module, or the modules of a list, at a path below a target, each with its path; none where it is ``None``.

    Raises:
        ComponentNotFoundError: The path names nothing.
        DeclarationError: It names something else.
    """
    found = _attribute_at(target, path, owner)
    if found is None:
        return []
    listed = list(found) if isinstance(found, (list, tuple, nn.ModuleList)) else [found]
    for one in listed:
        if not isinstance(one, nn.Module):
            problem = f"{path!r} names a {type(one).__name__}, not a module."
            raise DeclarationError(owner, problem, "Declare paths to modules.")
    if not listed:
        raise DeclarationError(owner, f"{path!r} names an empty list.", "Declare paths to modules.")
    if listed == [found]:
        return [(path, found)]
    return [(f"{path}.{index}", one) for index, one in enumerate(listed)]


def _attribute_at(target: Any, path: str, owner: str) -> Any:
    found = target
    for segment in path.split("."):
        if found is None:
            return None  # an optional module that this checkpoint lacks
        inner = unwrapped(found)
        found = asked(inner, segment, owner, path)
        if found is MISSING:
            raise ComponentNotFoundError(owner, path, segment, _module_names(inner))
    return found


def asked(holder: Any, name: str, owner: str, path: str) -> Any:
    """An attribute or ``MISSING``; a property's own ``AttributeError`` is told from a missing attribute.

    Raises:
        DeclarationError: A property raised ``AttributeError``.
    """
    try:
        return _get(holder, name)
    except AttributeError as error:
        raise DeclarationError(owner, f"{path!r}: the property {name!r} raised: {error}.") from error


def _get(holder: Any, name: str) -> Any:
    computed = inspect.getattr_static(type(holder), name, None)
    if isinstance(computed, (property, cached_property)) and not isinstance(holder, type):
        if isinstance(computed, cached_property) and name in vars(holder):
            return vars(holder)[name]
        return computed.__get__(holder, type(holder))  # not getattr: a module would hide what it raises
    if name.isdigit() and isinstance(holder, (list, tuple, nn.ModuleList, nn.Sequential)):
        return holder[int(name)] if int(name) < len(holder) else MISSING
    return getattr(holder, name, MISSING)


def _module_names(holder: Any) -> list[str]:
    names = list(holder._modules) if isinstance(holder, nn.Module) else []
    return names + [
        name for name, value in vars(holder).items() if isinstance(value, nn.Module) and name not in names
    ]
