"""Component and Role: the frozen records that say WHAT moves. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Role(str, Enum):
    """What a component is for; the conflicts follow from it."""

    ENCODER = "encoder"
    DIT = "dit"
    PART = "part"
    VAE = "vae"
    RESIDENT = "resident"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A named set of tensors that moves as one.

    Attributes:
        name: Unique in its ledger.
        role: Decides the conflicts.
        bytes: Device bytes of the component when it was declared, each storage once.
        tensors: How many parameters and buffers it has.
        resident: Always on the device, never swapped.
        model: Path of the module whose parts conflict with each other; the module's own path for a module.
        exclusive: It takes turns with others. If not, it conflicts with nothing: it comes at its first use and
            leaves at ``release()``.
    """

    name: str
    role: Role
    bytes: int
    tensors: int = 0
    resident: bool = False
    model: str = ""
    exclusive: bool = True


def conflict(
    one: Component, other: Component, *, exclusive_encoders: bool = False, everything: bool = False
) -> bool:
    """Whether two components must never both be on the device.

    DiT-DiT, DiT-encoder and part-part conflict, and a part inherits its DiT's conflicts. Encoders conflict
    with each other on request, VAEs with whoever swaps once they are swapped themselves.

    Args:
        one: A component.
        other: Another component.
        exclusive_encoders: Encoders exclude each other too.
        everything: Every swappable component excludes every other (a diffusers pipeline without lists).
    """
    if one.resident or other.resident or one.name == other.name:
        return False
    if not (one.exclusive and other.exclusive):
        return False
    if one.role is Role.ENCODER and other.role is Role.ENCODER:
        return exclusive_encoders or everything
    return True
