"""A simulated accelerator: the torch device type ``sim``, whose memory is host memory."""

from omni_components.testing.simulated.accelerator import SimulatedAccelerator
from omni_components.testing.simulated.build import unavailable_reason as simulated_accelerator_available
from omni_components.testing.simulated.errors import SimulatedAcceleratorUnavailable
from omni_components.testing.simulated.faults import FaultTrial, every_fault
from omni_components.testing.simulated.records import AcceleratorStats, RaceReport

__all__ = [
    "AcceleratorStats",
    "FaultTrial",
    "RaceReport",
    "SimulatedAccelerator",
    "SimulatedAcceleratorUnavailable",
    "every_fault",
    "simulated_accelerator_available",
]
