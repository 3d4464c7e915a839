"""The gate: one thread moves at a time; whoever asks waits here until nothing is in the way.

The mutex guards the book only and is never held while bytes travel, so that scopes on components which are
already present open meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ..errors import ResidencyDeadlockError, ResidencyTimeoutError, ScopeError
from .book import Book, Entry
from .events import Cause, EventKind
from .scope import OffloadScope
from .switch import Switch
from .threads import OfThread
from .turns import Turns, Waiter

_LOOK = 0.5  # seconds: a thread that dies, or a call that an interrupt ends, tells nobody that waits for it


class Gate:
    """Gives turns.

    Args:
        book: Whose entries are waited for.
        switch: Moves them, one at a time.
        turns: Who waits, and who may move.
        mutex: The ledger's.
        local: Each thread's open scopes.

    Attributes:
        changed: Notified whenever somebody who waits may have to look again; its lock is the mutex.
    """

    def __init__(
        self, book: Book, switch: Switch, turns: Turns, mutex: threading.Lock, local: OfThread
    ) -> None:
        self._book = book
        self._switch = switch
        self._turns = turns
        self._local = local
        self._mutex = mutex
        self.changed = threading.Condition(mutex)

    def in_turn(
        self,
        act: Callable[[], None],
        entry: Entry | None = None,
        timeout: float | None = None,
        *,
        first: bool = False,
        cause: Cause = Cause.MANUAL,
    ) -> None:
        """Wait until nothing is in the way, then act as the one thread that moves.

        Not a context manager: an interrupt at the first step of its ``__exit__`` would leave the turn taken.

        Args:
            act: What to do.
            entry: What it brings in; ``None`` if it sends components home, or only looks.
            timeout: Seconds to wait, ``None`` without limit.
            first: Go before those who wait already.
            cause: Who asks, for the events.
        """
        waiter = Waiter(self._local.stack, entry)
        moving = self._turns.moving
        if moving is not None and moving.stack is waiter.stack:
            raise ScopeError(
                waiter.name, "it was asked for while this thread moves bytes.", "This is a bug: report it."
            )
        try:
            with self._mutex:
                self._wait(waiter, timeout, first, cause)
                self._turns.moving = waiter
            act()
            if entry is not None and not self._turns.waiters:  # those who wait go before a guess
                self._switch.look_ahead()
        finally:
            if self._turns.moving is waiter:
                self._turns.moving = None  # before the mutex, whose wait an interrupt can end
            with self._mutex:
                self.changed.notify_all()

    def unpin(self, scope: OffloadScope) -> None:
        """Close a scope, and tell those who wait."""
        with self._mutex:
            self._book.unpin(scope)
            if self._turns.waiters:
                self.changed.notify_all()

    def reap(self) -> None:
        """Close scopes that nobody can leave any more, and tell those who wait for them (the mutex is held)."""
        if self._book.reap():
            self.changed.notify_all()

    def _wait(self, waiter: Waiter, timeout: float | None, first: bool, cause: Cause) -> None:
        self.reap()
        start = time.perf_counter()
        waiters = self._turns.waiters
        try:
            waiters.insert(0 if first else len(waiters), waiter)
            if self._turns.blocked(waiter):
                self._sleep(waiter, timeout, start)
                self._switch.record(EventKind.WAIT, waiter.name, cause, start)
            if waiter.entry is not None and self._book[waiter.name] is not waiter.entry:
                raise ScopeError(waiter.name, "its component was replaced meanwhile.", "Ask for a new scope.")
        finally:
            if waiter in waiters:
                waiters.remove(waiter)

    def _sleep(self, waiter: Waiter, timeout: float | None, start: float) -> None:
        self.changed.notify_all()  # what the others wait for may have changed by this one
        while self._turns.blocked(waiter):
            # Each time: a thread that runs may close a ring around others, by what it brings back or sends home.
            ring = self._turns.ring(waiter)
            if ring:
                raise ResidencyDeadlockError(waiter.name, ring)
            left = _LOOK if timeout is None else start + timeout - time.perf_counter()
            if left <= 0:
                raise ResidencyTimeoutError(waiter.name, timeout or 0.0, self._turns.holders(waiter))
            self.changed.wait(min(left, _LOOK))
            self.reap()
