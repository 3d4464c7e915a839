"""Masters and a mover of numbers only: the real ledger decides, nothing is stored or moved.

What decides about bytes is the run's own code: how groups are laid out and joined into copies, what a staging slab
carries at once. Here it works on tensors without memory, and what it would have sent and pinned is added up.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..components.grouping import Extent, reach
from ..components.tensors import Group
from ..policy import OffloadPolicy
from ..protocols import Moved
from ..transfer.hostmemory import FileMappings
from ..transfer.masters import PinBudget, Slab, adjoining, align, batches, laid_out, lay_out, pages
from ..transfer.staging import STAGING_BYTES, Pair, Staging
from .skeleton import IN_PAGES, Filled, Origin


@dataclass(slots=True, eq=False)
class Sheet(Group):
    """A group of bytes on paper.

    Attributes:
        origin: Where a loader has left it, or will leave it; ``None`` is in memory of its own.
    """

    origin: Origin | None = None

    @property
    def in_pages(self) -> bool:
        """Whether its bytes are pages of a file."""
        return self.origin is IN_PAGES and self.nbytes > 0


def sheets_on(runs: Iterable[Sequence[Extent]], origins: Mapping[int, Origin]) -> list[Sheet]:
    """The groups of a component that is not there.

    Args:
        runs: Its tensors, in runs whose bytes overlap.
        origins: By the ``id`` of a tensor, where its loader leaves it.
    """
    return [
        Sheet([], nothing(high - low), origin=origins.get(id(run[0].tensor)))
        for run in runs
        for low, high in [reach(run)]
    ]


def sheets_here(runs: Iterable[Sequence[Extent]], mappings: FileMappings) -> list[Sheet]:
    """The groups of a component that has been loaded; none of its bytes is read.

    Args:
        runs: Its tensors, in runs whose bytes overlap.
        mappings: The pages of files in this process.
    """
    sheets = [Sheet([], _bytes_of(run)) for run in runs]
    for one in sheets:
        if one.source.data_ptr() in mappings:
            one.origin = IN_PAGES
    filled: list[tuple[Any, list[Any]]] = laid_out(list(sheets))[0]
    for memory, members in filled:
        slab, start = Filled(len(memory)), members[0].source.data_ptr()
        for one in members:
            one.origin = Origin(slab, one.source.data_ptr() - start)
    return sheets


def _bytes_of(run: Sequence[Extent]) -> torch.Tensor:
    low, high = reach(run)
    tensor = run[0].tensor
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return whole[low:high]


def nothing(nbytes: int) -> torch.Tensor:
    """So many bytes that are not there."""
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")


# --- one component ------------------------------------------------------------------------------------------


class PaperCargo:
    """The masters of one component, in the steps of ``Cargo`` and its ``Home``.

    Args:
        sheets: Its groups.
        resident: Whether it stays on the device; then its weights stay where they are on the host.

    Attributes:
        pages: What has its masters in pages of files for now.
        seasoned: It has been on the device before.
    """

    def __init__(self, sheets: Iterable[Sheet], *, resident: bool) -> None:
        self.sheets = [Sheet([], one.source, origin=one.origin) for one in sheets]
        self.resident = resident
        self.pages: list[Sheet] = []
        self.seasoned = False
        self._slabs: list[Slab] = []
        self._size = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its layout."""
        return sum(align(one.nbytes) for one in self.sheets)

    @property
    def private(self) -> int:
        """Host bytes of what is neither packed nor in pages of a file."""
        return sum(one.nbytes for one in self.sheets if not one.packed and not one.in_pages)

    def master(self, budget: PinBudget, *, mapped: bool) -> None:
        """Lay everything out; what is in pages stays there if they count as ``mapped``."""
        if not self.resident:
            self.pages = [one for one in self.sheets if mapped and one.in_pages]
            stays = set(map(id, self.pages))
            for batch in _in_slabs([one for one in self.sheets if id(one) not in stays]):
                end = lay_out(batch, self._size)
                self._take_slab(budget, batch, self._size, end)
                self._size = end
        self._size = lay_out((one for one in self.sheets if not one.packed), self._size)

    def pin_pages(self, budget: PinBudget) -> None:
        """What was left in pages goes into slabs, in the places that it has."""
        for batch in adjoining(self.pages):
            last = batch[-1]
            self._take_slab(budget, batch, batch[0].offset, align(last.offset + last.nbytes))
        self.pages = []

    def copies(self, *, staged: bool) -> tuple[int, list[Pair]]:
        """Bytes that go straight to the device, and the copies that go by staging slabs, if there are any."""
        apart = [one for one in self.sheets if not one.packed and one.nbytes]
        through = [one for one in apart if staged and one.in_pages]
        straight = sum(one.nbytes for one in apart) - sum(one.nbytes for one in through)
        straight += sum(source.numel() for slab in self._slabs for _, source in slab.copies())
        block = nothing(self._size)
        return straight, [(block[one.offset : one.offset + one.nbytes], one.source) for one in through]

    def _take_slab(self, budget: PinBudget, batch: Sequence[Group], start: int, end: int) -> None:
        slab = budget.slab(end - start, start)
        slab.groups = list(batch)
        self._slabs.append(slab)
        for one in batch:
            one.packed = True


