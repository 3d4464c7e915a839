"""Fixtures that several test folders share; each folder's ``conftest.py`` imports them."""

from __future__ import annotations

import pytest
import torch

from omni_components.testing import SimulatedAccelerator


@pytest.fixture
def sim(simulated_accelerator: SimulatedAccelerator) -> SimulatedAccelerator:
    """The simulated accelerator under a short name; set ``sim.capacity`` to limit it."""
    return simulated_accelerator


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same random numbers each time."""
    torch.manual_seed(0)
