"""One case run three ways on one simulated accelerator: resident, by diffusers' own offload, by ours."""

from __future__ import annotations

import gc
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from omni_components import Offload, offload
from omni_components.components.recipes import called_alone
from omni_components.errors import OmniComponentsError
from omni_components.residency.events import EventKind
from omni_components.testing import SimulatedAccelerator

from .case import Case

REQUESTS = 2


@dataclass(kw_only=True)
class Row:
    """What is known about one class.

    Bytes are those of two requests, and diffusers' own are those above what the resident run moves itself.

    Attributes:
        name: The class.
        runs_resident: Its components fit the simulated accelerator's operators, all resident.
        runs_diffusers: It runs under diffusers' own offload.
        equal_diffusers: With the resident run's output, both times.
        runs_ours: It runs under ours.
        equal: The first request gives what the resident run gives, bit for bit.
        second_equal: The second, too.
        weights: Bytes of all components, each storage once.
        bytes_in: Weights to the device, by ours.
        bytes_in_diffusers: By diffusers' own.
        bytes_back: To the host, by ours.
        bytes_back_diffusers: By diffusers' own.
        besides: What else our way carried to the device and the resident run did not: bytes between weights (a packed
            copy keeps each at a multiple of 256, which counts only where weights are as small as here) and inputs
            that a hook moved.
        peak: Bytes of weights on the device together, at most, by ours.
        peak_diffusers: By diffusers' own.
        reason: Why not, where something does not run.
    """

    name: str
    runs_resident: bool = False
    runs_diffusers: bool = False
    equal_diffusers: bool = False
    runs_ours: bool = False
    equal: bool = False
    second_equal: bool = False
    weights: int = 0
    bytes_in: int = 0
    bytes_in_diffusers: int = 0
    bytes_back: int = 0
    bytes_back_diffusers: int = 0
    besides: int = 0
    peak: int = 0
    peak_diffusers: int = 0
    reason: str = ""

    def as_json(self) -> dict[str, Any]:
        """The row for the file, under the key ``class`` for the name."""
        fields = asdict(self)
        return {"class": fields.pop("name"), **fields}


@dataclass(kw_only=True)
class Run:
    """One way: outputs of each request, bytes over the link, the most weights together.

    For ours also the weights that were loaded, by its own events.
    """

    outputs: list[list[torch.Tensor]] = field(default_factory=list)
    sent: int = 0
    returned: int = 0
    peak: int = 0
    weights: int = 0
    error: str = ""


def compare(case: Case, module: str) -> Row:
    """Run a case in the three ways."""
    row = Row(name=case.name)
    with SimulatedAccelerator() as sim, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resident = _run(case, module, sim, _resident)
        row.runs_resident = not resident.error
        if resident.error:
            row.reason = f"resident: {resident.error}"
            return row
        row.reason = _useless(resident.outputs)
        row.weights = sum(weight_bytes(parts) for _, parts in modules(case.build(module)))
        theirs = _run(case, module, sim, _theirs)
        ours = _run(case, module, sim, _ours)
        row.runs_diffusers, row.runs_ours = not theirs.error, not ours.error
        if theirs.error:
            row.reason += f"diffusers: {theirs.error} "
        if ours.error:
            row.reason += f"ours: {ours.error} "
    row.equal_diffusers = not theirs.error and all(map(same, theirs.outputs, resident.outputs))
    if not ours.error:
        row.equal, row.second_equal = map(same, ours.outputs, resident.outputs)
    row.bytes_in, row.bytes_back = ours.weights, ours.returned - resident.returned
    row.besides = ours.sent - resident.sent - ours.weights
    row.bytes_in_diffusers = theirs.sent - resident.sent
    row.bytes_back_diffusers = theirs.returned - resident.returned
    row.peak, row.peak_diffusers = ours.peak, theirs.peak
    return row


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether two outputs are the same numbers, all of them."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def modules(pipeline: Any) -> list[tuple[str, list[nn.Module]]]:
    """The components that have weights, each once, by the modules in them; what is called alone is apart."""
    named = {id(one): (name, one) for name, one in pipeline.components.items() if isinstance(one, nn.Module)}
    whole = dict(named.values())
    alone = {path: attrgetter(path)(pipeline) for path in called_alone(pipeline)}
    apart = {id(one) for module in alone.values() for one in module.modules()}
    rest = {name: [one for one in module.modules() if id(one) not in apart] for name, module in whole.items()}
    return [*rest.items(), *((path, list(module.modules())) for path, module in alone.items())]


