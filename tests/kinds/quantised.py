"""Wrapper subclasses as quantisation libraries write them, and models whose weights they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map

from omni_components import SplitModel
from tests.helpers.pipelines import Stack, frozen

aten = torch.ops.aten


class Int8Weight(torch.Tensor):
    """A weight as int8 values and one scale per row; computes with the dequantised values.

    ``group`` stands for what a class passes on by itself when it is rebuilt.
    """

    values: torch.Tensor
    scale: torch.Tensor
    group: int

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor, group: int) -> Int8Weight:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype, device=values.device)

    def __init__(self, values: torch.Tensor, scale: torch.Tensor, group: int) -> None:
        self.values, self.scale, self.group = values, scale, group

    @classmethod
    def of(cls, weight: torch.Tensor) -> Int8Weight:
        """The nearest one to a float weight."""
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale, weight.shape[1])

    def plain(self) -> torch.Tensor:
        """The float weight it stands for."""
        return self.values.to(self.scale.dtype) * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["values", "scale"], {"group": self.group}

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: dict[str, Any], size: Any, stride: Any
    ) -> Int8Weight:
        return Int8Weight(inner["values"], inner["scale"], context["group"])

    def _each(self, act: Callable[[torch.Tensor], torch.Tensor]) -> Int8Weight:
        return Int8Weight(act(self.values), act(self.scale), self.group)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.alias.default, aten.clone.default):
            return args[0]._each(lambda one: func(one, **kwargs))
        if func is aten._to_copy.default:
            moved = {key: value for key, value in kwargs.items() if key != "dtype"}
            return args[0]._each(lambda one: func(one, **moved))
        if func is aten.copy_.default and isinstance(args[1], Int8Weight):
            args[0].values.copy_(args[1].values)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        if func is aten.mul_.Tensor or func is aten.mul_.Scalar:
            args[0].scale.mul_(args[1])  # the whole weight times a number
            return args[0]
        args, kwargs = tree_map(
            lambda one: one.plain() if isinstance(one, Int8Weight) else one, (args, kwargs)
        )
        return func(*args, **kwargs)


def int8(weight: torch.Tensor) -> torch.Tensor:
    return Int8Weight.of(weight)


def two(weight: torch.Tensor) -> torch.Tensor:
    return TwoTensor(weight.clone(), weight.clone() * 2)


def two_of_int8(weight: torch.Tensor) -> torch.Tensor:
    """A wrapper of wrappers."""
    return TwoTensor(Int8Weight.of(weight), Int8Weight.of(weight * 2))


def wrap(module: nn.Module, how: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """The module, each linear layer's weight put into a wrapper."""
    for one in module.modules():
        if isinstance(one, nn.Linear):
            one.weight = nn.Parameter(how(one.weight.detach()), requires_grad=False)
    return frozen(module)


class Pair(nn.Module):
    """An encoder and a DiT."""

    _dit_modules: ClassVar[list[str]] = ["B"]
    _encoder_modules: ClassVar[list[str]] = ["A"]
    _vae_modules: ClassVar[list[str]] = []

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.A, self.B = Stack(), Stack()

    def use(self, which: str, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, which)(x)


class Parts(SplitModel):
    """The same as parts of one model, down to single parameters."""

    _offload_components: ClassVar[dict[str, list[str]]] = {
        "A": ["A.layers.*.weight", "A.layers.*.bias"],
        "B": ["B"],
    }

    def __init__(self) -> None:
        super().__init__()
        self.A, self.B = Stack(), Stack()

    def use(self, which: str, x: torch.Tensor) -> torch.Tensor:
        with self._offload_context(which):
            return getattr(self, which)(x)


KINDS: dict[str, type] = {"modules": Pair, "parts": Parts}
WRAPPERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "two": two,
    "int8": int8,
    "two_of_int8": two_of_int8,
}
