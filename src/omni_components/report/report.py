"""ResidencyReport: what moved and what it cost, as a record; the table and the pictures are made from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..protocols import MoverFacts
from ..residency.events import ResidencyEvent, Totals
from ..residency.ledger import ResidencyLedger


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentRow:
    """One component's line in the report; bytes and seconds are totals."""

    name: str
    role: str
    resident: bool
    bytes: int
    loads: int
    evictions: int
    seconds: float
    bytes_in: int
    bytes_out: int
    waited: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyReport:
    """What moved, what it cost, and who was there when.

    Attributes:
        device: The execution device.
        rows: One per component.
        peak_bytes: Most device bytes of residents and loaded components at any time.
        predicted_peak: Most that the declaration allows.
        facts: What the mover adds.
        events: The history, oldest first.
    """

    device: str
    rows: tuple[ComponentRow, ...]
    peak_bytes: int
    predicted_peak: int
    facts: MoverFacts
    events: tuple[ResidencyEvent, ...]

    @classmethod
    def of(cls, ledger: ResidencyLedger, facts: MoverFacts, device: str) -> ResidencyReport:
        """The report of a ledger as it is now."""
        history = ledger.history
        rows = []
        for one in ledger.components:
            totals = history.totals.get(one.name, Totals())
            rows.append(
                ComponentRow(
                    name=one.name,
                    role=one.role.value,
                    resident=one.resident,
                    bytes=ledger.size(one.name),
                    loads=totals.loads,
                    evictions=totals.evictions,
                    seconds=totals.seconds,
                    bytes_in=totals.bytes_in,
                    bytes_out=totals.bytes_out,
                    waited=totals.waited,
                )
            )
        return cls(
            device=device,
            rows=tuple(rows),
            peak_bytes=history.peak,
            predicted_peak=ledger.predicted_peak,
            facts=facts,
            events=tuple(history),
        )

    @classmethod
    def empty(cls, device: str) -> ResidencyReport:
        """The report of a target that keeps no ledger."""
        return cls(device=device, rows=(), peak_bytes=0, predicted_peak=0, facts=MoverFacts(), events=())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)
