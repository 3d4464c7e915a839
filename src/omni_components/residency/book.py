"""The book: each component's state, pins and rivals. Its owner holds the mutex while it reads or writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from ..components.component import Component
from ..errors import BudgetError, InvariantError, OwnershipError, UnknownComponentError
from .graph import peak_bytes, peak_with_one_arriving
from .scope import OffloadScope
from .threads import ThreadStack


class State(Enum):
    """Where a component is, told by who holds memory for it."""

    HOST = auto()  # only the master's bytes
    ARRIVING = auto()  # as LOADING, but ahead of its scope: its tensors are the masters until that opens
    LOADING = auto()  # host and device bytes are both reserved
    DEVICE = auto()  # device bytes are in use; the master stays for the way back
    EVICTING = auto()  # device bytes are still held


AWAY = (State.HOST, State.ARRIVING)  # nobody can compute with it, and no rival has to wait for it

LEGAL = {
    (State.HOST, State.ARRIVING),
    (State.ARRIVING, State.LOADING),
    (State.ARRIVING, State.HOST),  # the guess was wrong
    (State.HOST, State.LOADING),
    (State.LOADING, State.DEVICE),
    (State.LOADING, State.HOST),  # rollback
    (State.DEVICE, State.EVICTING),
    (State.EVICTING, State.HOST),
    (State.EVICTING, State.DEVICE),  # rollback
}


@dataclass(slots=True, eq=False)
class Entry:
    """A component in the book.

    ``scopes`` are its open scopes: pins are counted, never stored, so they cannot drift. An entry on the
    host with open scopes is suspended: a nested rival of the same thread has its place.
    """

    component: Component
    bytes: int
    state: State = State.HOST
    scopes: list[OffloadScope] = field(default_factory=list)
    rivals: list[Entry] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The component's name."""
        return self.component.name


class Book:
    """Entries by name, and the bytes they hold on the device.

    Args:
        owner: Whose book, for messages.
        capacity: Most bytes of the device that may be held, ``None`` without limit.
        ahead: One component may arrive while its rivals are there.
    """

    def __init__(self, owner: str, capacity: int | None, *, ahead: bool = False) -> None:
        self.owner = owner
        self.capacity = capacity
        self.ahead = ahead
        self.entries: dict[str, Entry] = {}
        self.held = 0

    def __getitem__(self, name: str) -> Entry:
        try:
            return self.entries[name]
        except KeyError:
            raise UnknownComponentError(name, tuple(self.entries), self.owner) from None

    def admit(
        self, components: Sequence[Component], conflicts: Callable[[Component, Component], bool]
    ) -> None:
        """Enter components with their conflicts, all or none."""
        fresh = {one.name: Entry(one, one.bytes) for one in components}
        names = [one.name for one in components]
        taken = next((name for name in names if name in self.entries or names.count(name) > 1), None)
        if taken is not None:
            raise OwnershipError(
                taken, self.owner, "a second component", "Give the components different names."
            )
        everyone = {**self.entries, **fresh}
        for entry in fresh.values():
            self.check_budget(entry, everyone.values())
        links = [
            (one, other)
            for one in fresh.values()
            for other in everyone.values()
            if one is not other and conflicts(one.component, other.component)
        ]
        for one, other in links:
            if other not in one.rivals:
                one.rivals.append(other)
            if one not in other.rivals:
                other.rivals.append(one)
        self.entries = everyone

    def strike(self, gone: Iterable[Entry]) -> None:
        """Take entries out; they are on the host."""
        gone = list(gone)
        # At once, and first: an interrupt further down must not leave an entry whose rivals have forgotten it.
        self.entries = {name: one for name, one in self.entries.items() if one not in gone}
        for entry in gone:
            for rival in entry.rivals:
                if entry in rival.rivals:
                    rival.rivals.remove(entry)
            entry.rivals = []  # it may be struck twice, and whoever waits for it must wait no longer

    def step(self, entry: Entry, state: State) -> None:
        """The one place where a state changes."""
        if (entry.state, state) not in LEGAL:
            raise InvariantError(
                "I6 rest", f"{entry.name!r} cannot go from {entry.state.name} to {state.name}"
            )
        if entry.state is State.HOST:
            self.held += entry.bytes
        elif state is State.HOST:
            self.held -= entry.bytes
        entry.state = state

    def resize(self, entry: Entry, size: int) -> None:
        """A component has grown or shrunk by what was found in its slots."""
        if entry.state is not State.HOST:
            self.held += size - entry.bytes
        entry.bytes = size

    def check_budget(self, entry: Entry, everyone: Iterable[Entry] | None = None) -> None:
        """Refuse a component that cannot fit beside the residents, before anything moves."""
        if self.capacity is None:
            return  # no limit
        others = [
            one for one in everyone or self.entries.values() if one.component.resident and one is not entry
        ]
        held = sum(one.bytes for one in others)
        if held + entry.bytes > self.capacity:
            raise BudgetError(entry.name, entry.bytes, self.capacity, held, [one.name for one in others])

    @property
    def arriving(self) -> Entry | None:
        """Who is being copied ahead of its scope."""
        return next((entry for entry in self.entries.values() if entry.state is State.ARRIVING), None)

    def has_room_beside(self, entry: Entry) -> bool:
        """Whether its bytes fit into the limit beside all that is held now."""
        return self.capacity is None or self.held + entry.bytes <= self.capacity

    def predicted_peak(self) -> int:
        """Bytes of the heaviest set of components that may be on the device together, the arriving one included."""
        sizes = {name: entry.bytes for name, entry in self.entries.items()}
        rivals = {name: [one.name for one in entry.rivals] for name, entry in self.entries.items()}
        peak = peak_bytes(sizes, rivals)
        if not self.ahead:
            return peak
        more = peak_with_one_arriving(sizes, rivals)
        return more if self.capacity is None else max(peak, min(more, self.capacity))

    def needed(self, stack: ThreadStack) -> list[Entry]:
        """What a thread's innermost body needs: its component, and outer ones that no scope inside displaced."""
        needed: list[Entry] = []
        inside: list[Entry] = []
        for scope in reversed(stack.scopes):
            entry = self.entries[scope.name]
            if entry not in needed and not any(entry in one.rivals for one in inside):
                needed.append(entry)
            inside.append(entry)
        return needed

    def stacks(self) -> list[ThreadStack]:
        """The threads with open scopes."""
        found = {
            id(scope.stack): scope.stack
            for one in self.entries.values()
            for scope in one.scopes
            if scope.stack
        }
        return list(found.values())

    def pin(self, scope: OffloadScope, entry: Entry, stack: ThreadStack) -> None:
        """Open a scope: one more pin."""
        scope.stack = stack
        stack.scopes.append(scope)
        entry.scopes.append(scope)

    def unpin(self, scope: OffloadScope) -> None:
        """Close a scope; may be called again after an interrupt."""
        stack = scope.stack
        if stack is None:
            return  # closed already
        if scope in stack.scopes:
            stack.scopes.remove(scope)
        pins = self.entries[scope.name].scopes
        if scope in pins:
            pins.remove(scope)
        scope.stack = scope.call = None

    def reap(self) -> bool:
        """Close scopes that nobody can leave any more; returns whether there were any."""
        if not any(entry.scopes for entry in self.entries.values()):
            return False  # the usual case
        found = False
        for stack in self.stacks():
            for scope in stack.dead():
                found = True
                self.unpin(scope)
                # The outer scope's component comes back at the next leave; until then its body has the interrupt.
                stack.lost = stack.lost or scope.displaced
        return found
