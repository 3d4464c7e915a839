"""The arena: device memory in which conflicting components take turns."""

from __future__ import annotations

from collections.abc import Callable

import torch

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

    Args:
        device: Where.
        keep: Hold one buffer for all; otherwise take and give back each component's own bytes.
    """

    def __init__(self, device: torch.device, *, keep: bool) -> None:
        self.device = device
        self.keep = keep
        self._buffer: torch.Tensor | None = None
        self._views: dict[str, torch.Tensor] = {}
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
        self._views.pop(name, None)
        self._sizes.pop(name, None)

    def take(self, name: str, nbytes: int) -> torch.Tensor:
        """The bytes of a component; may raise the device's out-of-memory error, and then changes nothing."""
        if name in self._taken:
            return self._taken[name]  # taken already
        self._taken[name] = self._view(name, nbytes) if self._has_place(name, nbytes) else self._fresh(nbytes)
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
        """Whether this component comes back to the address it left."""
        return name in self._views and self._taken.get(name, self._views[name]) is self._views[name]

    def _has_place(self, name: str, nbytes: int) -> bool:
        # A component that has grown past its place (an adapter was added) gets memory of its own.
        return self.keep and name in self._places and nbytes <= self._places[name][1]

    def _view(self, name: str, nbytes: int) -> torch.Tensor:
        if self._buffer is None or self._buffer.numel() < self._size:
            self._buffer, self._views = self._fresh(self._size), {}
        if name not in self._views:
            offset, size = self._places[name]
            self._views[name] = self._buffer[offset : offset + size]
        return self._views[name]

    def _fresh(self, nbytes: int) -> torch.Tensor:
        if self.device.type == "cpu":
            return anonymous(nbytes)  # malloc would keep it
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _occupied(self) -> bool:
        return any(self._in_buffer(taken) for taken in self._taken.values())

    def _in_buffer(self, taken: torch.Tensor) -> bool:
        return any(taken is view for view in self._views.values())
