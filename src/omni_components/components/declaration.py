"""What a target declares: one record per component, found but not yet attached."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from .area import Area, FixedArea
from .component import Role
from .paths import unwrapped

REST = "(rest)"  # the resident of what a module holds besides its components
SHARED = "(shared)"  # the resident of what two components share


@dataclass(slots=True, eq=False)
class Found:
    """One component, found but not yet attached.

    Attributes:
        name: Unique in the declaration.
        role: From the list it was declared in.
        resident: It stays on the device.
        area: Its slots.
        model: The path of the split model it is a part of, else its own path.
        called: Modules whose calls open a scope; none for parts, which mark their phases themselves.
        split: The split model that this is a part, or the rest, of.
        part: For a part, the name under which the model opens its scope.
        entry_points: Methods that the policy declares for it.
        exclusive: It takes turns with others.
        beside: Encoders that it may stand beside although everything else excludes it.
        planned: It would take turns, and is resident because everything fits.
        clears: Those that go home when it is used, although they do not exclude it.
    """

    name: str
    role: Role
    resident: bool
    area: Area | FixedArea
    model: str
    called: list[tuple[str, nn.Module]] = field(default_factory=list)
    split: nn.Module | None = None
    part: str = ""
    entry_points: tuple[str, ...] = ()
    exclusive: bool = True
    beside: list[Found] = field(default_factory=list)
    planned: bool = False
    clears: list[Found] = field(default_factory=list)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that it was declared by; for a part, or the rest, the split model."""
        called = [unwrapped(module) for _, module in self.called]
        return called if self.split is None else [*called, self.split]


@dataclass(slots=True, eq=False)
class Declaration:
    """Everything a target declares.

    Attributes:
        owner: The target's class name, for messages.
        found: Its components.
        everything: Every swappable component excludes every other.
    """

    owner: str
    found: list[Found]
    everything: bool = False
