"""Amounts written as people write them: ``"64MiB"``, ``"25GB/s"``."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_MOST = (1 << 63) - 1
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(size: int | str) -> int:
    """Turns ``"64MiB"``, ``"1.5GiB"`` or a number of bytes into a number of bytes.

    Raises:
        ValueError: the text is not a number with a unit of bytes, or the size is negative.
    """
    if isinstance(size, str):
        match = _AMOUNT.fullmatch(size)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ValueError(f"{size!r} is not a size; write a number of bytes, or '64MiB', '1.5GiB', '2GB'")
        size = int(Fraction(match[1]) * unit)
    if size > _MOST:
        raise ValueError("a size of more bytes than a machine can address; write one such as '24GiB'")
    if size < 0:
        raise ValueError(f"a size cannot be negative: {size}")
    return size


def parse_speed(speed: float | str) -> float:
    """Turns ``"25GB/s"`` or a number of bytes per second into bytes per second.

    Raises:
        ValueError: the text is not a size per second, or the speed is not positive.
    """
    if isinstance(speed, str):
        size, _, per = speed.partition("/")
        if per.strip() != "s":
            raise ValueError(f"{speed!r} is not a speed; write '25GB/s'")
        speed = float(parse_bytes(size))
    if speed <= 0:
        raise ValueError(f"a link needs a positive speed, not {speed}")
    return speed
