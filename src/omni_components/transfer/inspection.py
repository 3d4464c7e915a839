"""Looking at what a mover holds: nothing here changes anything."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

import torch

from ..protocols import MoverFacts
from .ahead import Ahead
from .arena import Arena
from .cargo import Cargo
from .device import Backend
from .masters import Slab


def facts(cargoes: Collection[Cargo], arena: Arena, staging: Collection[Slab] = ()) -> MoverFacts:
    """Memory that the masters and the arena hold."""
    slabs = [slab for cargo in cargoes for slab in cargo.home.slabs]
    apart = [group for cargo in cargoes if not cargo.home.slabs for group in cargo.groups]
    mapped = sum(group.nbytes for group in apart) if arena.device.type == "cpu" else 0
    pageable = sum(slab.tensor.numel() for slab in slabs if not slab.pinned and slab.pins is None)
    stays = [one for cargo in cargoes for one in cargo.home.mapped if one in cargo.groups]
    pageable += 0 if mapped else sum(group.nbytes for group in apart if group not in stays)
    mapped += sum(group.nbytes for group in stays)
    mapped += sum(slab.tensor.numel() for slab in slabs if slab.pins is not None)  # not read yet
    plain = [one for cargo in cargoes for one in cargo.members() if one.slots]
    same = all(one.device is one.host for one in plain)
    return MoverFacts(
        pinned_bytes=sum(slab.taken for slab in (*slabs, *staging)),
        pageable_bytes=pageable,
        mapped_bytes=mapped,
        arena_bytes=arena.held,
        binding="data" if same else "slots",
    )


def audit(
    cargoes: Mapping[str, Cargo],
    ahead: Mapping[str, Ahead],
    present: Mapping[str, bool],
    device: torch.device,
) -> list[str]:
    """Every tensor against where it should be, and bytes that have two owners; in words.

    Args:
        cargoes: All components, by name.
        ahead: Those that are being copied ahead.
        present: Whether the ledger says that a component is on the device.
        device: Which one.
    """
    found = []
    ranges: list[tuple[int, int, str]] = []
    for name, expected in present.items():
        cargo = cargoes[name]
        if cargo.present is not expected:
            found.append(f"{name!r} is {'' if cargo.present else 'not '}on the device")
        found += cargo.misplaced(device if cargo.present else torch.device("cpu"))
        ranges += cargo.ranges()
    for name, one in ahead.items():
        ranges.append((one.block.data_ptr(), one.block.data_ptr() + one.block.numel(), name))
    ranges.sort()
    for (_, high, one_name), (low, _, other) in itertools.pairwise(ranges):
        if low < high:
            found.append(f"{one_name!r} and {other!r} share bytes")
    return found


def what_hinders_prefetch(cargoes: Mapping[str, Cargo], arena: Arena, backend: Backend) -> list[str]:
    """Why components are not copied ahead although that was asked for, in words."""
    if not arena.ahead:
        return []  # it was not
    if backend.touch() is None:
        return [f"prefetch: copies to {backend.device} make the host wait, so that nothing is copied ahead"]
    pageable = [
        name
        for name, one in cargoes.items()
        if one.home.slabs and not one.awaited and not one.payload(pinned=True)
    ]
    found = [
        f"prefetch: the master of {name!r} is not pinned, so that it is not copied ahead" for name in pageable
    ]
    if arena.has_no_room_for_one_more():
        found.append("prefetch: no room for a second component was found, so that nothing is copied ahead")
    return found
