"""A pipeline run three ways on the simulated device: all resident, with diffusers' own offload, with ours."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from omni_components import ResidencyEvent, offload
from omni_components.testing import SimulatedAccelerator
from tests.diffusers.tiny import seeded


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pipeline and a call of it.

    Attributes:
        build: Makes the pipeline, with the same weights each time.
        arguments: Of one request.
        alongside: Components outside of the sequence: they exclude nobody.
        resident: Components that are never swapped.
        together: Encoders that fit together into the room of the largest component.
        stays: Pairs of which the first stays when the second, which comes before it in the sequence, is back.
    """

    build: Callable[[], Any]
    arguments: dict[str, Any]
    alongside: frozenset[str] = frozenset()
    resident: frozenset[str] = frozenset()
    together: frozenset[str] = frozenset()
    stays: frozenset[tuple[str, str]] = frozenset()

    def request(self, pipeline: Any) -> torch.Tensor:
        return pipeline(**self.arguments, generator=seeded(), output_type="pt")[0].cpu()


@dataclass(kw_only=True)
class Run:
    """What one way gave and took; ``sent`` and ``returned`` are bytes over the link during the requests."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    peak: int = 0
    sent: int = 0
    returned: int = 0


@dataclass(kw_only=True)
class OurRun(Run):
    """The same for our offload."""

    events: list[ResidencyEvent] = field(default_factory=list)
    present: list[tuple[str, ...]] = field(default_factory=list)


@dataclass(kw_only=True)
class Comparison:
    """The three ways, and what an oracle says of the third.

    Attributes:
        weights: Bytes of each component, every storage once.
        uses: The components in the order of their use in one request, seen in the resident run.
        capacity: What the device had when ours ran: the peak of diffusers' own offload.
        resident_fits: Whether the resident run did with that capacity, too.
    """

    resident: Run
    theirs: Run
    ours: OurRun
    weights: dict[str, int]
    uses: list[str]
    capacity: int
    resident_fits: bool


def compare(case: Case, sim: SimulatedAccelerator, requests: int = 2) -> Comparison:
    """Run a case in the three ways, side by side on one device."""
    uses: list[str] = []
    resident = _alone(sim, lambda: _resident(case, sim, requests, uses))
    theirs = _alone(sim, lambda: _theirs(case, sim, requests))
    sim.capacity = theirs.peak
    ours = _alone(sim, lambda: _ours(case, sim, requests))
    resident_fits = _alone(sim, lambda: _fits(case, sim))
    sim.capacity = None
    return Comparison(
        resident=resident,
        theirs=theirs,
        ours=ours,
        weights={name: weight_bytes(one) for name, one in modules(case.build())},
        uses=uses[: len(uses) // requests],
        capacity=theirs.peak,
        resident_fits=resident_fits,
    )


def _alone(sim: SimulatedAccelerator, run: Callable[[], Any]) -> Any:
    result = run()
    gc.collect()  # a pipeline is full of cycles, and its weights are still on the device
    assert sim.stats().allocated == 0
    return result


def _resident(case: Case, sim: SimulatedAccelerator, requests: int, uses: list[str]) -> Run:
    pipeline = case.build().to(sim.device)
    note_uses(pipeline, uses)
    return _measured(case, sim, pipeline, requests, Run())


def _theirs(case: Case, sim: SimulatedAccelerator, requests: int) -> Run:
    pipeline = case.build()
    pipeline.enable_model_cpu_offload(device=sim.device)
    return _measured(case, sim, pipeline, requests, Run())


def _ours(case: Case, sim: SimulatedAccelerator, requests: int) -> OurRun:
    pipeline = case.build()
    with offload(pipeline, sim.device) as handle:
        run = _measured(case, sim, pipeline, requests, OurRun(), lambda: handle.ledger.present)
        handle.ledger.audit()
        run.events = list(handle.events)
    return run


def _fits(case: Case, sim: SimulatedAccelerator) -> bool:
    try:
        case.request(case.build().to(sim.device))
    except torch.OutOfMemoryError:
        return False
    return True


def expected_loads(case: Case, uses: list[str]) -> list[str]:
    """What has to be loaded for one request: one at a time, save for encoders with room for all of them."""
    loads: list[str] = []
    there: set[str] = set()
    for name in uses:
        if name in case.resident or name in there:
            continue
        loads.append(name)
        if name not in case.alongside:
            there = {
                one
                for one in there
                if one in case.alongside or {one, name} <= case.together or (one, name) in case.stays
            }
        there.add(name)
    return loads


def modules(pipeline: Any) -> list[tuple[str, nn.Module]]:
    return [(name, one) for name, one in pipeline.components.items() if isinstance(one, nn.Module)]


def weight_bytes(module: nn.Module) -> int:
    tensors = [*module.parameters(), *module.buffers()]
    return sum({one.data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def note_uses(pipeline: Any, uses: list[str]) -> None:
    """Write down whose ``forward``, ``encode`` or ``decode`` is called."""
    for name, module in modules(pipeline):
        module.register_forward_pre_hook(lambda *_, name=name: uses.append(name))
        for method in ("encode", "decode"):
            if hasattr(module, method):
                setattr(module, method, _noting(getattr(module, method), name, uses))


def _noting(method: Callable[..., Any], name: str, uses: list[str]) -> Callable[..., Any]:
    def noting(*args: Any, **kwargs: Any) -> Any:
        uses.append(name)
        return method(*args, **kwargs)

    return noting


def _measured(
    case: Case,
    sim: SimulatedAccelerator,
    pipeline: Any,
    requests: int,
    run: Any,
    present: Callable[[], tuple[str, ...]] | None = None,
) -> Any:
    sim.reset()
    for _ in range(requests):
        run.outputs.append(case.request(pipeline))
        if present is not None:
            run.present.append(present())
    stats = sim.stats()
    run.peak, run.sent, run.returned = stats.peak, stats.h2d_bytes, stats.d2h_bytes
    return run
