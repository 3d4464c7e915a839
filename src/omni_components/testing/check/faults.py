"""Every fault point of one request: afterwards the ledger is true, no weight is lost, the next request is right."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ...errors import OmniComponentsError
from .outputs import Flat, difference, same_bits
from .records import CheckFinding, FindingKind
from .targets import tensors, weights

Point = Literal["copy", "allocation", "step"]
# In a switch: what the device refuses, and an interrupt at whatever is asked of it.
_KINDS: tuple[tuple[Point, type[BaseException] | None], ...] = (
    ("copy", None),
    ("allocation", None),
    ("step", KeyboardInterrupt),
)
_BETWEEN = 12  # faults in what the pipeline itself computes
_STOP = 5  # findings after which more of the same would only be noise


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one trial: in the ``switch``-th switch of the request, or anywhere if that is ``None``."""

    point: Point
    number: int
    switch: int | None = None
    error: type[BaseException] | None = None
    component: str = ""

    def __str__(self) -> str:
        what = "KeyboardInterrupt" if self.error is KeyboardInterrupt else "a failure"
        where = "of the request" if self.switch is None else f"of switch {self.switch + 1}"
        return f"{what} at {self.point} {self.number + 1} {where}"


@dataclass
class FaultWalk:
    """Walks the faults of one request on one offloaded target.

    Args:
        target: The offloaded target.
        handle: Its offload.
        sim: The open device.
        request: Makes a request, gives its outputs.
        expected: What it must give; ``None`` if requests differ from each other anyway.
        changing: Paths of tensors that a request changes by itself.
        seed: Draws the faults outside of switches.

    Attributes:
        findings: What went wrong.
        walked: Faults that struck.
        switches: Loads and evictions of one request.
        complete: Every fault of every switch was walked.
    """

    target: Any
    handle: Any
    sim: Any
    request: Callable[[], Flat]
    expected: Flat | None
    changing: frozenset[str]
    seed: int
    findings: list[CheckFinding] = field(default_factory=list)
    walked: int = 0
    switches: int = 0
    complete: bool = True

    def run(self, limit: int | None) -> None:
        """Walk all of them, or the first ``limit``, one of each switch in turn."""
        self.handle.release()
        self._kept = weights(self.target)
        with self._striking(None) as moves:
            self.request()
        self.handle.release()
        self.switches = len(moves)
        queues = deque(
            (Fault(point, 0, index, error, name), 0)
            for index, name in enumerate(moves)
            for point, error in _KINDS
        )
        while queues and len(self.findings) < _STOP:
            if limit is not None and self.walked >= limit:
                self.complete = False
                return
            first, number = queues.popleft()
            fault = Fault(first.point, number, first.switch, first.error, first.component)
            if self._trial(fault):
                queues.append((first, number + 1))
        for fault in self._between(limit):
            self._trial(fault)

    def _between(self, limit: int | None) -> Iterator[Fault]:
        """Faults in the pipeline's own work: far from every place, since what is done about them is the same."""
        most = 1
        while self._trial(Fault("step", most)) and len(self.findings) < _STOP:
            if limit is not None and self.walked >= limit:
                return
            most *= 4
        drawn = random.Random(self.seed)
        for index in range(_BETWEEN):
            if (limit is not None and self.walked >= limit) or len(self.findings) >= _STOP:
                return
            error = KeyboardInterrupt if index % 2 else None
            yield Fault("step", drawn.randrange(most), None, error)

    # --- one fault ----------------------------------------------------------------------------------------

    def _trial(self, fault: Fault) -> bool:
        """One request with a fault, and one after it; returns whether the fault struck."""
        fired, error, output = self._struck(fault)
        self.sim.heal()
        torch.accelerator.synchronize(self.sim.device)  # what the request has left behind is over
        self.sim.expect_races()
        if error is not None and not fired:
            self._find("next_request", fault, error)
            return False
        self.walked += fired
        if error is None and output is not None:
            self._compare(fault, output)
        del error, output
        self._look(fault)
        if fired:
            try:
                self._compare(fault, self.request())
            except BaseException as second:
                self._find("next_request", fault, second)
            self._look(fault)
        self._weigh(fault)
        return fired

    def _struck(self, fault: Fault) -> tuple[bool, BaseException | None, Flat | None]:
        error: BaseException | None = None
        output: Flat | None = None
        try:
            if fault.switch is None:
                self.sim.fail_at(fault.point, fault.number, error=fault.error)
                output = self.request()
            else:
                with self._striking(fault):
                    output = self.request()
        except (Exception, KeyboardInterrupt) as caught:
            error = caught.with_traceback(None)
        fired = self.sim.fired(fault.point) if fault.switch is None else self._fired
        return fired, error, output

    @contextmanager
    def _striking(self, fault: Fault | None) -> Iterator[list[str]]:
        """Count the moves of the mover, and arm a fault for one of them."""
        mover = self.handle.ledger.mover
        moves: list[str] = []
        self._fired = False

        def counted(move: Callable[..., Any]) -> Callable[..., Any]:
            def act(name: str, *args: Any, **kwargs: Any) -> Any:
                moves.append(name)
                if fault is None or len(moves) - 1 != fault.switch:
                    return move(name, *args, **kwargs)
                self.sim.fail_at(fault.point, fault.number, error=fault.error)
                try:
                    return move(name, *args, **kwargs)
                finally:
                    self._fired = self.sim.fired(fault.point)
                    self.sim.heal()

            return act

        mover.load, mover.evict = counted(mover.load), counted(mover.evict)
        try:
            yield moves
        finally:
            del mover.load, mover.evict

    def _look(self, fault: Fault) -> None:
        """The state is whole: the ledger agrees with the tensors, no scope is left open."""
        ledger = self.handle.ledger
        try:
            ledger.check()
            ledger.audit()
            for one in ledger.components:
                if ledger.pins(one.name):
                    words = f"a scope of {one.name!r} is still open"
                    self._note("state", fault, words, component=one.name)
            self.handle.release()
        except OmniComponentsError as error:
            self._find("state", fault, error)

    def _weigh(self, fault: Fault) -> None:
        """No weight has changed, on the host, where everything that takes turns is now."""
        now = tensors(self.target)
        changed = [
            path
            for path, kept in self._kept.items()
            if path not in self.changing and (path not in now or not same_bits(now[path].cpu(), kept))
        ]
        if changed:
            self._note("weights", fault, "", tensors=tuple(changed))

    def _compare(self, fault: Fault, output: Flat) -> None:
        words = difference(output, self.expected) if self.expected is not None else None
        if words is not None:
            self._note("next_request", fault, words)

    def _find(self, kind: FindingKind, fault: Fault, error: BaseException) -> None:
        self._note(kind, fault, f"{type(error).__name__}: {error}")

    def _note(self, kind: FindingKind, fault: Fault, detail: str, **facts: Any) -> None:
        facts.setdefault("component", fault.component)
        self.findings.append(CheckFinding(kind=kind, detail=detail, step=str(fault), **facts))
