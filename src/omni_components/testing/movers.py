"""RecordingMover: carries numbers instead of tensors, and watches the rules of the ledger by itself.

It shares no code with the ledger, so that it is a second opinion: it knows who conflicts with whom, and an
act that breaks a rule raises at once and is remembered, should the ledger swallow the error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from ..errors import TransferError
from ..protocols import Moved

Verb = Literal["load", "evict", "prefetch"]
When = Literal["before", "inside", "after"]


class RuleBroken(AssertionError):
    """The ledger asked its mover for something that the rules forbid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A failure of one move.

    Attributes:
        verb: Which move fails.
        name: Of which component; ``None`` of any.
        after: How many such moves still succeed.
        when: ``before`` anything has moved; ``inside``, half way, taken back by the mover; ``after`` all has
            moved, so that only the caller never hears of it.
        error: The exception's type; a ``TransferError`` gets its facts.
    """

    verb: Verb
    name: str | None = None
    after: int = 0
    when: When = "before"
    error: type[BaseException] = TransferError

    def make(self, name: str) -> BaseException:
        """The exception to raise for a component."""
        if issubclass(self.error, TransferError):
            return self.error(name, 1, 0, "injected fault", to_host=self.verb == "evict")
        return self.error(f"injected into the {self.verb} of {name!r}")


class FaultPlan:
    """Faults that wait for their moves; each strikes once."""

    def __init__(self) -> None:
        self._armed: list[tuple[Fault, list[int]]] = []

    def arm(self, fault: Fault) -> None:
        """Add a fault."""
        self._armed.append((fault, [fault.after]))

    def clear(self) -> None:
        """Forget all of them."""
        self._armed = []

    def __len__(self) -> int:
        return len(self._armed)

    def strike(self, verb: Verb, name: str) -> Fault | None:
        """The fault of this move, if one is due; call it once per move."""
        due = None
        for item in list(self._armed):
            fault, left = item
            if fault.verb != verb or fault.name not in (None, name):
                continue
            if left[0] == 0 and due is None:
                due = fault
                self._armed.remove(item)
            else:
                left[0] = max(0, left[0] - 1)
        return due


@dataclass(slots=True)
class Freight:
    """A component as the recording mover sees it: one number for its weights.

    Attributes:
        bytes: Its size.
        master: The weights on the host.
        copy: The weights on the device, ``None`` while it is not there.
        ahead: The weights that were copied ahead, ``None`` while there are none.
        passing: It is being moved: its device bytes count.
        written: Someone wrote to the copy.
    """

    bytes: int
    master: int = 0
    copy: int | None = None
    ahead: int | None = None
    passing: bool = False
    written: bool = False

    @property
    def off_host(self) -> bool:
        """Whether it has bytes on the device, even for a moment."""
        return self.passing or self.copy is not None or self.ahead is not None


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the ledger to its mover."""

    verb: str
    name: str
    thread: str


@dataclass(slots=True)
class _Watch:
    moving: str = ""
    violations: list[str] = field(default_factory=list)


