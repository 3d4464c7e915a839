"""Transitions: reserve, act, commit, or roll back on any ``BaseException``. Only the moving thread calls this."""

from __future__ import annotations

import threading
import time

from ..protocols import Moved, Mover
from .book import Book, Entry, State
from .events import Cause, EventKind, History, ResidencyEvent


class Switch:
    """Moves components one at a time and writes down what happened."""

    def __init__(self, book: Book, mover: Mover, history: History, mutex: threading.Lock) -> None:
        self._book = book
        self._mover = mover
        self._history = history
        self._mutex = mutex

    def bring(self, entry: Entry, cause: Cause) -> None:
        """Evict the rivals, then load: never the other way round."""
        if entry.state is State.DEVICE:
            return  # already there
        self._book.check_budget(entry)
        for rival in entry.rivals:
            self.evict(rival, cause)
        self._transfer(entry, State.LOADING, State.DEVICE, cause)

    def evict(self, entry: Entry, cause: Cause) -> None:
        """Send a component home."""
        if entry.state is State.HOST:
            return  # already home
        self._transfer(entry, State.EVICTING, State.HOST, cause)

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
        if entry.state is truth:
            return  # it failed before anything was reserved
        if (entry.state, truth) == (State.DEVICE, State.HOST):
            self._step(entry, State.EVICTING)  # interrupted after a commit that the mover took back
        self._step(entry, truth)
        with self._mutex:
            self.record(EventKind.ROLLBACK, entry.name, cause, start)

    def _note(self, entry: Entry, kind: EventKind, cause: Cause, start: float, moved: Moved) -> None:
        with self._mutex:
            if moved.size is not None:
                self._book.resize(entry, moved.size)
            if moved.adopted:
                self.record(EventKind.ADOPT, entry.name, cause)
            if moved.written_back:
                self.record(EventKind.WRITE_BACK, entry.name, cause, size=moved.written_back)
            self.record(kind, entry.name, cause, start, moved.bytes)
