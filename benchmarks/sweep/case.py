"""A case: one pipeline class, its tiny components, one request of it."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch

from .inputs import COMMON, seeded

SEED = 0


@dataclass(frozen=True, kw_only=True)
class Case:
    """How to make a pipeline and what to ask of it.

    Attributes:
        name: The pipeline's class.
        parts: Makes the constructor's arguments.
        call: Arguments of a request; what is common to all classes is added from the signature.
        without: Common arguments that this class is not to be given.
        prepare: Done to a new pipeline, before it is put anywhere.
        first: Done at the start of every request (an inversion); gives more arguments.
    """

    name: str
    parts: Callable[[], dict[str, Any]]
    call: Mapping[str, Any] = field(default_factory=dict)
    without: frozenset[str] = frozenset()
    prepare: Callable[[Any], object] | None = None
    first: Callable[[Any], dict[str, Any]] | None = None

    def build(self, module: str) -> Any:
        """A pipeline with the same weights each time.

        Args:
            module: Where the class is, as ``classes.found`` tells.
        """
        torch.manual_seed(SEED)
        pipeline = getattr(importlib.import_module(module), self.name)(**self.parts())
        for one in pipeline.components.values():
            if isinstance(one, torch.nn.Module):
                one.eval()
        pipeline.set_progress_bar_config(disable=True)
        if self.prepare is not None:
            self.prepare(pipeline)
        return pipeline

    def request(self, pipeline: Any) -> list[torch.Tensor]:
        """Every tensor, array and picture of what one request gives, on the host."""
        given = {**self._common(pipeline), **copy.deepcopy(dict(self.call))}
        torch.manual_seed(SEED)  # for classes that draw noise without a generator
        with torch.no_grad():
            if self.first is not None:
                given.update(self.first(pipeline))
            return [one.clone() for one in tensors_of(pipeline(**given))]

    def _common(self, pipeline: Any) -> dict[str, Any]:
        accepted = inspect.signature(type(pipeline).__call__).parameters
        common = {name: value for name, value in COMMON.items() if name in accepted}
        if "generator" in accepted:
            common["generator"] = seeded()
        return {name: value for name, value in common.items() if name not in self.without}


def case(
    name: str,
    parts: Callable[[], dict[str, Any]],
    *,
    without: tuple[str, ...] = (),
    prepare: Callable[[Any], object] | None = None,
    first: Callable[[Any], dict[str, Any]] | None = None,
    **call: Any,
) -> Case:
    """A case, written on one line."""
    return Case(name=name, parts=parts, call=call, without=frozenset(without), prepare=prepare, first=first)


def made(usual: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Parts from makers: functions and classes are called; what is a part already, or a number, stays."""
    return {
        name: one() if isinstance(one, (partial, FunctionType, type)) else one
        for name, one in {**usual, **(more or {})}.items()
    }


def tensors_of(output: Any) -> Iterator[torch.Tensor]:
    """All numbers in an output, whatever holds them, as host tensors."""
    if isinstance(output, torch.Tensor):
        yield output.detach().cpu()
    elif isinstance(output, np.ndarray):
        yield torch.from_numpy(np.ascontiguousarray(output)) if output.dtype != object else torch.empty(0)
    elif hasattr(output, "getbands"):
        yield torch.from_numpy(np.array(output))
    elif isinstance(output, Mapping):
        for one in output.values():
            yield from tensors_of(one)
    elif isinstance(output, (list, tuple)):
        for one in output:
            yield from tensors_of(one)
    elif hasattr(output, "__dataclass_fields__") or hasattr(output, "__dict__"):
        for one in vars(output).values():
            yield from tensors_of(one)
