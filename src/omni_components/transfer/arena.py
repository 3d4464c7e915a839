"""The arena: device memory in which conflicting components take turns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from ..components.tensors import ALIGNMENT
from ..policy import left_for_weights
from .masters import align, anonymous


def place(sizes: dict[str, int], rivals: Callable[[str, str], bool]) -> dict[str, int]:
    """Offsets such that components which may be present together do not overlap, the largest first.

    Args:
        sizes: Bytes per component.
        rivals: Whether two of them exclude each other.

    Returns:
        Byte offsets. Where all exclude each other, all are 0 and the arena is as large as the largest.
    """
    placed: dict[str, int] = {}
    for name in sorted(sizes, key=lambda one: (-sizes[one], one)):
        neighbours = sorted(
            (placed[one], placed[one] + align(sizes[one])) for one in placed if not rivals(one, name)
        )
        offset = 0
        for low, high in neighbours:
            if offset + sizes[name] <= low:
                break
            offset = max(offset, high)
        placed[name] = offset
    return placed


class Arena:
    """Hands out device bytes (uint8) by component name; the same bytes, at the same address, every time.

    With ``ahead`` the buffer has room for one component more, and a component has two places: the arranged one,
    and one at the buffer's end, which it gets if it is copied ahead while a rival is in the first.

    Args:
        device: Where.
        keep: Hold one buffer for all; otherwise take and give back each component's own bytes.
        ahead: Components may be copied ahead.
        free: Tells how many device bytes are free now; ``None`` where nobody knows.

    Attributes:
        limit: Most bytes that may be taken, if the policy says; otherwise the free ones are measured.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        keep: bool,
        ahead: bool = False,
        free: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.device = device
        self.keep = keep
        self.ahead = ahead
        self.limit: int | None = None
        self._free = free
        self._buffer: torch.Tensor | None = None
        self._views: dict[tuple[str, int], torch.Tensor] = {}
        self._taken: dict[str, torch.Tensor] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._size = 0
        self._planned: tuple[dict[str, tuple[int, int]], int] | None = None
        self._sizes: dict[str, int] = {}
        self._rivals: Callable[[str, str], bool] = lambda one, other: True

    def arrange(self, sizes: dict[str, int], rivals: Callable[[str, str], bool]) -> bool:
        """Decide every component's place, from when the buffer is empty.

        Until then the old places hold, and a component that has none gets memory of its own: a new place may
        overlap with an old one that is in use.

        Args:
            sizes: Bytes of every swappable component.
            rivals: Whether two of them exclude each other.

        Returns:
            Whether a buffer was given up, so that nobody may keep a view of it.
        """
        self._sizes, self._rivals = dict(sizes), rivals
        offsets = place(sizes, rivals)
        places = {name: (offset, sizes[name]) for name, offset in offsets.items()}
        self._planned = (places, max((offset + sizes[name] for name, offset in offsets.items()), default=0))
        return self.renew()

    def renew(self) -> bool:
        """Take up the latest arrangement if nobody is in the buffer; returns whether a buffer was given up."""
        if self._planned is None or self._occupied():
            return False
        freed = self.release()
        (self._places, self._size), self._planned = self._planned, None
        return freed > 0

    def grow(self, name: str, nbytes: int) -> bool:
        """Plan for a component that has outgrown its place, and `renew`; else it and the buffer would be held."""
        if nbytes > self._sizes.get(name, nbytes):
            return self.arrange({**self._sizes, name: nbytes}, self._rivals)
        return self.renew()

    def forget(self, name: str) -> None:
        """A component is no longer declared: another of its name may have other rivals, or another size."""
        for places in (self._places, self._planned[0] if self._planned is not None else {}):
            places.pop(name, None)
        self._views = {key: view for key, view in self._views.items() if key[0] != name}
        self._sizes.pop(name, None)

    def take(self, name: str, nbytes: int) -> torch.Tensor:
        """The bytes of a component; may raise the device's out-of-memory error, and then changes nothing."""
        if name in self._taken:
            return self._taken[name]  # taken already
        self._taken[name] = self._arranged(name) if self._has_place(name, nbytes) else self._fresh(nbytes)
        return self._taken[name]

    def has_room_ahead(self, name: str, nbytes: int) -> bool:
        """Whether `take_ahead` would take bytes that are proven free."""
        if self._has_place(name, nbytes):
            return self._free_place(name) is not None
        return self.limit is not None or nbytes <= self._measured()  # within a limit the ledger has counted

    def take_ahead(self, name: str, nbytes: int) -> torch.Tensor:
        """Bytes for a component while others have theirs, if `has_room_ahead`."""
        place = self._free_place(name) if self._has_place(name, nbytes) else None
        self._taken[name] = self._fresh(nbytes) if place is None else self._view(name, place)
        return self._taken[name]

    def give(self, name: str) -> None:
        """Take the bytes back. Idempotent."""
        self._taken.pop(name, None)

    def holds(self, name: str) -> torch.Tensor | None:
        """The bytes a component has now."""
        return self._taken.get(name)

    def release(self) -> int:
        """Give the buffer back to the system unless someone is in it; returns its bytes."""
        if self._buffer is None or self._occupied():
            return 0
        freed = self._buffer.numel()
        self._buffer, self._views = None, {}
        return freed

    @property
    def held(self) -> int:
        """Device bytes held now, used or not."""
        apart = sum(one.numel() for one in self._taken.values() if not self._in_buffer(one))
        return apart + (self._buffer.numel() if self._buffer is not None else 0)

    def stable(self, name: str) -> bool:
        """Whether the bytes that this component left stay where they are, for it to come back to."""
        taken = self._taken.get(name)
        return any(key[0] == name and (taken is None or taken is view) for key, view in self._views.items())

    def _has_place(self, name: str, nbytes: int) -> bool:
        # A component that has grown past its place (an adapter was added) gets memory of its own.
        return self.keep and name in self._places and nbytes <= self._places[name][1]

    def _arranged(self, name: str) -> torch.Tensor:
        if self._buffer is None or self._buffer.numel() < self._size:
            self._buffer, self._views = self._allocated(), {}
        return self._view(name, self._places[name][0])

    def _view(self, name: str, offset: int) -> torch.Tensor:
        assert self._buffer is not None
        if (name, offset) not in self._views:
            self._views[name, offset] = self._buffer[offset : offset + self._places[name][1]]
        return self._views[name, offset]

    def has_no_room_for_one_more(self) -> bool:
        """Whether the buffer was allocated without any."""
        return self._buffer is not None and self._buffer.numel() == self._size < self._with_one_more()

    # --- room for one more --------------------------------------------------------------------------------

    def _allocated(self) -> torch.Tensor:
        """The buffer, with room for one component more if that is proven to be there."""
        most = self._measured() if self.limit is None else self.limit
        wanted = min(self._with_one_more(), most // ALIGNMENT * ALIGNMENT) if self.ahead else 0
        if wanted > self._size:
            # If others have it after all, nothing is copied ahead.
            with suppress(torch.OutOfMemoryError, MemoryError):
                return self._fresh(wanted)
        return self._fresh(self._size)

    def _measured(self) -> int:
        """Bytes that are proven free, less what the computing may need."""
        free = self._free()
        return 0 if free is None else left_for_weights(free)

    def _with_one_more(self) -> int:
        """Bytes for each component at the end of the buffer beside any other in its arranged place."""
        needs = (
            align(offset + size) + align(self._places[name][1])
            for name in self._places
            for other, (offset, size) in self._places.items()
            if other != name
        )
        return max(needs, default=0)

    def _free_place(self, name: str) -> int | None:
        """Where a component can be put now; never where one might be put that is no rival of it."""
        if self._buffer is None:
            return None  # it is the first load that takes it
        size = self._places[name][1]
        first, last = self._places[name][0], (self._buffer.numel() - size) // ALIGNMENT * ALIGNMENT
        if not self._in_the_way(first, size):
            return first
        beside = [other for other in self._places if other != name and not self._rivals(other, name)]
        crossed = any(_overlap(last, size, *self._places[other]) for other in beside)
        return None if crossed or self._in_the_way(last, size) else last

    def _in_the_way(self, offset: int, size: int) -> bool:
        """Whether anyone is in these bytes."""
        assert self._buffer is not None
        base = self._buffer.data_ptr()
        inside = [view for view in self._taken.values() if self._in_buffer(view)]
        return any(_overlap(offset, size, view.data_ptr() - base, view.numel()) for view in inside)

    def _fresh(self, nbytes: int) -> torch.Tensor:
        if self.device.type == "cpu":
            return anonymous(nbytes)  # malloc would keep it
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _occupied(self) -> bool:
        return any(self._in_buffer(taken) for taken in self._taken.values())

    def _in_buffer(self, taken: torch.Tensor) -> bool:
        return any(taken is view for view in self._views.values())


def _overlap(one: int, size: int, other: int, length: int) -> bool:
    return one < other + length and other < one + size
