"""What a declaration holds: every byte of it given to one component."""

from __future__ import annotations

from collections.abc import Callable

from ..components.area import FixedArea
from ..components.component import Component, Role
from ..components.declaration import Found
from ..components.grouping import Extent, extents, overlapping, span
from ..components.tensors import Slot
from ..components.unmovable import refuse_unmovable


def divide(
    fresh: list[Found], shared_name: str, refuse: Callable[[str, Slot], None] = refuse_unmovable
) -> dict[int, list[list[Extent]]]:
    """The runs of bytes of each component; what two of them share goes to a resident of its own (I3).

    Args:
        fresh: The components; the resident of what is shared is added to them.
        shared_name: Its name.
        refuse: Raises for a tensor that cannot be moved.

    Returns:
        Per component (by ``id``), its tensors in runs whose bytes overlap.
    """
    owners: dict[tuple[int, str], set[int]] = {}
    for found in fresh:
        for slot in found.area.slots():
            refuse(found.name, slot)
            owners.setdefault((id(slot.module), slot.name), set()).add(id(found))
    runs: dict[int, list[list[Extent]]] = {id(found): [] for found in fresh}
    shared: list[list[Extent]] = []
    found_runs = list(overlapping(extents(slot for found in fresh for slot in found.area.slots())))
    for run, keys in zip(found_runs, _together([_keys(run) for run in found_runs]), strict=True):
        holders = {holder for key in keys for holder in owners[key]}
        (runs[holders.pop()] if len(holders) == 1 else shared).append(run)
    if shared:
        fresh.append(_shared(fresh, shared, shared_name))
        runs[id(fresh[-1])] = shared
    # In the order of declaration, not of addresses: the layout, and each copy, is then the same every time.
    order = {key: index for index, key in enumerate(owners)}
    return {
        one: sorted(mine, key=lambda run: min(map(order.__getitem__, _keys(run))))
        for one, mine in runs.items()
    }


def record(found: Found, runs: list[list[Extent]]) -> Component:
    """A component's record."""
    slots = {(id(slot.module), slot.name) for run in runs for one in run for slot in one.slots}
    return Component(
        name=found.name,
        role=found.role,
        bytes=sum(span(run) for run in runs),
        tensors=len(
            {id(slot.tensor) for slot in found.area.slots() if (id(slot.module), slot.name) in slots}
        ),
        resident=found.resident,
        model=found.model,
        exclusive=found.exclusive,
        beside=frozenset(one.name for one in found.beside),
        clears=frozenset(one.name for one in found.clears),
    )


def _shared(fresh: list[Found], shared: list[list[Extent]], name: str) -> Found:
    # A module that lies in two components brings each of its slots twice.
    slots = list(
        {(id(slot.module), slot.name): slot for run in shared for one in run for slot in one.slots}.values()
    )
    for found in fresh:
        found.area.leave_out(slots=slots)
    return Found(name, Role.RESIDENT, True, FixedArea(slots), name)


def _keys(run: list[Extent]) -> set[tuple[int, str]]:
    return {(id(slot.module), slot.name) for one in run for slot in one.slots}


def _together(keys: list[set[tuple[int, str]]]) -> list[set[tuple[int, str]]]:
    """Per run of bytes, the slots that move with it: a wrapper's inner tensors lie in several, and stay together."""
    heads: dict[tuple[int, str], set[tuple[int, str]]] = {}
    for one in keys:
        joined = set(one).union(*(heads[key] for key in one if key in heads))
        heads |= dict.fromkeys(joined, joined)
    return [heads[next(iter(one))] for one in keys]
