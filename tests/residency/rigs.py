"""A ledger over a recording mover, and threads, in one line."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from omni_components import Component, OffloadPolicy, ResidencyLedger, Role
from omni_components.testing.movers import RecordingMover

Edges = Callable[[str, str], bool]


def component(name: str, size: int = 10, **fields: Any) -> Component:
    return Component(name=name, role=Role.DIT, bytes=size, tensors=1, **fields)


def edges(text: str) -> Edges:
    """Conflicts as text: ``"ab bc"`` says a-b and b-c."""
    pairs = {frozenset(pair) for pair in text.split()}
    return lambda one, other: frozenset((one, other)) in pairs


def everyone(one: str, other: str) -> bool:
    return one != other


class Rig:
    """A ledger with its mover. All components of 10 bytes, all of them rivals unless told otherwise."""

    def __init__(self, names: Iterable[str] = "abc", conflicts: Edges = everyone, **policy: Any) -> None:
        names = tuple(names)
        self.conflicts = conflicts
        self.mover = RecordingMover(dict.fromkeys(names, 10), conflicts)
        self.ledger = ResidencyLedger(self.mover, OffloadPolicy(**policy), owner="the test")
        self.ledger.admit([component(name) for name in names], self.conflict)
        self.mover.calls.clear()

    def conflict(self, one: Component, other: Component) -> bool:
        return self.conflicts(one.name, other.name)

    @property
    def present(self) -> set[str]:
        return set(self.ledger.present)

    def moves(self) -> str:
        """What was moved since the last question: ``"+a -a +b"``."""
        moved = " ".join(("+" if verb == "load" else "-") + name for verb, name in self.mover.moves())
        self.mover.calls.clear()
        return moved

    def sound(self, **pins: int) -> None:
        """I1 to I6 and I8 hold, with exactly these pins, and nobody moves or waits."""
        self.ledger.audit()
        assert self.mover.violations == []
        assert {
            one.name: self.ledger.pins(one.name)
            for one in self.ledger.components
            if self.ledger.pins(one.name)
        } == pins
        assert self.ledger._turns.moving is None
        assert self.ledger._turns.waiters == []
        assert not self.ledger._mutex.locked()


class Actor:
    """A thread that does one thing at a time, as told."""

    def __init__(self, name: str = "other") -> None:
        self.name = name
        self.error: BaseException | None = None
        self.value: Any = None
        self._thread: threading.Thread | None = None

    def begin(self, act: Callable[[], Any]) -> Actor:
        """Start; a second job needs the first to have ended."""

        def work() -> None:
            try:
                self.value = act()
            except BaseException as error:
                self.error = error

        self._thread = threading.Thread(target=work, name=self.name, daemon=True)
        self._thread.start()
        return self

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def end(self, seconds: float = 10.0) -> Any:
        """Wait for it; its error is raised here."""
        assert self._thread is not None
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"{self.name} is still busy"
        if self.error is not None:
            raise self.error
        return self.value


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for something that another thread is about to do."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


def waiting(rig: Rig, count: int = 1) -> Callable[[], bool]:
    """Whether so many threads wait for their turn."""
    return lambda: len(rig.ledger._turns.waiters) == count
