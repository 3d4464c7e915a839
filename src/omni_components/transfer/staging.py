"""Mapped masters on their way to an accelerator: file pages, a pinned staging slab, the device.

Two slabs take turns: while the device reads one, the host fills the other from the page cache. So a host that
has less memory than the weights needs only these two besides.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .device import Backend
from .hostmemory import FileMappings
from .masters import PinBudget, Slab, align

STAGING_BYTES = 64 << 20  # per slab: few copies, and little memory that is pinned for good
Pair = tuple[torch.Tensor, torch.Tensor]


class Staging:
    """Two slabs that are filled and sent in turn; taken at the first use, given back by ``close``.

    Args:
        backend: Runs the copies.
        budget: Pins the slabs while it lasts.
        mappings: The pages whose copies go this way; others go straight.
        nbytes: Of each slab.
    """

    def __init__(
        self, backend: Backend, budget: PinBudget, mappings: FileMappings, nbytes: int = STAGING_BYTES
    ) -> None:
        self._backend, self._budget, self._mappings, self._nbytes = backend, budget, mappings, nbytes
        self._slabs: list[Slab] = []
        self._turn = 0

    @property
    def slabs(self) -> tuple[Slab, ...]:
        """The memory it holds now."""
        return tuple(self._slabs)

    def send(self, pairs: Iterable[Pair]) -> int:
        """Enqueue copies on the copy stream, which must be current; those of file pages pass through the slabs.

        What lies close together on the device goes as one copy, the padding between included.

        Args:
            pairs: ``(to, from)``, in the order of the layout.

        Returns:
            The bytes that go over the link.
        """
        run: list[Pair] = []
        sent = 0
        for target, source in _pieces(pairs, self._nbytes):
            if source.data_ptr() not in self._mappings:
                target.copy_(source, non_blocking=True)
                sent += source.numel()
                continue
            if run and not self._fits(run, target):
                sent += self._flush(run)
                run = []
            run.append((target, source))
        return sent + self._flush(run) if run else sent

    def look_again(self) -> None:
        """New slabs may lie where a file was mapped when the system was last asked."""
        self._mappings = FileMappings()

    def close(self) -> None:
        """Give the slabs back, after the last copy from them. Idempotent."""
        while self._slabs:
            taken = self._slabs[-1].taken
            self._slabs[-1].unpin()
            self._budget.taken -= taken
            self._slabs.pop()

    def _fits(self, run: list[Pair], target: torch.Tensor) -> bool:
        first, last = run[0][0], run[-1][0]
        start = target.storage_offset()
        follows = start == align(int(last.storage_offset()) + last.numel())
        same = target.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        return same and follows and start + target.numel() - first.storage_offset() <= self._nbytes

    def _flush(self, run: list[Pair]) -> int:
        slab = self._free_slab()
        low = int(run[0][0].storage_offset())
        for target, source in run:
            place = int(target.storage_offset()) - low
            slab.tensor[place : place + source.numel()].copy_(source)
        high = int(run[-1][0].storage_offset()) + run[-1][0].numel()
        whole = torch.empty(0, dtype=torch.uint8, device=run[0][0].device)
        whole = whole.set_(run[0][0].untyped_storage(), low, (high - low,), (1,))
        whole.copy_(slab.tensor[: high - low], non_blocking=True)
        slab.reader = self._backend.done()
        return high - low

    def _free_slab(self) -> Slab:
        """The slab that was sent longest ago, once the device has read it."""
        if len(self._slabs) < 2:
            self._slabs.append(self._budget.slab(self._nbytes, 0))
            return self._slabs[-1]
        slab = self._slabs[self._turn]
        self._turn = 1 - self._turn
        reader: Any = slab.reader
        if reader is not None and not reader.query():
            reader.synchronize()
        return slab


def _pieces(pairs: Iterable[Pair], nbytes: int) -> Iterable[Pair]:
    """Pairs no longer than a slab."""
    for target, source in pairs:
        for start in range(0, source.numel(), nbytes):
            yield target[start : start + nbytes], source[start : start + nbytes]
