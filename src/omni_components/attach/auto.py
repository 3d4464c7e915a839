"""Before anything moves: whether components have to take turns at all, and the names of a declared order."""

from __future__ import annotations

import torch

from ..components.declaration import Declaration
from ..components.grouping import extents, overlapping, span
from ..errors import UnknownComponentError, format_bytes
from ..policy import HEADROOM, OffloadPolicy, left_for_weights
from ..transfer.device import backend_for
from .fleet import Fleet

_FITS = "policy auto: all {needed} of weights fit into {room} ({source}), so that everything is resident"
_TOO_MUCH = (
    "policy auto: {needed} of weights do not fit into {room} ({source}), so that components take turns"
)
_TOLD = "policy auto: {field} is given, so that components take turns as it says"
_UNKNOWN = (
    "policy auto: {device} does not tell its free memory, so that components take turns; "
    "device_memory=... says how much may be used"
)


def make_resident_if_all_fits(
    declaration: Declaration, device: torch.device, policy: OffloadPolicy
) -> str | None:
    """With policy auto, make everything resident if it fits; returns what was decided, in words."""
    if policy.mode != "auto":
        return None
    told = policy.who_takes_turns()
    if told is not None:
        return _TOLD.format(field=told)
    free = backend_for(device).free_bytes()
    if policy.device_memory is not None:
        room, source = policy.device_memory, "device_memory"
    elif free is not None:
        room = left_for_weights(free)
        source = f"{format_bytes(free)} free, {HEADROOM:.0%} of it left for activations"
    else:
        return _UNKNOWN.format(device=device)
    needed = _device_bytes(declaration, device, counted=policy.device_memory is not None)
    fits = needed <= room
    for found in declaration.found if fits else ():
        found.planned = found.planned or not found.resident
        found.resident = True
    text = _FITS if fits else _TOO_MUCH
    return text.format(needed=format_bytes(needed), room=format_bytes(room), source=source)


def check_order(declaration: Declaration, policy: OffloadPolicy, fleet: Fleet) -> None:
    """Refuse a declared order that names somebody unknown, before anything is touched.

    Raises:
        UnknownComponentError: It says which names there are.
    """
    known = [*(one.name for one in declaration.found), *(one.name for one in fleet.ledger.components)]
    for name in policy.prefetch if isinstance(policy.prefetch, tuple) else ():
        if name not in known:
            raise UnknownComponentError(name, known, declaration.owner)


def _device_bytes(declaration: Declaration, device: torch.device, *, counted: bool) -> int:
    """Bytes of all weights, each once; those that are there already only if ``counted``."""
    slots = (slot for found in declaration.found for slot in found.area.slots())
    runs = overlapping(extents(slots))
    return sum(span(run) for run in runs if counted or run[0].tensor.device != device)