def _in_slabs(sheets: list[Sheet]) -> Iterator[list[Sheet]]:
    """What lies in a slab each: as a loader fills them, if the component has all that is in it; then the rest."""
    inside: dict[Filled, list[Sheet]] = {}
    for one in sheets:
        if one.origin is not None and one.origin.slab is not None:
            inside.setdefault(one.origin.slab, []).append(one)
    whole = [
        members
        for slab, members in inside.items()
        if sum(align(one.nbytes) for one in members) == slab.nbytes
    ]
    yield from (sorted(members, key=lambda one: one.origin.place if one.origin else 0) for members in whole)
    taken = {id(one) for members in whole for one in members}
    yield from batches([one for one in sheets if id(one) not in taken])


# --- all of them --------------------------------------------------------------------------------------------


class PaperBudget(PinBudget):
    """Pins whatever is asked for, page by page, and notes the most that was pinned at a time."""

    def __init__(self) -> None:
        super().__init__(limit=sys.maxsize)
        self.most = 0

    def slab(self, nbytes: int, base: int) -> Slab:
        """As many bytes that are not there."""
        slab = self._took(Slab(nothing(nbytes), base), pages(nbytes))
        self.most = max(self.most, self.taken)
        return slab


class _NoDevice:
    """Nothing is ever on its way."""

    def done(self) -> None:
        """No event."""


class _PaperStaging(Staging):
    """The staging slabs' own arithmetic: what goes as one copy."""

    def __init__(self, budget: PinBudget, nbytes: int) -> None:
        backend: Any = _NoDevice()
        everything: Any = _Everything()
        super().__init__(backend, budget, everything, nbytes)

    def _flush(self, run: list[Pair]) -> int:
        self._free_slab()
        (first, _), (last, _) = run[0], run[-1]
        return int(last.storage_offset()) + last.numel() - int(first.storage_offset())


class _Everything:
    """Only pages of files are given to the staging slabs here."""

    def __contains__(self, pointer: int) -> bool:
        return True


class PaperMover:
    """Knows how many bytes each load takes over the link, what is pinned, and who would be on the device.

    Args:
        cargoes: By name; their masters are made here.
        masters: As in the policy; what may be pinned is not limited.
    """

    def __init__(self, cargoes: Mapping[str, PaperCargo], masters: str = OffloadPolicy().masters) -> None:
        self._cargoes = cargoes
        self._here: set[str] = set()
        self._sent: dict[str, int] = {}  # bytes of a load, as long as it stays what it was
        self._budget = PaperBudget()
        self._for_now = masters == "auto"
        mapped = masters != "pinned" and any(one.in_pages for each in cargoes.values() for one in each.sheets)
        largest = max((one.nbytes for one in cargoes.values()), default=0)
        self._staging = _PaperStaging(self._budget, min(STAGING_BYTES, largest)) if mapped else None
        for cargo in cargoes.values():
            cargo.master(self._budget, mapped=mapped)

    @property
    def pinned(self) -> int:
        """Host bytes that are pinned now."""
        return self._budget.taken

    @property
    def most_host(self) -> int:
        """Host bytes of weights at most so far: what was pinned, and residents that are in no file's pages."""
        return self._budget.most + sum(one.private for one in self._cargoes.values())

    def load(self, name: str) -> Moved:
        """Add it up."""
        cargo = self._cargoes[name]
        if cargo.seasoned and self._for_now and cargo.pages:
            cargo.pin_pages(self._budget)
            if self._staging is not None and not any(one.pages for one in self._cargoes.values()):
                self._staging.close()
            self._sent.pop(name, None)
        # Until both staging slabs are there, one more load may take the second.
        settled = self._staging is None or len(self._staging.slabs) == 2
        if name not in self._sent or not settled:
            self._sent[name] = self._send(cargo)
        cargo.seasoned = True
        self._here.add(name)
        return Moved(bytes=self._sent[name])

    def _send(self, cargo: PaperCargo) -> int:
        if self._staging is None:
            return cargo.copies(staged=False)[0]
        straight, through = cargo.copies(staged=True)
        return straight + self._staging.send(through)

    def evict(self, name: str) -> Moved:
        """Note it."""
        self._here.discard(name)
        return Moved()

    def has_room_ahead(self, name: str) -> bool:
        """A plan copies nothing ahead."""
        return False

    def prefetch(self, name: str) -> Moved:
        """Never asked: there is no room ahead."""
        raise NotImplementedError

    def drop(self, name: str) -> None:
        """Nothing was copied ahead."""

    def present(self, name: str) -> bool:
        """Whether it was noted as there."""
        return name in self._here

    def touch(self, name: str, stream: Any = None) -> Any:
        """No work is enqueued."""

    def release_arena(self) -> int:
        """There is none."""
        return 0

    def is_current(self, tensor: Any) -> bool:
        """No tensor is bound."""
        return False

    def audit(self, present: Mapping[str, bool]) -> list[str]:
        """Nothing to compare with."""
        return []
