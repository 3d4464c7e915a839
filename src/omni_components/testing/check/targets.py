"""Targets of any kind: their modules and tensors, how they are called, and the same random numbers each time."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...components.paths import unwrapped
from ...components.recipes import is_diffusers_pipeline
from ...components.wrappers import leaves
from .outputs import difference


def roots(target: Any) -> dict[str, nn.Module]:
    """The modules that a target holds, by attribute; a module is its own, under the empty name."""
    if isinstance(target, nn.Module):
        return {"": unwrapped(target)}
    if is_diffusers_pipeline(target):
        held: Mapping[str, Any] = target.components
    else:
        held = vars(target)
    found: dict[str, nn.Module] = {}
    for name, value in held.items():
        for path, module in _modules_in(value, name):
            if all(module is not one for one in found.values()):
                found[path] = module
    return found


def _modules_in(value: Any, path: str) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        yield path, unwrapped(value)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _modules_in(one, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, one in enumerate(value):
            yield from _modules_in(one, f"{path}.{index}")


def modules(target: Any) -> dict[str, nn.Module]:
    """Every module of a target by dotted path, each once."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for root, module in roots(target).items():
        for name, one in module.named_modules():
            if id(one) not in seen:
                seen.add(id(one))
                found[".".join(filter(None, (root, name)))] = one
    return found


def tensors(target: Any) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by dotted path; of wrappers, the tensors inside."""
    found: dict[str, torch.Tensor] = {}
    for path, module in modules(target).items():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    found.update(leaves(tensor, f"{path}.{name}" if path else name))
    return found


def weights(target: Any) -> dict[str, torch.Tensor]:
    """Copies of all tensors on the host."""
    return {path: one.detach().cpu().clone() for path, one in tensors(target).items()}


def to_device(target: Any, device: torch.device) -> None:
    """All of a target's modules, without offload."""
    for module in [target] if callable(getattr(target, "to", None)) else roots(target).values():
        module.to(device)


def called(target: Any, call: Callable[..., Any] | None) -> Callable[..., Any]:
    """How a request is made: as the user says, else by calling the target, else by its ``generate``."""
    if call is not None:
        return call
    if callable(target):
        return lambda target, *args, **kwargs: target(*args, **kwargs)
    if callable(getattr(target, "generate", None)):
        return lambda target, *args, **kwargs: target.generate(*args, **kwargs)
    raise TypeError(
        f"{type(target).__name__} can neither be called nor has it generate(); "
        "pass call=, a function (target, **inputs)"
    )


def arguments(inputs: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of one request, fresh and on a device."""
    given = inputs(device) if callable(inputs) else placed(inputs, device)
    if isinstance(given, Mapping):
        return (), dict(given)
    return (tuple(given) if isinstance(given, (tuple, list)) else (given,)), {}


def placed(value: Any, device: torch.device) -> Any:
    """A copy of nested arguments with every tensor on a device, and generators that start where they stand."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, dict):
        return {key: placed(one, device) for key, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(placed(one, device) for one in value)
    return value


def sow(seed: int) -> None:
    """The same random numbers from here on, on every device."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@contextmanager
def own_random_numbers() -> Iterator[None]:
    """Put the user's random states back afterwards."""
    numpy: Any = sys.modules.get("numpy")
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        if before[2] is not None:
            numpy.random.set_state(before[2])


def versions(target: Any) -> dict[str, int]:
    """The version counters of its tensors, where they have one."""
    return {path: one._version for path, one in tensors(target).items() if not one.is_inference()}


def written(target: Any, before: dict[str, torch.Tensor], counters: dict[str, int]) -> frozenset[str]:
    """Paths of tensors that requests wrote to, whatever came out of it."""
    now = weights(target)
    changed = {
        path for path in now if path not in before or difference({path: now[path]}, {path: before[path]})
    }
    moved = {path for path, version in versions(target).items() if counters.get(path) != version}
    return frozenset(changed | moved)
