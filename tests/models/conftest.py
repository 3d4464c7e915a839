from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.helpers.fixtures import seeded, sim

__all__ = ["one_thread", "seeded", "sim"]


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """The tensors are too small to share out, and on a busy machine waiting threads cost ten times more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
