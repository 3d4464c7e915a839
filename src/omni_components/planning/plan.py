"""The plan: a dry run of one request under each policy, with the real conflict graph and the real ledger."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..attach.inventory import divide, record
from ..components.component import Component, Role, conflict
from ..components.declaration import SHARED, Declaration
from ..components.discovery import declares_components, discover
from ..components.omni_models import recipe_for
from ..components.recipes import from_diffusers
from ..components.unmovable import refuse_unmovable_if_real
from ..errors import DeclarationError, format_bytes
from ..policy import HEADROOM, OffloadPolicy
from ..residency.ledger import ResidencyLedger
from ..transfer.device import moving
from ..transfer.hostmemory import FileMappings
from .paper import PaperCargo, PaperMover, Sheet, sheets_here, sheets_on
from .skeleton import Origin

LINK = 25e9
"""Bytes per second of PCIe 4.0 with 16 lanes, as far as one large copy from pinned memory gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedComponent:
    """A component of a plan.

    Attributes:
        name: As in the ledger.
        role: What it is for.
        bytes: Device bytes, each storage once, every group of tensors aligned.
        link_bytes: Bytes of one load; of a resident, when offload is enabled.
        first_link_bytes: Bytes of the first load, which may come from the pages of files.
        resident: It never leaves.
        rivals: Those that are never on the device with it.
    """

    name: str
    role: str
    bytes: int
    link_bytes: int
    first_link_bytes: int
    resident: bool
    rivals: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What one request costs in which each component that takes turns is used once.

    Attributes:
        loads: How often components are loaded.
        link_bytes: Bytes over the link for them.
        link_seconds: Seconds for these at the link's speed.
        pinned_bytes: Host bytes that are pinned when it ends, whole pages counted.
    """

    loads: int = 0
    link_bytes: int = 0
    link_seconds: float = 0.0
    pinned_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What one policy costs; bytes of weights are exact, activations an estimate.

    ``loads``, ``link_bytes``, ``link_seconds`` and ``pinned_bytes`` are those of each request but the first.

    Attributes:
        name: For people.
        arguments: For ``offload``; ``None`` where there is nothing to offload.
        device_peak: Device bytes of weights, at most, during any request.
        host_bytes: Host bytes of weights, at most, from the first request on; pages of files do not count, as the
            system may take them back.
        pinned_bytes: Of these, pinned when a request ends, whole pages counted.
        loads: How often components are loaded in one request.
        link_bytes: Bytes over the link in one request.
        link_seconds: Seconds for them at the link's speed.
        first: The first request: with ``masters="auto"`` its weights come from the pages of files, where they are.
        resident_link_bytes: Bytes over the link when offload is enabled, for what stays on the device.
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
    first: Request = field(default_factory=Request)
    resident_link_bytes: int = 0


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
    origins: Mapping[int, Origin] | None = None,
    sources: Mapping[str, str] | None = None,
    skipped: Mapping[str, str] | None = None,
) -> Plan:
    """Plan for a pipeline or model; none of its tensors is moved or read.

    Args:
        target: The pipeline or model; its tensors may be on ``meta``.
        room: The memory there is.
        model: What to call it.
        origins: By the ``id`` of a tensor, where its loader will leave it; ``None`` looks at where tensors are now.
        sources: Per component, where its shapes come from.
        skipped: What could not be planned for, with the reason.

    Raises:
        DeclarationError: What it declares cannot be carried out.
    """
    room = room or Room()
    with moving():  # else looking at a tensor that is still to be read would read it
        usual = _Declared(target, OffloadPolicy(), origins)
        options = _options(target, usual, room, origins)
    best = next((one.name for one in options if one.fits), None)
    return Plan(
        model=model or type(target).__name__,
        components=usual.run().planned(),
        options=tuple(options),
        best=best,
        room=room,
        sources=dict(sources or {}),
        skipped=dict(skipped or {}),
    )


class _Declared:
    """A target's components under one policy, and where their bytes are before offload is enabled."""

    def __init__(self, target: Any, policy: OffloadPolicy, origins: Mapping[int, Origin] | None) -> None:
        self.policy = policy
        self.declaration = _declaration(target, policy)
        found = self.declaration.found
        runs = divide(found, SHARED, refuse_unmovable_if_real)
        self.components = [record(one, runs[id(one)]) for one in found]
        mappings = FileMappings() if origins is None else None
        self.sheets: dict[str, list[Sheet]] = {
            one.name: sheets_on(runs[id(one)], origins or {})
            if mappings is None
            else sheets_here(runs[id(one)], mappings)
            for one in found
        }
        self._runs: dict[str, _Dry] = {}

    @property
    def from_files(self) -> bool:
        """Whether there is something that ``masters`` decides about."""
        swapped = (one.name for one in self.components if not one.resident)
        return any(one.in_pages for name in swapped for one in self.sheets[name])

    def run(self, masters: str = OffloadPolicy().masters) -> _Dry:
        """Two requests, once they have been run."""
        if masters not in self._runs:
            self._runs[masters] = _Dry(self, masters)
        return self._runs[masters]


