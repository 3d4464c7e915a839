"""ServeSettings: what a service allows, validated once."""

from __future__ import annotations

import codecs
import math
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import PolicyError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """What a service allows; every field has a value that suits one accelerator.

    Attributes:
        name: The model's id for clients; ``None`` takes the model's own, of a folder its last part.
        api_keys: Any of these must be in ``Authorization: Bearer KEY``; none at all lets everybody in.
        hosts: Names that clients may call the service by, in ``Host``; none at all allows any. Addresses always work.
        max_queue: Requests that may wait; one more is answered with 429.
        max_batch: Pictures that are made together. More need more memory for activations.
        max_pictures: Pictures that one request may ask for (``n``).
        max_prompt: Characters of a prompt.
        max_steps: Denoising steps.
        max_pixels: Width times height of a picture.
        max_body: Bytes of a request's body.
        body_timeout: Seconds that a client may take to send it.
        timeout: Seconds for one request, its wait in the queue included.
        idle_release: After so many idle seconds the device's memory is given back; ``None`` keeps it.
        max_watchers: Open streams of events.
        watch_timeout: Seconds after which such a stream ends, so that its client opens another; ``None``: never.
        replica: Names this copy of the service in its answers and metrics, where there are several.
    """

    name: str | None = None
    api_keys: tuple[bytes, ...] = field(default=(), repr=False)
    hosts: tuple[str, ...] = ()
    max_queue: int = 64
    max_batch: int = 8
    max_pictures: int = 10
    max_prompt: int = 4000
    max_steps: int = 100
    max_pixels: int = 2048 * 2048
    max_body: int = 64 * 1024
    body_timeout: float = 10.0
    timeout: float = 300.0
    idle_release: float | None = 60.0
    max_watchers: int = 32
    watch_timeout: float | None = None
    replica: str | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value, most = getattr(self, name), _MOST.get(name, math.inf)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                upto = "up" if most == math.inf else f"to {most}"
                raise PolicyError(name, value, f"a whole number from 1 {upto}")
        for name in ("body_timeout", "timeout", "idle_release", "watch_timeout"):
            value = getattr(self, name)
            if not _is_time(value) and not (name in _MAY_BE_NONE and value is None):
                raise PolicyError(name, value, "seconds, more than 0")
        keys = self.api_keys
        if isinstance(keys, (str, bytes)) or not all(isinstance(one, bytes) and one for one in keys):
            raise PolicyError("api_keys", "(not shown)", "bytes that are not empty, in a tuple")
        object.__setattr__(self, "api_keys", tuple(keys))
        names = self.hosts
        if isinstance(names, (str, bytes)) or not all(isinstance(one, str) and one for one in names):
            raise PolicyError("hosts", names, "names that are not empty, in a tuple")
        object.__setattr__(self, "hosts", tuple(names))
        copy = self.replica  # it goes into a header
        if copy is not None and not (
            isinstance(copy, str) and copy and copy.isascii() and copy.isprintable()
        ):
            raise PolicyError("replica", copy, "printable ASCII, or None")


_COUNTS = (
    "max_queue",
    "max_batch",
    "max_pictures",
    "max_prompt",
    "max_steps",
    "max_pixels",
    "max_body",
    "max_watchers",
)
_MOST = {"max_pictures": 1000, "max_prompt": 100_000, "max_steps": 100_000}  # as the schema has them
_MAY_BE_NONE = ("idle_release", "watch_timeout")


def read_keys(file: Path) -> tuple[bytes, ...]:
    """The API keys in a file, one a line; empty lines and spaces around a key do not count.

    Raises:
        PolicyError: There is none: an empty file must not let everybody in.
        OSError: The file cannot be read.
    """
    text = file.read_bytes().removeprefix(
        codecs.BOM_UTF8
    )  # some editors write it, and no client would send it
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys:
        raise PolicyError("api_key_file", str(file), "a file with one key a line")
    return keys


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
