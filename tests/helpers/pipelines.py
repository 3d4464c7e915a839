"""Tiny targets of every kind that can be declared, all with two exclusive components called A and B.

Each has ``names`` (the component's name in the ledger by ``"A"`` or ``"B"``), ``use(which, x)``, which computes
with one of them as its author would, and ``module(which)``, the module whose tensors it is made of.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from omni_components import SplitModel

WIDTH = 16


class Stack(nn.Module):
    """A few linear layers with a nonlinearity between them."""

    def __init__(self, width: int = WIDTH, depth: int = 2, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=dtype) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class ModulePair(nn.Module):
    """A module pipeline with the four lists."""

    _dit_modules: ClassVar[list[str]] = ["B"]
    _encoder_modules: ClassVar[list[str]] = ["A"]
    _vae_modules: ClassVar[list[str]] = []
    _resident_modules: ClassVar[list[str]] = []
    names: ClassVar[dict[str, str]] = {"A": "A", "B": "B"}

    def __init__(self, **shape: Any) -> None:
        super().__init__()
        self.A, self.B = Stack(**shape), Stack(**shape)

    def module(self, which: str) -> nn.Module:
        return getattr(self, which)

    def use(self, which: str, x: torch.Tensor) -> torch.Tensor:
        return self.module(which)(x)


class PlainPair:
    """The same, duck-typed: no module, and three lists."""

    _dit_modules: ClassVar[list[str]] = ["B"]
    _encoder_modules: ClassVar[list[str]] = ["A"]
    _vae_modules: ClassVar[list[str]] = []
    names: ClassVar[dict[str, str]] = {"A": "A", "B": "B"}

    def __init__(self, **shape: Any) -> None:
        self.A, self.B = Stack(**shape), Stack(**shape)

    def module(self, which: str) -> nn.Module:
        return getattr(self, which)

    def use(self, which: str, x: torch.Tensor) -> torch.Tensor:
        return self.module(which)(x)


class Holder(nn.Module):
    """A module that only holds others."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class NestedPair(nn.Module):
    """Components below dotted paths, the DiT a list of two modules."""

    _dit_modules: ClassVar[list[str]] = ["core.blocks"]
    _encoder_modules: ClassVar[list[str]] = ["core.text.model"]
    _vae_modules: ClassVar[list[str]] = []
    names: ClassVar[dict[str, str]] = {"A": "core.text.model", "B": "core.blocks"}

    def __init__(self, **shape: Any) -> None:
        super().__init__()
        blocks = nn.ModuleList([Stack(**shape), Stack(**shape)])
        self.core = Holder(text=Holder(model=Stack(**shape)), blocks=blocks)

    def module(self, which: str) -> nn.Module:
        return self.core.text.model if which == "A" else self.core.blocks

    def use(self, which: str, x: torch.Tensor) -> torch.Tensor:
        for block in [self.core.text.model] if which == "A" else self.core.blocks:
            x = block(x)
        return x


class SplitPair(SplitModel):
    """A split model whose parts are modules."""

    _offload_components: ClassVar[dict[str, list[str]]] = {"A": ["A"], "B": ["B"]}
    names: ClassVar[dict[str, str]] = {"A": "A", "B": "B"}

    def __init__(self, **shape: Any) -> None:
        super().__init__()
        self.A, self.B = Stack(**shape), Stack(**shape)

    def module(self, which: str) -> nn.Module:
        return getattr(self, which)

    def use(self, which: str, x: torch.Tensor) -> torch.Tensor:
        with self._offload_context(which):
            return self.module(which)(x)


