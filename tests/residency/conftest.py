"""What the tests of this folder have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def _one_thread_for_tiny_tensors() -> Iterator[None]:
    """Waking helpers for a matrix of 24 by 24 takes a hundred times as long as multiplying it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
