"""The demo's text encoder: a small bidirectional transformer over at most four tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from omni_components.demo.config import TextEncoderConfig


class EncoderBlock(nn.Module):
    """Pre-norm attention and feed-forward, both over all tokens that are not padding."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.to_qkv = nn.Linear(width, 3 * width)
        self.to_out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """(B, T, width) and the mask of real tokens (B, T) -> (B, T, width)."""
        batch, count, _ = tokens.shape
        qkv = self.to_qkv(self.norm1(tokens)).view(batch, count, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None, :])
        tokens = tokens + self.to_out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = tokens + self.mlp(self.norm2(tokens))
        return out


class DemoTextEncoder(nn.Module):
    """Turns token ids into one row of numbers per token."""

    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Parameter(0.02 * torch.randn(config.max_tokens, config.width))
        self.layers = nn.ModuleList(EncoderBlock(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Encode a batch of phrases.

        Args:
            ids: token ids, (B, T) integers.
            mask: true where a token is not padding, (B, T) booleans.

        Returns:
            (B, T, width).
        """
        tokens = self.embed_tokens(ids) + self.position
        for layer in self.layers:
            tokens = layer(tokens, mask)
        out: Tensor = self.norm(tokens)
        return out
