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
        beside: Encoders of a diffusers pipeline that it may stand beside: together they need no more room than
            the largest of those that take turns.
        clears: Components that go home when it is used, although they do not conflict: when they come back, it
            stays. In a diffusers pipeline, those of its role that come before it in the order; for a VAE and the
            last, all.
    """

    name: str
    role: Role
    bytes: int
    tensors: int = 0
    resident: bool = False
    model: str = ""
    exclusive: bool = True
    beside: frozenset[str] = frozenset()
    clears: frozenset[str] = frozenset()


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
        everything: Every swappable component excludes every other (a diffusers pipeline without lists), save
            encoders that say of each other that they may stand beside each other.
    """
    if one.resident or other.resident or one.name == other.name:
        return False
    if not (one.exclusive and other.exclusive) or one.name in other.clears or other.name in one.clears:
        return False
    if one.role is Role.ENCODER and other.role is Role.ENCODER:
        together = one.name in other.beside and other.name in one.beside
        return exclusive_encoders or (everything and not together)
    return True
