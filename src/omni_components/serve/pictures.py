"""Pictures as clients get them: of the size asked for, as base64."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any

from PIL import Image

if TYPE_CHECKING:
    from ..omni import OmniOutput

LONGEST_SIDE = {"png": 2**31 - 1, "jpeg": 65_535, "webp": 16_383}  # what the formats can say
_DEFAULT_QUALITY = {"jpeg": 90, "webp": 90}


def pictures_of(output: OmniOutput) -> list[Image.Image]:
    """One picture per prompt; of a video its first frame."""
    found = output.images if output.images is not None else output.frames
    return [_first(one) for one in found]


def _first(value: Any) -> Image.Image:
    while isinstance(value, (list, tuple)):
        value = value[0]
    if not isinstance(value, Image.Image):
        raise TypeError(f"a picture was expected, not {type(value).__name__}")
    return value


def fitted(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The whole picture inside a page of this size, in the colour of its own corner."""
    picture = picture.convert("RGB")
    scale = min(size[0] / picture.width, size[1] / picture.height)
    width, height = (max(1, round(one * scale)) for one in picture.size)  # 1: a page may be a mere line
    page = Image.new("RGB", size, _corner(picture))
    drawn = picture.resize((width, height), Image.Resampling.LANCZOS)
    page.paste(drawn, ((size[0] - width) // 2, (size[1] - height) // 2))
    return page


def _corner(picture: Image.Image) -> tuple[int, int, int]:
    red, green, blue = picture.crop((0, 0, 1, 1)).tobytes()
    return red, green, blue


def encoded(picture: Image.Image, form: str, quality: int | None) -> str:
    """The picture's file in base64.

    Args:
        picture: Any mode.
        form: ``png``, ``jpeg`` or ``webp``.
        quality: 0 to 100, for the two that lose something; ``None`` is a good one.
    """
    file = io.BytesIO()
    options = {} if form == "png" else {"quality": _DEFAULT_QUALITY[form] if quality is None else quality}
    picture.convert("RGB").save(file, format=form, **options)
    return base64.b64encode(file.getvalue()).decode("ascii")
