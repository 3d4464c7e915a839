"""A call of diffusers' Cosmos3 transformer: what it is given, and whether its text can be read by itself."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers.models.transformers.transformer_cosmos3 import Cosmos3OmniTransformer
from torch import Tensor

from .prompts import Inputs

_SIGNATURE = inspect.signature(Cosmos3OmniTransformer.forward)
_GENERATED = ("vision_sequence_indexes", "sound_sequence_indexes", "action_sequence_indexes")


def arguments_of(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, those given."""
    call = _SIGNATURE.bind(model, *args, **kwargs).arguments
    del call["self"]
    return call


def inputs_of(call: Mapping[str, Any]) -> Inputs:
    """The tensors by which a call is recognised; the first two are the text's ids and all positions."""
    return [call.get(name) for name in ("input_ids", "position_ids", "text_indexes", *_GENERATED)]


def text_positions(position_ids: Tensor, count: int) -> Tensor:
    """The text's positions on the three axes, (3, 1, N), in the type in which they are used."""
    text = position_ids[..., :count].float()
    return text.expand(3, -1)[:, None].clone()


def misplaced(call: Mapping[str, Any]) -> str:
    """Why the text of a call cannot be read by itself; empty if it can. Looks at values."""
    count = call["und_len"]
    text = call["text_indexes"]
    if len(call["input_ids"]) != count or not torch.equal(text, torch.arange(count, device=text.device)):
        return f"the text is not just the first {count} tokens."
    for name in _GENERATED:
        indexes = call.get(name)
        if indexes is not None and bool((indexes < count).any()):
            return f"{name} lie among the first {count} tokens, which are text."
    return ""
