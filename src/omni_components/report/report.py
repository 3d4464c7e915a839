"""ResidencyReport: what moved and what it cost, as a record; the table and the pictures are made from it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ..components.component import Component
from ..policy import OffloadPolicy
from ..protocols import MoverFacts
from ..residency.events import History, ResidencyEvent, Totals
from ..residency.ledger import ResidencyLedger

if TYPE_CHECKING:
    from rich.console import Group

    from .thrash import Thrash


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentRow:
    """One component's line in the report.

    Attributes:
        name: Unique in its ledger.
        role: ``encoder``, ``dit``, ``part``, ``vae`` or ``resident``.
        resident: It is on the device all the time.
        bytes: Its device bytes now.
        loads: How often it was loaded.
        evictions: How often it was evicted.
        seconds: Host time of its loads, evictions and roll-backs.
        bytes_in: Bytes over the link towards the device, for loads that succeeded.
        bytes_out: Bytes over the link towards the host, for tensors that changed on the device.
        waited: Seconds that threads waited for its turn.
        prefetched: How often it was copied ahead.
        prefetch_wasted: Of these, how often for nothing: someone else came, or its master changed meanwhile.
        prefetch_failed: How often copying it ahead failed; nobody noticed but the report.
        bytes_wasted: Bytes over the link for what was wasted; they are among ``bytes_in``.
    """

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
    prefetched: int = 0
    prefetch_wasted: int = 0
    prefetch_failed: int = 0
    bytes_wasted: int = 0

    @classmethod
    def of(cls, component: Component, size: int, totals: Totals) -> ComponentRow:
        """The line of a component."""
        return cls(
            name=component.name,
            role=component.role.value,
            resident=component.resident,
            bytes=size,
            **asdict(totals),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, from the call to what it gave; times are ``time.perf_counter()`` seconds, as in the events."""

    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ResidencyReport:
    """What moved, what it cost, and who was there when; prints as a table.

    Attributes:
        device: The execution device.
        rows: One per component.
        peak_bytes: Most device bytes of residents and loaded components at any time.
        predicted_peak: Most that the declarations in its history allowed.
        facts: What the mover adds.
        events: The history, oldest first.
        taken_at: ``time.perf_counter()`` when the report was made.
        notes: What was decided when it was enabled, and what stands in the way of a wish, in words.
        policy: The fields of the policy in force, as plain values; ``None`` is not known.
        requests: Those that ``Omni.generate`` has answered, oldest first; empty is not known.
    """

    device: str
    rows: tuple[ComponentRow, ...]
    peak_bytes: int
    predicted_peak: int
    facts: MoverFacts
    events: tuple[ResidencyEvent, ...]
    taken_at: float
    notes: tuple[str, ...] = ()
    policy: Mapping[str, Any] | None = None
    requests: tuple[Request, ...] = ()

    @classmethod
    def of(
        cls,
        ledger: ResidencyLedger,
        facts: MoverFacts,
        device: str,
        notes: tuple[str, ...] = (),
        policy: OffloadPolicy | None = None,
    ) -> ResidencyReport:
        """The report of a ledger as it is now."""
        history = ledger.history
        return cls(
            device=device,
            rows=tuple(
                ComponentRow.of(one, ledger.size(one.name), history.totals.get(one.name, Totals()))
                for one in ledger.components
            ),
            peak_bytes=history.peak,
            predicted_peak=max(history.predicted, ledger.predicted_peak),
            facts=facts,
            events=tuple(history),
            taken_at=time.perf_counter(),
            notes=notes,
            policy=None if policy is None else plain_policy(policy),
        )

    @classmethod
    def empty(cls, device: str) -> ResidencyReport:
        """The report of a target that keeps no ledger."""
        return cls(
            device=device,
            rows=(),
            peak_bytes=0,
            predicted_peak=0,
            facts=MoverFacts(),
            events=(),
            taken_at=time.perf_counter(),
        )

    def brought_up_to_date(self, history: History) -> ResidencyReport:
        """The same components with what has happened since: for those that are struck out of the ledger."""
        rows = (replace(row, **asdict(history.totals.get(row.name, Totals()))) for row in self.rows)
        return replace(
            self,
            rows=tuple(rows),
            peak_bytes=history.peak,
            events=tuple(history),
            taken_at=time.perf_counter(),
        )

    @property
    def thrash(self) -> tuple[Thrash, ...]:
        """Rivals that took the device from each other again and again, as far back as the history goes."""
        from .thrash import find_thrash  # imported here: a program that never asks need not wait for it

        return find_thrash(self.events)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; ``rows``, ``thrash`` and ``events`` are lists of records."""
        return {
            "device": self.device,
            "rows": [asdict(row) for row in self.rows],
            "peak_bytes": self.peak_bytes,
            "predicted_peak": self.predicted_peak,
            "facts": asdict(self.facts),
            "thrash": [asdict(one) | {"pair": list(one.pair)} for one in self.thrash],
            "events": [asdict(one) | {"kind": str(one.kind), "cause": str(one.cause)} for one in self.events],
            "taken_at": self.taken_at,
            "notes": list(self.notes),
            "policy": None if self.policy is None else dict(self.policy),
            "requests": [asdict(one) for one in self.requests],
        }

    def __repr__(self) -> str:  # the dataclass's own would print the whole history
        return f"<ResidencyReport of {len(self.rows)} components on {self.device}, {len(self.events)} events>"

    def __str__(self) -> str:
        from .table import as_text  # imported here, as above

        return as_text(self)

    def __rich__(self) -> Group:
        from .table import as_rich  # imported here, as above

        return as_rich(self)


def plain_policy(policy: OffloadPolicy) -> dict[str, Any]:
    """A policy's fields as JSON has them."""
    values = {one.name: getattr(policy, one.name) for one in fields(policy)}
    if policy.offload_components is not None:
        values["offload_components"] = sorted(policy.offload_components)
    if not isinstance(policy.prefetch, bool):
        values["prefetch"] = list(policy.prefetch)
    values["entry_points"] = {name: list(methods) for name, methods in policy.entry_points.items()}
    return values
