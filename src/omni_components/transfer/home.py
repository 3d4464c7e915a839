"""Home: where a component's bytes are on the host, and the copies that carry them from there."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence

import torch

from ..components.tensors import Group, own_storage
from ..components.unread import read
from ..errors import ResidencyWarning
from .hostmemory import FileMappings
from .masters import PinBudget, Run, Slab, adjoining, align, anonymous, lay_out, pack, repack


class Home:
    """The masters of one component: slabs, pages of files, memory that stays where it is.

    Attributes:
        slabs: Hold the packed groups.
        mapped: The groups whose masters are pages of files.
    """

    def __init__(self) -> None:
        self.slabs: list[Slab] = []
        self.mapped: list[Group] = []
        self._pins: PinBudget | None = None  # what is mapped goes into slabs of this at the second load
        self._unread = True  # until somebody has looked
        self._runs: list[Run] | None = None

    def take_in(
        self, groups: list[Group], budget: PinBudget, mappings: FileMappings | None, *, for_now: bool
    ) -> int:
        """Pack groups into slabs, but for those in pages of files, and bind them there; returns the layout's size.

        Args:
            groups: All of the component.
            budget: Pins the slabs while it lasts.
            mappings: Weights in these pages stay there.
            for_now: They stay until :meth:`pin_pages`.
        """
        self.mapped = [one for one in groups if mappings is not None and one.source.data_ptr() in mappings]
        stays = {id(one) for one in self.mapped}
        packed = pack([one for one in groups if id(one) not in stays], budget, self.slabs)
        size = stay_apart(self.mapped, packed)
        self._pins = budget if for_now and self.mapped else None
        return size

    # --- before a load ------------------------------------------------------------------------------------

    def read(self, tensors: Iterable[torch.Tensor | None]) -> Iterator[Slab]:
        """Read what a loader has left in files, slab by slab, each of which is pinned and handed out then.

        Args:
            tensors: All of the component, those included that do not travel; read last, if no slab has them.
        """
        if not self._unread:
            return
        self._runs = None  # first: what is pinned from here on would pass for pageable
        for slab in self.slabs:
            read(slot.tensor for group in slab.groups for one in group.members for slot in one.slots)
            if slab.pins is not None and not slab.pinned:
                slab.pins.pin(slab)
            slab.pins = None
            yield slab
        read(tensors)
        self._unread = False  # last: an interrupted one is done again

    @property
    def unpinned_for_now(self) -> bool:
        """Whether there is something in pages of files that is to be pinned."""
        return self._pins is not None

    @property
    def unpinned_until_read(self) -> bool:
        """Whether there are slabs that are pinned once they have been read."""
        return any(slab.pins is not None for slab in self.slabs)

    def pin_pages(self, groups: Iterable[Group], name: str) -> None:
        """What was left in its file's pages for now goes into slabs, in the places that it has.

        Where the memory is missing, or may not be pinned, it stays mapped. Once the caller knows of it, it says so
        by :meth:`settled`; until then it is done again.
        """
        assert self._pins is not None
        living = set(map(id, groups))
        waiting = [one for one in self.mapped if id(one) in living and not one.packed]
        try:
            for batch in adjoining(waiting):
                if self._pins.lasts(sum(align(one.nbytes) for one in batch)):
                    repack(batch, self._pins, self.slabs)
        except (MemoryError, OSError) as error:
            text = f"the weights of {name!r} stay in their files' pages: no host memory for them ({error})."
            warnings.warn(text, ResidencyWarning, stacklevel=2)

    def settled(self) -> None:
        """What :meth:`pin_pages` has left in pages stays there for good."""
        self.mapped = [one for one in self.mapped if not one.packed]
        self._pins = None

    # --- when tensors come or go --------------------------------------------------------------------------

    def regrouped(self) -> None:
        """Groups come, go or move: the copies are others."""
        self._runs = None

    def adopted(self) -> None:
        """New tensors came, some of which may be unread."""
        self._unread = True

    def lay_out(self, groups: list[Group]) -> int:
        """Places anew: slabs that still hold something, then whatever travels by itself; returns the size."""
        living = {id(group) for group in groups}
        end = 0
        for slab in self.slabs:
            slab.groups = [group for group in slab.groups if id(group) in living]
            if slab.groups:
                end = slab.move(end)
            else:
                slab.unpin()
        self.slabs = [slab for slab in self.slabs if slab.groups]
        return lay_out((group for group in groups if not group.packed), end)

    # --- copies -------------------------------------------------------------------------------------------

    def runs(self, groups: Iterable[Group]) -> list[Run]:
        """``(place in the layout, bytes, whether they are pinned)``: what carries all groups."""
        if self._runs is None:
            runs = [one for slab in self.slabs for one in slab.runs()]
            self._runs = [*runs, *_apart(groups)]  # at once: half of it would be taken for all of it later
        return self._runs

    def runs_as_read(self, groups: Iterable[Group], tensors: Iterable[torch.Tensor | None]) -> Iterator[Run]:
        """The same; what is still to be read is read on the way, so that copies run meanwhile."""
        if not self._unread:
            yield from self.runs(groups)
            return
        for slab in self.read(tensors):
            yield from slab.runs()
        yield from _apart(groups)


def _apart(groups: Iterable[Group]) -> list[Run]:
    """What travels by itself."""
    return [(one.offset, one.source, False) for one in groups if not one.packed and one.nbytes]


def stay_apart(groups: Sequence[Group], start: int = 0) -> int:
    """Bind groups where they are, each by itself; returns the end of their layout."""
    for group in groups:
        own_memory(group)
        group.bind_host()
        group.leave()
    return lay_out(groups, start)


def own_memory(group: Group) -> int:
    """Host memory of its own for a group; returns the bytes copied from the device."""
    if group.source.device.type == "cpu":
        # One of its own stays: around it, each time that it is enabled, there would be one more.
        alone = group.source.untyped_storage().nbytes() == group.nbytes
        group.rehome(group.source if alone else own_storage(group.source))
        return 0
    group.rehome(anonymous(group.nbytes).copy_(group.source))
    return group.nbytes
