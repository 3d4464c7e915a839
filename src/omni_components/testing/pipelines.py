"""TinyPipeline: a declared pipeline of a few kilobytes, in any of the shapes that real ones have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ..attach.split import SplitModel
from .modules import TinyModule

WIDTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """What a pipeline is made of; :meth:`build` gives the same weights each time.

    Attributes:
        encoders: How many encoders.
        dits: How many DiTs.
        split: The last DiT is a split model, its parts interleaved and named by pattern.
        vae: There is a VAE.
        tied: The first DiT and the first encoder share a weight.
        traits: Of all modules, see ``TinyModule``.
        seed: Draws the weights.
    """

    encoders: int = 1
    dits: int = 1
    split: bool = False
    vae: bool = False
    tied: bool = False
    traits: frozenset[str] = frozenset()
    seed: int = 0

    def build(self) -> TinyPipeline:
        """A new pipeline."""
        return TinyPipeline(self)


class TinySplit(SplitModel):
    """Two halves, interleaved; a norm and a buffer are in no part."""

    _offload_components: ClassVar[dict[str, list[str]]] = {
        "reader": ["layers.*.read", "scale"],
        "writer": ["layers.*.write"],
    }

    def __init__(self, shape: PipelineShape, generator: torch.Generator) -> None:
        super().__init__()
        halves = ("read", "write")
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: TinyModule(WIDTH, 1, shape.traits, generator) for name in halves})
            for _ in range(2)
        )
        self.scale = nn.Parameter(torch.rand(WIDTH, generator=generator))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One phase of each half."""
        with self._offload_context("reader"):
            for layer in self.layers:
                x = layer["read"](x) * self.scale  # type: ignore[index]
        with self._offload_context("writer"):
            for layer in self.layers:
                x = layer["write"](self.norm(x))  # type: ignore[index]
        return x


class TinyPipeline(nn.Module):
    """Encoders, then DiTs, then a VAE, each used once a request.

    Args:
        shape: What it is made of.
    """

    def __init__(self, shape: PipelineShape) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(shape.seed)

        def module() -> nn.Module:
            return TinyModule(WIDTH, 2, shape.traits, generator)

        self._encoder_modules = [f"encoder_{index}" for index in range(shape.encoders)]
        self._dit_modules = [f"dit_{index}" for index in range(shape.dits)]
        self._vae_modules = ["vae"] if shape.vae else []
        for name in [*self._encoder_modules, *self._dit_modules, *self._vae_modules]:
            last = name == self._dit_modules[-1]
            self.add_module(name, TinySplit(shape, generator) if last and shape.split else module())
        if shape.tied:
            first = self.get_submodule(self._encoder_modules[0]).get_submodule("layers.1")
            dit = self.get_submodule(self._dit_modules[0])
            other = dit.get_submodule("layers.1.write.layers.0" if isinstance(dit, TinySplit) else "layers.1")
            other.weight = first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A float32 tensor of the same shape, (N, 4)."""
        for name in [*self._encoder_modules, *self._dit_modules, *self._vae_modules]:
            x = self.get_submodule(name)(x)
        return x
