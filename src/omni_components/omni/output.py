"""What a pipeline gave: its pictures, video and sound, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ModelError

# What the outputs of diffusers' pipelines call their pictures, video and sound.
_IMAGES, _FRAMES, _AUDIO = ("images", "image"), ("frames", "video", "videos"), ("audio", "audios", "sound")
_SAMPLE_RATES = (  # where diffusers' pipelines with sound keep their rate
    ("vae", "sampling_rate"),
    ("vocoder", "output_sampling_rate"),
    ("vocoder", "sampling_rate"),
    ("sound_tokenizer", "sampling_rate"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OmniOutput:
    """What one ``Omni.generate`` gave; what the model does not make is ``None``.

    Attributes:
        images: Pictures, one per prompt: PIL images unless ``output_type`` asked for another form.
        frames: Video, one per prompt, in the pipeline's own form.
        audio: Sound in -1..1, in the pipeline's own form.
        sample_rate: Of the sound, per second, where the model tells.
        seed: The seed that gives the same again, or one per picture; ``None`` if ``generator=`` was given, or the
            pipeline takes none.
        seconds: How long it took, loads included.
    """

    images: Any = None
    frames: Any = None
    audio: Any = None
    sample_rate: int | None = None
    seed: int | tuple[int, ...] | None = None
    seconds: float = 0.0


def output_of(result: Any, pipeline: Any, model: str, seed: int | tuple[int, ...] | None) -> OmniOutput:
    """What a pipeline's own output holds; ``seconds`` are for its caller to fill in.

    Raises:
        ModelError: Nothing that is known.
    """
    images, frames, audio = (_brought_home(_first(result, names)) for names in (_IMAGES, _FRAMES, _AUDIO))
    if images is None and frames is None and audio is None:
        problem = f"gave a {type(result).__name__} without pictures, video or sound."
        raise ModelError(model, problem, "Call omni.pipeline itself.")
    rate = None if audio is None else _sample_rate(pipeline)
    return OmniOutput(images=images, frames=frames, audio=audio, sample_rate=rate, seed=seed)


def _first(result: Any, names: Sequence[str]) -> Any:
    return next((found for name in names if (found := getattr(result, name, None)) is not None), None)


def _brought_home(value: Any) -> Any:
    """Tensors are given on the host, wherever they were made."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, (list, tuple)):
        return [_brought_home(one) for one in value]
    return value


def _sample_rate(pipeline: Any) -> int | None:
    for name, attribute in _SAMPLE_RATES:
        component = getattr(pipeline, name, None)
        for owner in (component, getattr(component, "config", None)):
            rate = getattr(owner, attribute, None)
            if isinstance(rate, int):
                return rate
    return None
