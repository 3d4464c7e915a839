"""Faults made on purpose, each named by what it does wrong and by the invariant that it breaks.

A mutant patches the real class; the suite must notice. Those named after a fault that was once in the code keep
it from coming back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from omni_components.components.tensors import Member
from omni_components.protocols import Moved
from omni_components.residency.book import Book, Entry, State
from omni_components.residency.events import Cause, EventKind
from omni_components.residency.gate import Gate
from omni_components.residency.ledger import ResidencyLedger
from omni_components.residency.nesting import Nesting
from omni_components.residency.scope import OffloadScope
from omni_components.residency.switch import Switch
from omni_components.residency.threads import ThreadStack
from omni_components.residency.turns import Turns
from omni_components.testing.movers import Freight, RecordingMover
from omni_components.transfer import arena as arena_module
from omni_components.transfer.arena import Arena
from omni_components.transfer.cargo import Cargo
from omni_components.transfer.device import AcceleratorBackend
from omni_components.transfer.mover import ArenaMover

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        name: What it does wrong.
        breaks: The invariant, or what else was promised.
        apply: Puts it in.
        named: The test that is sure to meet it, where random phases come there too seldom: its address.
    """

    name: str
    breaks: str
    apply: Patch
    named: str = ""


LEDGER: list[Mutant] = []
TURNS: list[Mutant] = []
MOVER: list[Mutant] = []


def fault(table: list[Mutant], breaks: str, named: str = "") -> Callable[[Patch], Patch]:
    """Enter a patch into a table under its own name."""

    def enter(apply: Patch) -> Patch:
        table.append(Mutant(apply.__name__, breaks, apply, named))
        return apply

    return enter


# --- the ledger: switching ------------------------------------------------------------------------------------


@fault(LEDGER, "I1")
def evicts_after_loading(patch: pytest.MonkeyPatch) -> None:
    def bring(self: Switch, entry: Entry, cause: Cause) -> None:
        if entry.state is not State.DEVICE:
            self._transfer(entry, State.LOADING, State.DEVICE, cause)
            for rival in entry.rivals:
                self.evict(rival, cause)

    patch.setattr(Switch, "bring", bring)


@fault(LEDGER, "I1")
def evicts_one_rival_only(patch: pytest.MonkeyPatch) -> None:
    def bring(self: Switch, entry: Entry, cause: Cause) -> None:
        if entry.state is not State.DEVICE:
            for rival in [one for one in entry.rivals if one.state is State.DEVICE][:1]:
                self.evict(rival, cause)
            self._transfer(entry, State.LOADING, State.DEVICE, cause)

    patch.setattr(Switch, "bring", bring)


@fault(LEDGER, "I1")
def ignores_one_conflict(patch: pytest.MonkeyPatch) -> None:
    admit = Book.admit

    def admit_all_but_one(self: Book, components: Any, conflicts: Any) -> None:
        admit(
            self,
            components,
            lambda one, other: {one.name, other.name} != {"a", "b"} and conflicts(one, other),
        )

    patch.setattr(Book, "admit", admit_all_but_one)


@fault(LEDGER, "I1")
def knows_a_conflict_from_one_side_only(patch: pytest.MonkeyPatch) -> None:
    admit = Book.admit

    def one_sided(self: Book, components: Any, conflicts: Any) -> None:
        admit(self, components, conflicts)
        for entry in self.entries.values():
            entry.rivals = [rival for rival in entry.rivals if rival.name > entry.name]

    patch.setattr(Book, "admit", one_sided)


@fault(
    LEDGER,
    "I1",
    named="tests/residency/test_scopes.py::test_an_eviction_that_fails_leaves_the_rival_whole_on_the_device",
)
def loads_although_the_eviction_failed(patch: pytest.MonkeyPatch) -> None:
    evict = Switch.evict

    def swallow(self: Switch, entry: Entry, cause: Cause) -> None:
        try:
            evict(self, entry, cause)
        except Exception:
            pass

    patch.setattr(Switch, "evict", swallow)


@fault(LEDGER, "I6")
def forgets_rollback(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Switch, "_settle", lambda self, entry, cause, start: None)


@fault(LEDGER, "I6")
def forgets_the_rollback_of_an_eviction(patch: pytest.MonkeyPatch) -> None:
    settle = Switch._settle

    def half(self: Switch, entry: Entry, cause: Cause, start: float) -> None:
        if entry.state is not State.EVICTING:
            settle(self, entry, cause, start)

    patch.setattr(Switch, "_settle", half)


