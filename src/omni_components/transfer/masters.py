"""Masters: a component's copy of record on the host: pinned slabs, pageable slabs, mapped files."""

from __future__ import annotations

import bisect
import mmap
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from ..components.tensors import ALIGNMENT, Group, own_storage
from ..components.unread import Unread, read
from ..errors import ResidencyWarning, format_bytes
from .device import Registrar
from .hostmemory import give_freed_back

SLAB_BYTES = 256 << 20  # few large copies; enabling needs at most one slab besides the weights
_RAGGED = 16  # so many small copies cost less than a person can measure
_LARGE = 16 << 20  # freed memory of this size is worth the tens of milliseconds that giving it back takes
_SMALL = 4 << 20  # in a slab of this size any number does; there padding could be most of the bytes
# Python maps shared memory unless told otherwise; the system then counts it apart from the process's own.
_PRIVATE: dict[str, int] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
)
_PAGEABLE = (
    "the host memory could not be pinned beyond {pinned} ({reason}); the rest of the weights is pageable, "
    "and its copies are slower. Free host memory, raise the container's or `ulimit -l` limit, or lower pinned_limit."
)

Run = tuple[int, torch.Tensor, bool]  # a place in the layout, bytes that go there, whether they are pinned


def align(nbytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def pages(nbytes: int) -> int:
    """The bytes of the whole pages that so many bytes take."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclass(slots=True, eq=False)
class Slab:
    """A piece of host memory that holds groups as they lie in the component's layout.

    Attributes:
        tensor: Its bytes, uint8.
        base: Where it starts in the layout, in bytes.
        pinned: Whether copies from it run without the host.
        taken: Bytes that pinning really took (whole pages, or the allocator's block).
        groups: What lies in it, in the order of their places.
        reader: The event behind the last copies from it.
        pins: Pins it once its values have been read.
    """

    tensor: torch.Tensor
    base: int
    pinned: bool = False
    taken: int = 0
    registrar: Registrar | None = None
    groups: list[Group] = field(default_factory=list)
    reader: Any = None
    pins: PinBudget | None = None

    def copies(self) -> Iterator[tuple[int, torch.Tensor]]:
        """``(place, bytes)`` pairs that fill a component's device bytes from here: few, and without padding.

        The groups that follow each other without a gap are one copy. The ragged rest, biases mostly, goes one
        by one while that is cheap, and beyond that as one copy, its padding included.
        """
        solid, rest = self._solid()
        if solid:
            yield self.base, self.tensor[:solid]
        one_by_one = len(rest) <= _RAGGED or self.tensor.numel() <= _SMALL
        for group in rest if one_by_one else ():
            yield group.offset, group.source
        if rest and not one_by_one:
            low, high = rest[0].offset, rest[-1].offset + rest[-1].nbytes
            yield low, self.tensor[low - self.base : high - self.base]

    def runs(self) -> Iterator[Run]:
        """The same, and whether they are pinned."""
        return ((*one, self.pinned) for one in self.copies())

    def move(self, base: int) -> int:
        """Take another place in the layout; returns its end."""
        for group in self.groups:
            group.offset += base - self.base
        self.base = base
        return base + self.tensor.numel()

    def _solid(self) -> tuple[int, list[Group]]:
        end = self.base
        for index, group in enumerate(self.groups):
            if group.offset != end:
                return end - self.base, [one for one in self.groups[index:] if one.nbytes]
            end += group.nbytes
        return end - self.base, []

    def unpin(self) -> None:
        """Give the pin back; the memory and its values stay. Idempotent."""
        if self.reader is not None:
            self.reader.synchronize()  # an adopted component's old slab may go while it is still being read
            self.reader = None
        pointer = self.tensor.data_ptr()
        registrar, self.registrar = self.registrar, None  # first: an interrupted call must not be made again
        if registrar is not None:
            registrar.host_unregister(pointer)
        self.pinned, self.taken = False, 0

    def __del__(self) -> None:
        # An offload that was dropped without disable(): memory that is given back must not stay registered.
        with suppress(Exception):  # at the interpreter's end the device may be gone
            self.unpin()


@dataclass(slots=True)
class PinBudget:
    """Pins slabs while the budget lasts; afterwards they are pageable, which is said once.

    Attributes:
        limit: Most bytes to pin.
        registrar: Pins memory in place; ``None`` takes blocks of torch's pinned allocator, which rounds
            each one up to a power of two.
        pool: Whether that allocator may be asked.
    """

    limit: int
    registrar: Registrar | None = None
    pool: bool = False
    taken: int = 0
    said: bool = field(default=False)

    def slab(self, nbytes: int, base: int) -> Slab:
        """New host memory of ``nbytes``, pinned if possible."""
        if nbytes == 0:
            return Slab(anonymous(0), base)  # a component of empty tensors: nothing to pin
        if self.registrar is not None:
            return self.pin(Slab(anonymous(nbytes), base))
        if self.pool:
            return self._pooled(nbytes, base)
        return Slab(anonymous(nbytes), base)

    def lasts(self, nbytes: int) -> bool:
        """Whether a slab of ``nbytes`` would be pinned."""
        return self.taken + (_block(nbytes) if self.registrar is None else pages(nbytes)) <= self.limit

    def adopts(self) -> bool:
        """Whether memory that is there already can become a slab: torch's allocator pins only its own blocks."""
        return self.registrar is not None or not self.pool or self.limit == 0

    def pin(self, slab: Slab) -> Slab:
        """Pin memory that is there already where it is, if possible."""
        nbytes = slab.tensor.numel()
        whole = pages(nbytes)
        if self.registrar is None or self._refused(whole):
            return slab
        pointer = slab.tensor.data_ptr()
        slab.registrar = self.registrar  # first, lest an interrupt leaks a pin
        try:
            self.registrar.host_register(pointer, nbytes)
            return self._took(slab, whole)
        except RuntimeError as error:
            slab.registrar = None
            self._say(str(error))
            return slab
        except BaseException:
            with suppress(RuntimeError):  # interrupted before it was pinned
                slab.unpin()
            raise

    def _pooled(self, nbytes: int, base: int) -> Slab:
        block = _block(nbytes)
        if self._refused(block):
            return Slab(anonymous(nbytes), base)
        try:
            slab = Slab(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), base)
        except RuntimeError as error:
            self._say(str(error))
            return Slab(anonymous(nbytes), base)
        return self._took(slab, block)

    def _took(self, slab: Slab, taken: int) -> Slab:
        slab.pinned, slab.taken = True, taken
        self.taken += taken
        return slab

    def _refused(self, nbytes: int) -> bool:
        if self.taken + nbytes <= self.limit:
            return False
        self._say(f"the limit is {format_bytes(self.limit)}")
        return True

    def _say(self, reason: str) -> None:
        if not self.said:
            self.said = True
            text = _PAGEABLE.format(pinned=format_bytes(self.taken), reason=reason.splitlines()[0])
            warnings.warn(text, ResidencyWarning, stacklevel=2)


def _block(nbytes: int) -> int:
    """What torch's pinned allocator takes for so many bytes."""
    return 1 << (nbytes - 1).bit_length()


def anonymous(nbytes: int) -> torch.Tensor:
    """Fresh private memory (uint8) that goes back to the system as soon as nothing refers to it."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return _over(mmap.mmap(-1, nbytes, **_PRIVATE))


def _over(memory: mmap.mmap) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8, count=len(memory))


# Slabs that a loader has filled, by address: enabling takes them as they are. A slab is gone with its last tensor.
_READY: dict[int, weakref.ref[mmap.mmap]] = {}


def ready_slab(nbytes: int) -> torch.Tensor:
    """Memory for tensors laid out by :func:`lay_out`; a component that has all of them takes it as its master."""
    memory = mmap.mmap(-1, nbytes, **_PRIVATE)
    slab = _over(memory)
    address = slab.data_ptr()
    _READY[address] = weakref.ref(memory)
    weakref.finalize(memory, _READY.pop, address, None).atexit = False
    return slab


class Placed(Protocol):
    """Bytes that get a place in a layout."""

    offset: int

    @property
    def nbytes(self) -> int:
        """How many."""
        ...


AnyPlaced = TypeVar("AnyPlaced", bound=Placed)


def lay_out(groups: Iterable[Placed], start: int = 0) -> int:
    """Give each group its place, aligned, one after the other; returns the end."""
    for group in groups:
        group.offset = start
        start = align(start + group.nbytes)
    return start


def pack(groups: list[Group], budget: PinBudget, slabs: list[Slab]) -> int:
    """Lay groups out in slabs, those without padding first, and move their bytes there, slab by slab.

    Each group's old memory is freed as soon as its bytes are in a slab, so that the peak is the weights and
    one slab. What a loader has laid out already stays where it is.

    Args:
        groups: Any that are not mapped; their tensors are rebound to the slabs.
        budget: Pins the slabs.
        slabs: Takes the slabs, one by one: when a later one fails, the earlier ones are there to be unpinned.

    Returns:
        The end of the layout.
    """
    start = 0
    ready, rest = laid_out(groups) if budget.adopts() else ([], groups)
    for memory, members in ready:
        slab = Slab(_over(memory), start)
        slabs.append(slab)
        if any(is_unread(group) for group in members):
            slab.pins = budget  # its pages are not even taken yet
        else:
            budget.pin(slab)
        address = slab.tensor.data_ptr()
        for group in members:
            group.offset = start + group.source.data_ptr() - address
            group.rehome(group.source)
            group.bind_host()
            group.leave()
            group.packed = True
        slab.groups = members
        start += slab.tensor.numel()
    for batch in batches(rest):
        end = lay_out(batch, start)
        slab = budget.slab(end - start, start)
        slabs.append(slab)
        for group in batch:
            place = group.offset - start
            target = own_storage(slab.tensor[place : place + group.nbytes])
            read(member.host for member in group.members)
            target.copy_(group.source)
            group.rehome(target)
            group.bind_host()
            group.leave()  # the old memory is free now, on whichever side it was
            group.packed = True
        slab.groups = batch
        if end - start >= _LARGE:
            give_freed_back()  # else the next slabs come on top of it, and at the end there is a second model
        start = end
    return start


def is_unread(group: Group) -> bool:
    """Whether its values are still in a file."""
    return any(type(member.host) is Unread for member in group.members)


def repack(batch: list[Group], budget: PinBudget, slabs: list[Slab]) -> None:
    """Move groups that follow each other in a layout into one slab, which takes their place in it.

    Interrupted anywhere, every group has its bytes and travels: by itself, with the slab, or both ways.
    """
    start = batch[0].offset
    slab = budget.slab(align(batch[-1].offset + batch[-1].nbytes) - start, start)
    for group in batch:
        place = group.offset - start
        target = own_storage(slab.tensor[place : place + group.nbytes])
        target.copy_(group.source)
        group.rehome(target)
        group.bind_host()
    slab.groups = batch
    slabs.append(slab)
    for group in batch:
        group.packed = True


def adjoining(groups: Iterable[Group]) -> Iterator[list[Group]]:
    """Groups, by their places in a layout, in runs without anything between that fit into a slab each."""
    run: list[Group] = []
    for group in sorted(groups, key=lambda one: one.offset):
        if run:
            last = run[-1]
            follows = group.offset == align(last.offset + last.nbytes)
            if not follows or group.offset + group.nbytes - run[0].offset > SLAB_BYTES:
                yield run
                run = []
        run.append(group)
    if run:
        yield run


def laid_out(groups: list[Group]) -> tuple[list[tuple[mmap.mmap, list[Group]]], list[Group]]:
    """Filled slabs whose tensors are all among the groups, in order, and the groups that lie in no such slab."""
    found = sorted(
        (address, memory) for address, one in _READY.copy().items() if (memory := one()) is not None
    )
    starts = [address for address, _ in found]
    inside: dict[int, list[Group]] = {}
    for group in groups:
        index = bisect.bisect_right(starts, group.source.data_ptr()) - 1 if group.nbytes else -1
        if index >= 0 and group.source.device.type == "cpu":
            low = group.source.data_ptr() - starts[index]
            if low % ALIGNMENT == 0 and low + group.nbytes <= len(found[index][1]):
                inside.setdefault(index, []).append(group)
    whole = {
        index: sorted(members, key=lambda one: one.source.data_ptr())
        for index, members in inside.items()
        if sum(align(one.nbytes) for one in members) == len(found[index][1])
    }
    taken = {id(one) for members in whole.values() for one in members}
    return [(found[index][1], whole[index]) for index in whole], [
        one for one in groups if id(one) not in taken
    ]


def batches(groups: Iterable[AnyPlaced]) -> Iterator[list[AnyPlaced]]:
    """What goes into a slab each, those without padding first."""
    batch: list[AnyPlaced] = []
    size = 0
    for group in groups:
        if batch and size + align(group.nbytes) > SLAB_BYTES:
            yield _solid_first(batch)
            batch, size = [], 0
        batch.append(group)
        size += align(group.nbytes)
    if batch:
        yield _solid_first(batch)


def _solid_first(batch: list[AnyPlaced]) -> list[AnyPlaced]:
    return sorted(batch, key=lambda group: group.nbytes % ALIGNMENT != 0)
