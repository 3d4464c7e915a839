"""Masters and a mover of numbers only: the real ledger decides, nothing is stored or moved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..components.tensors import Group
from ..protocols import Moved
from ..transfer.masters import Slab, batches, lay_out


@dataclass(frozen=True, slots=True, kw_only=True)
class Papers:
    """What the masters of a component would be.

    Attributes:
        slabs: Bytes of each slab; a resident keeps its weights where they are.
        link_bytes: Bytes of the copies of one load.
    """

    slabs: tuple[int, ...]
    link_bytes: int


def papers_of(groups: Iterable[int], resident: bool) -> Papers:
    """Lay out groups of bytes as the real masters do, in memory that is not there.

    Args:
        groups: Bytes of each group of tensors.
        resident: Whether the component stays on the device.
    """
    sizes = list(groups)
    if resident:
        return Papers(slabs=(), link_bytes=sum(sizes))
    slabs, start = [], 0
    for batch in batches([Group([], _nothing(size)) for size in sizes]):
        end = lay_out(batch, start)
        slabs.append(Slab(_nothing(end - start), start, groups=batch))
        start = end
    link = sum(source.numel() for slab in slabs for _, source in slab.copies())
    return Papers(slabs=tuple(slab.tensor.numel() for slab in slabs), link_bytes=link)


def _nothing(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")


class PaperMover:
    """Knows how many bytes each component would take over the link, and who would be on the device.

    Args:
        payload: Link bytes per component.
    """

    def __init__(self, payload: Mapping[str, int]) -> None:
        self._payload = payload
        self._here: set[str] = set()

    def load(self, name: str) -> Moved:
        """Note it."""
        self._here.add(name)
        return Moved(bytes=self._payload[name])

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
