"""Values go to where they will stay: into slabs laid out as the mover uses them, or they stay in their file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from ..components.patterns import parts_of
from ..components.tensors import Slot, own_slots, own_storage
from ..transfer.masters import batches, lay_out, ready_slab
from .deferred import Deferred, Plan
from .files import Progress


@dataclass(slots=True, eq=False)
class Awaited:
    """A tensor that is not there yet, with all slots that hold it; ``offset`` is its place in a layout, in bytes."""

    tensor: Deferred
    slots: list[Slot] = field(default_factory=list)
    offset: int = 0
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = int(self.tensor.numel()) * self.tensor.element_size()

    @property
    def plan(self) -> Plan:
        """How to get its values."""
        return self.tensor.plan

    def give(self, values: torch.Tensor) -> None:
        """Put the tensor itself into every slot; what a library noted on the stand-in stays noted."""
        notes = {name: one for name, one in vars(self.tensor).items() if name not in ("plan", "_is_param")}
        made = values
        if isinstance(self.tensor, nn.Parameter):
            made = nn.Parameter(values, requires_grad=self.tensor.requires_grad)
        made.__dict__.update(notes)
        for slot in self.slots:
            slot.put(made)


def awaited(model: nn.Module) -> list[Awaited]:
    """Every tensor of a model that has to be read, in the order of its modules."""
    found: dict[int, Awaited] = {}
    for path, module in model.named_modules():
        for slot in own_slots(path, module):
            if isinstance(slot.tensor, Deferred):
                found.setdefault(id(slot.tensor), Awaited(slot.tensor)).slots.append(slot)
    return list(found.values())


def stranded(model: nn.Module) -> list[str]:
    """Tensors that have neither values nor a plan to get them."""
    slots = (slot for path, module in model.named_modules() for slot in own_slots(path, module))
    return [
        slot.path
        for slot in slots
        if slot.tensor is not None and slot.tensor.is_meta and not isinstance(slot.tensor, Deferred)
    ]


def fill(model: nn.Module, waiting: Iterable[Awaited], told: Progress) -> None:
    """Read tensors into slabs, each part of a split model into slabs of its own.

    Memory: the slabs, and what one conversion needs.
    """
    for group in _by_part(model, waiting):
        for batch in batches([one for one in group if one.nbytes]):
            slab = ready_slab(lay_out(batch))
            for one in batch:
                raw = own_storage(slab[one.offset : one.offset + one.nbytes])
                values = raw.view(one.tensor.dtype).view(tuple(one.tensor.shape))
                one.plan.fill(values, told)
                one.give(values)
        for one in group:
            if not one.nbytes:
                one.give(torch.empty(tuple(one.tensor.shape), dtype=one.tensor.dtype))


def map_in(waiting: Iterable[Awaited], told: Progress) -> list[Awaited]:
    """Leave tensors in their files' pages; returns those that have to be converted, and so cannot stay."""
    rest = []
    for one in waiting:
        values = one.plan.mapped()
        if values is None:
            rest.append(one)
        else:
            one.give(values)
            told(one.nbytes)
    return rest


def _by_part(model: nn.Module, waiting: Iterable[Awaited]) -> Iterator[list[Awaited]]:
    waiting = list(waiting)
    part_of = _parts(model)
    for part in {part_of(one): None for one in waiting}:
        yield [one for one in waiting if part_of(one) == part]


def _parts(model: nn.Module) -> Callable[[Awaited], str]:
    declared = getattr(model, "_offload_components", None)
    if not declared:
        return lambda one: ""
    areas = parts_of(model, declared, type(model).__name__)
    owners = {(id(slot.module), slot.name): part for part, area in areas.items() for slot in area.slots()}

    def part_of(one: Awaited) -> str:
        holders = {owners.get((id(slot.module), slot.name), "") for slot in one.slots}
        return holders.pop() if len(holders) == 1 else ""  # in several, or in none: resident

    return part_of
