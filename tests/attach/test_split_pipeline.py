"""A pipeline whose DiT is a split model: encoder, reasoner and generator under one ledger. Design section 8."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

from omni_components import SplitModel, offload
from tests.helpers.pipelines import Stack, TwoWays, footprint, frozen, kinds_of, payload, resident_copy

WIDTH = 64


class Omni(SplitModel):
    """Two halves interleaved in each block, down to single parameters; what neither owns is resident."""

    _offload_components: ClassVar[dict[str, list[str]]] = {
        "reasoner": ["embed", "blocks.*.to_a", "blocks.*.scale_a"],
        "generator": ["proj_in", "blocks.*.to_b", "blocks.*.scale_b", "time.weight", "gain"],
    }

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.proj_in = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.time = nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(TwoWays(WIDTH, torch.float32) for _ in range(3))
        self.gain = nn.Parameter(torch.ones(1))

    def read(self, prompt: torch.Tensor) -> list[torch.Tensor]:
        with self._offload_context("reasoner"):
            memory, x = [], self.embed(prompt)
            for block in self.blocks:
                x = torch.tanh(block.to_a(x) * block.scale_a + block.bias)
                memory.append(x)
            return memory

    def forward(self, x: torch.Tensor, t: torch.Tensor, memory: list[torch.Tensor]) -> torch.Tensor:
        with self._offload_context("generator"):
            x = self.proj_in(x) + nn.functional.linear(t, self.time.weight)
            for block, one in zip(self.blocks, memory, strict=True):
                x = torch.tanh(block.to_b(x + one) * block.scale_b + block.bias)
            return x * self.gain


class OmniPipeline(nn.Module):
    """Text encoder, split DiT, VAE; guided, so the generator runs twice a step."""

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vae"]

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder, self.transformer, self.vae = Stack(WIDTH), Omni(), Stack(WIDTH, depth=1)

    def forward(self, prompts: list[torch.Tensor], steps: int = 10) -> torch.Tensor:
        memories = [self.transformer.read(one) for one in [self.text_encoder(prompt) for prompt in prompts]]
        x = torch.zeros_like(prompts[0])
        for step in range(steps):
            t = torch.full((1, 1), step / steps, device=x.device)
            guided, plain = (self.transformer(x, t, memory) for memory in memories)
            x = x + (plain + 2 * (guided - plain)) / steps
        return self.vae(x)


@pytest.mark.parametrize("arena", ["keep", "fit"])
def test_encoder_reasoner_and_generator_take_turns_under_one_ledger(sim, arena):
    """I1, I2, I8: each loaded once per request; the peak is residents and the largest; results as all resident."""
    pipe = frozen(OmniPipeline())
    clean = footprint(pipe)
    prompts = [torch.randn(2, WIDTH, device=sim.device) for _ in range(2)]
    expected = resident_copy(pipe, sim.device)(prompts).cpu()
    with offload(pipe, sim.device, arena=arena) as handle:
        swapped = ["reasoner", "generator", "text_encoder"]
        assert [one.name for one in handle.components if not one.resident] == swapped
        for name in swapped:
            assert set(handle.ledger.rivals(name)) == set(swapped) - {name}
        sizes = {one.name: one.bytes for one in handle.components}
        residents = sum(one.bytes for one in handle.components if one.resident)
        room = residents + max(sizes[name] for name in swapped) + 64 * 1024
        sim.reset()
        sim.capacity = room
        for request in range(2):
            start = len(handle.events)
            assert torch.equal(pipe(prompts).cpu(), expected)
            assert kinds_of(handle.events[start:], "load") == [
                ("load", "text_encoder"),
                ("load", "reasoner"),
                ("load", "generator"),
            ], request
            handle.ledger.audit()
            handle.release()
        assert handle.report().peak_bytes == residents + max(sizes[name] for name in swapped)
        parts = (
            sum(one.nbytes for one in pipe.parameters())
            - payload(pipe.vae)
            - pipe.transformer.time.bias.nbytes
        )
        assert (
            sum(one.bytes for one in handle.events if str(one.kind) == "load" and one.component in swapped)
            == 2 * parts
        )
    with pytest.raises(torch.OutOfMemoryError):
        resident_copy(pipe, sim.device)
    assert footprint(pipe) == clean


def test_what_is_in_no_part_is_resident_beside_the_vae(sim):
    """I3, I8: single parameters of one module may be in a part and in none."""
    pipe = frozen(OmniPipeline())
    with offload(pipe, sim.device) as handle:
        rest = next(one for one in handle.components if one.name == "transformer (rest)")
        assert (rest.resident, rest.tensors) == (True, 1 + 3)  # the bias of `time`, a buffer in each block
        with handle.scope("reasoner"):
            assert pipe.transformer.time.bias.device == sim.device
            assert pipe.transformer.time.weight.device.type == "cpu"
            assert pipe.transformer.blocks[0].scale_a.device == sim.device
            assert pipe.transformer.blocks[0].scale_b.device.type == "cpu"


def test_vaes_join_the_graph_on_request(sim):
    """I1: with ``vae="exclusive"`` there are four, and the report's peak is the largest of them."""
    pipe = frozen(OmniPipeline())
    prompts = [torch.randn(2, WIDTH, device=sim.device) for _ in range(2)]
    expected = resident_copy(pipe, sim.device)(prompts).cpu()
    with offload(pipe, sim.device, vae="exclusive") as handle:
        assert torch.equal(pipe(prompts).cpu(), expected)
        assert [name for _, name in kinds_of(handle.events, "load") if name != "transformer (rest)"] == [
            "text_encoder",
            "reasoner",
            "generator",
            "vae",
        ]
        handle.ledger.audit()


def test_a_dit_alone_that_is_split_needs_no_encoder(sim):
    """Its parts are something to swap; an encoder that is ``None`` in this checkpoint is no error."""
    pipe = frozen(OmniPipeline())
    pipe.text_encoder = None
    with offload(pipe, sim.device) as handle:
        assert {one.name for one in handle.components if not one.resident} == {"reasoner", "generator"}
