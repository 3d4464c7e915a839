"""The two halves of one Cosmos3 layer, each by itself, over the modules of diffusers' own layer.

Text looks at text only (causally), so the reasoner's half needs nothing of the generator's. The generator's
half looks at both; of the text it needs this layer's keys and values, and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor

Turn = tuple[Tensor, Tensor]


def read(layer: Any, text: Tensor, turn: Turn) -> tuple[Tensor, Tensor, Tensor]:
    """The reasoner's half.

    Args:
        layer: A ``Cosmos3VLTextMoTDecoderLayer``.
        text: (N, width).
        turn: Cosines and sines of the text's positions, (N, head width) each.

    Returns:
        The text after this layer, and the keys and values that it shows to the generator, (N, heads, head
        width) each.
    """
    attention = layer.self_attn
    hidden = layer.input_layernorm(text)
    query = attention.norm_q(_heads(attention, attention.to_q(hidden)))
    key = attention.norm_k(_heads(attention, attention.to_k(hidden)))
    value = _heads(attention, attention.to_v(hidden))
    own_key = _turned(key, turn)
    mixed = _attend(attention, _turned(query, turn), own_key, value, causal=True)
    text = text + attention.to_out(mixed)
    text = text + layer.mlp(layer.post_attention_layernorm(text))
    # Some checkpoints show the generator a key of its own: normed, where the text's own keys are not.
    shown = attention.k_norm_und_for_gen
    return text, own_key if shown is None else _turned(shown(key), turn), value


def draw(layer: Any, tokens: Tensor, text_key: Tensor, text_value: Tensor, turn: Turn) -> Tensor:
    """The generator's half: (M, width) -> (M, width).

    Args:
        layer: A ``Cosmos3VLTextMoTDecoderLayer``.
        tokens: Everything that is generated: picture, sound, action; (M, width).
        text_key: What ``read`` left for this layer, (N, heads, head width).
        text_value: As ``text_key``.
        turn: Cosines and sines of the tokens' positions, (M, head width) each.
    """
    attention = layer.self_attn
    hidden = layer.input_layernorm_moe_gen(tokens)
    query = attention.norm_added_q(_heads(attention, attention.add_q_proj(hidden)))
    key = attention.norm_added_k(_heads(attention, attention.add_k_proj(hidden)))
    value = _heads(attention, attention.add_v_proj(hidden))
    keys = torch.cat([text_key, _turned(key, turn)])
    values = torch.cat([text_value, value])
    mixed = _attend(attention, _turned(query, turn), keys, values, causal=False)
    tokens = tokens + attention.to_add_out(mixed)
    out: Tensor = tokens + layer.mlp_moe_gen(layer.post_attention_layernorm_moe_gen(tokens))
    return out


def _heads(attention: Any, tokens: Tensor) -> Tensor:
    return tokens.view(len(tokens), -1, attention.head_dim)


def _turned(heads: Tensor, turn: Turn) -> Tensor:
    """Rotary position embedding: the two halves of a head are the coordinates that turn."""
    cosine, sine = (one[:, None] for one in turn)
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat([-second, first], dim=-1) * sine


def _attend(attention: Any, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
    """Attention as diffusers' processor asks for it: its backend, its parallelism; (T, width)."""
    mixed = dispatch_attention_fn(
        query[None],
        key[None],
        value[None],
        is_causal=causal,
        enable_gqa=True,
        backend=attention.processor._attention_backend,
        parallel_config=attention.processor._parallel_config,
    )
    return mixed[0].flatten(-2)
