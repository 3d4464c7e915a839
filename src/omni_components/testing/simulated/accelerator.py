"""`SimulatedAccelerator`: one or more simulated devices, for as long as a ``with`` block lasts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from omni_components.sizes import parse_bytes, parse_speed
from omni_components.testing.simulated.backend import BACKEND, extension
from omni_components.testing.simulated.faults import FaultPoint
from omni_components.testing.simulated.records import AcceleratorStats, RaceReport

if TYPE_CHECKING:
    from types import TracebackType

CopyOrder = Literal["lazy", "eager", "engine"] | Callable[[int], int]
_UNLIMITED = -1
_MOST_DEVICES = 4
_NOT_OPEN = "this SimulatedAccelerator is not open: use it in a with block"
_FAULT_POINTS: tuple[FaultPoint, ...] = ("copy", "allocation", "pin", "step")


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What an accelerator had seen when its block ended."""

    stats: list[AcceleratorStats]
    races: list[RaceReport]
    seconds: float


class SimulatedAccelerator:
    """A torch device backed by host memory, with a capacity, counters, late copies and race reports.

    The first use in a process builds a C++ extension (about half a minute, then cached) and registers the
    device type ``sim``. While a block is open ``torch.accelerator.is_available()`` is true.

    Args:
        capacity: device bytes, as a number or ``"64MiB"``; None for no limit.
        pinned_capacity: host bytes that may be pinned; None for no limit.
        poison: fill free and not yet copied memory with NaN, and check that the host leaves the source of a
            late copy alone. Each costs a pass over the memory: turn it off to measure time.
        devices: how many devices; they are ``sim:0``, ``sim:1`` and so on, each with its own capacity.
        copies: when non-blocking copies run, see `copies`.
        link: speed of the link to the host, ``"25GB/s"``; None for a link that takes no time.
        latency: seconds that each copy takes besides.
    """

    def __init__(
        self,
        capacity: int | str | None = None,
        *,
        pinned_capacity: int | str | None = None,
        poison: bool = True,
        devices: int = 1,
        copies: CopyOrder = "lazy",
        link: float | str | None = None,
        latency: float = 0.0,
    ) -> None:
        self._capacity = _bytes_or_unlimited(capacity)
        self._pinned_capacity = _bytes_or_unlimited(pinned_capacity)
        self._poison = poison
        if not 1 <= devices <= _MOST_DEVICES:
            raise ValueError(f"devices must be from 1 to {_MOST_DEVICES}, not {devices}")
        if latency < 0:
            raise ValueError(f"latency cannot be negative: {latency}")
        self._devices = devices
        self._copies = _checked_order(copies)
        self._speed = 0.0 if link is None else parse_speed(link)
        self._latency = latency
        self._first: int | None = None
        self._device_before = 0
        self._extension: Any = None
        self._final: _Snapshot | None = None
        self._final_first = 0

    def __enter__(self) -> SimulatedAccelerator:
        if self._first is not None:
            raise RuntimeError("this SimulatedAccelerator is already open")
        self._extension = extension()
        self._first = self._extension.open(self._devices)
        self._final = None
        self._configure()
        self._set_order()
        self._device_before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self._first)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        torch.accelerator.set_device_index(self._device_before)
        # What still waits runs now: a source that was overwritten meanwhile is to show in `races`.
        self._extension.drain(self._leader)
        self._final = _Snapshot([self.stats(device) for device in self.devices], self.races, self.seconds)
        self._extension.close(self._leader)
        self._final_first, self._first = self._leader, None

    @property
    def device(self) -> torch.device:
        """The first device."""
        return torch.device(BACKEND, self._leader)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices."""
        return tuple(torch.device(BACKEND, self._leader + offset) for offset in range(self._devices))

    @property
    def capacity(self) -> int | None:
        """Device bytes, per device; None for no limit. Assign ``"64MiB"`` or a number to change it."""
        return None if self._capacity == _UNLIMITED else self._capacity

    @capacity.setter
    def capacity(self, capacity: int | str | None) -> None:
        self._capacity = _bytes_or_unlimited(capacity)
        self._configure()

    @property
    def pinned_capacity(self) -> int | None:
        """Host bytes that may be pinned; None for no limit."""
        return None if self._pinned_capacity == _UNLIMITED else self._pinned_capacity

    @pinned_capacity.setter
    def pinned_capacity(self, capacity: int | str | None) -> None:
        self._pinned_capacity = _bytes_or_unlimited(capacity)
        self._configure()

    def stats(self, device: torch.device | None = None) -> AcceleratorStats:
        """The counters of a device, by default the first one; after the block, as it left them."""
        if self._final is not None:
            return self._final.stats[0 if device is None else device.index - self._final_first]
        index = self._leader if device is None else device.index
        return AcceleratorStats(**self._loaded.stats(index))

    def reset(self) -> None:
        """Sets counters, peak, races and faults back; what is allocated stays allocated."""
        self._loaded.reset(self._leader)

    @property
    def races(self) -> list[RaceReport]:
        """The races found since the last reset."""
        if self._final is not None:
            return list(self._final.races)
        return [RaceReport(**race) for race in self._loaded.races(self._leader)]

    @property
    def seconds(self) -> float:
        """Virtual seconds since the last reset, until all that was issued is done.

        Copies over the link take their bytes divided by its speed, plus the latency; each direction
        carries one copy at a time. Kernels take no time of their own: add it with `spend`.
        """
        return self._final.seconds if self._final is not None else float(self._loaded.seconds(self._leader))

    def spend(self, seconds: float, device: torch.device | None = None) -> None:
        """Keeps the current stream busy for a while in virtual time, as a kernel would."""
        self._loaded.spend(self._leader if device is None else device.index, seconds)

    def expect_races(self) -> list[RaceReport]:
        """Returns the races found so far and forgets them: for tests that cause them on purpose."""
        races = self.races
        self._loaded.clear_races(self._leader)
        return races

    def label(self, target: torch.Tensor | torch.nn.Module, name: str) -> None:
        """Names the bytes that a tensor occupies now; race reports about them carry the name.

        Of a module it names each parameter and buffer on the device, as ``name.layers.0.weight``. A new name
        replaces older ones of the same bytes, and freed memory loses its name.
        """
        if isinstance(target, torch.Tensor):
            self._label_tensor(target, name)
            return
        for path, tensor in [*target.named_parameters(), *target.named_buffers()]:
            if tensor.device.type == BACKEND:
                self._label_tensor(tensor, f"{name}.{path}")

    def _label_tensor(self, tensor: torch.Tensor, name: str) -> None:
        if tensor.numel() == 0:
            return
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self._loaded.label(tensor.data_ptr(), (last + 1) * tensor.element_size(), name)

    def fail(
        self,
        *,
        copy: int | None = None,
        allocation: int | None = None,
        pin: int | None = None,
        step: int | None = None,
        persistent: bool = False,
        error: type[BaseException] | None = None,
    ) -> None:
        """Makes a later operation fail; each kind holds one fault, a new one replaces it.

        Args:
            copy: how many copies over the link still succeed before one raises; 0 fails the next one.
            allocation: the same for device allocations, which raise `torch.OutOfMemoryError`.
            pin: the same for pinned tensors and ``torch.sim.host_register``.
            step: the same for whatever the program asks of the device: kernels, copies, allocations, pins,
                events, waits.
            persistent: from then on every one fails, until `reset`.
            error: raise this exception type instead of the usual one.
        """
        points: dict[FaultPoint, int | None] = {
            "copy": copy,
            "allocation": allocation,
            "pin": pin,
            "step": step,
        }
        for point, after in points.items():
            if after is not None:
                self.fail_at(point, after, persistent=persistent, error=error)

    def fail_at(
        self,
        point: FaultPoint,
        after: int,
        *,
        persistent: bool = False,
        error: type[BaseException] | None = None,
    ) -> None:
        """`fail` for a point given by name.

        Raises:
            ValueError: `after` is negative.
        """
        if after < 0:
            raise ValueError(f"a fault at {point} {after}: the count starts at 0, the next one")
        self._loaded.set_fault(self._leader, point, after, persistent, error)

    def heal(self) -> None:
        """Takes all faults away; counters stay."""
        for point in _FAULT_POINTS:
            self._loaded.set_fault(self._leader, point, -1, False, None)

    def fired(self, point: FaultPoint) -> bool:
        """Whether the fault set last at this point has raised."""
        return bool(self._loaded.fault_hits(self._leader, point))

    @property
    def copies(self) -> CopyOrder:
        """When non-blocking copies run: ``"lazy"``, ``"eager"``, ``"engine"``, or a chooser.

        A lazy copy runs when somebody waits for it, an eager one when it is issued. ``"engine"`` runs them on
        a thread of its own while the host goes on, as a GPU's copy engine does: to measure time. A chooser is called
        before each operation while copies wait on n streams, and answers which of them may run its next
        one: 1 to n, or 0 for none. With Hypothesis: ``lambda n: data.draw(st.integers(0, n))``.
        """
        return self._copies

    @copies.setter
    def copies(self, order: CopyOrder) -> None:
        self._copies = _checked_order(order)
        self._set_order()

    def _set_order(self) -> None:
        if self._first is None:
            return  # takes effect when the block opens
        if callable(self._copies):
            self._extension.set_order(self._first, "drawn", self._copies)
        else:
            self._extension.set_order(self._first, self._copies, None)

    def _configure(self) -> None:
        if self._first is None:
            return  # takes effect when the block opens
        settings = self._extension.Settings(
            capacity=self._capacity,
            pinned_capacity=self._pinned_capacity,
            poison=self._poison,
            bytes_per_second=self._speed,
            latency=self._latency,
        )
        self._extension.configure(self._first, settings)

    @property
    def _loaded(self) -> Any:
        if self._first is None:
            raise RuntimeError(_NOT_OPEN)
        return self._extension

    @property
    def _leader(self) -> int:
        if self._first is None:
            raise RuntimeError(_NOT_OPEN)
        return self._first


def _bytes_or_unlimited(size: int | str | None) -> int:
    return _UNLIMITED if size is None else parse_bytes(size)


def _checked_order(order: CopyOrder) -> CopyOrder:
    if callable(order) or order in ("lazy", "eager", "engine"):
        return order
    raise ValueError(f"copies must be 'lazy', 'eager', 'engine' or a callable, not {order!r}")
