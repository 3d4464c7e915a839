"""Cargo: one component as the mover sees it: its groups, its masters, its place on the device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..components.area import Area, FixedArea
from ..components.computed import Cached, Computed, computed
from ..components.grouping import Extent, extents, make_group, overlapping
from ..components.roster import Side
from ..components.tensors import Group, Member, Slot, own_storage
from ..components.unmovable import refuse_unmovable
from ..components.wrappers import Composite, compose, leaves
from .home import Home, own_memory, stay_apart
from .hostmemory import FileMappings
from .masters import PinBudget, lay_out

Pair = tuple[torch.Tensor, torch.Tensor]


class Cargo:
    """A component's tensors on their way between host and device.

    Args:
        name: The component.
        area: Which slots are its own.
        crosses: Whether ``.data =`` can carry a host tensor to the device.

    Attributes:
        groups: Its bytes, in the order of the layout.
        composites: The wrappers around some of its tensors; bound after them.
        home: Its masters.
        seasoned: It has been on the device before.
        size: Bytes of the layout.
        present: It is on the device. Written last, so that it is true after any failure.
        streams: The streams its work may be enqueued on since it was loaded.
        arrived: The event behind its copies.
    """

    def __init__(self, name: str, area: Area | FixedArea, *, crosses: bool) -> None:
        self.name = name
        self.area = area
        self.groups: list[Group] = []
        self.composites: list[Composite] = []
        self.home = Home()
        self.seasoned = False
        self.size = 0
        self.present = False
        self.streams: list[Any] = []
        self.arrived: Any = None
        self._crosses = crosses
        self._at_home = False
        self._unsure = False  # an adoption was interrupted: look again
        self._told = 0  # the size that the ledger knows
        self._started_on: list[tuple[Group, torch.device]] = []
        self._place: torch.Tensor | None = None  # the block in which every group is settled
        self._sides: dict[bool, Side] = {}  # by presence; made once a side will come back as it is
        self._norms: list[torch.nn.Module] | None = None
        self._computed: list[Computed | Cached] | None = None
        area.note()

    # --- enabling -----------------------------------------------------------------------------------------

    def declare(self, runs: Iterable[list[Extent]]) -> None:
        """Take over the memory where the tensors are now; nothing moves yet."""
        runs = list(runs)
        self.groups = [make_group(run, crosses=self._crosses) for run in runs]
        self.composites = compose(runs, self.groups)
        self._started_on = [
            (one, one.source.device) for one in self.groups if one.source.device.type != "cpu"
        ]

    def send_back(self) -> None:
        """Enabling failed, and the component is home: what was on a device goes back, aliases as aliases."""
        sent: set[int] = set()
        for group, device in self._started_on:
            if group.source.device == device:
                continue  # it never left
            raw = group.source.to(device)
            for member in group.members:
                member.stay_at(member.view(raw))
                member.bind_device()
                sent.add(id(member))
        for composite in self.composites:
            if any(id(leaf) in sent for leaf in composite.leaves):
                composite.bind_device()
        self.restore_computed()
        self.groups, self.composites = [], []  # from here on the memory is the tensors' own

    def master(
        self, budget: PinBudget | None, mappings: FileMappings | None = None, *, for_now: bool = False
    ) -> None:
        """Make the masters and bind them.

        Args:
            budget: Packs the weights into slabs, pinned while it lasts; ``None`` leaves them where they are.
            mappings: Weights in these pages of files stay there.
            for_now: They stay there until :meth:`pin_pages`.
        """
        if budget is not None:
            size = self.home.take_in(self.groups, budget, mappings, for_now=for_now)
        else:
            size = stay_apart(self.groups)
        self.size = self._told = size
        self._regrouped()
        for composite in self.composites:
            composite.bind_host()
            composite.leave()
        self._let_go_of_computed()

    def read(self) -> None:
        """Read what a loader has left in files; those that do not travel, too."""
        for _ in self.home.read(self._held()):
            pass

    @property
    def awaited(self) -> bool:
        """Its next load will pin what is not pinned yet: what is still to be read, or came once from its file."""
        return self.home.unpinned_until_read or (self.seasoned and self.home.unpinned_for_now)

    def pin_pages(self) -> bool:
        """Move what was left in its file's pages for now into slabs; returns whether there was any.

        A component that comes a second time will come again: only then is it worth the memory and the time.
        """
        if not self.home.unpinned_for_now:
            return False
        self.home.pin_pages(self.groups, self.name)
        self._regrouped()
        self.home.settled()  # last: an interrupted one is done again
        return True

    def new_size(self) -> int | None:
        """The size if it has changed since it was last asked for, by this switch or by one that failed."""
        told, self._told = self._told, self.size
        return None if told == self.size else self.size

    def stay(self, mappings: FileMappings) -> None:
        """The host is the execution device: only what is mapped from a file travels, into private memory."""
        self.groups = [one for one in self.groups if one.nbytes and one.source.data_ptr() in mappings]
        self.size = self._told = lay_out(self.groups)
        self._regrouped()
        travelling = {id(one) for one in self.members()}
        self.composites = [
            one for one in self.composites if any(id(leaf) in travelling for leaf in one.leaves)
        ]
        self._at_home = True

    # --- binding ------------------------------------------------------------------------------------------

    def members(self) -> Iterator[Member]:
        """Every tensor that has bytes of its own."""
        for group in self.groups:
            yield from group.members

    @property
    def tensors(self) -> int:
        """How many parameters and buffers it has."""
        return sum(1 for one in self.members() if one.slots) + len(self.composites)

    def bind_host(self) -> None:
        """Register the masters everywhere."""
        if False in self._sides:
            self._sides[False].bind()
        else:
            for member in self.members():
                member.bind_host()
        for composite in self.composites:
            composite.bind_host()
        self._let_go_of_computed()
        self.present = False

    def bind_device(self) -> None:
        """Register the device memory everywhere."""
        if True in self._sides:
            self._sides[True].bind()
        else:
            for member in self.members():
                member.bind_device()
        for composite in self.composites:
            composite.bind_device()
        self._let_go_of_computed()
        self.present = True

    def settle(self, block: torch.Tensor) -> None:
        """Give each group its range of the component's device bytes."""
        if block is self._place:
            return  # each is there already
        self._moved()
        for group in self.groups:
            if group.raw is None or group.raw.data_ptr() != block.data_ptr() + group.offset:
                group.settle(own_storage(block[group.offset : group.offset + group.nbytes]))
        self._place = block

    def leave(self, *, stable: bool) -> None:
        """Let go of the device bytes; of those at a stable address the views stay, for the next time."""
        if stable and self._place is not None:
            if True not in self._sides and all(one.device is not None for one in self.members()):
                self._sides[True] = Side(self.members(), True)
            return
        self._moved()
        for group in self.groups:
            if not stable or group.raw is None:
                group.leave()
        for composite in () if stable else self.composites:
            composite.leave()

    def restore_computed(self) -> None:
        """From here on its modules are called without us: what they compute before a call is there as before."""
        for one in self._what_is_computed():
            one.restore()

    def _let_go_of_computed(self) -> None:
        """What its modules compute before a call was computed on the side that they leave."""
        for one in self._what_is_computed():
            one.let_go()

    def _what_is_computed(self) -> list[Computed | Cached]:
        if self._computed is None:
            covered = [one for _, one in self.area.modules()] if isinstance(self.area, Area) else []
            self._computed = computed([*covered, *(slot.module for slot in self.area.slots())])
        return self._computed

    def memory(self) -> list[torch.Tensor]:
        """Its device bytes, as far as it has any, group by group."""
        return [group.raw for group in self.groups if group.raw is not None]

    def storages(self) -> set[int]:
        """The storages that its slots hold now, by address."""
        held = [one for one in self._held() if one is not None]
        return {leaf.untyped_storage()._cdata for one in held for _, leaf in leaves(one)}

    def _held(self) -> Iterator[torch.Tensor | None]:
        return (slot.tensor for slot in self.area.slots())

    def _moved(self) -> None:
        """The device side is not, or no more, where it was."""
        self._place = None
        self._sides.pop(True, None)

    def _regrouped(self) -> None:
        """Members come or go: what was worked out for those of now holds no more."""
        self._moved()
        self._sides.clear()
        self.home.regrouped()
        self._norms = self._computed = None

    # --- copies -------------------------------------------------------------------------------------------

    def copies(self, block: torch.Tensor, *, pinned: bool | None = None) -> Iterator[Pair]:
        """``(to, from)`` pairs that fill the device bytes; only those from pinned masters, or only the others."""
        for offset, source, fast in self.home.runs(self.groups):
            if pinned is None or pinned is fast:
                yield block[offset : offset + source.numel()], source

    def copies_as_read(self, block: torch.Tensor) -> Iterator[Pair]:
        """All of them; what a loader has left in files is read on the way."""
        for offset, source, _ in self.home.runs_as_read(self.groups, self._held()):
            yield block[offset : offset + source.numel()], source

    def payload(self, *, pinned: bool | None = None) -> int:
        """Bytes of those copies."""
        runs = self.home.runs(self.groups)
        return sum(source.numel() for _, source, fast in runs if pinned is None or pinned is fast)

    def written(self) -> list[Group]:
        """Groups that someone wrote to on the device."""
        if True in self._sides and not self._sides[True].written() and not self._look_closer():
            return []
        inner = {id(leaf) for one in self.composites if one.written() for leaf in one.leaves}
        found = [
            group
            for group in self.groups
            if any(member.written() or id(member) in inner for member in group.members)
        ]
        ran = {id(slot.module) for group in found for member in group.members for slot in member.slots}
        return found + [
            group
            for group in self.groups
            if any(norm.training or id(norm) in ran for norm in group.norms) and group not in found
        ]

    def _look_closer(self) -> bool:
        """Whether there may be writes that no member's version counter tells of."""
        if self._norms is None:
            self._norms = [norm for group in self.groups for norm in group.norms]
        return any(norm.training for norm in self._norms) or any(one.written() for one in self.composites)

    # --- what an audit asks ---------------------------------------------------------------------------------

    def misplaced(self, device: torch.device) -> list[str]:
        """Tensors the mover bound that are not on ``device``, in words."""
        found = []
        for member in self.members():
            bound = member.device if self.present else member.host
            if bound is None or not member.intact(self.present):
                continue  # someone else put something there: the next switch adopts it
            if bound.device != device:
                found.append(f"{self.name}: {member.path} is on {bound.device}, not on {device}")
        for composite in self.composites:
            wrapper = composite.bound(self.present)
            if wrapper is not None and composite.intact(self.present) and wrapper.device != device:
                found.append(f"{self.name}: {composite.path} is on {wrapper.device}, not on {device}")
        return found

    def ranges(self) -> Iterator[tuple[int, int, str]]:
        """Address ranges ``[low, high)`` of its masters, and of its device bytes if it is there."""
        for group in self.groups:
            for raw in (group.source, group.raw if self.present else None):
                if raw is not None and raw.numel():
                    yield raw.data_ptr(), raw.data_ptr() + raw.numel(), self.name

    # --- what others put into the slots -------------------------------------------------------------------

    def disturbed(self) -> bool:
        """Whether a slot was added, emptied, or has something that the mover did not put there."""
        if self._unsure or self.area.changed():
            return True
        if not self._intact():
            return True
        return not all(composite.intact(self.present) for composite in self.composites)

    def _intact(self) -> bool:
        if not self.present and False not in self._sides:
            self._sides[False] = Side(self.members(), False)
        if self.present in self._sides:
            return self._sides[self.present].intact()
        return all(member.intact(self.present) for member in self.members())

    def adopt(self) -> tuple[int, int]:
        """Make what is in the slots now the component; what is still sound stays where it is.

        Found on the device, a tensor is copied to the host, and that copy becomes its master; found on the
        host, its own memory does. Nothing is bound here: the switch that follows does that.

        Returns:
            How many tensors were adopted, and the bytes copied to the host for them.
        """
        kept, strays = self._sorted_slots()
        if self._at_home:
            strays = []  # in the memory of the execution device already
        for slot in strays:
            refuse_unmovable(self.name, slot)
        partners = self._partners()
        runs = list(overlapping(extents(strays)))
        fresh = [make_group(run, crosses=self._crosses, partners=partners) for run in runs]
        wrappers = compose(runs, fresh)
        copied = sum(own_memory(group) for group in fresh)
        self._unsure = True  # first: an interrupt may come between any two steps
        self.home.adopted()
        self._regrouped()
        self.area.note()
        partners.clear()  # here, too: nobody but its user holds what was taken out
        self._keep_only(kept, {id(member.device) for group in fresh for member in group.members})
        self.groups += fresh
        self.composites += wrappers
        self.size = self.home.lay_out(self.groups)
        self._unsure = False
        return sum(1 for group in fresh for one in group.members if one.slots) + len(wrappers), copied

    def _sorted_slots(self) -> tuple[dict[int, list[Slot]], list[Slot]]:
        """Slots by the member whose bound object they hold (by ``id``), and those that hold something else."""
        everything: list[Member | Composite] = [
            *(one for one in self.members() if one.slots),
            *self.composites,
        ]
        bound = {
            id(one.device if self.present else one.host): one for one in everything if one.sound(self.present)
        }
        kept: dict[int, list[Slot]] = {}
        strays = []
        for slot in self.area.slots():
            one = bound.get(id(slot.tensor))
            if one is None:
                strays.append(slot)
            else:
                kept.setdefault(id(one), []).append(slot)
        return kept, strays

    def _partners(self) -> dict[int, torch.Tensor]:
        pairs = [(one.host, one.device) for one in self.members() if one.device is not None]
        return {id(mine): other for host, device in pairs for mine, other in ((host, device), (device, host))}

    def _keep_only(self, kept: dict[int, list[Slot]], taken_over: set[int]) -> None:
        """Drop what is in no slot any more; the device objects of those taken over have a new member already."""
        for composite in self.composites:
            composite.slots = kept.get(id(composite), [])
        self.composites = [composite for composite in self.composites if composite.slots]
        inner = {id(leaf) for composite in self.composites for leaf in composite.leaves}
        gone: list[Member] = []
        for group in self.groups:
            for member in group.members:
                member.slots = kept.get(id(member), [])
                if not member.slots and id(member) not in inner and id(member.device) not in taken_over:
                    gone.append(member)
            group.members = [member for member in group.members if member.slots or id(member) in inner]
        self.groups = [group for group in self.groups if group.members]
        for member in gone:
            if member.sound(self.present):
                _leave_whole(member, self.present)


def _leave_whole(member: Member, present: bool) -> None:
    """Whoever took a tensor out of its module keeps it whole: its memory goes to a rival, or to nobody."""
    if member.device is member.host:
        member.host.data = member.home
    elif present and member.device is not None and member.away is not None:
        bound, member.device = weakref.ref(member.device), None
        taken = bound()
        if taken is not None:  # somebody does keep it
            taken.data = member.away.clone()