@fault(
    LEDGER, "I6", named="tests/residency/test_scopes.py::test_a_load_that_fails_leaves_everything_on_the_host"
)
def takes_a_failed_load_for_a_success(patch: pytest.MonkeyPatch) -> None:
    transfer = Switch._transfer

    def swallow(self: Switch, entry: Entry, passing: State, target: State, cause: Cause) -> None:
        try:
            transfer(self, entry, passing, target, cause)
        except Exception:
            if target is State.HOST:
                raise

    patch.setattr(Switch, "_transfer", swallow)


@fault(LEDGER, "I5")
def rolls_back_by_hope_and_asks_no_mover(patch: pytest.MonkeyPatch) -> None:
    def settle(self: Switch, entry: Entry, cause: Cause, start: float) -> None:
        if entry.state in (State.LOADING, State.EVICTING):
            self._step(entry, State.HOST)

    patch.setattr(Switch, "_settle", settle)


@fault(LEDGER, "I5")
def writes_the_state_before_the_move(patch: pytest.MonkeyPatch) -> None:
    def transfer(self: Switch, entry: Entry, passing: State, target: State, cause: Cause) -> None:
        self._step(entry, passing)
        self._step(entry, target)
        moved = (self._mover.load if target is State.DEVICE else self._mover.evict)(entry.name)
        kind = EventKind.LOAD if target is State.DEVICE else EventKind.EVICT
        self._note(entry, kind, cause, 0.0, moved)

    patch.setattr(Switch, "_transfer", transfer)


@fault(LEDGER, "I8")
def forgets_to_count_down(patch: pytest.MonkeyPatch) -> None:
    step = Book.step

    def counts_up_only(self: Book, entry: Entry, state: State) -> None:
        held = self.held
        step(self, entry, state)
        self.held = max(held, self.held)

    patch.setattr(Book, "step", counts_up_only)


@fault(LEDGER, "I8")
def counts_a_component_when_it_has_arrived_only(patch: pytest.MonkeyPatch) -> None:
    step = Book.step

    def late(self: Book, entry: Entry, state: State) -> None:
        before = entry.state
        step(self, entry, state)
        if state is State.LOADING:
            self.held -= entry.bytes
        if (before, state) == (State.LOADING, State.DEVICE):
            self.held += entry.bytes

    patch.setattr(Book, "step", late)


# --- the ledger: scopes and pins ------------------------------------------------------------------------------


@fault(LEDGER, "I4")
def drops_a_pin(patch: pytest.MonkeyPatch) -> None:
    enter = ResidencyLedger.enter

    def drop(self: ResidencyLedger, scope: OffloadScope) -> None:
        enter(self, scope)
        pins = self._book[scope.name].scopes
        if len(pins) > 1:
            pins.pop()

    patch.setattr(ResidencyLedger, "enter", drop)


