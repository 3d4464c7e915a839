"""The plan: a dry run of one request under each policy, with the real conflict graph and the real ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from ..attach.inventory import divide, record
from ..components.component import Component, Role, conflict
from ..components.discovery import SHARED, Declaration, declares_components, discover
from ..components.omni_models import recipe_for
from ..components.recipes import from_diffusers
from ..components.tensors import Extent, Slot, reach, refuse_unmovable
from ..errors import DeclarationError, format_bytes
from ..policy import HEADROOM, OffloadPolicy
from ..residency.ledger import ResidencyLedger
from ..transfer.masters import pages
from ..transfer.staging import STAGING_BYTES
from .paper import PaperMover, Papers, papers_of

LINK = 25e9
"""Bytes per second of PCIe 4.0 with 16 lanes, as far as one large copy from pinned memory gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedComponent:
    """A component of a plan.

    Attributes:
        name: As in the ledger.
        role: What it is for.
        bytes: Device bytes, each storage once, every group of tensors aligned.
        link_bytes: Bytes of one load.
        resident: It never leaves.
        rivals: Those that are never on the device with it.
    """

    name: str
    role: str
    bytes: int
    link_bytes: int
    resident: bool
    rivals: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What one policy costs; bytes of weights are exact, activations an estimate.

    Attributes:
        name: For people.
        arguments: For ``offload``; ``None`` where there is nothing to offload.
        device_peak: Device bytes of weights, at most, during one request.
        host_bytes: Host bytes of weights while it runs.
        pinned_bytes: Of these, pinned, whole pages counted.
        loads: How often components are loaded in one request.
        link_bytes: Bytes over the link in one request.
        link_seconds: Seconds for them at the link's speed.
        fits: Whether it fits into the memory that was given; ``None`` if none was.
        reason: Why it does not.
    """

    name: str
    arguments: Mapping[str, Any] | None
    device_peak: int
    host_bytes: int
    pinned_bytes: int
    loads: int
    link_bytes: int
    link_seconds: float
    fits: bool | None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The memory there is, and the link; ``None`` is not limited.

    Attributes:
        device: Bytes of the accelerator.
        host: Bytes of the host.
        link: Bytes per second from host to device.
        activations: Device bytes that computing takes; by default a share of the device.
    """

    device: int | None = None
    host: int | None = None
    link: float = LINK
    activations: int | None = None

    def for_activations(self) -> int:
        """The bytes, or the estimate."""
        if self.activations is not None:
            return self.activations
        return int(HEADROOM * self.device) if self.device is not None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What offload would cost for one model.

    Attributes:
        model: What was planned for.
        components: Under the usual policy.
        options: Every policy, the cheapest first.
        best: The name of the cheapest one that fits, if any does.
        room: What it was planned into.
        sources: Per component, where its shapes come from.
        skipped: What could not be planned for, with the reason.
    """

    model: str
    components: tuple[PlannedComponent, ...]
    options: tuple[Option, ...]
    best: str | None
    room: Room
    sources: Mapping[str, str]
    skipped: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as for JSON."""
        return {**asdict(self), "activations": self.room.for_activations()}


def plan_for(
    target: Any,
    room: Room | None = None,
    *,
    model: str = "",
    sources: Mapping[str, str] | None = None,
    skipped: Mapping[str, str] | None = None,
) -> Plan:
    """Plan for a pipeline or model; its tensors may be on ``meta``, and none is moved.

    Raises:
        DeclarationError: What it declares cannot be carried out.
    """
    room = room or Room()
    usual = _Dry(target, OffloadPolicy())
    options = [one for one in _options(target, usual, room) if one is not None]
    best = next((one.name for one in options if one.fits), None)
    return Plan(
        model=model or type(target).__name__,
        components=usual.planned(),
        options=tuple(options),
        best=best,
        room=room,
        sources=dict(sources or {}),
        skipped=dict(skipped or {}),
    )


