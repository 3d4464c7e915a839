"""Runs: fresh targets, resident or offloaded, and requests that start from the same random numbers."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import GeneratorType
from typing import Any

import torch

from ...attach.pipeline import offload
from ...components.recipe import Recipe
from ...errors import ResidencyWarning, ScopeError
from ...policy import OffloadPolicy
from ...residency.events import History
from ..simulated.accelerator import SimulatedAccelerator
from .calls import NotedCall
from .lines import raised_at
from .outputs import Flat, captured, difference
from .owners import Owners
from .records import CheckFinding, CheckStep
from .restless import restless
from .targets import arguments, called, sow, to_device
from .traffic import Measured
from .watch import Watch, merged


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What ``check_offload`` was asked for; its arguments."""

    factory: Callable[[], Any]
    inputs: Any
    capacity: int | None
    call: Callable[..., Any] | None
    seed: int
    orders: int
    faults: bool | int
    loads: dict[str, int]
    recipe: Recipe | None
    policy: OffloadPolicy


@dataclass
class Resident:
    """The run without offload: what it gave, and what it says about the target."""

    outputs: list[Flat] = field(default_factory=list)
    calls: dict[str, list[NotedCall]] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    written: frozenset[str] = frozenset()
    peak: int = 0

    @property
    def repeats(self) -> bool:
        """Whether every request gives the same."""
        return all(difference(one, self.outputs[0]) is None for one in self.outputs[1:])


@dataclass
class Counter:
    """How many of what a step counted."""

    count: int = 0
    of: str = ""

    def counted(self, count: int, of: str) -> None:
        """Say it."""
        self.count, self.of = count, of


class Runs:
    """Makes targets and requests.

    Args:
        options: Of the check.

    Attributes:
        findings: What went wrong so far.
        notes: What is worth knowing.
        histories: Of the runs that a reader of a failure wants to see; alive as long as an error shows its frames.
        resident: The run that all others must equal.
        steps: What was done.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.findings: list[CheckFinding] = []
        self.notes: list[str] = []
        self.histories: list[History] = []
        self.resident = Resident()
        self.steps: list[CheckStep] = []

    @contextmanager
    def step(self, name: str) -> Iterator[Counter]:
        """A step of the check, timed; the block says how many of what it counted."""
        counter = Counter()
        start = time.perf_counter()
        try:
            yield counter
        finally:
            seconds = time.perf_counter() - start
            self.steps.append(CheckStep(name=name, count=counter.count, of=counter.of, seconds=seconds))

    def request(self, target: Any, sim: SimulatedAccelerator) -> Flat:
        """One request; its outputs on the host."""
        return captured(self._called(target, self._arguments(sim)))

    def back_to_back(self, target: Any, sim: SimulatedAccelerator) -> list[Flat]:
        """Two requests, and nothing between them that would make the host wait: no input copied, no output read."""
        inputs = [self._arguments(sim), self._arguments(sim)]
        outputs = [self._called(target, one) for one in inputs]
        return [captured(one) for one in outputs]

    def _arguments(self, sim: SimulatedAccelerator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        sow(self.options.seed)
        return arguments(self.options.inputs, sim.device)

    def _called(self, target: Any, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        call = called(target, self.options.call)
        sow(self.options.seed)
        with torch.no_grad():
            output = call(target, *given[0], **given[1])
            return list(output) if isinstance(output, GeneratorType) else output

    def fresh(self) -> Any:
        """A new target, on the host."""
        sow(self.options.seed)
        return self.options.factory()

    def on_device(self, sim: SimulatedAccelerator) -> Any:
        """A new target without offload."""
        target = self.fresh()
        to_device(target, sim.device)
        return target

    @contextmanager
    def offloaded(self, sim: SimulatedAccelerator) -> Iterator[tuple[Any, Any]]:
        """A new target and the handle of its offload, for as long as the block lasts."""
        target = self.fresh()
        with quiet():  # said once, in the report
            handle = offload(target, sim.device, recipe=self.options.recipe, policy=self.options.policy)
        try:
            yield target, handle
        finally:
            try:
                handle.disable()
            except ScopeError as error:
                if all(one.kind != "state" for one in self.findings):
                    name = error.component
                    found = CheckFinding(kind="state", detail=str(error), component=name, step="all requests")
                    self.findings.append(found)

    def compare(
        self,
        target: Any,
        handle: Any,
        sim: SimulatedAccelerator,
        words: str,
        measured: Measured | None,
        *,
        requests: int = 2,
    ) -> None:
        """Requests of an offloaded target under watch, each compared with its like of the resident run.

        Args:
            target: The target.
            handle: Its offload.
            sim: The open device.
            words: What this run is, for the findings.
            measured: Notes what one more request moves.
            requests: 1, or 2 back to back.
        """
        owners = Owners(target, handle, sim)
        watch = Watch(owners, sim, heal=False, step=words)
        try:
            with watch, quiet():
                outputs = self.back_to_back(target, sim) if requests > 1 else [self.request(target, sim)]
            if measured is not None:
                handle.release()
                with watch, quiet(), measured.watching(handle, sim):
                    outputs.append(self.request(target, sim))
            pairs = zip(outputs, self.resident.outputs, strict=False)
            differs = next((one for pair in pairs if (one := difference(*pair)) is not None), None)
            if differs is not None:
                self.findings.append(CheckFinding(kind="outputs", detail=differs, step=words))
            handle.ledger.audit()
            handle.release()
        except Exception as error:
            self.explain(error, words, offloaded=True)
        finally:
            owners.close()
        self.findings += watch.noted.sure
        self.notes += [f"{one}" for one in merged(watch.noted.advice)]
        sim.expect_races()

    def explain(self, error: Exception, words: str, *, offloaded: bool) -> None:
        """The same request on a new target, in which whatever is on the wrong side is moved and noted."""
        where, function = raised_at(error)
        with SimulatedAccelerator() as sim:
            if offloaded:
                with self.offloaded(sim) as (target, handle):
                    self.histories.append(handle.ledger.history)
                    noted = self._healed(target, handle, sim, words)
            else:
                noted = self._healed(self.on_device(sim), None, sim, words)
            sim.expect_races()
        self.findings += noted
        if not noted:
            detail = f"{type(error).__name__}: {error}"
            found = CheckFinding(kind="error", detail=detail, step=words, where=where, function=function)
            self.findings.append(found)

    def _healed(self, target: Any, handle: Any, sim: SimulatedAccelerator, words: str) -> list[CheckFinding]:
        owners = Owners(target, handle, sim)
        watch = Watch(owners, sim, heal=True, step=words)
        ledger = handle.ledger if handle is not None else None
        # Suppressed: it is the first error that is told of.
        with suppress(Exception), watch, quiet(), restless(ledger):
            self.request(target, sim)
        owners.close()
        return [*watch.noted.mixed, *watch.noted.sure]


@contextmanager
def quiet() -> Iterator[None]:
    """Nested rivals are found as thrash, not as a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResidencyWarning)
        yield
