"""What a reasoner leaves behind for a generator, and when it may be used again.

A memory belongs to the thread that made it: the end of one thread's request does not take another's away.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Inputs = Sequence[Tensor | None]


class Sighting:
    """Tensors as they were seen once: recognised by identity, without a look at the device.

    It keeps them alive, so that no new tensor can take the identity of one that is gone.
    """

    def __init__(self, tensors: Inputs) -> None:
        self._tensors = tuple(tensors)
        self._versions = tuple(_version(one) for one in tensors)

    def again(self, tensors: Inputs) -> bool:
        """Whether these are the same objects, and nobody has written to them since."""
        if len(tensors) != len(self._tensors):
            return False
        return all(
            new is old and version is not None and _version(new) == version
            for new, old, version in zip(tensors, self._tensors, self._versions, strict=True)
        )


def _version(tensor: Tensor | None) -> int | None:
    """The number of writes so far; ``None`` for a tensor of inference mode, which does not count them."""
    if tensor is None:
        return 0
    return None if tensor.is_inference() else tensor._version


@dataclass(slots=True, eq=False)
class PromptMemory:
    """One prompt as the reasoner has read it. Activations: they stay when the reasoner's weights leave.

    Attributes:
        ids: Copy of the token ids, (N,).
        positions: Copy of the position ids, (3, 1, N), float32.
        keys: Per layer, what the generator's queries meet, (N, heads, head width).
        values: Per layer, as ``keys``.
        out: The reasoner's own last hidden states, (N, width).
        blank: Stands for embedded text where only its shape and type count, (N, width) over one element.
        stamp: The state of the weights that read it.
        weights: The tensors whose versions the stamp counts.
        seen: The inputs of the last call that it served.
    """

    ids: Tensor
    positions: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    out: Tensor
    blank: Tensor
    stamp: Hashable = None
    weights: tuple[Tensor, ...] = field(default=(), repr=False)
    seen: Sighting | None = None

    def holds(self, ids: Tensor, positions: Tensor) -> bool:
        """Whether it is of this prompt, by value."""
        pairs = ((self.ids, ids), (self.positions, positions))
        return all(
            mine.shape == other.shape and mine.device == other.device and torch.equal(mine, other)
            for mine, other in pairs
        )


class PromptMemories(threading.local):
    """The memories of the current thread, the latest used last.

    Args:
        limit: How many are kept; the one not used for longest makes room.

    Attributes:
        reading: The memory that the generator reads now.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: list[PromptMemory] = []
        self.reading: PromptMemory | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[PromptMemory]:
        return iter(self._kept[::-1])

    def keep(self, memory: PromptMemory) -> None:
        """Note that a memory is in use now."""
        kept = [one for one in self._kept if one is not memory]
        self._kept = [*kept[len(kept) + 1 - self._limit if len(kept) >= self._limit else 0 :], memory]

    def drop(self, memory: PromptMemory) -> None:
        """Forget one."""
        self._kept = [one for one in self._kept if one is not memory]

    def forget(self) -> None:
        """Forget all of this thread's."""
        self._kept = []

    @contextmanager
    def read(self, memory: PromptMemory) -> Iterator[None]:
        """The generator reads this memory inside the block."""
        before, self.reading = self.reading, memory
        try:
            yield
        finally:
            self.reading = before

    # A copy of the model starts without memories; the lock inside a thread's own storage cannot be copied.

    def __deepcopy__(self, memo: dict[int, Any]) -> PromptMemories:
        return PromptMemories(self._limit)

    def __reduce__(self) -> Any:
        return PromptMemories, (self._limit,)