@fault(LEDGER, "I4")
def keeps_the_pin_when_the_body_raises(patch: pytest.MonkeyPatch) -> None:
    leave = OffloadScope.__exit__

    def keep(self: OffloadScope, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            leave(self, kind, error, trace)

    patch.setattr(OffloadScope, "__exit__", keep)


@fault(LEDGER, "I4")
def evicts_when_the_body_raises(patch: pytest.MonkeyPatch) -> None:
    leave = OffloadScope.__exit__

    def clean_up(self: OffloadScope, kind: Any, error: Any, trace: Any) -> None:
        leave(self, kind, error, trace)
        if kind is not None:
            self.owner.release()  # type: ignore[attr-defined]

    patch.setattr(OffloadScope, "__exit__", clean_up)


@fault(LEDGER, "I2")
def restores_late(patch: pytest.MonkeyPatch) -> None:
    """The outer component comes back at the thread's next scope, not before its body resumes."""
    restore, enter = ResidencyLedger._restore, ResidencyLedger.enter
    owed: dict[int, Cause] = {}

    def later(self: ResidencyLedger, stack: ThreadStack, cause: Cause) -> None:
        owed[id(stack)] = cause
        stack.lost = False

    def enter_first(self: ResidencyLedger, scope: OffloadScope) -> None:
        stack = self._local.stack
        if id(stack) in owed:
            restore(self, stack, owed.pop(id(stack)))
        enter(self, scope)

    patch.setattr(ResidencyLedger, "_restore", later)
    patch.setattr(ResidencyLedger, "enter", enter_first)


@fault(
    LEDGER,
    "I2",
    named="tests/residency/test_scopes.py::test_a_nested_load_that_fails_puts_the_suspended_outer_component_back",
)
def forgets_the_outer_component_after_a_failed_load(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ResidencyLedger, "_restore_after", lambda self, error, stack, cause: None)


@fault(LEDGER, "I2")
def brings_back_the_innermost_only(patch: pytest.MonkeyPatch) -> None:
    needed = Book.needed
    patch.setattr(Book, "needed", lambda self, stack: needed(self, stack)[:1])


@fault(LEDGER, "I2")
def once_needs_what_a_scope_between_has_displaced(patch: pytest.MonkeyPatch) -> None:
    """Found by the machine: a, in it its rival i, in it g, which excludes i and not a."""

    def needed(self: Book, stack: ThreadStack) -> list[Entry]:
        found: list[Entry] = []
        for scope in reversed(stack.scopes):
            entry = self.entries[scope.name]
            if entry not in found and not any(entry in one.rivals for one in found):
                found.append(entry)
        return found

    patch.setattr(Book, "needed", needed)


@fault(
    LEDGER,
    "I2",
    named="tests/residency/test_scopes.py::test_what_was_lost_comes_back_after_a_scope_of_the_rival_that_is_still_there",
)
def once_forgot_what_was_lost_before_a_scope_opened(patch: pytest.MonkeyPatch) -> None:
    """Found by the machine: the way back failed, a scope of the rival that is still there opens and closes."""
    enter = ResidencyLedger.enter

    def enter_without_memory(self: ResidencyLedger, scope: OffloadScope) -> None:
        stack, state = self._local.stack, self._book[scope.name].state
        enter(self, scope)
        if state is State.DEVICE and stack.lost:
            scope.displaced = False

    patch.setattr(ResidencyLedger, "enter", enter_without_memory)


@fault(
    LEDGER,
    "I4",
    named="tests/residency/test_scopes.py::test_a_scope_entered_again_after_it_closed_is_refused",
)
def lets_a_scope_be_used_again(patch: pytest.MonkeyPatch) -> None:
    enter = ResidencyLedger.enter

    def again(self: ResidencyLedger, scope: OffloadScope) -> None:
        scope.used = False
        enter(self, scope)

    patch.setattr(ResidencyLedger, "enter", again)


@fault(
    LEDGER,
    "I4",
    named="tests/residency/test_scopes.py::test_an_outer_scope_left_first_is_refused_and_both_can_still_be_left_in_order",
)
def lets_scopes_close_in_any_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ResidencyLedger, "_refuse_out_of_order", lambda self, scope, stack: None)


@fault(
    LEDGER,
    "I4",
    named="tests/residency/test_threads.py::test_a_scope_left_by_another_thread_is_refused_and_stays_open",
)
def lets_any_thread_close_a_scope(patch: pytest.MonkeyPatch) -> None:
    leave = ResidencyLedger.leave

    def take_over(self: ResidencyLedger, scope: OffloadScope) -> None:
        mine = self._local.stack
        if scope.stack is not None and scope.stack is not mine:
            self._local.stack = scope.stack
        try:
            leave(self, scope)
        finally:
            self._local.stack = mine

    patch.setattr(ResidencyLedger, "leave", take_over)


@fault(LEDGER, "I4")
def lets_rivals_nest_although_refused(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Nesting, "allow", lambda self, entry, stack: None)


@fault(LEDGER, "the words")
def warns_about_each_nesting(patch: pytest.MonkeyPatch) -> None:
    allow = Nesting.allow

    def always(self: Nesting, entry: Entry, stack: ThreadStack) -> None:
        self._warned.clear()
        allow(self, entry, stack)

    patch.setattr(Nesting, "allow", always)


@fault(LEDGER, "I4")
def loads_ahead_inside_a_rivals_scope(patch: pytest.MonkeyPatch) -> None:
    def load(self: ResidencyLedger, name: str, *, timeout: float | None = None) -> None:
        entry = self._book[name]
        self._gate.in_turn(lambda: self._switch.bring(entry, Cause.MANUAL), entry, timeout)

    patch.setattr(ResidencyLedger, "load", load)


@fault(LEDGER, "I4")
def releases_what_is_in_use(patch: pytest.MonkeyPatch) -> None:
    def send_home(self: Switch, free_arena: bool) -> None:
        for entry in self._book.entries.values():
            if not entry.component.resident:
                self.evict(entry, Cause.RELEASE)

    patch.setattr(Switch, "send_home", send_home)


