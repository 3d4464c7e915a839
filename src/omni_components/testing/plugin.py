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


def pytest_configure(config: pytest.Config) -> None:
    """Declares the markers."""
    config.addinivalue_line(
        "markers", "max_device_memory(size): the capacity of `simulated_accelerator`, such as '64MiB'"
    )


@pytest.fixture
def simulated_accelerator(request: pytest.FixtureRequest) -> Iterator[SimulatedAccelerator]:
    """A fresh `SimulatedAccelerator`; the test fails if it leaves a race unexplained.

    It has no limits unless the test is marked ``@pytest.mark.max_device_memory("64MiB")`` or assigns
    ``simulated_accelerator.capacity``. Races that a test causes on purpose it takes with
    ``sim.expect_races()``. Where no C++ compiler is, the test is skipped, or fails under ``CI``.
    """
    require_simulated_accelerator()
    from omni_components.testing.simulated import SimulatedAccelerator

    marker = request.node.get_closest_marker("max_device_memory")
    with SimulatedAccelerator(marker.args[0] if marker else None) as accelerator:
        yield accelerator
    if accelerator.races:
        pytest.fail("\n".join(f"race: {race}" for race in accelerator.races), pytrace=False)


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
