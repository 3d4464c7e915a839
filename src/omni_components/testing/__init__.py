"""Tools to test offloading without a GPU. Importing this imports no torch, builds and registers nothing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omni_components.testing.simulated import (
        AcceleratorStats,
        FaultTrial,
        RaceReport,
        SimulatedAccelerator,
        SimulatedAcceleratorUnavailable,
        every_fault,
        simulated_accelerator_available,
    )

__all__ = [
    "AcceleratorStats",
    "FaultTrial",
    "RaceReport",
    "SimulatedAccelerator",
    "SimulatedAcceleratorUnavailable",
    "every_fault",
    "simulated_accelerator_available",
]


def __getattr__(name: str) -> Any:
    # Lazy: pytest loads the plugin, and with it this package, in every run of every project.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.simulated"), name)
