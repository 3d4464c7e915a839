"""Threads that run interleaved at every lock and in the middle of every move, in an order Hypothesis draws."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import event, given, note
from hypothesis import strategies as st

from omni_components import (
    Component,
    OffloadPolicy,
    ResidencyDeadlockError,
    ResidencyLedger,
    ScopeError,
    UnknownComponentError,
)
from omni_components.residency.checks import problems
from omni_components.residency.threads import ThreadStack
from omni_components.testing.crew import Crew
from omni_components.testing.movers import RecordingMover
from omni_components.testing.strategies import ComponentSet, Phase, component_sets, programs

THREADS = ("t1", "t2", "t3")
CHORES = ("release", "audit", "load", "replace")


class Raised(Exception):
    pass


class Run:
    """Programs over one ledger; each body looks for itself whether its component is there (I2)."""

    def __init__(self, declared: ComponentSet, crew: Crew) -> None:
        self.crew = crew
        self.ends: list[str] = []
        self.mover = RecordingMover(
            {one.name: one.bytes for one in declared.components}, declared.conflict, pause=crew.pause
        )
        self.ledger = ResidencyLedger(self.mover, OffloadPolicy())
        self.declared = declared
        self.ledger.admit(declared.components, self._conflict)
        crew.take_over(self.ledger)

    def program(self, phases: Sequence[Phase]) -> None:
        for phase in phases:
            try:
                self.phase(phase)
            except Raised:
                self.ends.append("a body raised")
            except ResidencyDeadlockError:
                self.ends.append("a ring was refused")
            except UnknownComponentError:
                self.ends.append("a component was away")
            except ScopeError as error:
                self.ends.append(
                    str(error).partition("its component was ")[2].partition(".")[0] or str(error)
                )

    def chores(self, plan: Sequence[tuple[str, str]]) -> None:
        """What a server does beside its requests: ends of requests, audits, components that come and go."""
        for chore, name in plan:
            try:
                getattr(self, f"_{chore}")(name)
            except (ResidencyDeadlockError, ScopeError, UnknownComponentError) as error:
                self.ends.append(f"a chore ended with {type(error).__name__}")

    def _release(self, name: str) -> None:
        self.ledger.release()

    def _audit(self, name: str) -> None:
        self.ledger.audit()

    def _load(self, name: str) -> None:
        self.ledger.load(name)

    def _replace(self, name: str) -> None:
        self.ledger.retire([name])
        self.mover.forget(name)
        self.crew.pause()
        self.mover.register(name, self.declared.of(name).bytes)
        self.ledger.admit([self.declared.of(name)], self._conflict)

    def _conflict(self, one: Component, other: Component) -> bool:
        return self.declared.conflict(one.name, other.name)

    def phase(self, phase: Phase) -> None:
        if phase.hint and not self.ledger._local.stack.scopes:
            self.ledger.load(phase.name)
        with self.ledger.scope(phase.name):
            self.body(phase.name)
            for inner in phase.body:
                self.phase(inner)
                self.body(phase.name)
            if phase.ends == "raises":
                raise Raised
            self.body(phase.name)

    def body(self, name: str) -> None:
        self.crew.pause()
        assert self.mover.present(name), f"{name} is not there in the body of its scope"
        found = list(problems(self.ledger._book, self.ledger._turns, ThreadStack()))
        assert found == [], found


@pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")
@given(data=st.data(), declared=component_sets(members=2))
def test_interleaved_programs_end_and_find_their_components(
    data: st.DataObject, declared: ComponentSet
) -> None:
    """I1, I2, I4, I6, I8: whatever the order, every body has its component and every thread comes to its end."""
    plans = {thread: data.draw(programs(declared.names, depth=2), label=thread) for thread in THREADS}
    # Drawn ahead, since only the test's own thread may draw; a run that is longer goes on without choices.
    choices = iter(data.draw(st.lists(st.integers(0, 3), max_size=200), label="choices"))
    plan = data.draw(
        st.lists(st.tuples(st.sampled_from(CHORES), st.sampled_from(declared.names))), label="chores"
    )
    crew = Crew((*THREADS, "chores"), chooser=lambda count: next(choices, 0) % count)
    run = Run(declared, crew)
    try:
        jobs = {name: partial(run.program, plan) for name, plan in plans.items()}
        outcomes = crew.run(chores=lambda: run.chores(plan), **jobs)
        for name in (*THREADS, "chores"):
            assert name in outcomes, f"{name} waits for ever: {crew.waiting}"
            if outcomes[name].error is not None:
                note(name)
                raise outcomes[name].error
        for end in run.ends:
            event(end)
            assert "scope of" not in end, end
        run.ledger.audit()
        assert run.mover.violations == []
        assert all(run.ledger.pins(name) == 0 for name in declared.names)
    finally:
        crew.dismiss()
