"""The model and the real thing side by side: each step is taken by both, and after it all must agree."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import event, note
from hypothesis.stateful import RuleBasedStateMachine, invariant

from ..errors import ResidencyWarning
from .crew import Crew
from .model import Model, Steps
from .subjects import Subject


class Agreement(RuleBasedStateMachine):
    """What is compared, and how; the rules are its subclasses'.

    Attributes:
        subject: The real thing: a ledger, its mover and its device.
        model: What should be.
        crew: The threads that act.
        hands: Their names.
    """

    subject: Subject
    model: Model
    crew: Crew
    hands: Sequence[str]
    _said = 0  # warnings of the ledger

    @property
    def free(self) -> list[str]:
        """The threads that do not wait."""
        return [thread for thread in self.hands if thread not in self.model.waiting]

    def _step(self, thread: str, steps: Steps, act: Callable[[], Any]) -> None:
        """One operation on the model and on the real thing; whatever ends in it must end alike."""
        self.model.start(thread, steps)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outcomes = self.crew.run(**{thread: act})
        self._said += sum(1 for one in caught if issubclass(one.category, ResidencyWarning))
        self._same(outcomes, self.model.outcomes)
        if len(self.model.waiting) > 1:
            # Two threads may now move in one step, and which of them meets a fault is nobody's promise.
            self.model.faults.clear()
            self.subject.disarm()

    def _same(self, real: dict[str, Any], expected: dict[str, type[BaseException] | None]) -> None:
        for thread in sorted({*real, *expected}):
            assert thread in real, f"{thread} should have ended and still waits"
            assert thread in expected, f"{thread} should wait and has ended: {real[thread]}"
            error = real[thread].error
            note(f"  {thread}: {'done' if error is None else repr(error)}")
            event(f"ended with {type(error).__name__}" if error is not None else "ended well")
            wanted = expected[thread]
            if wanted is None and error is not None:
                raise AssertionError(f"{thread} should have ended well") from error
            if wanted is not None and type(error) is not wanted:
                raise AssertionError(f"{thread} should have raised {wanted.__name__}") from error

    @invariant()
    def everything_agrees(self) -> None:
        """All checks, after each step."""
        if not hasattr(self, "model"):
            return  # before the beginning
        self.model.watch(self.subject.ledger.arriving)
        self.check_waiting()
        self.check_presence()
        self.check_pins()
        self.check_accounting()
        self.check_conflicts()
        self.check_weights()
        self.check_history()
        self.check_observers()
        event(f"scopes inside each other: {max(map(len, self.model.stacks.values()), default=0)}")
        event(f"threads waiting: {len(self.model.waiting)}")
        event(f"one arrives: {self.model.arriving is not None}")

    def check_waiting(self) -> None:
        """Whoever should wait waits, in the same order."""
        assert self.crew.waiting == self.model.waiting

    def check_presence(self) -> None:
        """I2 presence, I6 rest: the model's components are on the device, and the needed ones are among them."""
        assert set(self.subject.ledger.present) == self.model.present
        for thread in self.free:
            if thread not in self.model.lost:
                assert set(self.model.needed(thread)) <= self.model.present, f"{thread} lacks what it needs"

    def check_pins(self) -> None:
        """I4 pins."""
        for name, place in self.model.places.items():
            assert self.subject.ledger.pins(name) == len(place.scopes), f"pins of {name!r}"

    def check_accounting(self) -> None:
        """I8 accounting."""
        ledger = self.subject.ledger
        assert ledger.device_bytes == self.model.device_bytes
        assert ledger.device_bytes <= ledger.predicted_peak

    def check_conflicts(self) -> None:
        """I1 exclusion: the ledger's graph is the author's, and nobody is with a rival."""
        names = sorted(self.model.places)
        for name in names:
            rivals = {other for other in names if other != name and self.subject.conflict(name, other)}
            assert set(self.subject.ledger.rivals(name)) == rivals
            assert not (name in self.model.present and rivals & self.model.present)

    def check_weights(self) -> None:
        """I7 nothing lost."""
        for name, place in self.model.places.items():
            assert self.subject.read(name) == place.value, f"the weights of {name!r}"

    def check_history(self) -> None:
        """The totals count what was moved; each pair of nested rivals was warned about once."""
        totals = self.subject.ledger.history.totals
        for name, place in self.model.places.items():
            # A component may come back under its name after it was retired: its totals go on.
            assert totals[name].loads >= place.loads
            assert totals[name].evictions >= place.evictions
        assert self._said == len(self.model.warned)

    def check_observers(self) -> None:
        """I1 to I6 as the ledger, the mover and others see them."""
        assert list(self.subject.violations()) == []
        self.subject.ledger.check()
        self.subject.ledger.audit()
