"""A simulated accelerator: the torch device type ``sim``, whose memory is host memory.

What it does as an accelerator does:

* tensors on it do not mix with tensors on the host; copies count, by direction and by byte;
* memory has a capacity, blocks are rounded up to 512 bytes, freed ones are cached and poisoned with NaN;
* pinned memory is rounded up to powers of two, registered memory to pages, and both can be limited;
* streams and events order work; non-blocking copies of pinned memory run late, and whatever somebody forgot to
  wait for is reported as a race, by happens-before: whether or not it went wrong in this run;
* a link with a speed and a latency takes virtual time, the same on every machine;
* allocations, copies, pins and every other call can be made to fail at any point.

Kernels are the CPU's own, run when they are issued, so results equal the CPU's bit for bit. Known differences:
kernels take no virtual time unless told so; freed pinned memory goes back at once instead of being cached; memory
that a kernel needs only while it runs is not counted; races on strided tensors are judged by the range from the
first element to the last; sparse and quantized tensors are not simulated; training works if the device is
registered before the process runs its first backward pass.

Outside a block torch finds no accelerator: ``torch.accelerator.is_available()`` is false and pinning raises.
``torch.accelerator.current_accelerator()`` names ``sim`` once it is registered, unless asked with
``check_available=True``.
"""

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
