"""A crew of threads of which one runs at a time, so that a run with threads is the same every time.

The machine hands each thread a job. The ledger's mutex and condition are replaced by ones that know the crew:
a thread that waits gives the baton on, and a thread that was notified gets it back. Nothing sleeps, and
whoever was not notified stays asleep, so that a forgotten wake-up shows. With a chooser, threads also take
turns at every lock and in the middle of every move: that explores interleavings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from types import TracebackType
from typing import Any

from ..residency.ledger import ResidencyLedger

Job = Callable[[], Any]


class CrewStuck(AssertionError):
    """A thread neither finished nor waited in the ledger within the crew's patience."""


class _Dismissed(BaseException):
    """Ends a thread that still waits when the crew is dismissed."""


class _Duty(Enum):
    IDLE = auto()  # no job
    READY = auto()  # has a job and may run
    ASLEEP = auto()  # waits to be notified


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended."""

    value: Any = None
    error: BaseException | None = None


class Hand:
    """One thread of a crew."""

    def __init__(self, crew: Crew, name: str) -> None:
        self.name = name
        self.duty = _Duty.IDLE
        self.since = 0  # when it began to wait: who has waited longest goes first
        self.fresh = True  # its next wait is a new one, not the same one again
        self.job: Job | None = None
        self.baton = threading.Semaphore(0)
        self._crew = crew
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)

    def _work(self) -> None:
        while True:
            self.baton.acquire()
            if self._crew.dismissed or self.job is None:
                return
            try:
                outcome = Outcome(value=self.job())
            except _Dismissed:
                return
            except BaseException as error:
                outcome = Outcome(error=error)
            self._crew.finished(self, outcome)
            del outcome  # it holds the frames of what went wrong


class Crew:
    """Threads that pass a baton.

    Args:
        names: One thread each.
        chooser: Picks which of ``n`` ready threads goes on, at every lock; ``None`` lets a thread run until
            it ends or waits.
        patience: Real seconds after which a run counts as stuck.
    """

    def __init__(
        self, names: tuple[str, ...], *, chooser: Callable[[int], int] | None = None, patience: float = 20.0
    ) -> None:
        self.hands = {name: Hand(self, name) for name in names}
        self.chooser = chooser
        self.patience = patience
        self.dismissed = False
        self.outcomes: dict[str, Outcome] = {}
        self._control = threading.Semaphore(0)
        self._clock = 0
        for hand in self.hands.values():
            hand.thread.start()

    # --- for the controller -------------------------------------------------------------------------------

    def run(self, **jobs: Job) -> dict[str, Outcome]:
        """Give idle threads a job each, and let the crew run until everyone has ended or waits.

        Returns:
            How the jobs ended that ended now, by thread; jobs given earlier may be among them.

        Raises:
            CrewStuck: It took longer than the crew's patience.
        """
        for name, job in jobs.items():
            hand = self.hands[name]
            if hand.duty is not _Duty.IDLE:
                raise RuntimeError(f"{name} has a job already")
            hand.job, hand.fresh = job, True
            self._ready(hand)
        self.outcomes = {}
        first = self._pick(None)
        if first is not None:
            first.baton.release()
            if not self._control.acquire(timeout=self.patience):
                raise CrewStuck(f"no thread has ended or waited for {self.patience:g} s")
        return self.outcomes

    @property
    def waiting(self) -> tuple[str, ...]:
        """The threads whose job is not over, the one that waits longest first."""
        waiting = [hand for hand in self.hands.values() if hand.job is not None]
        return tuple(hand.name for hand in sorted(waiting, key=lambda hand: hand.since))

    def take_over(self, ledger: ResidencyLedger) -> None:
        """Replace a ledger's mutex and condition by the crew's, before anyone uses it."""
        mutex = CrewLock(self)
        for one in (ledger, ledger._switch, ledger._gate, ledger._nesting):
            one._mutex = mutex  # type: ignore[assignment]
        ledger._gate.changed = CrewCondition(self, mutex)  # type: ignore[assignment]

    def dismiss(self) -> None:
        """End all threads, waiting ones too. Idempotent."""
        self.dismissed = True
        for hand in self.hands.values():
            hand.baton.release()

    # --- for its threads ----------------------------------------------------------------------------------

    def me(self) -> Hand | None:
        """The calling thread's hand; ``None`` for the controller."""
        thread = threading.current_thread()
        return next((hand for hand in self.hands.values() if hand.thread is thread), None)

    def pause(self) -> None:
        """A place where another thread may go on, if a chooser says so."""
        hand = self.me()
        if self.chooser is not None and hand is not None and not self.dismissed:
            self._pass_on(hand)

    def sleep(self, hand: Hand) -> None:
        """Wait until notified."""
        if hand.fresh:
            self._clock += 1
            hand.since, hand.fresh = self._clock, False
        hand.duty = _Duty.ASLEEP
        self._pass_on(hand)

    def wake(self) -> None:
        """Everyone who waits may look again."""
        for hand in self.hands.values():
            if hand.duty is _Duty.ASLEEP:
                hand.duty = _Duty.READY

    def finished(self, hand: Hand, outcome: Outcome) -> None:
        """A job has ended."""
        self.outcomes[hand.name] = outcome
        hand.duty, hand.job = _Duty.IDLE, None
        self._give(self._pick(hand))

    def _ready(self, hand: Hand) -> None:
        self._clock += 1
        hand.since, hand.duty = self._clock, _Duty.READY

    def _pass_on(self, hand: Hand) -> None:
        if self.dismissed:
            raise _Dismissed
        chosen = self._pick(hand)
        if chosen is hand:
            return
        self._give(chosen)
        hand.baton.acquire()
        if self.dismissed:
            raise _Dismissed

    def _give(self, chosen: Hand | None) -> None:
        (self._control if chosen is None else chosen.baton).release()

    def _pick(self, running: Hand | None) -> Hand | None:
        ready = [hand for hand in self.hands.values() if hand.duty is _Duty.READY]
        if not ready:
            return None
        ready.sort(key=lambda hand: hand.since)
        if self.chooser is not None:
            return ready[self.chooser(len(ready))] if len(ready) > 1 else ready[0]
        return running if running in ready else ready[0]


