"""ResidencyMachine: a Hypothesis state machine that runs a ledger, its mover and its device against the model.

Point it at your own pipeline::

    TestMyPipeline = ResidencyMachine.for_target(MyPipeline, simulated={"capacity": "64MiB"}).TestCase

or subclass ``PipelineMachine`` and override ``make_pipeline``, to add rules of your own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from ..policy import OffloadPolicy
from ..residency.scope import OffloadScope
from .agreement import Agreement
from .crew import Crew
from .model import Model, ModelScope
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


class ResidencyMachine(Agreement):
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
