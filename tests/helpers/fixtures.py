"""Fixtures that several test folders share; each folder's ``conftest.py`` imports them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from omni_components.testing import SimulatedAccelerator


@pytest.fixture
def sim(simulated_accelerator: SimulatedAccelerator) -> SimulatedAccelerator:
    """The simulated accelerator under a short name; set ``sim.capacity`` to limit it."""
    return simulated_accelerator


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Every test draws the same random numbers each time, and computes its tiny layers in one thread.

    Two threads would spend their time waiting for each other on a busy machine.
    """
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
