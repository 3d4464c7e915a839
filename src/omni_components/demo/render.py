"""Ink to picture: decoded digits are enlarged, inked and laid side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Sequence

TILE = 128  # picture pixels per digit, each way
COLUMNS = 12  # digits per line
MARGIN = 2  # decoded pixels of paper around each digit
SIDE = 16  # decoded pixels of a digit, each way
_PAPER = (250, 246, 236)
_INK = (27, 32, 52)
# Ink below the first figure is paper, above the second it is full: strokes get an edge, not a halo.
_EDGE = (0.28, 0.76)


def render_digits(ink: Tensor) -> Image.Image:
    """Draw digits as one picture of dark ink on light paper.

    Args:
        ink: (N, 16, 16) in 0..1, any device.

    Returns:
        An RGB picture, `TILE` pixels high per line of up to `COLUMNS` digits.
    """
    tiles = _enlarge(ink.detach().to("cpu", torch.float32))
    lines = [torch.cat(list(line), dim=1) for line in torch.split(tiles, COLUMNS)]
    width = max(line.shape[1] for line in lines)
    page = torch.cat([F.pad(line, (0, width - line.shape[1])) for line in lines])
    size = (page.shape[1], page.shape[0])
    return Image.composite(Image.new("RGB", size, _INK), Image.new("RGB", size, _PAPER), _grey(page, size))


def tile_boxes(count: int) -> Sequence[tuple[int, int, int, int]]:
    """Where each of `count` digits stands in its picture: (left, top, right, bottom) in pixels."""
    places = [(index % COLUMNS * TILE, index // COLUMNS * TILE) for index in range(count)]
    return [(left, top, left + TILE, top + TILE) for left, top in places]


def _enlarge(ink: Tensor) -> Tensor:
    padded = F.pad(ink[:, None], (MARGIN,) * 4)
    smooth = F.interpolate(padded, size=(TILE, TILE), mode="bicubic", align_corners=False)[:, 0]
    low, high = _EDGE
    edge = ((smooth - low) / (high - low)).clamp(0, 1)
    return edge * edge * (3 - 2 * edge)


def _grey(page: Tensor, size: tuple[int, int]) -> Image.Image:
    levels = (page * 255).round().to(torch.uint8)
    # Through a list: `Tensor.numpy` would make numpy a dependency.
    return Image.frombytes("L", size, bytes(levels.flatten().tolist()))
