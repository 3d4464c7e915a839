"""Weights that a module computes from others before each call: they move with nobody, and must not stay behind.

torch's older ``weight_norm`` and ``spectral_norm`` do it in a forward pre-hook, which puts the result into a plain
attribute; its parametrizations keep the result while ``parametrize.cached()`` is on. Either is device memory, as
large as the weight itself, that no slot names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """A weight that a module computes before each call, into an attribute that is no slot."""

    module: nn.Module
    hook: WeightNorm | SpectralNorm

    def let_go(self) -> None:
        """Take the attribute's memory off the device; the next call computes it anew.

        What stands there meanwhile has its shape and type, hardly any bytes, and a value that nobody can take for a
        weight.
        """
        tensor = vars(self.module).get(self.hook.name)
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
            value = torch.full((), float("nan")).to(tensor.dtype)
            vars(self.module)[self.hook.name] = value.expand(tensor.shape)

    def restore(self) -> None:
        """Compute it where the module is now: it is called without us from here on, perhaps past its hooks."""
        tensor = vars(self.module).get(self.hook.name)
        if isinstance(tensor, torch.Tensor) and tensor.numel() and tensor.flatten()[0].isnan():
            vars(self.module)[self.hook.name] = self._weight()

    def _weight(self) -> Any:
        if isinstance(self.hook, SpectralNorm):
            return self.hook.compute_weight(self.module, do_power_iteration=False)  # it would change a buffer
        return self.hook.compute_weight(self.module)


@dataclass(frozen=True, slots=True, eq=False)
class Cached:
    """The weights of a parametrized module, which ``parametrize.cached()`` keeps while it is on."""

    module: Any

    def let_go(self) -> None:
        """Forget them: they are where the module was. The next look computes them anew."""
        # There is no public way to let go of a single one (torch 2.13); the table is another after each block.
        cache: dict[tuple[int, str], torch.Tensor] = getattr(parametrize, "_cache", {})
        for name in self.module.parametrizations if cache else ():
            cache.pop((id(self.module), name), None)

    def restore(self) -> None:
        """Nothing stands in their place."""


def computed(modules: Iterable[nn.Module]) -> list[Computed | Cached]:
    """What some modules compute before each call."""
    found: list[Computed | Cached] = []
    for module in {id(one): one for one in modules}.values():
        hooks = module._forward_pre_hooks.values()
        found += [Computed(module, hook) for hook in hooks if isinstance(hook, (WeightNorm, SpectralNorm))]
        if parametrize.is_parametrized(module):
            found.append(Cached(module))
    return found
