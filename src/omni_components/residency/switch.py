"""Transitions: reserve, act, commit, or roll back on any ``BaseException``. Only the moving thread calls this."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from ..errors import InvariantError, ScopeError
from ..protocols import Moved, Mover
from .book import Book, Entry, State
from .events import Cause, EventKind, History, ResidencyEvent
from .order import Order


class Switch:
    """Moves components one at a time and writes down what happened.

    Args:
        book: Who is where.
        mover: Carries the bytes.
        history: Takes the events.
        mutex: The ledger's.
        order: Tells who comes next, if components may be copied ahead.
    """

    def __init__(
        self, book: Book, mover: Mover, history: History, mutex: threading.Lock, order: Order | None = None
    ) -> None:
        self._book = book
        self._mover = mover
        self._history = history
        self._mutex = mutex
        self._order = order

    def bring(self, entry: Entry, cause: Cause) -> None:
        """Evict the rivals, then load: never the other way round."""
        for done in self.cleared_by(entry):
            self.evict(done, cause)
        if entry.state is State.DEVICE:
            return  # already there
        self._book.check_budget(entry)
        arriving = self._book.arriving
        if arriving is not None and arriving is not entry:
            self.evict(arriving, cause)  # someone else was expected, and its bytes may be needed
        for rival in entry.rivals:
            self.evict(rival, cause)
        self._transfer(entry, State.LOADING, State.DEVICE, cause)
        if self._order is not None and not entry.component.resident:
            self._order.note(entry.name)

    def cleared_by(self, entry: Entry) -> list[Entry]:
        """Those on the device that go home when a component is used: no rivals, so whoever is in use stays."""
        named = [self._book.entries.get(name) for name in sorted(entry.component.clears)]
        return [one for one in named if one is not None and one.state is State.DEVICE and not one.scopes]

    def evict(self, entry: Entry, cause: Cause) -> None:
        """Send a component home."""
        if entry.state is State.HOST:
            return  # already home
        if entry.state is State.ARRIVING:
            self._give_up(entry, EventKind.EVICT)
        else:
            self._transfer(entry, State.EVICTING, State.HOST, cause)

    def look_ahead(self) -> None:
        """Copy whoever probably comes next while the present one computes, if there is room for both."""
        entry = self._expected()
        if entry is None:
            return  # nobody, or nowhere to put it
        start, moved = time.perf_counter(), None
        try:
            with suppress(Exception):  # a guess that fails is the user's business only in the report
                self._step(entry, State.ARRIVING)
                moved = self._mover.prefetch(entry.name)
        finally:
            if moved is None:
                self._give_up(entry, EventKind.ROLLBACK)
        if moved is not None:
            self._note(entry, EventKind.LOAD, Cause.PREFETCH, start, moved)

    def _expected(self) -> Entry | None:
        if self._order is None or self._book.arriving is not None:
            return None
        for name in self._order.guesses():
            entry = self._book.entries.get(name)
            if entry is not None and entry.state is State.HOST:
                room = self._book.has_room_beside(entry) and self._mover.has_room_ahead(name)
                return entry if room else None
        return None

    def _give_up(self, entry: Entry, kind: EventKind) -> None:
        """Nothing comes of a copy made ahead; an interrupt leaves it as it is, for the next one who asks."""
        start = time.perf_counter()
        with suppress(Exception):  # as when it began
            self._mover.drop(entry.name)
        with self._mutex:
            if entry.state is State.ARRIVING:
                self._book.step(entry, State.HOST)
                self.record(kind, entry.name, Cause.PREFETCH, start)

    def strike(self, gone: Sequence[Entry]) -> None:
        """Send components home and take them out of the book.

        Raises:
            ScopeError: A scope is open on one of them; nothing was changed.
        """
        pinned = next((entry.name for entry in gone if entry.scopes), None)
        if pinned is not None:
            raise ScopeError(pinned, "offload cannot be disabled while it is open.", "Leave the scope first.")
        for entry in gone:
            self.evict(entry, Cause.MANUAL)
        with self._mutex:
            self._book.strike(gone)
            for entry in gone:
                self.record(EventKind.DISABLE, entry.name, Cause.MANUAL)

    def send_home(self, free_arena: bool) -> None:
        """Send every unpinned component home that is not resident.

        Whoever arrives for the next request goes on arriving, in bytes that are held for that.

        Args:
            free_arena: Also give back the device memory in which components take turns.
        """
        for entry in self._book.entries.values():
            if entry.state is State.ARRIVING:
                if free_arena:
                    self.evict(entry, Cause.RELEASE)
            elif not entry.component.resident and not entry.scopes:
                self.evict(entry, Cause.RELEASE)
        if free_arena:
            self._mover.release_arena()

    def cycle(self) -> None:
        """Send every unpinned component home, and bring the residents back."""
        free = [entry for entry in self._book.entries.values() if not entry.scopes]
        for entry in free:
            self.evict(entry, Cause.MANUAL)
        for entry in free:
            if entry.component.resident:
                self.bring(entry, Cause.MANUAL)

    def compare(self) -> None:
        """Let the mover compare the book with where every tensor is.

        Raises:
            InvariantError: They differ.
        """
        entries = self._book.entries.items()
        differences = self._mover.audit({name: entry.state is State.DEVICE for name, entry in entries})
        if differences:
            raise InvariantError("I5 truth", "; ".join(differences))

    def record(
        self, kind: EventKind, name: str, cause: Cause, start: float | None = None, size: int = 0
    ) -> None:
        """Write an event down (the mutex is held)."""
        now = time.perf_counter()
        self._history.record(
            ResidencyEvent(
                kind=kind,
                component=name,
                cause=cause,
                bytes=size,
                seconds=0.0 if start is None else now - start,
                at=now,
                device_bytes=self._book.held,
            )
        )

    def _transfer(self, entry: Entry, passing: State, target: State, cause: Cause) -> None:
        start = time.perf_counter()
        act = self._mover.load if target is State.DEVICE else self._mover.evict
        kind = EventKind.LOAD if target is State.DEVICE else EventKind.EVICT
        moved = None
        try:
            self._step(entry, passing)
            moved = act(entry.name)
            self._step(entry, target)
        except BaseException:
            self._settle(entry, cause, start)
            if moved is not None and entry.state is target:
                self._note(entry, kind, cause, start, moved)  # interrupted when it was done already
            raise
        self._note(entry, kind, cause, start, moved)

    def _step(self, entry: Entry, state: State) -> None:
        with self._mutex:
            self._book.step(entry, state)

    def _settle(self, entry: Entry, cause: Cause, start: float) -> None:
        """After a failure the mover knows best on which side the component is whole."""
        truth = State.DEVICE if self._mover.present(entry.name) else State.HOST
        if entry.state in (truth, State.ARRIVING):
            return  # it failed before anything was changed
        if truth is State.HOST and self._order is not None:
            self._mover.drop(entry.name)  # what was copied ahead, if the mover was never asked for the rest
        if (entry.state, truth) == (State.DEVICE, State.HOST):
            self._step(entry, State.EVICTING)  # interrupted after a commit that the mover took back
        self._step(entry, truth)
        with self._mutex:
            self.record(EventKind.ROLLBACK, entry.name, cause, start)

    def _note(self, entry: Entry, kind: EventKind, cause: Cause, start: float, moved: Moved) -> None:
        with self._mutex:
            if moved.size is not None:
                self._book.resize(entry, moved.size)
            if moved.recopied:
                self.record(EventKind.EVICT, entry.name, Cause.PREFETCH)
            if moved.adopted:
                self.record(EventKind.ADOPT, entry.name, cause)
            if moved.written_back:
                self.record(EventKind.WRITE_BACK, entry.name, cause, size=moved.written_back)
            self.record(kind, entry.name, cause, start, moved.bytes)
