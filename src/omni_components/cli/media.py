"""Pictures, video and sound as files, by suffix: only what the installed libraries really write."""

from __future__ import annotations

import wave
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from ..errors import ModelError

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..omni import Omni, OmniOutput

_VIDEO = ("num_frames", "video_length")  # what diffusers' pipelines for video, and only they, take
_SAMPLE = 2  # bytes of one, in a WAV file


class Format(NamedTuple):
    """A kind of file: what it holds, and who writes it."""

    holds: str
    write: Callable[[OmniOutput, Path, int, str], None]


def format_of(out: Path) -> Format:
    """The format of a file, by its suffix.

    Raises:
        typer.BadParameter: It is none that can be written here; it says what to choose or install.
    """
    found = FORMATS.get(out.suffix.lower())
    if found is None:
        text = f"'{out}' tells no format; choose a name that ends in {', '.join(FORMATS)}."
        raise typer.BadParameter(text, param_hint="--out")
    if out.suffix.lower() == ".mp4" and not writes_mp4():
        text = "an .mp4 file needs an encoder: pip install 'omni-components[video]', or choose a .gif file."
        raise typer.BadParameter(text, param_hint="--out")
    return found


def writes_mp4() -> bool:
    """Whether the libraries that encode MP4 are installed."""
    return all(find_spec(name) is not None for name in ("imageio", "imageio_ffmpeg"))


def refuse_what_it_does_not_make(omni: Omni, out: Path, frames: int | None) -> None:
    """Refuse a suffix that does not suit the model, before the work rather than after it.

    Raises:
        typer.BadParameter: It says which suffix to choose.
    """
    wanted = format_of(out).holds
    arguments = omni.sampling_arguments
    video = any(name in arguments for name in _VIDEO)
    sound = any("audio" in name or "sound" in name for name in arguments)
    if wanted == "sound" and not sound:
        raise _wrong(omni, "no sound", ".gif" if video else ".png")
    if wanted == "video" and not video:
        raise _wrong(omni, "no video", ".wav" if sound else ".png")
    if wanted == "a picture" and sound and not video:
        raise _wrong(omni, "sound", ".wav")
    if wanted == "a picture" and video and frames != 1:
        raise _wrong(omni, "video", ".gif, or pass --frames 1")


def _wrong(omni: Omni, makes: str, choose: str) -> typer.BadParameter:
    return typer.BadParameter(f"{omni.model} makes {makes}; choose {choose}.", param_hint="--out")


# --- writing --------------------------------------------------------------------------------------------


def _write_picture(output: OmniOutput, path: Path, fps: int, model: str) -> None:
    pictures = _pictures(output.images if output.images is not None else output.frames)
    _some(pictures, model, "picture")[0].save(path, format="PNG")


def _write_gif(output: OmniOutput, path: Path, fps: int, model: str) -> None:
    first, *others = _some(_pictures(output.frames), model, "video")
    first.save(path, format="GIF", save_all=True, append_images=others, duration=round(1000 / fps), loop=0)


def _write_mp4(output: OmniOutput, path: Path, fps: int, model: str) -> None:
    from diffusers.utils.export_utils import export_to_video  # imported here: it takes seconds

    export_to_video(_some(_pictures(output.frames), model, "video"), str(path), fps=fps)


def _write_sound(output: OmniOutput, path: Path, fps: int, model: str) -> None:
    import numpy as np  # imported here: --help need not wait for it

    if output.audio is None or output.sample_rate is None:
        lacks = "no sound" if output.audio is None else "sound, but not how many samples a second has"
        raise ModelError(model, f"gave {lacks}.", "Use Omni in Python, and write the file yourself.")
    samples = np.asarray(output.audio[0] if isinstance(output.audio, list) else output.audio, dtype="float32")
    while samples.ndim > 2:  # (prompts, channels, samples)
        samples = samples[0]
    channels = np.atleast_2d(samples)
    whole = np.rint(np.clip(channels, -1.0, 1.0) * 32767).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(channels))
        file.setsampwidth(_SAMPLE)
        file.setframerate(output.sample_rate)
        file.writeframes(whole.T.tobytes())


def _some(pictures: list[Image], model: str, what: str) -> list[Image]:
    if not pictures:
        raise ModelError(model, f"gave no {what}.", "Use Omni in Python, and look at what it gives.")
    return pictures


def _pictures(value: Any) -> list[Image]:
    """The pictures of the first prompt, from the forms in which pipelines give them."""
    from PIL import Image  # imported here: --help need not wait for it

    if value is None or isinstance(value, Image.Image):
        return [] if value is None else [value]
    if isinstance(value, list):
        plain = [one for one in value if isinstance(one, Image.Image)]
        return plain or (_pictures(value[0]) if value else [])
    return [Image.fromarray(one) for one in _pixels(value)]


def _pixels(value: Any) -> Any:
    """An array (..., frames, height, width, 3) of 0..1 as bytes, of the first prompt."""
    import numpy as np  # imported here: --help need not wait for it

    array = np.asarray(value)
    while array.ndim > 4:
        array = array[0]
    return np.rint(np.clip(array, 0.0, 1.0) * 255).astype("uint8")


FORMATS = {
    ".png": Format("a picture", _write_picture),
    ".gif": Format("video", _write_gif),
    ".mp4": Format("video", _write_mp4),
    ".wav": Format("sound", _write_sound),
}
