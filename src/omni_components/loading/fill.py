"""Values go to where they will stay: into slabs laid out as the mover uses them, or they stay in their file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from ..components.omni_models import recipe_for
from ..components.patterns import parts_of
from ..components.tensors import Slot, own_slots, own_storage
from ..components.unread import Source
from ..transfer.masters import batches, lay_out, ready_slab
from .deferred import Deferred, Plan, facts_of
from .files import Progress


@dataclass(slots=True, eq=False)
class Awaited:
    """A tensor that is not there yet, with all slots that hold it; ``offset`` is its place in a layout, in bytes."""

    tensor: Deferred
    slots: list[Slot] = field(default_factory=list)
    offset: int = 0
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        shape, dtype = facts_of(self.tensor)
        self.nbytes = shape.numel() * dtype.itemsize

    @property
    def plan(self) -> Plan:
        """How to get its values."""
        return self.tensor.plan

    @property
    def stored(self) -> int:
        """Bytes that reading it takes from files."""
        return self.nbytes if self.plan.entry is None else self.plan.entry.nbytes

    def give(self, values: torch.Tensor) -> None:
        """Put the tensor itself into every slot."""
        if isinstance(self.tensor, nn.Parameter):
            values = nn.Parameter(values, requires_grad=self.tensor.requires_grad)
        self._put(values)

    def promise(self, values: torch.Tensor, source: Source) -> None:
        """Put a tensor into every slot whose values will be read into this memory."""
        plan = self.plan
        self._put(source.promise(values, self.tensor, lambda target: plan.fill(target, _silent)))

    def _put(self, made: torch.Tensor) -> None:
        notes = {name: one for name, one in vars(self.tensor).items() if name not in ("plan", "_is_param")}
        made.__dict__.update(notes)  # what a library noted on the stand-in stays noted
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


def fill(model: nn.Module, waiting: Iterable[Awaited], told: Progress, *, later: bool = False) -> None:
    """Read tensors into slabs, each part of a split model into slabs of its own.

    Memory: the slabs, and what one conversion needs.

    Args:
        model: Holds the tensors.
        waiting: Which ones.
        told: The bytes as they are read, or promised.
        later: Read a slab when one of its tensors is first used; until then it takes no memory.
    """
    for group in by_part(model, waiting):
        for batch in batches([one for one in group if one.nbytes]):
            slab, source = ready_slab(lay_out(batch)), Source()
            for one in batch:
                raw = own_storage(slab[one.offset : one.offset + one.nbytes])
                values = raw.view(one.tensor.dtype).view(tuple(one.tensor.shape))
                if later:
                    one.promise(values, source)
                    told(one.stored)
                else:
                    one.plan.fill(values, told)
                    one.give(values)
        for one in group:
            if not one.nbytes:
                one.give(torch.empty(tuple(one.tensor.shape), dtype=one.tensor.dtype))


def _silent(count: int) -> None:
    """Nobody watches when a promise is kept."""


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


def by_part(model: nn.Module, waiting: Iterable[Awaited]) -> Iterator[list[Awaited]]:
    """The tensors of each part of a split model, or of each component that a recipe makes of a model."""
    waiting = list(waiting)
    part_of = _parts(model)
    for part in {part_of(one): None for one in waiting}:
        yield [one for one in waiting if part_of(one) == part]


def _parts(model: nn.Module) -> Callable[[Awaited], str]:
    declared = getattr(model, "_offload_components", None)
    if not declared:
        return _parts_of_recipe(model)
    areas = parts_of(model, declared, type(model).__name__)
    owners = {(id(slot.module), slot.name): part for part, area in areas.items() for slot in area.slots()}

    def part_of(one: Awaited) -> str:
        holders = {owners.get((id(slot.module), slot.name), "") for slot in one.slots}
        return holders.pop() if len(holders) == 1 else ""  # in several, or in none: resident

    return part_of


def _parts_of_recipe(model: nn.Module) -> Callable[[Awaited], str]:
    recipe = recipe_for(model)
    paths = [path for listed in recipe.lists().values() for path in listed] if recipe is not None else []

    def innermost(slot: Slot) -> str:
        return max((path for path in paths if slot.path.startswith(f"{path}.")), key=len, default="")

    def part_of(one: Awaited) -> str:
        holders = {innermost(slot) for slot in one.slots}
        return holders.pop() if len(holders) == 1 else ""

    return part_of