@fault(LEDGER, "the end of a request")
def forgets_one_in_release(patch: pytest.MonkeyPatch) -> None:
    def send_home(self: Switch, free_arena: bool) -> None:
        free = [
            entry
            for entry in self._book.entries.values()
            if not entry.component.resident and not entry.scopes
        ]
        for entry in [one for one in free if one.state is State.DEVICE][1:]:
            self.evict(entry, Cause.RELEASE)

    patch.setattr(Switch, "send_home", send_home)


@fault(
    LEDGER,
    "residents",
    named="tests/residency/test_scopes.py::test_release_sends_all_unpinned_swappable_components_home_and_keeps_the_rest",
)
def releases_residents(patch: pytest.MonkeyPatch) -> None:
    def send_home(self: Switch, free_arena: bool) -> None:
        for entry in self._book.entries.values():
            if not entry.scopes:
                self.evict(entry, Cause.RELEASE)

    patch.setattr(Switch, "send_home", send_home)


@fault(
    LEDGER,
    "I4",
    named="tests/residency/test_scopes.py::test_retire_with_an_open_scope_is_refused_and_changes_nothing",
)
def retires_what_is_in_use(patch: pytest.MonkeyPatch) -> None:
    def strike(self: Switch, gone: list[Entry]) -> None:
        for entry in gone:
            self.evict(entry, Cause.MANUAL)
        with self._mutex:
            self._book.strike(gone)

    patch.setattr(Switch, "strike", strike)


@fault(
    LEDGER,
    "I5",
    named="tests/residency/test_scopes.py::test_retire_brings_components_home_and_forgets_their_conflicts",
)
def retires_without_bringing_home(patch: pytest.MonkeyPatch) -> None:
    def strike(self: Switch, gone: list[Entry]) -> None:
        with self._mutex:
            self._book.strike([entry for entry in gone if not entry.scopes])

    patch.setattr(Switch, "strike", strike)


@fault(LEDGER, "I3")
def admits_a_name_twice(patch: pytest.MonkeyPatch) -> None:
    admit = Book.admit

    def replace(self: Book, components: Any, conflicts: Any) -> None:
        self.entries = {
            name: one for name, one in self.entries.items() if name not in {c.name for c in components}
        }
        admit(self, components, conflicts)

    patch.setattr(Book, "admit", replace)


# --- taking turns ---------------------------------------------------------------------------------------------


@fault(TURNS, "I4")
def evicts_what_another_thread_uses(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Turns, "_hard", lambda self, waiter: iter(()))


@fault(TURNS, "first come, first served")
def shares_past_a_rival_that_waits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Turns, "_ahead", lambda self, waiter: iter(()))


@fault(TURNS, "first come, first served")
def queues_behind_whoever_waits_for_oneself(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Turns, "_reaches", lambda self, start, goal: False)


@fault(TURNS, "first come, first served")
def serves_the_last_first(patch: pytest.MonkeyPatch) -> None:
    def ahead(self: Turns, waiter: Any) -> Iterator[Any]:
        later = self.waiters[self.waiters.index(waiter) + 1 :] if waiter in self.waiters else []
        return (one for one in later if waiter.entry is not None and one.entry in waiter.entry.rivals)

    patch.setattr(Turns, "_ahead", ahead)


@fault(
    TURNS, "wakes", named="tests/residency/test_turns.py::test_the_last_sharer_that_leaves_lets_the_waiter_go"
)
def tells_nobody_when_a_scope_closes(patch: pytest.MonkeyPatch) -> None:
    def unpin(self: Gate, scope: OffloadScope) -> None:
        with self._mutex:
            self._book.unpin(scope)

    leave = ResidencyLedger.leave

    def silent(self: ResidencyLedger, scope: OffloadScope) -> None:
        changed = self._gate.changed
        notify, changed.notify_all = changed.notify_all, lambda: None  # type: ignore[method-assign]
        try:
            leave(self, scope)
        finally:
            changed.notify_all = notify  # type: ignore[method-assign]

    patch.setattr(Gate, "unpin", unpin)
    patch.setattr(ResidencyLedger, "leave", silent)


@fault(TURNS, "rings")
def looks_for_no_ring(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Turns, "ring", lambda self, waiter: [])


@fault(
    TURNS,
    "rings",
    named="tests/residency/test_turns.py::test_a_ring_of_three_is_refused_to_the_one_who_would_close_it",
)
def sees_rings_of_two_only(patch: pytest.MonkeyPatch) -> None:
    ring = Turns.ring

    def short(self: Turns, waiter: Any) -> list[str]:
        found = ring(self, waiter)
        return found if len(found) <= 3 else []

    patch.setattr(Turns, "ring", short)


