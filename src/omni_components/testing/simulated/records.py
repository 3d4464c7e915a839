"""What the simulated accelerator reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorStats:
    """Counters of one simulated device, in bytes and times.

    Attributes:
        allocated: live device bytes, each block rounded up to 512 as CUDA's caching allocator does.
        peak: the most `allocated` has been since the last reset.
        allocations: blocks asked for.
        h2d_bytes: bytes copied from the host to the device.
        h2d_copies: copies from the host to the device.
        d2h_bytes: bytes copied from the device to the host; reading a scalar does not count.
        d2h_copies: copies from the device to the host.
        pinned: host bytes held pinned: powers of two for pinned tensors, whole pages for registered memory.
        syncs: explicit waits of the host for a stream, an event or the device.
        host_waits: every time the host waited: `syncs`, blocking copies, and reads of a scalar.
        flushes: calls of ``torch.accelerator.empty_cache()`` or ``torch.sim.empty_cache()``.
    """

    allocated: int
    peak: int
    allocations: int
    h2d_bytes: int
    h2d_copies: int
    d2h_bytes: int
    d2h_copies: int
    pinned: int
    syncs: int
    host_waits: int
    flushes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceReport:
    """Two operations on the same bytes with no wait between them, or one through a stale reference to them.

    Attributes:
        kind: which hazard it is.
        first: the operation issued first.
        first_stream: the stream it was issued on.
        second: the operation that did not wait for it.
        second_stream: the stream of the second one.
        label: the tensor's name, where `SimulatedAccelerator.label` gave it one; else empty.
        where: the file and line that issued the second operation, where known; else empty.
        address: the first of the bytes.
        bytes: how many bytes.
    """

    kind: str
    first: str
    first_stream: str
    second: str
    second_stream: str
    label: str
    where: str
    address: int
    bytes: int

    @property
    def missing_wait(self) -> str:
        """The wait that would have ordered the two; none helps a stale reference."""
        if self.first == "revoke":
            return ""
        if self.second_stream == "host":
            return f"the host must wait for {self.first_stream}"
        return f"{self.second_stream} must wait for {self.first_stream} before {self.second}"

    def __str__(self) -> str:
        name = f" of {self.label}" if self.label else ""
        where = f" ({self.where})" if self.where else ""
        if self.first == "revoke":
            return (
                f"{self.kind}: {self.second} on {self.second_stream}{where} touches {self.bytes} bytes{name} at "
                f"{self.address:#x} that belong to somebody else by now; take the tensor from its module again"
            )
        return (
            f"{self.kind}: {self.second} on {self.second_stream}{where} touches {self.bytes} bytes{name} at "
            f"{self.address:#x} that {self.first} on {self.first_stream} may still be using; "
            f"missing wait: {self.missing_wait}"
        )
