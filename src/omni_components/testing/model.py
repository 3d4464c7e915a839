"""Model: what a ledger must do, in dicts and lists, one thread at a time.

Each operation is a generator that runs until it ends, raises :class:`Refused`, or yields because it must wait;
the model resumes those that wait, the longest first, as soon as nothing is in their way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import (
    OwnershipError,
    ResidencyDeadlockError,
    ResidencyTimeoutError,
    ScopeError,
    UnknownComponentError,
)
from .movers import FaultPlan, Verb

if TYPE_CHECKING:
    from .strategies import Phase

Steps = Iterator[None]


class Refused(Exception):
    """The operation must raise ``error``, and exactly this type."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__(error.__name__)
        self.error = error


@dataclass(eq=False)
class ModelScope:
    """A scope as the model sees it."""

    name: str
    thread: str | None = None
    used: bool = False
    displaced: bool = False


@dataclass(eq=False)
class Waiting:
    """A thread in the queue for its turn; no ``name``: it wants to evict."""

    thread: str
    name: str | None


@dataclass
class Place:
    """A component as the model sees it."""

    bytes: int
    resident: bool
    present: bool = False
    value: int = 0
    loads: int = 0
    evictions: int = 0
    scopes: list[ModelScope] = field(default_factory=list)


class Model:
    """The reference for one ledger.

    Args:
        order: The rivals of a component, in the order in which the ledger evicts them.
        nesting: The policy's.
        ahead: Components may be copied ahead.
        budget: Most bytes that may be held then; ``None`` without limit.

    Attributes:
        places: The components declared now.
        stacks: The open scopes of each thread, outermost first.
        lost: Threads whose open scopes could not be served; their bodies got an error.
        faults: What is going to fail.
        warned: Pairs of rivals that were nested.
        arriving: Who is copied ahead. A guess changes nothing for anyone, so that it is watched, not foretold.
        outcomes: How the operations ended that ended in the last step, by thread; ``None`` is a success.
    """

    def __init__(
        self,
        order: Callable[[str], Sequence[str]],
        nesting: str = "switch",
        *,
        ahead: bool = False,
        budget: int | None = None,
    ) -> None:
        self.order = order
        self.nesting = nesting
        self.ahead = ahead
        self.budget = budget
        self.arriving: str | None = None
        self.places: dict[str, Place] = {}
        self.stacks: dict[str, list[ModelScope]] = {}
        self.lost: set[str] = set()
        self.faults = FaultPlan()
        self.warned: set[tuple[str, str]] = set()
        self.outcomes: dict[str, type[BaseException] | None] = {}
        self._queue: list[Waiting] = []
        self._running: dict[str, Steps] = {}  # those that wait, the longest first

    # --- what it says -------------------------------------------------------------------------------------

    @property
    def present(self) -> set[str]:
        """The components on the device."""
        return {name for name, place in self.places.items() if place.present}

    @property
    def device_bytes(self) -> int:
        """Their bytes, and those of the one that arrives."""
        held = [place.bytes for name, place in self.places.items() if place.present or name == self.arriving]
        return sum(held)

    @property
    def waiting(self) -> tuple[str, ...]:
        """The threads that wait, the longest first."""
        return tuple(self._running)

    def needed(self, thread: str) -> list[str]:
        """What a thread's innermost body needs: its component, and outer ones that no scope inside displaced."""
        names = [scope.name for scope in reversed(self.stacks.get(thread, []))]
        left = [name for place, name in enumerate(names) if not set(names[:place]) & set(self._rivals(name))]
        return list(dict.fromkeys(left))

    def watch(self, arriving: str | None) -> None:
        """I1 with prefetch: one active, one arriving, within the budget; without it, nobody arrives."""
        self.arriving = arriving
        if arriving is not None:
            assert self.ahead, f"{arriving!r} arrives, and nobody asked for that"
            assert not self.places[arriving].present, f"{arriving!r} arrives and is there"
            assert self.budget is None or self.device_bytes <= self.budget, f"{arriving!r} has no room"

    # --- running operations -------------------------------------------------------------------------------

    def start(self, thread: str, steps: Steps) -> None:
        """Run an operation of a thread as far as it goes, and whatever it lets go on."""
        self.outcomes = {}
        self._advance(thread, steps)
        moved = True
        while moved:
            moved = False
            for other in list(self._running):
                waiter = next(one for one in self._queue if one.thread == other)
                if not self._blocked(waiter) or self._in_ring(waiter):
                    self._advance(other, self._running.pop(other))
                    moved = True
                    break

    def _advance(self, thread: str, steps: Steps) -> None:
        try:
            next(steps)
        except StopIteration:
            self.outcomes[thread] = None
        except Refused as refused:
            self.outcomes[thread] = refused.error
        else:
            self._running[thread] = steps

    # --- the operations -----------------------------------------------------------------------------------

    def enter(self, thread: str, scope: ModelScope, timeout: float | None = None) -> Steps:
        """``with ledger.scope(...)``, its beginning."""
        if scope.used:
            raise Refused(ScopeError)
        scope.used = True
        place = self._place(scope.name)
        if place.present and not self._blocked(Waiting(thread, scope.name)):
            scope.displaced = thread in self.lost
            self._pin(thread, scope)
            return
        outer = self._displaced_by(thread, scope.name)
        if outer and self.nesting == "error":
            raise Refused(ScopeError)
        self.warned |= {(one, scope.name) for one in outer}
        try:
            yield from self._turn(thread, scope.name, timeout)
            scope.displaced = thread in self.lost or bool(self._displaced_by(thread, scope.name))
            self._bring(scope.name)
            self._pin(thread, scope)
        except Refused:
            if scope.displaced:
                yield from self._restore_after_failure(thread)
            raise

    def leave(self, thread: str, scope: ModelScope) -> Steps:
        """``with ledger.scope(...)``, its end."""
        if scope.thread != thread or self.stacks[thread][-1] is not scope:
            raise Refused(ScopeError)
        self.stacks[thread].pop()
        self.places[scope.name].scopes.remove(scope)
        scope.thread = None
        if scope.displaced or thread in self.lost:
            yield from self._restore(thread)

    def program(self, thread: str, phases: Sequence[Phase], error: type[BaseException]) -> Steps:
        """``with`` statements after and inside each other; a body that raises raises ``error``."""
        for phase in phases:
            scope = ModelScope(phase.name)
            yield from self.enter(thread, scope)
            try:
                yield from self.program(thread, phase.body, error)
                if phase.ends == "raises":
                    raise Refused(error)
            except Refused:
                yield from self.leave(thread, scope)  # an error on the way back is the one that is seen
                raise
            yield from self.leave(thread, scope)

    def load(self, thread: str, name: str, timeout: float | None = None) -> Steps:
        """``ledger.load(name)``."""
        self._place(name)
        if self._displaced_by(thread, name):
            raise Refused(ScopeError)
        yield from self._turn(thread, name, timeout)
        self._bring(name)

    def release(self, thread: str) -> Steps:
        """``ledger.release()``."""
        yield from self._turn(thread, None)
        for name, place in self.places.items():
            if not place.resident and not place.scopes:
                self._evict(name)

    def admit(self, names: dict[str, tuple[int, bool]]) -> Steps:
        """``ledger.admit(...)``: size, and whether resident, by name."""
        if any(name in self.places for name in names):
            raise Refused(OwnershipError)
        self.places |= {name: Place(size, resident) for name, (size, resident) in names.items()}
        yield from ()

    def retire(self, thread: str, names: Sequence[str]) -> Steps:
        """``ledger.retire(names)``."""
        gone = [self._place(name) for name in names]
        yield from self._turn(thread, None)
        if any(place.scopes for place in gone):
            raise Refused(ScopeError)
        for name in names:
            self._evict(name)
        for name in names:
            self.places.pop(name, None)

    # --- turns --------------------------------------------------------------------------------------------

    def _turn(
        self, thread: str, name: str | None, timeout: float | None = None, *, first: bool = False
    ) -> Steps:
        waiter = Waiting(thread, name)
        self._queue.insert(0 if first else len(self._queue), waiter)
        try:
            while self._blocked(waiter):
                if self._in_ring(waiter):
                    raise Refused(ResidencyDeadlockError)
                if timeout is not None:
                    raise Refused(ResidencyTimeoutError)
                yield
            if name is not None:
                self._place(name)  # it may have been retired meanwhile
        finally:
            self._queue.remove(waiter)

    def _blocked(self, waiter: Waiting) -> bool:
        if self._holders(waiter):
            return True
        return any(not self._waits_for(other, waiter.thread, soft=True) for other in self._ahead(waiter))

    def _in_ring(self, waiter: Waiting) -> bool:
        return self._waits_for(waiter, waiter.thread, soft=False)

    def _holders(self, waiter: Waiting) -> set[str]:
        """Other threads that need a rival which is on the device."""
        if waiter.name not in self.places or self.places[waiter.name].present:
            return set()
        rivals = {rival for rival in self._rivals(waiter.name) if self.places[rival].present}
        return {one for one in self.stacks if one != waiter.thread and rivals & set(self.needed(one))}

    def _ahead(self, waiter: Waiting) -> list[Waiting]:
        """Earlier waiters that want a rival."""
        if waiter.name not in self.places:
            return []
        place = self._queue.index(waiter) if waiter in self._queue else len(self._queue)
        return [other for other in self._queue[:place] if other.name in self._rivals(waiter.name)]

    def _waits_for(self, start: Waiting, thread: str, *, soft: bool) -> bool:
        """Whether ``start`` waits, through whatever chain, for ``thread``; soft: also for its turn."""
        reached: set[str] = set()
        todo = [start]
        while todo:
            waiter = todo.pop()
            before = self._holders(waiter) | ({one.thread for one in self._ahead(waiter)} if soft else set())
            todo += [other for other in self._queue if other.thread in before - reached]
            reached |= before
        return thread in reached

    # --- moving -------------------------------------------------------------------------------------------

    def _bring(self, name: str) -> None:
        if self.places[name].present:
            return
        for rival in self._rivals(name):
            self._evict(rival)
        self._move("load", name)

    def _evict(self, name: str) -> None:
        if self.places[name].present:
            self._move("evict", name)

    def _move(self, verb: Verb, name: str) -> None:
        place = self.places[name]
        fault = self.faults.strike(verb, name)
        if fault is None or fault.when == "after":
            place.present = verb == "load"
        if fault is not None:
            raise Refused(fault.error)
        if verb == "load":
            place.loads += 1
        else:
            place.evictions += 1

    def _restore(self, thread: str) -> Steps:
        self.lost.add(thread)
        for name in self.needed(thread):
            if not self.places[name].present:
                yield from self._turn(thread, name, first=True)
                self._bring(name)
        self.lost.discard(thread)

    def _restore_after_failure(self, thread: str) -> Steps:
        """The first error is the one that is seen, unless the second is an interrupt."""
        try:
            yield from self._restore(thread)
        except Refused as second:
            if not issubclass(second.error, Exception):
                raise

    # --- small things -------------------------------------------------------------------------------------

    def _rivals(self, name: str) -> list[str]:
        return [rival for rival in self.order(name) if rival in self.places]

    def _place(self, name: str) -> Place:
        if name not in self.places:
            raise Refused(UnknownComponentError)
        return self.places[name]

    def _pin(self, thread: str, scope: ModelScope) -> None:
        scope.thread = thread
        self.stacks.setdefault(thread, []).append(scope)
        self.places[scope.name].scopes.append(scope)

    def _displaced_by(self, thread: str, name: str) -> list[str]:
        mine = {scope.name for scope in self.stacks.get(thread, [])}
        return [rival for rival in self._rivals(name) if rival in mine and self.places[rival].present]