class CrewLock:
    """A mutex for threads that pass a baton: whoever runs can always have it."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self._held = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hand = self.crew.me()
        if hand is not None:
            hand.fresh = True
        self.release()

    def acquire(self) -> bool:
        """Take it; other threads may run before."""
        self.crew.pause()
        return self.acquire_again()

    def acquire_again(self) -> bool:
        """Take it after a wait, without another pause."""
        if self._held and not self.crew.dismissed:
            raise CrewStuck("the mutex is held by a thread that does not run")
        self._held = True
        return True

    def release(self) -> None:
        """Give it back."""
        self._held = False

    def locked(self) -> bool:
        """Whether somebody has it."""
        return self._held


class CrewCondition:
    """A condition for threads that pass a baton; time does not pass, a limit of 0 has run out at once."""

    def __init__(self, crew: Crew, mutex: CrewLock) -> None:
        self.crew = crew
        self.mutex = mutex

    def __enter__(self) -> bool:
        return self.mutex.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.mutex.__exit__(kind, error, trace)

    def notify_all(self) -> None:
        """Wake everyone."""
        self.crew.wake()

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until notified."""
        hand = self.crew.me()
        if hand is None:
            raise CrewStuck("the controller would wait")
        if timeout is not None and timeout <= 0:
            return False
        self.mutex.release()
        try:
            self.crew.sleep(hand)
        finally:
            self.mutex.acquire_again()
        return True

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Sleep until the predicate holds."""
        while not predicate():
            if not self.wait(timeout):
                return predicate()
        return True
