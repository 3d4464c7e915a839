"""A split model: one transformer whose two halves, interleaved in every block, take turns.

    python examples/split_model.py [DEVICE]

The *reasoner* reads the prompt once and leaves keys and values; the *generator* attends to them at every
denoising step. No hook can tell the halves apart, since their weights lie side by side in the same blocks. So
the model says which tensors belong to which part, and marks its phases.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from omni_components import SplitModel, offload

Memory = list[tuple[torch.Tensor, torch.Tensor]]


class Attention(nn.Module):
    """Projections of both halves; ``add_*`` is the generator's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))
        self.add_q_proj, self.add_k_proj, self.add_v_proj = (nn.Linear(width, width) for _ in range(3))


class Block(nn.Module):
    """A layer of both halves, with one feed-forward for each and a norm that they share."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.self_attn = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.mlp_moe_gen = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class OmniTransformer(SplitModel):
    """Reads tokens, then draws latents."""

    _offload_components: ClassVar[dict[str, list[str]]] = {
        "reasoner": [
            "embed_tokens",
            "layers.*.self_attn.to_q",
            "layers.*.self_attn.to_k",
            "layers.*.self_attn.to_v",
            "layers.*.mlp",
        ],
        "generator": [
            "proj_in",
            "proj_out",
            "time_scale",  # a part may have single parameters
            "layers.*.self_attn.add_q_proj",
            "layers.*.self_attn.add_k_proj",
            "layers.*.self_attn.add_v_proj",
            "layers.*.mlp_moe_gen",
        ],
        # `layers.*.norm` is in no part: both halves use it, so it stays on the device.
    }

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(1000, width)
        self.proj_in, self.proj_out = nn.Linear(16, width), nn.Linear(width, 16)
        self.time_scale = nn.Parameter(torch.rand(width))
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, ids: torch.Tensor, latents: torch.Tensor, steps: int = 4) -> torch.Tensor:
        """Draw latents (B, S, 16) after token ids (B, T)."""
        with self._offload_context("reasoner"):
            memory = self._read(ids)
        with self._offload_context("generator"):  # around the loop: two switches a call, not two a step
            for time in torch.linspace(1, 1 / steps, steps).tolist():
                latents = latents - self._velocity(latents, time, memory) / steps
        return latents

    def _read(self, ids: torch.Tensor) -> Memory:
        text, memory = self.embed_tokens(ids), []
        for block in self._blocks():
            hidden, attention = block.norm(text), block.self_attn
            key, value = attention.to_k(hidden), attention.to_v(hidden)
            text = text + F.scaled_dot_product_attention(attention.to_q(hidden), key, value, is_causal=True)
            text = text + block.mlp(text)
            memory.append((key, value))
        return memory

    def _velocity(self, latents: torch.Tensor, time: float, memory: Memory) -> torch.Tensor:
        image = self.proj_in(latents) + time * self.time_scale
        for block, (text_key, text_value) in zip(self._blocks(), memory, strict=True):
            hidden, attention = block.norm(image), block.self_attn
            key = torch.cat([text_key, attention.add_k_proj(hidden)], dim=1)
            value = torch.cat([text_value, attention.add_v_proj(hidden)], dim=1)
            image = image + F.scaled_dot_product_attention(attention.add_q_proj(hidden), key, value)
            image = image + block.mlp_moe_gen(image)
        return self.proj_out(image)

    def _blocks(self) -> Iterator[Block]:
        yield from self.layers  # type: ignore[misc]  # a ModuleList does not know what it holds


@torch.no_grad()
def main(device: str | None = None) -> None:
    """Run once without offload, once with the halves taking turns, and compare."""
    torch.manual_seed(0)
    model = OmniTransformer()
    ids, latents = torch.randint(1000, (1, 12)), torch.randn(1, 64, 16)
    expected = model(ids, latents)  # `_offload_context` does nothing while offload is not enabled

    with offload(model, device) as handle:
        place = handle.execution_device
        result = model(ids.to(place), latents.to(place)).cpu()
        for event in handle.events:
            if event.kind in ("load", "evict"):
                print(f"{event.kind!s:5} {event.component:12} -> {event.device_bytes:>9,} bytes there")
        print(handle.report())
    print(f"largest difference to the run without offload: {(result - expected).abs().max():.1e}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
