"""TinyModule: a module of a few hundred bytes with what makes real ones hard to move."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

import torch
from torch import nn


class TinyModule(nn.Module):
    """Linear layers, and any of the traits.

    * ``tied``: the second layer's weight is the first one's;
    * ``view``: a buffer is a view of the second row of the first weight;
    * ``transposed``: a parameter with exchanged strides;
    * ``half``: a bfloat16 parameter;
    * ``counter``: an integer buffer without a place in the state dict;
    * ``empty``: a parameter without elements, and a buffer that is ``None``.

    Args:
        width: Features in and out.
        depth: Layers.
        traits: Any of ``TRAITS``.
        generator: Draws the weights.
    """

    TRAITS: ClassVar[tuple[str, ...]] = ("tied", "view", "transposed", "half", "counter", "empty")

    def __init__(self, width: int, depth: int, traits: Collection[str], generator: torch.Generator) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        for parameter in self.parameters():
            parameter.data.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
        first = self.layers[0].get_parameter("weight")
        if "tied" in traits:
            self.layers.append(nn.Linear(width, width, bias=False))
            self.layers[-1].weight = first
        if "view" in traits:
            self.register_buffer("row", first.detach()[1])
        if "transposed" in traits:
            self.across = nn.Parameter(
                torch.rand((width, width + 1), generator=generator).t(), requires_grad=False
            )
        if "half" in traits:
            self.scale = nn.Parameter(torch.rand(width, generator=generator).to(torch.bfloat16))
        if "counter" in traits:
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        if "empty" in traits:
            self.nothing = nn.Parameter(torch.empty(0, width))
            self.register_buffer("missing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A float32 tensor of the same shape."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if hasattr(self, "row"):
            x = x + self.get_buffer("row")
        if hasattr(self, "across"):
            x = x + self.across[0]
        if hasattr(self, "scale"):
            x = x * self.scale.float()
        return x
