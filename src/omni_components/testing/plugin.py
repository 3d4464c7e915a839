"""The pytest plugin of ``omni_components.testing``: the fixture `simulated_accelerator`.

pytest loads this file in every project that has the package installed, so it imports no torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_components.testing.simulated import SimulatedAccelerator


@pytest.fixture
def simulated_accelerator() -> Iterator[SimulatedAccelerator]:
    """A fresh `SimulatedAccelerator` without limits; the test fails if it leaves a race unexplained.

    Set its limits with ``sim.capacity = "64MiB"``. Races that a test causes on purpose it takes with
    ``sim.expect_races()``. Where no C++ compiler is, the test is skipped, or fails under ``CI``.
    """
    require_simulated_accelerator()
    from omni_components.testing.simulated import SimulatedAccelerator

    with SimulatedAccelerator() as accelerator:
        yield accelerator
        races = accelerator.races
    if races:
        pytest.fail("\n".join(f"race: {race}" for race in races), pytrace=False)


def require_simulated_accelerator() -> None:
    """Skips the running test where the simulated accelerator cannot be built; under ``CI`` fails it."""
    from omni_components.testing.simulated.build import unavailable_reason

    reason = unavailable_reason()
    if reason is None:
        return
    text = f"the simulated accelerator is not available: {reason}"
    if os.environ.get("CI"):
        pytest.fail(f"{text} (a CI run may not skip it)", pytrace=False)
    pytest.skip(text)
