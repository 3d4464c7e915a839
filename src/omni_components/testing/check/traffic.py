"""What one request moved, against the formula: each swapped component that is used, once; nothing back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ...components.component import Component
from ...errors import format_bytes
from ...report.thrash import find_thrash
from ...residency.events import EventKind, ResidencyEvent
from ..simulated.accelerator import SimulatedAccelerator
from .calls import NotedCall
from .records import CheckedComponent, CheckFinding, CheckReport


@dataclass
class Measured:
    """One request of an offloaded target, from a released device."""

    components: tuple[Component, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    payloads: dict[str, int] = field(default_factory=dict)
    events: tuple[ResidencyEvent, ...] = ()
    peak: int = 0
    weight_peak: int = 0
    predicted: int = 0

    @contextmanager
    def watching(self, handle: Any, sim: SimulatedAccelerator) -> Iterator[None]:
        """Measure the request inside the block."""
        ledger = handle.ledger
        self.components = ledger.components
        self.predicted = ledger.predicted_peak
        self.payloads = {one.name: _payload(ledger, one.name) for one in self.components}
        before = len(tuple(ledger.history))
        torch.accelerator.reset_peak_memory_stats(sim.device)
        yield
        self.events = tuple(ledger.history)[before:]
        self.sizes = {one.name: ledger.size(one.name) for one in self.components}
        self.peak = sim.stats().peak
        self.weight_peak = ledger.history.peak

    def report(self, calls: Mapping[str, list[NotedCall]]) -> CheckReport:
        """Its numbers."""
        rows = [
            CheckedComponent(
                name=one.name,
                role=one.role.value,
                resident=one.resident,
                bytes=self.sizes.get(one.name, one.bytes),
                loads=len(self._of(EventKind.LOAD, one.name)),
                bytes_in=sum(event.bytes for event in self._of(EventKind.LOAD, one.name)),
                calls=len(calls.get(one.name, ())),
            )
            for one in self.components
        ]
        return CheckReport(
            target="",
            components=tuple(rows),
            bytes_in=sum(row.bytes_in for row in rows),
            expected_bytes=sum(row.bytes_in // row.loads for row in rows if row.loads),
            bytes_out=sum(event.bytes for event in self.events if event.kind is EventKind.WRITE_BACK),
            peak_bytes=self.peak,
            weight_peak=self.weight_peak,
            predicted_peak=self.predicted,
        )

    def findings(
        self, *, loads: Mapping[str, int], written: Collection[str], capacity: int | None, lenient: bool
    ) -> Iterator[CheckFinding]:
        """Where the numbers are not those of the formula."""
        for one in self.components:
            arrived = self._of(EventKind.LOAD, one.name)
            if len(arrived) > loads.get(one.name, 1) and not lenient:
                yield self._thrash(one, arrived)
            low, high = self.payloads[one.name], self.sizes.get(one.name, one.bytes)
            for event in arrived[:1]:
                if not low <= event.bytes <= high:
                    words = f"its tensors have {format_bytes(low)}, with gaps {format_bytes(high)}"
                    yield CheckFinding(kind="traffic", component=one.name, bytes=event.bytes, detail=words)
            back = sum(event.bytes for event in self._of(EventKind.WRITE_BACK, one.name))
            if back and not written:
                yield CheckFinding(kind="write_back", component=one.name, bytes=back)
        if self.weight_peak > self.predicted:
            words = f"the declaration allows {format_bytes(self.predicted)}"
            yield CheckFinding(kind="peak", bytes=self.weight_peak, detail=words)
        if capacity is not None and self.peak > capacity:
            yield CheckFinding(kind="capacity", bytes=self.peak, detail=self._over(capacity))

    def notes(self, written: Collection[str], *, lenient: bool) -> Iterator[str]:
        """What costs more than it might, and is nobody's mistake."""
        for one in self.components:
            arrived = self._of(EventKind.LOAD, one.name)
            if len(arrived) > 1 and lenient:
                more = sum(event.bytes for event in arrived[1:])
                times = f"{len(arrived)} times in one request"
                yield f"{one.name!r} was loaded {times}, {format_bytes(more)} more than once"
            back = sum(event.bytes for event in self._of(EventKind.WRITE_BACK, one.name))
            if back and written:
                yield f"{one.name!r} sent {format_bytes(back)} home: a request writes to its tensors"

    def _thrash(self, one: Component, arrived: list[ResidencyEvent]) -> CheckFinding:
        rivals = sorted(
            {name for pair in find_thrash(self.events) for name in pair.pair if one.name in pair.pair}
        )
        others = [repr(name) for name in rivals if name != one.name]
        taken = f", taking turns with {', '.join(others)}" if others else ""
        more = sum(event.bytes for event in arrived[1:])
        return CheckFinding(
            kind="thrash", component=one.name, bytes=more, detail=f"{len(arrived)} times{taken}"
        )

    def _over(self, capacity: int) -> str:
        largest = max((one for one in self.components), key=lambda one: self.sizes[one.name])
        return (
            f"the capacity is {format_bytes(capacity)}. Of it weights take {format_bytes(self.weight_peak)}, the "
            f"largest component {largest.name!r} {format_bytes(self.sizes[largest.name])}"
        )

    def _of(self, kind: EventKind, name: str) -> list[ResidencyEvent]:
        return [event for event in self.events if event.kind is kind and event.component == name]


def _payload(ledger: Any, name: str) -> int:
    """Bytes of a component's tensors, each storage once: counted from the tensors, not from the layout."""
    places: dict[int, set[tuple[int, int]]] = {}
    for member in ledger.mover.cargo(name).members():
        home = member.home
        if home.numel():
            last = sum((size - 1) * step for size, step in zip(home.shape, home.stride(), strict=True))
            low = home.data_ptr()
            high = low + (last + 1) * home.element_size()
            places.setdefault(home.untyped_storage()._cdata, set()).add((low, high))
    return sum(_covered(ranges) for ranges in places.values())


def _covered(ranges: set[tuple[int, int]]) -> int:
    total, end = 0, 0
    for low, high in sorted(ranges):
        total += max(0, high - max(low, end))
        end = max(end, high)
    return total