class _Dry:
    """A target under one policy: its components in a ledger of its own, over a mover of numbers."""

    def __init__(self, target: Any, policy: OffloadPolicy) -> None:
        declaration = _declaration(target, policy)
        self.runs = divide(declaration.found, SHARED, _refuse_unmovable)
        self.components = [record(one, self.runs[id(one)]) for one in declaration.found]
        self.papers: dict[str, Papers] = {
            one.name: papers_of([_bytes(run) for run in self.runs[id(one)]], one.resident)
            for one in declaration.found
        }
        payload = {name: one.link_bytes for name, one in self.papers.items()}
        self._ledger = ResidencyLedger(PaperMover(payload), policy, owner=declaration.owner)

        def rivals(one: Component, other: Component) -> bool:
            exclusive = policy.exclusive_encoders
            return conflict(one, other, exclusive_encoders=exclusive, everything=declaration.everything)

        self._ledger.admit(self.components, rivals)

    @property
    def swapped(self) -> list[Component]:
        """Those that take turns, in the order in which a request uses them."""
        return sorted((one for one in self.components if not one.resident), key=lambda one: _STAGE[one.role])

    @cached_property  # a second one would find on the device what the first left there
    def request(self) -> tuple[int, int, int]:
        """The first request: the peak, the loads, and the link bytes."""
        for one in self.components:
            if one.resident:
                self._ledger.load(one.name)
        start = len(tuple(self._ledger.history))
        peak = self._ledger.device_bytes
        for one in self.swapped:
            with self._ledger.scope(one.name):
                peak = max(peak, self._ledger.device_bytes)
        events = [event for event in tuple(self._ledger.history)[start:] if event.kind == "load"]
        self._ledger.check()
        return peak, len(events), sum(event.bytes for event in events)

    def planned(self) -> tuple[PlannedComponent, ...]:
        """For the table."""
        return tuple(
            PlannedComponent(
                name=one.name,
                role=str(one.role),
                bytes=one.bytes,
                link_bytes=self.papers[one.name].link_bytes,
                resident=one.resident,
                rivals=self._ledger.rivals(one.name),
            )
            for one in self.components
        )


_STAGE = {Role.ENCODER: 0, Role.DIT: 1, Role.PART: 1, Role.VAE: 2, Role.RESIDENT: 3}


def _declaration(target: Any, policy: OffloadPolicy) -> Declaration:
    recipe = recipe_for(target)
    if recipe is None and not declares_components(target) and hasattr(target, "model_cpu_offload_seq"):
        return from_diffusers(target, policy)
    return discover(target, policy, recipe)


def _refuse_unmovable(component: str, slot: Slot) -> None:
    if slot.tensor is not None and not slot.tensor.is_meta:
        refuse_unmovable(component, slot)  # one on meta will be checked when it is there


def _bytes(run: Sequence[Extent]) -> int:
    low, high = reach(run)
    return high - low


# --- the policies -----------------------------------------------------------------------------------------


def _options(target: Any, usual: _Dry, room: Room) -> list[Option | None]:
    weights = sum(one.bytes for one in usual.components)
    return [
        _option("all resident", None, room, peak=weights, host=0, pinned=0),
        _swapping("model level", {}, usual, room),
        _exclusive(target, usual, room),
        _swapping("mapped", {"masters": "mapped"}, usual, room, mapped=True),
    ]


def _exclusive(target: Any, usual: _Dry, room: Room) -> Option | None:
    try:
        dry = _Dry(target, OffloadPolicy(vae="exclusive"))
    except DeclarationError:
        return None
    return _swapping("exclusive VAE", {"vae": "exclusive"}, dry, room) if _has_vae(dry) else None


def _has_vae(dry: _Dry) -> bool:
    return any(one.role is Role.VAE for one in dry.components)


def _swapping(
    name: str, arguments: Mapping[str, Any], dry: _Dry, room: Room, *, mapped: bool = False
) -> Option:
    peak, loads, link = dry.request
    if mapped:  # in the files' pages, which the system may take back; two slabs carry them
        largest = max((one.bytes for one in dry.components), default=0)
        pinned = host = 2 * pages(min(STAGING_BYTES, largest))
    else:
        pinned = sum(pages(one) for each in dry.swapped for one in dry.papers[each.name].slabs)
        host = pinned + sum(dry.papers[one.name].link_bytes for one in dry.components if one.resident)
    return _option(name, arguments, room, peak=peak, host=host, pinned=pinned, loads=loads, link=link)


def _option(
    name: str,
    arguments: Mapping[str, Any] | None,
    room: Room,
    *,
    peak: int,
    host: int,
    pinned: int,
    loads: int = 0,
    link: int = 0,
) -> Option:
    reasons = []
    needed = peak + room.for_activations()
    if room.device is not None and needed > room.device:
        told = f"{format_bytes(peak)} of weights and {format_bytes(room.for_activations())} for activations"
        reasons.append(f"{told} are more than {format_bytes(room.device)} of the device")
    if room.host is not None and host > room.host:
        reasons.append(f"{format_bytes(host)} on the host are more than {format_bytes(room.host)}")
    limited = room.device is not None or room.host is not None
    return Option(
        name=name,
        arguments=arguments,
        device_peak=peak,
        host_bytes=host,
        pinned_bytes=pinned,
        loads=loads,
        link_bytes=link,
        link_seconds=link / room.link,
        fits=not reasons if limited else None,
        reason="; ".join(reasons),
    )
