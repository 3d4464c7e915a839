"""Tools to test offloading without a GPU. Importing this imports no torch, builds and registers nothing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .check import CheckedComponent, CheckFinding, CheckReport, OffloadCheckError, check_offload
    from .machine import PipelineMachine, RecordingMachine, ResidencyMachine
    from .model import Model
    from .pipelines import PipelineShape
    from .simulated import (
        AcceleratorStats,
        FaultTrial,
        RaceReport,
        SimulatedAccelerator,
        SimulatedAcceleratorUnavailable,
        every_fault,
        simulated_accelerator_available,
    )
    from .strategies import (
        ComponentSet,
        Phase,
        component_sets,
        faults,
        pipeline_shapes,
        programs,
        tiny_modules,
    )

# Lazy: pytest loads the plugin, and with it this package, in every run of every project.
_HOMES = {
    "AcceleratorStats": "simulated",
    "CheckFinding": "check",
    "CheckReport": "check",
    "CheckedComponent": "check",
    "ComponentSet": "strategies",
    "FaultTrial": "simulated",
    "Model": "model",
    "OffloadCheckError": "check",
    "Phase": "strategies",
    "PipelineMachine": "machine",
    "PipelineShape": "pipelines",
    "RaceReport": "simulated",
    "RecordingMachine": "machine",
    "ResidencyMachine": "machine",
    "SimulatedAccelerator": "simulated",
    "SimulatedAcceleratorUnavailable": "simulated",
    "check_offload": "check",
    "component_sets": "strategies",
    "every_fault": "simulated",
    "faults": "strategies",
    "pipeline_shapes": "strategies",
    "programs": "strategies",
    "simulated_accelerator_available": "simulated",
    "tiny_modules": "strategies",
}
__all__ = [
    "AcceleratorStats",
    "CheckFinding",
    "CheckReport",
    "CheckedComponent",
    "ComponentSet",
    "FaultTrial",
    "Model",
    "OffloadCheckError",
    "Phase",
    "PipelineMachine",
    "PipelineShape",
    "RaceReport",
    "RecordingMachine",
    "ResidencyMachine",
    "SimulatedAccelerator",
    "SimulatedAcceleratorUnavailable",
    "check_offload",
    "component_sets",
    "every_fault",
    "faults",
    "pipeline_shapes",
    "programs",
    "simulated_accelerator_available",
    "tiny_modules",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its home."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