class _Dry:
    """Two requests in a ledger of their own, over a mover of numbers."""

    def __init__(self, declared: _Declared, masters: str) -> None:
        self.components, declaration, policy = declared.components, declared.declaration, declared.policy
        resident = {one.name: one.resident for one in self.components}
        cargoes = {
            name: PaperCargo(sheets, resident=resident[name]) for name, sheets in declared.sheets.items()
        }
        self._mover = PaperMover(cargoes, masters)
        self._ledger = ResidencyLedger(self._mover, policy, owner=declaration.owner)

        def rivals(one: Component, other: Component) -> bool:
            exclusive = policy.exclusive_encoders
            return conflict(one, other, exclusive_encoders=exclusive, everything=declaration.everything)

        self._ledger.admit(self.components, rivals)
        self.peak = 0
        self._brought: list[dict[str, int]] = []  # link bytes by component: when enabling, then per request
        self._run([one for one in self.components if one.resident])
        self.first, self.later = self._request(), self._request()
        self.most_host = self._mover.most_host
        self._ledger.check()

    @property
    def resident_link_bytes(self) -> int:
        """Link bytes of enabling."""
        return sum(self._brought[0].values())

    def _request(self) -> Request:
        self._run(as_used(self.components))
        self._ledger.release()  # as diffusers' pipelines do; in others the next request's first load does as much
        brought = self._brought[-1]
        return Request(loads=len(brought), link_bytes=sum(brought.values()), pinned_bytes=self._mover.pinned)

    def _run(self, components: Sequence[Component]) -> None:
        start = len(self._ledger.history)
        for one in components:
            if one.resident:
                self._ledger.load(one.name)
            else:
                with self._ledger.scope(one.name):
                    pass
        events = tuple(self._ledger.history)[start:]
        self.peak = max([self.peak, *(one.device_bytes for one in events)])
        self._brought.append({one.component: one.bytes for one in events if one.kind == "load"})

    def planned(self) -> tuple[PlannedComponent, ...]:
        """For the table."""
        enabling, first, later = self._brought
        return tuple(
            PlannedComponent(
                name=one.name,
                role=str(one.role),
                bytes=one.bytes,
                link_bytes=(enabling if one.resident else later)[one.name],
                first_link_bytes=(enabling if one.resident else first)[one.name],
                resident=one.resident,
                rivals=self._ledger.rivals(one.name),
            )
            for one in self.components
        )


def as_used(components: Iterable[Component]) -> list[Component]:
    """Those that take turns, in the order in which a request uses them."""
    return sorted((one for one in components if not one.resident), key=lambda one: _STAGE[one.role])


_STAGE = {Role.ENCODER: 0, Role.DIT: 1, Role.PART: 1, Role.VAE: 2, Role.RESIDENT: 3}


def _declaration(target: Any, policy: OffloadPolicy) -> Declaration:
    recipe = recipe_for(target)
    if recipe is None and not declares_components(target) and hasattr(target, "model_cpu_offload_seq"):
        return from_diffusers(target, policy)
    return discover(target, policy, recipe)


# --- the policies -----------------------------------------------------------------------------------------


def _options(target: Any, usual: _Declared, room: Room, origins: Mapping[int, Origin] | None) -> list[Option]:
    weights = sum(one.bytes for one in usual.components)
    found = [
        _option("all resident", None, room, peak=weights, host=0),
        _swapping("model level", {}, usual.run(), room),
    ]
    exclusive = _exclusive(target, origins)
    if exclusive is not None:
        found.append(_swapping("exclusive VAE", {"vae": "exclusive"}, exclusive.run(), room))
    for_files = ("pinned", "mapped") if usual.from_files else ()
    return found + [_swapping(one, {"masters": one}, usual.run(one), room) for one in for_files]


def _exclusive(target: Any, origins: Mapping[int, Origin] | None) -> _Declared | None:
    try:
        found = _Declared(target, OffloadPolicy(vae="exclusive"), origins)
    except DeclarationError:
        return None
    return found if any(one.role is Role.VAE for one in found.components) else None


def _swapping(name: str, arguments: Mapping[str, Any], dry: _Dry, room: Room) -> Option:
    return _option(
        name,
        arguments,
        room,
        peak=dry.peak,
        host=dry.most_host,
        requests=(dry.first, dry.later),
        resident=dry.resident_link_bytes,
    )


def _option(
    name: str,
    arguments: Mapping[str, Any] | None,
    room: Room,
    *,
    peak: int,
    host: int,
    requests: tuple[Request, Request] = (Request(), Request()),
    resident: int = 0,
) -> Option:
    reasons = []
    needed = peak + room.for_activations()
    if room.device is not None and needed > room.device:
        told = f"{format_bytes(peak)} of weights and {format_bytes(room.for_activations())} for activations"
        reasons.append(f"{told} are more than {format_bytes(room.device)} of the device")
    if room.host is not None and host > room.host:
        reasons.append(f"{format_bytes(host)} on the host are more than {format_bytes(room.host)}")
    limited = room.device is not None or room.host is not None
    first, later = (replace(one, link_seconds=one.link_bytes / room.link) for one in requests)
    return Option(
        name=name,
        arguments=arguments,
        device_peak=peak,
        host_bytes=host,
        pinned_bytes=later.pinned_bytes,
        loads=later.loads,
        link_bytes=later.link_bytes,
        link_seconds=later.link_seconds,
        fits=not reasons if limited else None,
        reason="; ".join(reasons),
        first=first,
        resident_link_bytes=resident,
    )
