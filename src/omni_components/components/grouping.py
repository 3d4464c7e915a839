"""Which tensors share memory: what slots hold, as ranges of bytes, and a group for each run of them that overlaps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from .tensors import ALIGNMENT, Group, Member, Slot, twin
from .wrappers import leaves


@dataclass(slots=True)
class Extent:
    """The bytes ``[low, high)`` of a storage that one tensor covers; its slots hold it, or a wrapper around it."""

    storage: tuple[str, int]
    low: int
    high: int
    tensor: torch.Tensor
    slots: list[Slot]
    path: str


def extents(slots: Iterable[Slot]) -> list[Extent]:
    """One extent per distinct tensor, with all its slots, sorted by place in memory; wrappers by their leaves."""
    found: dict[int, Extent] = {}
    for slot in slots:
        if slot.tensor is None:
            continue
        for path, tensor in leaves(slot.tensor, slot.path):
            if id(tensor) in found:
                found[id(tensor)].slots.append(slot)
            else:
                found[id(tensor)] = _extent(tensor, slot, path)
    return sorted(found.values(), key=lambda one: (one.storage, one.low))


def _extent(tensor: torch.Tensor, slot: Slot, path: str) -> Extent:
    storage = tensor.untyped_storage()
    size = tensor.element_size()
    low = int(tensor.storage_offset()) * size
    reach = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    high = low + (reach + 1) * size if tensor.numel() else low
    # An empty tensor has no address: it is alone in its group. One without memory (a plan's) is known by its storage.
    place = -id(tensor) if not storage.nbytes() else storage._cdata if tensor.is_meta else storage.data_ptr()
    return Extent((str(tensor.device), place), low, high, tensor, [slot], path)


def overlapping(found: Iterable[Extent]) -> Iterator[list[Extent]]:
    """Sorted extents in runs whose bytes overlap."""
    run: list[Extent] = []
    high = 0
    for one in found:
        if run and (one.storage != run[0].storage or one.low >= high):
            yield run
            run, high = [], 0
        run.append(one)
        high = max(high, one.high)
    if run:
        yield run


def span(run: Iterable[Extent]) -> int:
    """Bytes that a group of these extents takes on the device, the rounding up to the next place included."""
    low, high = reach(run)
    return -(-(high - low) // ALIGNMENT) * ALIGNMENT


def reach(run: Iterable[Extent]) -> tuple[int, int]:
    """From where to where the extents reach; it starts at a multiple of every element size."""
    run = list(run)
    return min(one.low for one in run) // 16 * 16, max(one.high for one in run)


def make_group(
    run: list[Extent], *, crosses: bool, partners: Mapping[int, torch.Tensor] | None = None
) -> Group:
    """A group over the memory where its tensors are now; nothing moves or is rebound.

    Args:
        run: Extents whose bytes overlap.
        crosses: Whether ``.data =`` can carry a host tensor object to the device and back.
        partners: The object of the other side for tensors (by ``id``) that have one already.
    """
    low, high = reach(run)
    members = []
    for one in run:
        tensor = one.tensor
        offset = int(tensor.storage_offset()) - low // tensor.element_size()
        geometry = (tuple(tensor.shape), tuple(tensor.stride()), offset)
        slots = [slot for slot in one.slots if slot.tensor is tensor]
        # A wrapper's device is fixed when it is made: its inner tensors never cross.
        alone = len(slots) == len(one.slots)
        host, device = _objects(tensor, crosses and alone, (partners or {}).get(id(tensor)))
        member = Member(slots, host, device, tensor.dtype, geometry, home=tensor.detach(), inner=one.path)
        if tensor.device.type != "cpu":
            member.away, member.away_address = member.home, tensor.data_ptr()
            member.version = 0 if tensor.is_inference() else tensor._version
        members.append(member)
    return Group(
        members, _bytes_of(run[0].tensor, low, high), norms=_norms(slot for one in run for slot in one.slots)
    )


def _norms(slots: Iterable[Slot]) -> tuple[nn.Module, ...]:
    running = ("running_mean", "running_var")
    return tuple(one.module for one in slots if one.name in running and isinstance(one.module, _NormBase))


def _bytes_of(tensor: torch.Tensor, low: int, high: int) -> torch.Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return whole[low:high]


def _objects(
    tensor: torch.Tensor, crosses: bool, partner: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The objects for the two sides; ``None`` for one that is made at its first use."""
    on_host = tensor.device.type == "cpu"
    if tensor.is_inference():
        # It has no version counter, so that a write would go unseen: a normal tensor takes its place.
        tensor = twin(tensor, torch.empty_like(tensor))
    if crosses:
        return tensor, tensor
    if on_host:
        return tensor, partner
    return partner if partner is not None else twin(tensor, torch.empty(0, dtype=tensor.dtype)), tensor
