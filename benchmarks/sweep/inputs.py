"""What requests are made of: words, pictures, films, sounds, noise; all small, all the same every time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image

COMMON: dict[str, Any] = {
    "prompt": "a lighthouse",
    "num_inference_steps": 2,
    "height": 32,
    "width": 32,
    "max_sequence_length": 16,
    "output_type": "pt",
}


def seeded(seed: int = 7) -> torch.Generator:
    """Noise is drawn on the host, so that it is the same wherever the pipeline computes."""
    return torch.Generator("cpu").manual_seed(seed)


def noise(*shape: int, seed: int = 7) -> torch.Tensor:
    """A tensor of normal numbers."""
    return torch.randn(shape, generator=seeded(seed))


def levels(*shape: int, seed: int = 7) -> torch.Tensor:
    """A tensor of numbers from 0 to 1."""
    return torch.rand(shape, generator=seeded(seed))


def picture(side: int = 32, *, width: int | None = None, seed: int = 7) -> Image.Image:
    """A picture of coloured noise."""
    pixels = levels(side, width or side, 3, seed=seed).mul(255).to(torch.uint8).numpy()
    return Image.fromarray(pixels)


def mask(side: int = 32) -> Image.Image:
    """A mask: the left half."""
    pixels = np.zeros((side, side), dtype=np.uint8)
    pixels[:, : side // 2] = 255
    return Image.fromarray(pixels)


def film(frames: int, side: int = 32) -> list[Image.Image]:
    """Pictures one after another."""
    return [picture(side, seed=seed) for seed in range(frames)]