@fault(TURNS, "rings")
def takes_every_wait_for_a_ring(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Turns, "ring", lambda self, waiter: ["me", "me"])


@fault(
    TURNS,
    "timeouts",
    named="tests/residency/test_turns.py::test_a_timeout_of_zero_leaves_the_queue_as_it_was",
)
def waits_longer_than_allowed(patch: pytest.MonkeyPatch) -> None:
    sleep = Gate._sleep
    patch.setattr(Gate, "_sleep", lambda self, waiter, timeout, start: sleep(self, waiter, None, start))


@fault(
    TURNS,
    "rings",
    named="tests/residency/test_turns.py::test_a_ring_that_a_third_thread_closes_around_two_waiters_is_refused_too",
)
def once_looked_for_rings_at_first_only(patch: pytest.MonkeyPatch) -> None:
    """Found by eight threads: a third one closes a ring around two that wait already."""
    ring = Turns.ring
    seen: set[int] = set()

    def first_time(self: Turns, waiter: Any) -> list[str]:
        if id(waiter) in seen:
            return []
        seen.add(id(waiter))
        return ring(self, waiter)

    patch.setattr(Turns, "ring", first_time)


@fault(
    TURNS,
    "turns",
    named="tests/residency/test_turns.py::test_a_pin_below_a_rival_of_its_own_thread_does_not_block_others",
)
def once_waited_for_pins_that_nobody_needs_now(patch: pytest.MonkeyPatch) -> None:
    """Found by eight threads: displaced by its own thread, brought back by a sharer."""
    from omni_components.residency import turns

    patch.setattr(turns, "_displaced", lambda scope, stack, entry: False)


@fault(
    TURNS,
    "I8",
    named="tests/residency/test_threads.py::test_who_waits_for_a_component_that_was_replaced_is_told",
)
def once_brought_in_what_was_retired_meanwhile(patch: pytest.MonkeyPatch) -> None:
    """Found by reading: the waiter held on to the entry."""

    def wait(self: Gate, waiter: Any, timeout: float | None, first: bool, cause: Cause) -> None:
        waiters = self._turns.waiters
        waiters.insert(0 if first else len(waiters), waiter)
        try:
            if self._turns.blocked(waiter):
                self._sleep(waiter, timeout, 0.0 if timeout else float("inf"))
        finally:
            waiters.remove(waiter)

    patch.setattr(Gate, "_wait", wait)


# --- movers ---------------------------------------------------------------------------------------------------


@fault(LEDGER, "I7")
def recording_mover_forgets_the_write_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecordingMover, "write_back", lambda self, freight: 0)


@fault(LEDGER, "I5")
def recording_mover_leaves_a_copy_behind(patch: pytest.MonkeyPatch) -> None:
    def evict(self: RecordingMover, name: str) -> Moved:
        with self._move("evict", name) as freight:
            self.write_back(freight)
        return Moved()

    patch.setattr(RecordingMover, "evict", evict)


@fault(LEDGER, "I7")
def recording_mover_loads_stale_weights(patch: pytest.MonkeyPatch) -> None:
    """As a mover would that keeps the copy of last time and thinks that it is still good."""
    cache: dict[int, int] = {}
    load = RecordingMover.load

    def stale(self: RecordingMover, name: str) -> Moved:
        moved = load(self, name)
        freight: Freight = self._freight[name]
        freight.copy = cache.setdefault(id(freight), freight.master)
        return moved

    patch.setattr(RecordingMover, "load", stale)


@fault(MOVER, "I7")
def forgets_the_write_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cargo, "written", lambda self: [])


@fault(MOVER, "I7")
def writes_back_one_group_only(patch: pytest.MonkeyPatch) -> None:
    written = Cargo.written
    patch.setattr(Cargo, "written", lambda self: written(self)[1:])


@fault(MOVER, "I7")
def adopts_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cargo, "disturbed", lambda self: False)


