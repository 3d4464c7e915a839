"""ResidencyMachine: a Hypothesis state machine that runs a ledger, its mover and its device against the model.

Point it at your own pipeline::

    TestMyPipeline = ResidencyMachine.for_target(MyPipeline, simulated={"capacity": "64MiB"}).TestCase

or subclass ``PipelineMachine`` and override ``make_pipeline``, to add rules of your own.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from hypothesis import event, note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ..errors import ResidencyWarning
from ..policy import OffloadPolicy
from ..residency.scope import OffloadScope
from .crew import Crew
from .model import Model, ModelScope, Steps
from .movers import Fault
from .strategies import Phase, component_sets, faults, programs
from .subjects import PipelineSubject, RecordingSubject, Subject

THREADS = ("t1", "t2", "t3")
MISUSES = (
    "leave_out_of_order",
    "leave_elsewhere",
    "leave_again",
    "enter_again",
    "unknown",
    "admit_twice",
)


class BodyRaised(Exception):
    """What a user's body raises."""


def _machine() -> st.SearchStrategy[Any]:
    return st.runner()


_free = _machine().flatmap(lambda machine: st.sampled_from(machine.free))
_inside = _machine().flatmap(lambda machine: st.sampled_from(machine.inside))
_known = _machine().flatmap(lambda machine: st.sampled_from(sorted(machine.model.places)))
_absent = _machine().flatmap(lambda machine: st.sampled_from(machine.absent))
_programs = _machine().flatmap(lambda machine: programs(sorted(machine.model.places), depth=3, length=2))
_faults = _machine().flatmap(lambda machine: faults(sorted(machine.model.places)))
NESTING: st.SearchStrategy[Literal["switch", "error"]] = st.sampled_from(
    ("switch", "switch", "switch", "error")
)
_patience = st.sampled_from((None, None, None, 0))


