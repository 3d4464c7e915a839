"""The steps of a check, in order; each adds what it finds."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch

from ...attach.pipeline import offload
from ...components.recipes import follows_its_sequence
from ...errors import OmniComponentsError, PolicyError, ResidencyWarning
from ..simulated.accelerator import SimulatedAccelerator
from . import traffic
from .calls import CallRecorder, callables
from .faults import FaultWalk
from .orders import PhaseOrders
from .outputs import difference, with_nan
from .owners import Owners
from .records import CheckFinding, CheckReport
from .restless import restless
from .runs import Options, Runs, quiet
from .targets import modules, versions, weights, written
from .watch import Watch, merged

REQUESTS = 3  # one from the beginning, one after it, one that is measured


class Check(Runs):
    """One check; each step adds its findings."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.target = ""
        self.watched: dict[str, list[str]] = {}
        self.measured = traffic.Measured()
        self.lenient = False  # nobody declared anything, so that no declaration is to blame

    def run(self) -> None:
        """All steps, as far as they make sense after what was found."""
        if not self._same_weights() or not self._declaration():
            return
        if not self._run_resident():
            return
        self._run_offloaded()
        self._run_restless()
        if self.findings:
            self.notes.append("phase orders and faults were not tried: what is above comes first")
            return
        self._run_at_capacity()
        if self.options.orders:
            self._run_orders()
        if self.options.faults:
            self._run_faults()

    def report(self) -> CheckReport:
        """The record of it all."""
        return replace(
            self.measured.report(self.resident.calls),
            target=self.target,
            steps=tuple(self.steps),
            findings=tuple(merged(self.findings)),
            notes=tuple(dict.fromkeys(self.notes)),
            resident_peak=self.resident.peak,
            capacity=self.options.capacity,
        )

    # --- the steps ----------------------------------------------------------------------------------------

    def _same_weights(self) -> bool:
        with self.step("two targets of the factory") as step:
            one, other = self.fresh(), self.fresh()
            self.target = type(one).__name__
            self.lenient = follows_its_sequence(one)
            mine, theirs = weights(one), weights(other)
            step.counted(len(mine), "tensors")
            same = {id(module) for module in modules(one).values()}
            shared = [path for path, module in modules(other).items() if id(module) in same]
            if shared or one is other:
                self._find("factory", "gave the same module twice", tensors=tuple(shared) or (self.target,))
                return False
            differing = [path for path in mine if difference({path: mine[path]}, {path: theirs.get(path)})]
            if differing:
                self._find("factory", "made two targets whose weights differ", tensors=tuple(differing))
            return not differing

    def _declaration(self) -> bool:
        """Enable once, to know the components."""
        with self.step("the declaration") as step, SimulatedAccelerator() as sim:
            target = self.fresh()
            try:
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    handle = offload(
                        target, sim.device, recipe=self.options.recipe, policy=self.options.policy
                    )
                with handle:
                    self.watched = callables(handle, target)
                    step.counted(len(handle.components), "components")
            except PolicyError:
                raise  # of the caller's, not of the target's
            except OmniComponentsError as error:
                self._find("declaration", str(error))
                return False
            self.notes += [f"{one.message}" for one in said if issubclass(one.category, ResidencyWarning)]
        return True

    def _run_resident(self) -> bool:
        """The run that all others must equal, on two targets: the second shows that the first was no accident."""
        with self.step("resident requests") as step, SimulatedAccelerator() as sim:
            target = self.on_device(sim)
            before, counters = weights(target), versions(target)
            recorder = CallRecorder(target, self.watched)
            watch = Watch(Owners(target, None, sim), sim, heal=False, step="the resident run")
            try:
                self.resident.weights = before
                with watch:
                    self.resident.outputs += self.back_to_back(target, sim)
                torch.accelerator.reset_peak_memory_stats(sim.device)
                with recorder.listening():
                    self.resident.outputs.append(self.request(target, sim))
                self.resident.peak = sim.stats().peak
            except Exception as error:
                self.explain(error, "the resident run", offloaded=False)
                return False
            self.resident.written = written(target, before, counters)
            with torch.no_grad():
                self.resident.calls = recorder.repeatable(self.options.seed, sim.device)
            self.findings += watch.noted.sure
            again = self.request(self.on_device(sim), sim)
            sim.expect_races()
            step.counted(REQUESTS + 1, "requests")
        words = difference(again, self.resident.outputs[0])
        if words is not None:
            self._find("not_reproducible", words)
        nans = sorted({path for one in self.resident.outputs for path in with_nan(one)})
        if nans:
            self.notes.append(
                f"there are NaN in {', '.join(nans[:4])}, without offload as well: they count as equal"
            )
        if not self.resident.repeats:
            self.notes.append(
                "requests differ from each other without offload: each is compared with its like"
            )
        return words is None

    def _run_offloaded(self) -> None:
        with (
            self.step("offloaded requests") as step,
            SimulatedAccelerator() as sim,
            self.offloaded(sim) as (target, handle),
        ):
            self.histories.append(handle.ledger.history)
            step.counted(REQUESTS, "requests")
            self.compare(target, handle, sim, "the offloaded run", self.measured)
            self.findings += self.measured.findings(
                loads=self.options.loads,
                written=self.resident.written,
                capacity=self.options.capacity,
                lenient=self.lenient,
            )
            self.notes += self.measured.notes(self.resident.written, lenient=self.lenient)

    def _run_restless(self) -> None:
        """Every component leaves as soon as its last scope closes: nothing is there by luck."""
        with (
            self.step("restless requests") as step,
            SimulatedAccelerator() as sim,
            self.offloaded(sim) as (target, handle),
            restless(handle.ledger),
        ):
            step.counted(2, "requests")
            words = "the run in which each component leaves at the end of its scope"
            self.compare(target, handle, sim, words, None)

    def _run_at_capacity(self) -> None:
        if self.options.capacity is None:
            return
        with self.step("requests at the capacity") as step, SimulatedAccelerator() as sim:
            sim.capacity = self.options.capacity
            with self.offloaded(sim) as (target, handle):
                step.counted(1, "request")
                words = "the run within the capacity"
                self.compare(target, handle, sim, words, None, requests=1)

    def _run_orders(self) -> None:
        with (
            self.step("phase orders") as step,
            SimulatedAccelerator() as sim,
            self.offloaded(sim) as (target, handle),
        ):
            calls, kept = self.resident.calls, self.resident.weights
            stable = {path: one for path, one in kept.items() if path not in self.resident.written}
            orders = PhaseOrders(target, handle, sim, calls, stable, self.options.seed)
            orders.run(self.options.orders)
            step.counted(orders.scopes, f"scopes in {self.options.orders} orders, {orders.compared} compared")
            self.findings += orders.findings
            handle.ledger.audit()

    def _run_faults(self) -> None:
        with self.step("faults") as step, SimulatedAccelerator() as sim:
            expected = self.resident.outputs[0] if self.resident.repeats else None
            with self.offloaded(sim) as (target, handle):
                walk = FaultWalk(
                    target=target,
                    handle=handle,
                    sim=sim,
                    request=lambda: self.request(target, sim),
                    expected=expected,
                    changing=self.resident.written,
                    seed=self.options.seed,
                )
                with quiet():
                    walk.run(None if self.options.faults is True else int(self.options.faults))
                sim.expect_races()
                step.counted(walk.walked, f"faults, {walk.switches} switches")
                self.findings += walk.findings
        if not walk.complete:
            self.notes.append(f"{walk.walked} faults were tried, as asked, and not all there are")
        self._run_pins()

    def _run_pins(self) -> None:
        """Pinning fails for the n-th master, for every n: that master is pageable, and all else as before."""
        limit = None if self.options.faults is True else int(self.options.faults)
        with self.step("pinning faults") as step:
            number, fired = 0, True
            while fired and (limit is None or number < limit):
                with SimulatedAccelerator() as sim:
                    sim.fail_at("pin", number)
                    with self.offloaded(sim) as (target, handle):
                        fired = sim.fired("pin")
                        sim.heal()
                        if fired:
                            words = f"the run after pinning failure {number + 1}"
                            self.compare(target, handle, sim, words, None, requests=1)
                number += fired
            step.counted(number, "faults")

    # --- small things -------------------------------------------------------------------------------------

    def _find(self, kind: Any, detail: str, **facts: Any) -> None:
        self.findings.append(CheckFinding(kind=kind, detail=detail, **facts))
