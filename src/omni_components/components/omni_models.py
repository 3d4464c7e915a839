"""Omni models of transformers: their phases as components, and what one phase reads of another as residents.

Who calls whom is taken from the models' own ``generate`` (transformers 5.24); no weight and no code of theirs is
changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from .recipe import Recipe


def recipe_for(target: object) -> Recipe | None:
    """The recipe of a transformers model, or of one that inherits from it; none for others."""
    for base in type(target).__mro__ if isinstance(target, nn.Module) else ():
        if base.__module__.startswith("transformers.") and base.__name__ in _RECIPES:
            return _RECIPES[base.__name__](target)
    return None


_POSITIONS = frozenset({"rope_deltas"})  # of the last prefill


def _qwen2_5_omni(model: Any) -> Recipe:
    """Thinker, talker, token2wav; the talker's input is built from the thinker's embeddings."""
    return Recipe(
        dit_modules=_present(model, "thinker", "talker", "token2wav"),
        resident_modules=_paths(model, model.thinker.get_input_embeddings()),
        methods=("generate",),
        scratch=_POSITIONS,
    )


def _qwen3_omni(model: Any) -> Recipe:
    """The same phases; here ``generate`` itself also calls the talker's projections and embeddings."""
    talker = getattr(model, "talker", None)
    shared = [_first_holder(model.thinker), model.thinker.get_input_embeddings()]
    if talker is not None:
        shared += [talker.get_input_embeddings(), talker.text_projection, talker.hidden_projection]
    return Recipe(
        dit_modules=_present(model, "thinker", "talker", "code2wav"),
        resident_modules=_paths(model, *shared),
        entry_points={"code2wav": ("chunked_decode",)} if talker is not None else {},
        methods=("generate",),
        scratch=_POSITIONS,
    )


def _janus(model: Any) -> Recipe:
    """Text is embedded, images are encoded, then the language model runs; it makes the tokens of an image, too."""
    return Recipe(
        dit_modules=("model.language_model", "model.vision_model"),
        vae_modules=("model.vqmodel",),
        resident_modules=_paths(model, _first_holder(model), model.get_input_embeddings()),
        methods=("generate", "decode_image_tokens"),
    )


_RECIPES: Mapping[str, Callable[[Any], Recipe]] = {
    "Qwen2_5OmniForConditionalGeneration": _qwen2_5_omni,
    "Qwen3OmniMoeForConditionalGeneration": _qwen3_omni,
    "JanusForConditionalGeneration": _janus,
}


def _present(model: Any, *names: str) -> tuple[str, ...]:
    """Checkpoints without speech lack some of them."""
    return tuple(name for name in names if getattr(model, name, None) is not None)


def _first_holder(model: nn.Module) -> nn.Module:
    """The module with the first parameter, which transformers asks where a model computes (``model.device``)."""
    return next(one for one in model.modules() if next(one.parameters(recurse=False), None) is not None)


def _paths(model: nn.Module, *wanted: nn.Module) -> tuple[str, ...]:
    """Where modules are: releases of transformers have moved them."""
    paths = {id(module): path for path, module in model.named_modules()}
    return tuple(paths[id(module)] for module in wanted)
