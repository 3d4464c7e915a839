from __future__ import annotations

from collections.abc import Iterator

import pytest

from omni_components import Omni
from tests.helpers.fixtures import seeded, sim
from tests.serve.running import Running, demo, running

__all__ = ["seeded", "sim"]


@pytest.fixture(scope="package")
def omni() -> Iterator[Omni]:
    """The demo on the CPU, its components taking turns."""
    with demo() as made:
        yield made


@pytest.fixture(scope="package")
def up(omni: Omni) -> Iterator[Running]:
    with running(omni) as made:
        yield made


@pytest.fixture
def service(up: Running) -> Iterator[Running]:
    """A service of the demo behind a real server, with the usual settings; it is whole after the test."""
    yield up
    up.check()
