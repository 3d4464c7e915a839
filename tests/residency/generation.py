"""A pipeline for stress: an encoder, a DiT in two interleaved parts, a VAE; and what its requests must give."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from omni_components import Offload, SplitModel
from omni_components.testing import SimulatedAccelerator
from omni_components.testing.modules import TinyModule

WIDTH = 8
PROMPTS = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, 1, WIDTH)


class Backbone(SplitModel):
    """A reasoner and a generator inside each block.

    Args:
        counts: The generator counts its steps in a buffer, on the device.
    """

    _offload_components: ClassVar[dict[str, list[str]]] = {
        "reasoner": ["layers.*.reason"],
        "generator": ["layers.*.generate", "drawn"],
    }

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"reason": nn.Linear(WIDTH, WIDTH), "generate": nn.Linear(WIDTH, WIDTH)})
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)  # in no part: resident
        self.register_buffer("drawn", torch.zeros((), dtype=torch.int64))
        self.counts, self.counted = counts, 0  # what the buffer must say

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self._offload_context("reasoner"):
            x = self.reason(x)
        for _ in range(2):
            with self._offload_context("generator"):
                x = self.generate(x)
        return x

    def reason(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer["reason"](x))
        return x

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.drawn.add_(1)
            self.counted += 1
        for layer in self.layers:
            x = self.norm(x + layer["generate"](x))
        return x


class Decoder(nn.Module):
    """A VAE that is called by ``decode``."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(x)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.out(x))


class Pipeline(nn.Module):
    """One request goes through all of them. Made anew it has the same weights.

    Args:
        counts: Write to the weights, too. Threads would race for that, as without offload.
    """

    _dit_modules: ClassVar[list[str]] = ["backbone"]
    _encoder_modules: ClassVar[list[str]] = ["text"]
    _vae_modules: ClassVar[list[str]] = ["vae"]
    _resident_modules: ClassVar[list[str]] = []

    def __init__(self, *, counts: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.text = TinyModule(WIDTH, 2, ("tied", "view", "half", "transposed"), generator)
        self.backbone, self.vae = Backbone(counts=counts), Decoder()
        for parameter in (*self.backbone.parameters(), *self.vae.parameters()):
            parameter.data.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn: torch.Tensor = self.vae.decode(self.backbone(self.text(x)))
        return drawn


def resident_results() -> list[torch.Tensor]:
    """What each prompt gives without offload."""
    twin = Pipeline()
    return [twin(prompt) for prompt in PROMPTS]


def masters(handle: Offload) -> dict[str, str]:
    """A hash of each master, by component and tensor."""
    fleet: Any = handle.ledger.attachment
    return {
        f"{one.name}: {group.members[0].path}": hashlib.sha256(group.source.numpy().tobytes()).hexdigest()
        for one in handle.components
        for group in fleet.mover.cargo(one.name).groups
    }


class Studio:
    """An offloaded pipeline that is asked after each trial whether everything about it is as it should be."""

    def __init__(
        self,
        sim: SimulatedAccelerator,
        enable: Callable[[Pipeline], Offload],
        pipe: Pipeline | None = None,
    ) -> None:
        self.sim = sim
        self.expected = resident_results()
        self.pipe = pipe or Pipeline()
        self.handle = enable(self.pipe)
        self.masters = masters(self.handle)

    def serve(self, prompt: int = 0) -> None:
        """A request that must be right."""
        assert torch.equal(self.pipe(PROMPTS[prompt]).cpu(), self.expected[prompt])

    def whole(self) -> None:
        """I1 to I8 by ``check`` and ``audit``; no pin, no race; every master has the bits that it should have."""
        ledger = self.handle.ledger
        ledger.check()
        ledger.audit()
        assert [one.name for one in self.handle.components if ledger.pins(one.name)] == []
        assert self.sim.races == []
        now, changes = masters(self.handle), "generator: backbone.drawn"
        assert {**now, changes: ""} == {**self.masters, changes: ""}
        assert int(self.pipe.backbone.drawn) == self.pipe.backbone.counted

    def usable(self, prompt: int = 1) -> None:
        """The next request is right, and leaves everything whole."""
        self.serve(prompt)
        self.whole()
