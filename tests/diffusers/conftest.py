"""What the tests of this folder have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.helpers.fixtures import seeded, sim

__all__ = ["seeded", "sim"]


@pytest.fixture(autouse=True, scope="package")
def _one_thread_for_tiny_tensors() -> Iterator[None]:
    """For fixtures that outlive a test, too: two threads on a busy machine take five times as long as one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
