"""Ahead: a component that is copied to the device while its tensors are still its masters."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch

from .cargo import Cargo

_version: Any = attrgetter("_version")


class Ahead:
    """Device bytes that fill up for a component before anyone asks for it.

    Args:
        cargo: The component.
        block: Its device bytes to be.

    Attributes:
        block: Likewise.
        arrived: The event behind the copies.
    """

    def __init__(self, cargo: Cargo, block: torch.Tensor) -> None:
        self.block = block
        self.arrived: Any = None
        # The masters are in use meanwhile: whoever writes to one after this moves its version counter.
        self._watched: list[torch.Tensor] = [member.host for member in cargo.members()]
        self._watched += [one.host for one in cargo.composites if one.host is not None]
        self._versions = list(map(_version, self._watched))

    def up_to_date(self) -> bool:
        """Whether the masters are as they were when the copies began."""
        return list(map(_version, self._watched)) == self._versions