class RecordingMover:
    """A mover without tensors that writes down each call and raises :class:`RuleBroken` for a forbidden one.

    Forbidden are: two conflicting components off the host, even while one of them is passing (I1), save that one
    component may be copied ahead; more bytes than ``capacity`` (I8); a move of a component that is there already,
    or is being moved, or of an unknown one; two moves at a time; a ``touch`` of a component that is not there (I2).

    Args:
        sizes: Bytes by name; more can be registered later.
        conflicts: Whether two components must never be on the device together.
        capacity: Most bytes off the host.
        pause: Called in the middle of each move: tests let other threads run there.

    Attributes:
        calls: Every call, in order.
        faults: Arm them with :meth:`fail`.
        violations: What was forbidden and asked for all the same.
        peak: Most bytes that were off the host at once.
        room_ahead: What `has_room_ahead` says.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        conflicts: Callable[[str, str], bool] = lambda one, other: True,
        *,
        capacity: int | None = None,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        self.conflicts = conflicts
        self.capacity = capacity
        self.pause = pause
        self.calls: list[Call] = []
        self.faults = FaultPlan()
        self.peak = 0
        self.room_ahead = True
        self._freight: dict[str, Freight] = {name: Freight(size) for name, size in sizes.items()}
        self._watch = _Watch()

    # --- for tests ----------------------------------------------------------------------------------------

    @property
    def violations(self) -> list[str]:
        """What was forbidden and asked for all the same."""
        return self._watch.violations

    @property
    def names(self) -> tuple[str, ...]:
        """Everything registered."""
        return tuple(self._freight)

    def register(self, name: str, size: int) -> None:
        """Take a component on."""
        self._freight[name] = Freight(size)

    def forget(self, name: str) -> None:
        """Drop a component; it must be at home."""
        if self._freight.pop(name).off_host:
            self._forbid(f"{name!r} was forgotten while it was on the device")

    def fail(
        self,
        verb: Verb,
        name: str | None = None,
        *,
        after: int = 0,
        when: When = "before",
        error: type[BaseException] = TransferError,
    ) -> None:
        """Let a later move fail: that of ``name``, or of anyone, after ``after`` such moves that succeed."""
        self.faults.arm(Fault(verb=verb, name=name, after=after, when=when, error=error))

    def write(self, name: str, value: int) -> None:
        """Write to the weights, on whichever side they are now."""
        freight = self._freight[name]
        if freight.copy is None:
            freight.master = value
        else:
            freight.copy, freight.written = value, True

    def read(self, name: str) -> int:
        """The weights, from whichever side they are on now."""
        freight = self._freight[name]
        return freight.master if freight.copy is None else freight.copy

    def moves(self) -> list[tuple[str, str]]:
        """The loads and evictions so far, as ``(verb, name)``."""
        return [(call.verb, call.name) for call in self.calls if call.verb in ("load", "evict")]

    # --- the protocol -------------------------------------------------------------------------------------

    def load(self, name: str) -> Moved:
        """Copy the number to the device."""
        with self._move("load", name) as freight:
            if freight.copy is not None:
                self._forbid(f"{name!r} was loaded twice")
            self._meet(name, freight)
            with self._passing(freight):
                ahead, freight.ahead = freight.ahead, None
                freight.copy, freight.written = freight.master, False
        recopied = ahead not in (None, freight.master)
        return Moved(bytes=freight.bytes if ahead is None or recopied else 0, recopied=recopied)

    def evict(self, name: str) -> Moved:
        """Drop the copy; what was written to it goes home first."""
        with self._move("evict", name) as freight:
            if freight.copy is None:
                self._forbid(f"{name!r} was evicted while it was on the host")
            with self._passing(freight):
                back = self.write_back(freight)
                freight.copy, freight.written = None, False
        return Moved(written_back=back)

    def write_back(self, freight: Freight) -> int:
        """Bring what was written on the device home; returns the bytes."""
        if not freight.written or freight.copy is None:
            return 0
        freight.master = freight.copy
        return freight.bytes

    def has_room_ahead(self, name: str) -> bool:
        """As told."""
        return self.room_ahead

    def prefetch(self, name: str) -> Moved:
        """Copy the number without using it."""
        with self._move("prefetch", name) as freight:
            if freight.off_host or any(one.ahead is not None for one in self._freight.values()):
                self._forbid(f"{name!r} was copied ahead: it is off the host, or another one arrives")
            self._weigh(name, freight)
            with self._passing(freight):
                freight.ahead = freight.master
        return Moved(bytes=freight.bytes)

    def drop(self, name: str) -> None:
        """Forget the number that was copied ahead."""
        self._note("drop", name)
        self._freight[name].ahead = None

    def present(self, name: str) -> bool:
        """Whether it is on the device."""
        return self._freight[name].copy is not None

    def touch(self, name: str, stream: object = None) -> None:
        """A scope opens, or its body resumes: the component must be there."""
        self._note("touch", name)
        if not self.present(name):
            self._forbid(f"a scope of {name!r} opened while it was on the host")

    def release_arena(self) -> int:
        """There is no arena."""
        self._note("release_arena", "")
        return 0

    def is_current(self, tensor: object) -> bool:
        """There are no tensors."""
        return False

    def audit(self, present: Mapping[str, bool]) -> list[str]:
        """Compare with where the ledger says each component is."""
        found = [
            f"{name!r} is {'' if self.present(name) else 'not '}on the device"
            for name, expected in present.items()
            if self.present(name) is not expected
        ]
        return found + [f"{name!r} is half moved" for name, one in self._freight.items() if one.passing]

    # --- the rules ----------------------------------------------------------------------------------------

    @contextmanager
    def _move(self, verb: Verb, name: str) -> Iterator[Freight]:
        self._note(verb, name)
        if name not in self._freight:
            self._forbid(f"the {verb} of {name!r}, which nobody registered")
        if self._watch.moving:
            self._forbid(f"the {verb} of {name!r} during {self._watch.moving}")
        fault = self.faults.strike(verb, name)
        if fault is not None and fault.when == "before":
            raise fault.make(name)
        self._watch.moving = f"the {verb} of {name!r}"
        try:
            freight = self._freight[name]
            before = (freight.master, freight.copy, freight.written)
            yield freight
            if fault is not None and fault.when == "inside":
                freight.master, freight.copy, freight.written = before
                freight.ahead = None
        finally:
            self._watch.moving = ""
        if fault is not None:
            raise fault.make(name)

    @contextmanager
    def _passing(self, freight: Freight) -> Iterator[None]:
        freight.passing = True
        try:
            self.pause()
            yield
        finally:
            freight.passing = False

    def _meet(self, name: str, freight: Freight) -> None:
        """Nobody whom it excludes may be off the host when it arrives."""
        for other, one in self._freight.items():
            if other != name and one.off_host and self.conflicts(name, other):
                self._forbid(f"{name!r} was loaded while its rival {other!r} was on the device")
        self._weigh(name, freight)

    def _weigh(self, name: str, freight: Freight) -> None:
        others = (one for other, one in self._freight.items() if other != name and one.off_host)
        held = freight.bytes + sum(one.bytes for one in others)
        self.peak = max(self.peak, held)
        if self.capacity is not None and held > self.capacity:
            self._forbid(f"{name!r} was loaded: {held} bytes on a device of {self.capacity}")

    def _note(self, verb: str, name: str) -> None:
        self.calls.append(Call(verb, name, threading.current_thread().name))

    def _forbid(self, problem: str) -> None:
        self.violations.append(problem)
        raise RuleBroken(problem)
