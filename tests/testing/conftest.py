from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omni_components.testing import SimulatedAccelerator


@pytest.fixture
def sim(simulated_accelerator: SimulatedAccelerator) -> SimulatedAccelerator:
    return simulated_accelerator


@pytest.fixture
def side(sim: SimulatedAccelerator) -> torch.Stream:
    return torch.Stream(device=sim.device)


@pytest.fixture
def run_python() -> Callable[..., str]:
    def run(code: str, **environment: str) -> str:
        command = [sys.executable, "-W", "error", "-c", code]
        environ = {**os.environ, **environment}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def one_thread() -> Iterator[None]:
    # Tiny kernels on many threads spend their time waiting for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
