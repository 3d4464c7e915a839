"""The demo's transformer: a reasoner and a generator interleaved in every block, as in real omni models.

The reasoner reads the encoded prompt once and leaves, per layer, keys and values. The generator is a
diffusion transformer that attends to them at every denoising step. They never compute at the same time,
so they can take turns on the device; since their weights sit side by side inside each block, they are
declared by pattern.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omni_components.attach.split import SplitModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from omni_components.demo.config import TransformerConfig

_MODULATIONS = 6  # shift, scale and gate, before attention and before the feed-forward


@dataclass(frozen=True, slots=True)
class PromptMemory:
    """What the reasoner leaves behind; activations, so they stay when the reasoner's weights leave.

    Attributes:
        keys: per layer, (B, heads, T, head width).
        values: per layer, as `keys`.
        summary: the state of each prompt's last token, (B, width).
        mask: true where a token is not padding, (B, T).
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    summary: Tensor
    mask: Tensor

    def rows(self, index: Tensor) -> PromptMemory:
        """The prompts at `index` (N,), in that order; one prompt may be taken many times."""
        return PromptMemory(
            keys=tuple(key[index] for key in self.keys),
            values=tuple(value[index] for value in self.values),
            summary=self.summary[index],
            mask=self.mask[index],
        )


class SplitAttention(nn.Module):
    """Two attentions over one set of heads: `to_*` is the reasoner's, `add_*` the generator's."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(width, width)
        self.to_v = nn.Linear(width, width)
        self.to_out = nn.Linear(width, width)
        self.norm_q = nn.RMSNorm(width // heads, eps=1e-6)
        self.norm_k = nn.RMSNorm(width // heads, eps=1e-6)
        self.add_q_proj = nn.Linear(width, width)
        self.add_k_proj = nn.Linear(width, width)
        self.add_v_proj = nn.Linear(width, width)
        self.to_add_out = nn.Linear(width, width)
        self.norm_added_q = nn.RMSNorm(width // heads, eps=1e-6)
        self.norm_added_k = nn.RMSNorm(width // heads, eps=1e-6)

    def read(self, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The reasoner's half: causal attention of (B, T, width) over itself, and its keys and values."""
        query = self.norm_q(self._split_heads(self.to_q(text)))
        key: Tensor = self.norm_k(self._split_heads(self.to_k(text)))
        value = self._split_heads(self.to_v(text))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.to_out(_join_heads(mixed)), key, value

    def draw(self, image: Tensor, text_key: Tensor, text_value: Tensor, mask: Tensor) -> Tensor:
        """The generator's half: (B, S, width) attends to the prompt's keys and values, then to itself.

        Args:
            image: (B, S, width).
            text_key: what `read` left for this layer, (B, heads, T, head width).
            text_value: as `text_key`.
            mask: true where attention may look, (B, 1, 1, T + S).
        """
        query = self.norm_added_q(self._split_heads(self.add_q_proj(image)))
        own_key = self.norm_added_k(self._split_heads(self.add_k_proj(image)))
        own_value = self._split_heads(self.add_v_proj(image))
        key = torch.cat([text_key, own_key], dim=2)
        value = torch.cat([text_value, own_value], dim=2)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        out: Tensor = self.to_add_out(_join_heads(mixed))
        return out

    def _split_heads(self, tokens: Tensor) -> Tensor:
        batch, count, width = tokens.shape
        return tokens.view(batch, count, self.heads, width // self.heads).transpose(1, 2)


class SplitBlock(nn.Module):
    """One layer of both halves; the generator's names end in `moe_gen`, as in Cosmos3."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width = config.width
        self.self_attn = SplitAttention(width, config.heads)
        self.input_layernorm = nn.RMSNorm(width, eps=1e-6)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=1e-6)
        self.mlp = _feed_forward(width, config.reasoner_mlp_width)
        self.input_layernorm_moe_gen = nn.RMSNorm(width, eps=1e-6)
        self.post_attention_layernorm_moe_gen = nn.RMSNorm(width, eps=1e-6)
        self.mlp_moe_gen = _feed_forward(width, config.generator_mlp_width)
        self.modulation_moe_gen = nn.Parameter(torch.zeros(_MODULATIONS, width))

    def read(self, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The reasoner's layer: (B, T, width) -> the same, with this layer's keys and values."""
        mixed, key, value = self.self_attn.read(self.input_layernorm(text))
        text = text + mixed
        return text + self.mlp(self.post_attention_layernorm(text)), key, value

    def draw(self, image: Tensor, modulation: Tensor, text: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """The generator's layer: (B, S, width) -> (B, S, width).

        Args:
            image: (B, S, width).
            modulation: what the time says, (B, 6, width).
            text: this layer's keys and values.
            mask: true where attention may look, (B, 1, 1, T + S).
        """
        table = (self.modulation_moe_gen + modulation)[:, :, None]
        shift1, scale1, gate1, shift2, scale2, gate2 = table.unbind(1)
        hidden = self.input_layernorm_moe_gen(image) * (1 + scale1) + shift1
        image = image + gate1 * self.self_attn.draw(hidden, *text, mask)
        hidden = self.post_attention_layernorm_moe_gen(image) * (1 + scale2) + shift2
        out: Tensor = image + gate2 * self.mlp_moe_gen(hidden)
        return out


class DemoTransformer(SplitModel):
    """Predicts the velocity of a rectified flow from noise (time 1) to latents of a digit (time 0)."""

    _offload_components: ClassVar[dict[str, list[str]]] = {
        "reasoner": [
            "text_in",
            "layers.*.input_layernorm",
            "layers.*.self_attn.to_q",
            "layers.*.self_attn.to_k",
            "layers.*.self_attn.to_v",
            "layers.*.self_attn.to_out",
            "layers.*.self_attn.norm_q",
            "layers.*.self_attn.norm_k",
            "layers.*.post_attention_layernorm",
            "layers.*.mlp",
            "norm",
        ],
        "generator": [
            "proj_in",
            "position",  # a single parameter
            "time_frequencies",  # a buffer
            "time_in",
            "time_modulation",
            "layers.*.input_layernorm_moe_gen",
            "layers.*.self_attn.add_q_proj",
            "layers.*.self_attn.add_k_proj",
            "layers.*.self_attn.add_v_proj",
            "layers.*.self_attn.to_add_out",
            "layers.*.self_attn.norm_added_q",
            "layers.*.self_attn.norm_added_k",
            "layers.*.post_attention_layernorm_moe_gen",
            "layers.*.mlp_moe_gen",
            "layers.*.modulation_moe_gen",
            "norm_moe_gen",
            "modulation_out",
            "proj_out",
        ],
    }

    time_frequencies: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width = config.width
        self.latent_shape = (config.latent_channels, config.latent_size, config.latent_size)
        self.layers = nn.ModuleList(SplitBlock(config) for _ in range(config.layers))
        # The reasoner's ends.
        self.text_in = nn.Linear(config.text_width, width)
        self.norm = nn.RMSNorm(width, eps=1e-6)
        # The generator's ends.
        self.proj_in = nn.Linear(config.latent_channels, width)
        self.position = nn.Parameter(0.1 * torch.randn(config.latent_size**2, width))
        self.register_buffer("time_frequencies", 100.0 ** torch.linspace(0, 1, width // 2))
        self.time_in = _feed_forward(width, width)
        self.time_modulation = nn.Linear(width, _MODULATIONS * width)
        self.norm_moe_gen = nn.RMSNorm(width, eps=1e-6)
        self.modulation_out = nn.Linear(width, 2 * width)
        self.proj_out = nn.Linear(width, config.latent_channels)
        # Every block starts as the identity and the velocity as zero, which steadies the start of training.
        for layer in (self.time_modulation, self.modulation_out, self.proj_out):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def prefill(self, text: Tensor, mask: Tensor) -> PromptMemory:
        """Read the encoded prompts: the reasoner's one phase of a request.

        Args:
            text: encoded prompts, (B, T, text width).
            mask: true where a token is not padding, (B, T).
        """
        with self._offload_context("reasoner"):
            hidden = self.text_in(text)
            keys, values = [], []
            for layer in self._blocks():
                hidden, key, value = layer.read(hidden)
                keys.append(key)
                values.append(value)
            last = mask.sum(dim=1) - 1
            summary = self.norm(hidden[torch.arange(len(hidden), device=hidden.device), last])
        return PromptMemory(tuple(keys), tuple(values), summary, mask)

    def generating(self) -> AbstractContextManager[object]:
        """Keep the generator present for a whole denoising loop.

        `forward` asks for the generator by itself. Asking once around the loop means that another thread's
        request waits for the end of the loop, instead of costing two switches between two steps.
        """
        return self._offload_context("generator")

    def forward(self, latents: Tensor, time: Tensor, memory: PromptMemory) -> Tensor:
        """One step of the generator.

        Args:
            latents: (B, channels, size, size).
            time: 1 at noise, 0 at the picture, (B,).
            memory: what `prefill` left for the same B prompts.

        Returns:
            The velocity from picture to noise, as `latents`.
        """
        with self._offload_context("generator"):
            time_state = self._embed_time(time)
            modulation = self.time_modulation(F.silu(time_state)).view(len(time), _MODULATIONS, -1)
            image = self.proj_in(latents.flatten(2).transpose(1, 2)) + self.position
            # Image tokens see the prompt's real tokens and all image tokens.
            mask = F.pad(memory.mask, (0, image.shape[1]), value=True)[:, None, None, :]
            for layer, key, value in zip(self._blocks(), memory.keys, memory.values, strict=True):
                image = layer.draw(image, modulation, (key, value), mask)
            state = F.silu(time_state + memory.summary)
            shift, scale = self.modulation_out(state)[:, None].chunk(2, dim=-1)
            velocity: Tensor = self.proj_out(self.norm_moe_gen(image) * (1 + scale) + shift)
            return velocity.transpose(1, 2).reshape(latents.shape)

    def _blocks(self) -> Iterator[SplitBlock]:
        return iter(cast("list[SplitBlock]", self.layers))

    def _embed_time(self, time: Tensor) -> Tensor:
        angles = time[:, None] * self.time_frequencies
        state: Tensor = self.time_in(torch.cat([angles.sin(), angles.cos()], dim=-1))
        return state


def _join_heads(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)


def _feed_forward(width: int, inner: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(approximate="tanh"), nn.Linear(inner, width))