def weight_bytes(parts: list[nn.Module]) -> int:
    """Bytes of the storages of some modules' own tensors, each once."""
    held = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for one in parts
        for tensor in (*one.parameters(recurse=False), *one.buffers(recurse=False))
    }
    return sum(held.values())


def _useless(outputs: list[list[torch.Tensor]]) -> str:
    """Outputs that any offload would give prove nothing."""
    floats = [one for output in outputs for one in output if one.numel() > 1]
    if not floats:
        return "case: no numbers in the output "
    if not all(torch.isfinite(one.float()).all() for one in floats):
        return "case: numbers that are not finite "
    if all((one == one.flatten()[0]).all() for one in floats):
        return "case: the same number everywhere "
    return ""


def _run(case: Case, module: str, sim: SimulatedAccelerator, way: Callable[..., None]) -> Run:
    run = Run()
    try:
        way(case, case.build(module), sim, run)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        told = str(error).strip().splitlines() or [""]
        place = f"{where.filename.split('site-packages/')[-1]}:{where.lineno}"
        run.error = f"{type(error).__name__}: {told[0][:300]} ({place})"
        if VERBOSE:
            traceback.print_exc()
        error.__traceback__ = None
    gc.collect()  # a pipeline is full of cycles, and its weights are still on the device
    return run


VERBOSE = False


def _resident(case: Case, pipeline: Any, sim: SimulatedAccelerator, run: Run) -> None:
    pipeline.to(sim.device)
    _requests(case, pipeline, sim, run)


def _theirs(case: Case, pipeline: Any, sim: SimulatedAccelerator, run: Run) -> None:
    pipeline.enable_model_cpu_offload(device=sim.device)
    _requests(case, pipeline, sim, run)


def _ours(case: Case, pipeline: Any, sim: SimulatedAccelerator, run: Run) -> None:
    with offload(pipeline, device=sim.device) as handle:
        _requests(case, pipeline, sim, run)
        handle.ledger.audit()
        run.weights = _loaded(handle, dict(modules(pipeline)))
    if sim.races:
        raise OmniComponentsError(f"{len(sim.races)} races: {sim.races[0]}")


def _loaded(handle: Offload, parts: dict[str, list[nn.Module]]) -> int:
    sizes = {one.name: weight_bytes(parts[one.name]) for one in handle.components if not one.resident}
    loads = [event for event in handle.events if event.kind is EventKind.LOAD and event.component in sizes]
    return sum(min(event.bytes, sizes[event.component]) for event in loads)  # what is shared stays


def _requests(case: Case, pipeline: Any, sim: SimulatedAccelerator, run: Run) -> None:
    sim.reset()
    with _watched(pipeline, sim.device, run):
        for _ in range(REQUESTS):
            run.outputs.append(case.request(pipeline))
    stats = sim.stats()
    run.sent, run.returned = stats.h2d_bytes, stats.d2h_bytes


@contextmanager
def _watched(pipeline: Any, device: torch.device, run: Run) -> Iterator[None]:
    """Look at every call of every module, from outside, whose weights are on the device."""
    watched = [(weight_bytes(parts), _largest(parts)) for _, parts in modules(pipeline)]

    def look(*_: Any) -> None:
        there = sum(size for size, at in watched if at is not None and at[0][at[1]].device == device)
        run.peak = max(run.peak, there)

    handles = [register_module_forward_pre_hook(look), register_module_forward_hook(look)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _largest(parts: list[nn.Module]) -> tuple[dict[str, Any], str] | None:
    """Where the largest tensor of some modules is registered: the one that tells where they are."""
    places = [
        (tensor.numel(), table, name)
        for one in parts
        for table in (one._parameters, one._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]
    return max(places, key=lambda place: place[0])[1:] if places else None