@fault(
    MOVER,
    "I6",
    named="tests/residency/test_arena.py::test_an_interrupt_between_two_tensors_that_are_bound_to_the_device_is_undone",
)
def leaves_a_failed_load_as_it_is(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def nothing_undone(self: ArenaMover, cargo: Cargo) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise self._error(cargo, error, to_host=False) from error

    patch.setattr(ArenaMover, "_undone_on_failure", nothing_undone)


@fault(
    MOVER,
    "I2",
    named="tests/residency/test_arena.py::test_what_a_failed_load_had_taken_is_free_for_the_way_back",
)
def once_let_the_error_hold_the_bytes_of_a_failed_load(patch: pytest.MonkeyPatch) -> None:
    """Found by the machine: its traceback held the block, and the outer component found no room on its way back."""
    from omni_components.transfer import mover

    patch.setattr(mover.traceback, "clear_frames", lambda trace: None)


@fault(
    MOVER,
    "I8",
    named="tests/residency/test_arena.py::test_a_component_that_outgrows_its_place_gets_a_larger_arena_not_a_second_one",
)
def once_never_enlarged_the_arena(patch: pytest.MonkeyPatch) -> None:
    """Found by the machine: a component that outgrew its place by a byte cost an arena more."""
    patch.setattr(Arena, "grow", lambda self, name, nbytes: self.renew())


@fault(MOVER, "I5")
def says_it_is_home_and_binds_nothing(patch: pytest.MonkeyPatch) -> None:
    def bind_host(self: Cargo) -> None:
        self.present = False

    patch.setattr(Cargo, "bind_host", bind_host)


@fault(MOVER, "I2")
def computes_before_the_copy_has_come(patch: pytest.MonkeyPatch) -> None:
    """No wait for the event behind the copies."""
    patch.setattr(AcceleratorBackend, "wait", lambda self, stream, event: None)


@fault(
    MOVER,
    "I7",
    named="tests/residency/test_arena.py::test_a_rival_does_not_overwrite_what_compute_still_reads",
)
def copies_into_memory_that_compute_still_uses(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AcceleratorBackend, "after", lambda self, streams: None)


@fault(
    MOVER,
    "I7",
    named="tests/residency/test_arena.py::test_a_master_may_be_written_as_soon_as_its_component_is_home",
)
def leaves_a_copy_reading_the_master_after_eviction(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ArenaMover, "_settle_copies", lambda self, cargo: None)


@fault(MOVER, "I3")
def places_everyone_at_the_start_of_the_arena(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(arena_module, "place", lambda sizes, rivals: dict.fromkeys(sizes, 0))


@fault(
    MOVER,
    "I3",
    named="tests/residency/test_arena.py::test_components_admitted_while_one_is_present_do_not_take_its_bytes",
)
def once_moved_the_places_under_those_present(patch: pytest.MonkeyPatch) -> None:
    """Found by the machine: a component is admitted while another one is in the arena."""

    def arrange(self: Arena, sizes: dict[str, int], rivals: Any) -> bool:
        offsets = arena_module.place(sizes, rivals)
        self._places = {name: (offset, sizes[name]) for name, offset in offsets.items()}
        self._size = max((offset + sizes[name] for name, offset in offsets.items()), default=0)
        return False

    patch.setattr(Arena, "arrange", arrange)


@fault(MOVER, "I8")
def gives_no_device_memory_back(patch: pytest.MonkeyPatch) -> None:
    leaked: list[Any] = []
    give = Arena.give

    def leak(self: Arena, name: str) -> None:
        leaked.append(self.holds(name))
        give(self, name)

    patch.setattr(Arena, "give", leak)


@fault(MOVER, "I7")
def loses_the_place_of_a_view(patch: pytest.MonkeyPatch) -> None:
    view = Member.view

    def from_the_start(self: Member, raw: Any) -> Any:
        size, stride, _ = self.geometry
        self.geometry = (size, stride, 0)
        return view(self, raw)

    patch.setattr(Member, "view", from_the_start)


@fault(MOVER, "I7")
def copies_all_but_the_last_run(patch: pytest.MonkeyPatch) -> None:
    copies = Cargo.copies_as_read

    def all_but_the_last(self: Cargo, block: Any) -> list[Any]:
        every = list(copies(self, block))
        return every[:-1] or every

    patch.setattr(Cargo, "copies_as_read", all_but_the_last)


@fault(MOVER, "I7")
def takes_the_master_from_before_the_last_write(patch: pytest.MonkeyPatch) -> None:
    """The write-back goes to fresh memory, and the tensors are bound to the old."""
    copy_home = ArenaMover._copy_home

    def elsewhere(self: ArenaMover, cargo: Cargo, group: Any) -> int:
        source, group.source = group.source, group.source.clone()
        copied = copy_home(self, cargo, group)
        group.source = source
        return copied

    patch.setattr(ArenaMover, "_copy_home", elsewhere)
