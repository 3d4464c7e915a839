"""Amounts as people write them."""

from __future__ import annotations

import pytest

from omni_components.sizes import parse_bytes, parse_speed


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("64MiB", 64 << 20),
        (" 1.5 GiB ", 3 << 29),
        ("2GB", 2 * 10**9),
        ("512", 512),
        (512, 512),
        ("9007199254740993", 9007199254740993),  # 2**53 + 1: no floating-point number
        ("0.1kb", 100),
    ],
)
def test_a_size_is_exact_to_the_byte(text: int | str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "MiB", "1e9", "-1", "64 parsecs", "9" * 400, f"{'9' * 400}GiB", -1, 1 << 63]
)
def test_what_is_no_size_is_told(text: int | str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["25GB", "25GB/h", 0, -1.0, "0GB/s"])
def test_what_is_no_speed_is_told(text: float | str) -> None:
    with pytest.raises(ValueError, match="speed"):
        parse_speed(text)
