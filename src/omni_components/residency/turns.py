"""Who waits for whom: first come first served, and a ring of waits is an error at once.

All of it runs under the ledger's mutex. A waiter is blocked by threads, for one of three reasons:

* another thread is moving bytes that concern it (it never waits, so this always ends);
* another thread has a scope open on a rival that is on the device, and no scope inside it displaces that one;
* an earlier waiter wants a rival: its turn comes first, unless it waits, directly or not, for this thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .book import AWAY, Entry, State
from .scope import OffloadScope
from .threads import ThreadStack


@dataclass(slots=True, eq=False)
class Waiter:
    """A thread that wants an entry on the device; ``None`` wants to evict whatever is not pinned."""

    stack: ThreadStack
    entry: Entry | None

    @property
    def name(self) -> str:
        """What it waits for, for messages."""
        return self.entry.name if self.entry is not None else "*"


class Turns:
    """The queue of waiters and the one that may move bytes."""

    def __init__(self) -> None:
        self.waiters: list[Waiter] = []
        self.moving: Waiter | None = None

    def blocked(self, waiter: Waiter) -> bool:
        """Whether it is not yet the waiter's turn to move."""
        moving = self.moving  # its thread sets it back without the mutex
        return (moving is not None and moving.stack is not waiter.stack) or not self.may_share(waiter)

    def may_share(self, waiter: Waiter) -> bool:
        """Whether nobody is, or comes first, in the waiter's way."""
        if next(self._hard(waiter), None) is not None:
            return False
        return all(self._reaches(other, waiter.stack) for other in self._ahead(waiter))

    def ring(self, waiter: Waiter) -> list[str]:
        """A ring of threads that wait for each other's open scopes, in words; empty if there is none."""
        paths = [[waiter]]
        seen = [waiter]
        while paths:
            path = paths.pop()
            for stack in self._hard(path[-1]):
                if stack is waiter.stack:
                    return [f"{one.stack.name} (waits for {one.name!r})" for one in path] + [
                        waiter.stack.name
                    ]
                follower = self._waiter_of(stack)
                if follower is not None and follower not in seen:
                    seen.append(follower)
                    paths.append([*path, follower])
        return []

    def holders(self, waiter: Waiter) -> list[str]:
        """Who is in the way, in words."""
        rivals = waiter.entry.rivals if waiter.entry else []
        held = [(rival.name, scope.stack.name) for rival in rivals for scope in rival.scopes if scope.stack]
        return [f"{name!r} in thread {thread}" for name, thread in dict.fromkeys(held)]

    def _hard(self, waiter: Waiter) -> Iterator[ThreadStack]:
        """Threads that hold what the waiter needs."""
        entry, moving = waiter.entry, self.moving
        if moving is not None and moving.stack is not waiter.stack and _concerns(moving, entry):
            yield moving.stack
        if entry is None or entry.state is State.DEVICE:
            return  # there already: no rival has to go
        for rival in entry.rivals:
            if rival.state in AWAY:
                continue  # suspended by its own thread: it has no place to give
            for scope in rival.scopes:
                stack = scope.stack
                if stack is not None and stack is not waiter.stack and not _displaced(scope, stack, rival):
                    yield stack

    def _ahead(self, waiter: Waiter) -> Iterator[Waiter]:
        """Earlier waiters whose turn comes first."""
        for other in self.waiters:
            if other is waiter:
                return
            if waiter.entry is not None and other.entry in waiter.entry.rivals:
                yield other

    def _reaches(self, start: Waiter, goal: ThreadStack) -> bool:
        """Whether ``start`` waits, through whatever chain, for ``goal``."""
        seen: set[int] = set()
        todo = [start]
        while todo:
            waiter = todo.pop()
            if id(waiter) in seen:
                continue
            seen.add(id(waiter))
            for stack in [*self._hard(waiter), *(other.stack for other in self._ahead(waiter))]:
                if stack is goal:
                    return True
                follower = self._waiter_of(stack)
                if follower is not None:
                    todo.append(follower)
        return False

    def _waiter_of(self, stack: ThreadStack) -> Waiter | None:
        return next((waiter for waiter in self.waiters if waiter.stack is stack), None)


def _displaced(scope: OffloadScope, stack: ThreadStack, entry: Entry) -> bool:
    """Whether a scope inside it has taken its place: a sharer may have brought it back, but it needs none now."""
    inside = {one.name for one in stack.scopes[stack.scopes.index(scope) + 1 :]}
    return any(rival.name in inside for rival in entry.rivals)


def _concerns(moving: Waiter, entry: Entry | None) -> bool:
    if entry is None or moving.entry is None or entry.state is not State.DEVICE:
        return True  # both would move, or the mover evicts whatever is not pinned
    return moving.entry in entry.rivals
