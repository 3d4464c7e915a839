"""Random phase orders: scopes in any order and depth, late copies in a drawn order, noted calls inside."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import ResidencyWarning
from ..strategies import Phase, programs
from .calls import NotedCall, made
from .outputs import Flat, captured, difference
from .records import CheckFinding
from .targets import modules
from .watch import race_words


class _BodyRaised(Exception):
    """What a drawn body raises."""


@dataclass
class PhaseOrders:
    """Runs programs of phases on one offloaded target and compares what comes out of them.

    Args:
        target: The offloaded target.
        handle: Its offload.
        sim: The open device.
        calls: Noted calls by component.
        weights: The weights of a resident target, by path.
        seed: Of each call.

    Attributes:
        findings: What went wrong, in the first program in which anything did.
        scopes: Scopes entered.
        compared: Results and weights compared.
    """

    target: Any
    handle: Any
    sim: Any
    calls: dict[str, list[NotedCall]]
    weights: dict[str, torch.Tensor]
    seed: int
    findings: list[CheckFinding] = field(default_factory=list)
    scopes: int = 0
    compared: int = 0

    def __post_init__(self) -> None:
        self._modules = modules(self.target)
        self._names = [one.name for one in self.handle.ledger.components if not one.resident]
        self._results: list[tuple[str, Any, Flat]] = []
        self._reads: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._turn = 0

    def run(self, count: int) -> None:
        """So many drawn programs; the same ones each time."""
        from hypothesis import HealthCheck, given, seed, settings
        from hypothesis import Phase as Stage
        from hypothesis import strategies as st

        depth = 1 if self.handle.policy.nesting == "error" else 3
        picks = st.integers(0, 99)

        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=(Stage.generate,),
            suppress_health_check=list(HealthCheck),
        )
        @seed(self.seed)
        @given(programs(self._names, depth=depth, length=3), st.lists(picks, max_size=30), picks)
        def each(phases: list[Phase], order: list[int], start: int) -> None:
            if not self.findings:
                self._program(phases, order, start)

        each()

    def _program(self, phases: Sequence[Phase], order: Sequence[int], start: int) -> None:
        self._turn = start
        self.sim.copies = _chooser(order)
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore", ResidencyWarning)  # rivals are nested here on purpose
                self._phases(phases, top=True)
        except _BodyRaised:
            pass
        except Exception as error:
            self._find(phases, f"{type(error).__name__}: {error}")
        finally:
            self.sim.copies = "lazy"
        self._compare(phases)
        self.handle.release()
        for race in self.sim.expect_races():
            self._find(phases, race_words(race), tensor=race.label, where=race.where)

    def _phases(self, phases: Sequence[Phase], *, top: bool) -> None:
        for phase in phases:
            if phase.hint and top:
                self.handle.ledger.load(phase.name)
            with self.handle.ledger.scope(phase.name):
                self.scopes += 1
                self._compute(phase.name)
                if phase.body:
                    self._phases(phase.body, top=False)
                    self._compute(phase.name)
                if phase.ends == "raises":
                    raise _BodyRaised

    def _compute(self, name: str) -> None:
        """Enqueue work and wait for nothing: whoever should have waited is found out."""
        self._turn += 1
        noted = self.calls.get(name)
        if noted:
            call = noted[self._turn % len(noted)]
            result = made(self._modules[call.path], call, self.seed, self.sim.device)
            self._results.append((call.path, result, call.output))
        slots = list(self.handle.ledger.attachment.attached[name].found.area.slots())
        slot = slots[self._turn % len(slots)] if slots else None
        if slot is not None and slot.path in self.weights and slot.tensor is not None:
            self._reads.append((slot.path, slot.tensor.detach().clone(), self.weights[slot.path]))

    def _compare(self, phases: Sequence[Phase]) -> None:
        results = [(path, captured(result), expected) for path, result, expected in self._results]
        results += [(path, captured(read), captured(kept)) for path, read, kept in self._reads]
        self._results, self._reads = [], []
        self.compared += len(results)
        for path, result, expected in results:
            words = difference(result, expected)
            if words is not None:
                self._find(phases, words, tensor=path)

    def _find(self, phases: Sequence[Phase], words: str, *, tensor: str = "", where: str = "") -> None:
        detail = f"{words}; in the order {described(phases)}"
        names = (tensor,) if tensor else ()
        self.findings.append(
            CheckFinding(kind="order", tensors=names, where=where, detail=detail, step="phase orders")
        )


def described(phases: Sequence[Phase]) -> str:
    """A program in a line: ``reasoner(generator), generator!``; ``!`` is a body that raises."""
    shown = [
        f"{one.name}{f'({described(one.body)})' if one.body else ''}{'!' if one.ends == 'raises' else ''}"
        for one in phases
    ]
    return ", ".join(shown)


def _chooser(order: Sequence[int]) -> Callable[[int], int]:
    left = iter(order)
    return lambda count: next(left, 0) % (count + 1)