class TwoWays(nn.Module):
    """One block of an interleaved model: a projection and a scale for each part, and a norm for both."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.to_a = nn.Linear(width, width, dtype=dtype)
        self.to_b = nn.Linear(width, width, dtype=dtype)
        self.scale_a = nn.Parameter(torch.rand(width, dtype=dtype))
        self.scale_b = nn.Parameter(torch.rand(width, dtype=dtype))
        self.register_buffer("bias", torch.rand(width, dtype=dtype))


class InterleavedPair(SplitModel):
    """A split model whose halves are interleaved in each block, down to single parameters; a buffer is in no part."""

    _offload_components: ClassVar[dict[str, list[str]]] = {
        "A": ["blocks.*.to_a", "blocks.*.scale_a"],
        "B": ["blocks.*.to_b", "blocks.*.scale_b"],
    }
    names: ClassVar[dict[str, str]] = {"A": "A", "B": "B"}

    def __init__(self, width: int = WIDTH, depth: int = 2, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TwoWays(width, dtype) for _ in range(depth))

    def module(self, which: str) -> nn.Module:
        half = Holder()
        for i, block in enumerate(self.blocks):
            half.add_module(f"to_{i}", getattr(block, f"to_{which.lower()}"))
            half.register_parameter(f"scale_{i}", getattr(block, f"scale_{which.lower()}"))
        return half

    def use(self, which: str, x: torch.Tensor) -> torch.Tensor:
        with self._offload_context(which):
            for block in self.blocks:
                linear, scale = (
                    getattr(block, f"to_{which.lower()}"),
                    getattr(block, f"scale_{which.lower()}"),
                )
                x = torch.tanh(linear(x) * scale + block.bias)
        return x


KINDS: dict[str, type] = {
    "pipeline": ModulePair,
    "duck": PlainPair,
    "nested": NestedPair,
    "split": SplitPair,
    "interleaved": InterleavedPair,
}


def build(kind: str, seed: int = 0, **shape: Any) -> Any:
    """A target of a kind, with random weights that need no gradients."""
    torch.manual_seed(seed)
    return frozen(KINDS[kind](**shape))


def frozen(target: Any) -> Any:
    """The target, its weights without gradients."""
    for tensor in tensors(target):
        tensor.requires_grad_(False)
    return target


def modules(target: Any) -> Iterable[nn.Module]:
    """The target if it is a module, else the modules it holds."""
    return (
        [target]
        if isinstance(target, nn.Module)
        else [one for one in vars(target).values() if isinstance(one, nn.Module)]
    )


def tensors(target: Any) -> Iterator[torch.Tensor]:
    """All parameters and buffers."""
    for module in modules(target):
        yield from module.parameters()
        yield from module.buffers()


def values(target: Any) -> dict[str, torch.Tensor]:
    """Host copies of all parameters and buffers, by path."""
    found = {}
    for index, module in enumerate(modules(target)):
        for table in (module.named_parameters, module.named_buffers):
            found |= {
                f"{index}.{name}": one.detach().cpu().clone() for name, one in table(remove_duplicate=False)
            }
    return found


def same_values(target: Any, before: dict[str, torch.Tensor]) -> bool:
    """Whether all tensors have, bit for bit, the values of ``values()`` before."""
    now = values(target)
    return now.keys() == before.keys() and all(
        now[name].shape == before[name].shape
        and now[name].dtype is before[name].dtype
        and torch.equal(now[name].nan_to_num(7.0), before[name].nan_to_num(7.0))
        for name in before
    )


def payload(module: nn.Module) -> int:
    """Bytes of a module's tensors, each tensor once."""
    found = {id(one): one.nbytes for one in [*module.parameters(), *module.buffers()]}
    return sum(found.values())


def resident_copy(target: Any, device: torch.device) -> Any:
    """A copy of a target with all of it on the device: the run that an offloaded one must equal."""
    twin = copy.deepcopy(target)
    for module in modules(twin):
        module.to(device)
    return twin


def places(target: Any) -> dict[str, str]:
    """Where each tensor is."""
    return {
        f"{index}.{name}": str(one.device)
        for index, module in enumerate(modules(target))
        for table in (module.named_parameters, module.named_buffers)
        for name, one in table(remove_duplicate=False)
    }


def footprint(target: Any) -> dict[str, Any]:
    """Everything that attaching could leave behind: attributes, hooks and methods of every module, and its own."""
    found: dict[str, Any] = {"target": sorted(vars(target))}
    for index, root in enumerate(modules(target)):
        for path, module in root.named_modules():
            hooks = {
                name: len(table) for name, table in vars(module).items() if name.endswith("_hooks") and table
            }
            found[f"{index}.{path}"] = (sorted(vars(module)), hooks)
    return found


def kinds_of(events: Iterable[Any], *kinds: str) -> list[tuple[str, str]]:
    """``(kind, component)`` of the events of some kinds, in order."""
    return [(str(one.kind), one.component) for one in events if str(one.kind) in kinds]