class ResidencyMachine(RuleBasedStateMachine):
    """Random phases in several threads; after each step the ledger, the mover and the weights must be the model's.

    Subclass it and override :meth:`make_subject`. One thread runs at a time, so that runs repeat exactly.

    Attributes:
        threads: Names of the threads; each run takes one, some or all of them.
        can_fail: Draw failing moves.
        can_write: Draw writes to the weights.
        can_change: Draw components that are declared and struck out.
        patience: Seconds after which a step counts as hanging.
    """

    threads: Sequence[str] = THREADS
    can_fail = True
    can_write = True
    can_change = True
    patience = 20.0

    subject: Subject
    model: Model

    @classmethod
    def for_target(
        cls,
        factory: Callable[[], Any],
        *,
        device: str = "cpu",
        simulated: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> type[PipelineMachine]:
        """The machine for a pipeline or split model of yours.

        Its ``TestCase`` is what pytest collects; ``hypothesis.settings`` decide how long it runs.

        Args:
            factory: Makes a new target; small weights do.
            device: Where it computes; not asked for if ``simulated`` is given.
            simulated: The arguments of a :class:`SimulatedAccelerator` to compute on; ``{}`` for one without limits.
            **fields: Of the policy, as ``offload()`` takes them.
        """
        name = f"{getattr(factory, '__name__', 'Target')}Machine"
        given = {
            "make_pipeline": lambda self: factory(),
            "device": device,
            "simulated": simulated,
            "policy": fields,
            "__doc__": f"Random phases of what {getattr(factory, '__qualname__', factory)} makes.",
        }
        return type(name, (PipelineMachine,), given)

    def make_subject(self, data: st.DataObject) -> Subject:
        """What to run; ``data.draw`` draws its shape."""
        raise NotImplementedError("override make_subject, or take ResidencyMachine.for_target(factory)")

    # --- setting up ---------------------------------------------------------------------------------------

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        """Make the subject, its model and the threads."""
        self.subject = self.make_subject(data)
        ledger = self.subject.ledger
        count = data.draw(st.integers(1, len(self.threads)), label="threads")
        self.hands = tuple(self.threads[:count])  # of one alone, scopes nest more deeply
        self.crew = Crew(self.hands, patience=self.patience)
        self.crew.take_over(ledger)
        policy = ledger.policy
        self.model = Model(
            ledger.rivals, policy.nesting, ahead=bool(policy.prefetch), budget=policy.device_memory
        )
        self.model.start("", self.model.admit(self._sizes([one.name for one in ledger.components])))
        for name in ledger.present:
            self.model.places[name].present = True
        for name, place in self.model.places.items():
            place.value = self.subject.read(name)
            place.loads = ledger.history.totals[name].loads
        self.pairs: dict[ModelScope, OffloadScope] = {}
        self.left: list[ModelScope] = []
        self._said = 0

    @property
    def free(self) -> list[str]:
        """The threads that do not wait."""
        return [thread for thread in self.hands if thread not in self.model.waiting]

    @property
    def inside(self) -> list[str]:
        """The threads that do not wait and have a scope open."""
        return [thread for thread in self.free if self.model.stacks.get(thread)]

    @property
    def absent(self) -> list[str]:
        """Components that may be declared and are not."""
        return [one.name for one in self.subject.components if one.name not in self.model.places]

    def _sizes(self, names: Sequence[str]) -> dict[str, tuple[int, bool]]:
        return {one.name: (one.bytes, one.resident) for one in self.subject.components if one.name in names}

    def some_inside(self) -> bool:
        """Precondition of leaving."""
        return bool(self.inside)

    # --- phases -------------------------------------------------------------------------------------------

    @rule(thread=_free, name=_known, timeout=_patience)
    def enter(self, thread: str, name: str, timeout: float | None) -> None:
        """A scope opens: nested, shared, waiting or refused, as it comes."""
        mine, theirs = ModelScope(name), self.subject.ledger.scope(name, timeout=timeout)
        self.pairs[mine] = theirs
        self._step(thread, self.model.enter(thread, mine, timeout), theirs.__enter__)

    @precondition(some_inside)
    @rule(thread=_inside)
    def leave(self, thread: str) -> None:
        """The innermost scope of a thread closes."""
        mine = self.model.stacks[thread][-1]
        self.left.append(mine)
        self._leave(thread, mine)

    @rule(thread=_free, phases=_programs)
    def program(self, thread: str, phases: list[Phase]) -> None:
        """``with`` statements after and inside each other, as a pipeline runs them; nobody looks in between."""
        self._step(thread, self.model.program(thread, phases, BodyRaised), lambda: self._run(phases))

    def _run(self, phases: Sequence[Phase]) -> None:
        for phase in phases:
            with self.subject.ledger.scope(phase.name):
                self.subject.compute(phase.name)
                if phase.body:
                    self._run(phase.body)
                    self.subject.compute(phase.name)
                if phase.ends == "raises":
                    raise BodyRaised

    @rule(thread=_free, name=_known, timeout=_patience)
    def load(self, thread: str, name: str, timeout: float | None) -> None:
        """A component is brought in ahead."""
        act = self.model.load(thread, name, timeout)
        self._step(thread, act, lambda: self.subject.ledger.load(name, timeout=timeout))

    @rule(thread=_free, free_arena=st.booleans())
    def release(self, thread: str, free_arena: bool) -> None:
        """The end of a request."""
        self._step(
            thread, self.model.release(thread), lambda: self.subject.ledger.release(free_arena=free_arena)
        )

    @precondition(some_inside)
    @rule(thread=_inside)
    def compute(self, thread: str) -> None:
        """A body computes with everything it needs."""
        if thread in self.model.lost:
            return  # this body got an error instead
        for name in self.model.needed(thread):
            self._same(
                self.crew.run(**{thread: lambda name=name: self.subject.compute(name)}), {thread: None}
            )

    # --- misuse -------------------------------------------------------------------------------------------

    @rule(thread=_free, other=_free, kind=st.sampled_from(MISUSES), place=st.integers(0, 99))
    def misuse(self, thread: str, other: str, kind: str, place: int) -> None:
        """A scope is used against its rules, or a name is unknown or taken: an error, and nothing changes."""
        getattr(self, f"_{kind}")(thread, other, place)

    def _leave_out_of_order(self, thread: str, other: str, place: int) -> None:
        stack = self.model.stacks.get(thread, [])[:-1]
        if stack:
            self._leave(thread, stack[place % len(stack)])

    def _leave_elsewhere(self, thread: str, other: str, place: int) -> None:
        stack = self.model.stacks.get(thread, [])
        if stack and thread != other:
            self._leave(other, stack[-1])

    def _leave_again(self, thread: str, other: str, place: int) -> None:
        if self.left:
            self._leave(thread, self.left[place % len(self.left)])

    def _enter_again(self, thread: str, other: str, place: int) -> None:
        if self.pairs:
            mine = list(self.pairs)[place % len(self.pairs)]
            self._step(thread, self.model.enter(thread, mine), self.pairs[mine].__enter__)

    def _unknown(self, thread: str, other: str, place: int) -> None:
        act = self.model.enter(thread, ModelScope("nobody"))
        self._step(thread, act, lambda: self.subject.ledger.scope("nobody"))

    def _admit_twice(self, thread: str, other: str, place: int) -> None:
        names = sorted(self.model.places)
        if self.can_change and names:
            taken = [names[place % len(names)]]
            self._step(thread, self.model.admit(self._sizes(taken)), lambda: self.subject.admit(taken))

    def _leave(self, thread: str, mine: ModelScope) -> None:
        theirs = self.pairs[mine]
        self._step(thread, self.model.leave(thread, mine), lambda: theirs.__exit__(None, None, None))

    # --- changes ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.can_write)
    @rule(name=_known, value=st.integers(1, 100))
    def write(self, name: str, value: int) -> None:
        """The weights change, wherever they are."""
        self.model.places[name].value = value
        self.subject.write(name, value)

    @precondition(lambda self: self.can_fail and len(self.model.waiting) < 2)
    @rule(fault=_faults)
    def fail(self, fault: Fault) -> None:
        """The next move of a component is going to fail."""
        self.model.faults.arm(fault)
        self.subject.arm(fault)

    @precondition(lambda self: self.can_change and bool(self.absent))
    @rule(thread=_free, names=st.sets(_absent, min_size=1, max_size=3).map(sorted))
    def admit(self, thread: str, names: list[str]) -> None:
        """Components are declared."""
        self._step(thread, self.model.admit(self._sizes(names)), lambda: self.subject.admit(names))
        for name in names:
            self.model.places[name].value = self.subject.read(name)

    @precondition(lambda self: self.can_change and len(self.model.places) > 2)
    @rule(thread=_free, names=st.sets(_known, min_size=1, max_size=2).map(sorted))
    def retire(self, thread: str, names: list[str]) -> None:
        """Components are struck out, unless they are in use."""
        self._step(thread, self.model.retire(thread, names), lambda: self.subject.retire(names))

    # --- comparing ----------------------------------------------------------------------------------------

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

    def teardown(self) -> None:
        """Ends the threads; asserts nothing, which would hide the true failure."""
        if hasattr(self, "crew"):
            self.crew.dismiss()
            with contextlib.suppress(Exception):
                self.subject.close()


class RecordingMachine(ResidencyMachine):
    """The machine over a ledger and a :class:`RecordingMover`: thousands of steps a second of nothing but rules."""

    def make_subject(self, data: st.DataObject) -> Subject:
        """Two or three exclusive sets."""
        declared = data.draw(component_sets(), label="declared")
        return RecordingSubject(declared, OffloadPolicy(nesting=data.draw(NESTING, label="nesting")))


class PipelineMachine(ResidencyMachine):
    """The machine over a pipeline of yours: override :meth:`make_pipeline`.

    Attributes:
        device: Where it computes; not asked for if ``simulated`` is set.
        simulated: The arguments of a :class:`SimulatedAccelerator` to compute on.
        policy: Fields of the policy, as ``offload()`` takes them.
    """

    can_change = False
    device: str = "cpu"
    simulated: Mapping[str, Any] | None = None
    policy: Mapping[str, Any] = {}

    def make_pipeline(self) -> Any:
        """A new pipeline; small weights do."""
        raise NotImplementedError("override make_pipeline: return what offload() is to take")

    def make_subject(self, data: st.DataObject) -> Subject:
        """The pipeline, offloaded."""
        if self.simulated is None:
            return PipelineSubject(self.make_pipeline(), self.device, self.policy)
        from .simulated import SimulatedAccelerator

        accelerator = SimulatedAccelerator(**self.simulated)
        accelerator.__enter__()
        return PipelineSubject(self.make_pipeline(), accelerator.device, self.policy, accelerator)
