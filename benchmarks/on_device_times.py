"""What ``on_device.py`` measures: switches, pinning, the first load of a mapped file, and what prefetch hides."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from torch import nn

from benchmarks import switch
from benchmarks.harness import MIB, Case, Layers, Time, median_ms, median_ratio, size_of
from omni_components import offload
from omni_components.transfer.device import registrar_for
from omni_components.transfer.hostmemory import pinnable_bytes
from omni_components.transfer.masters import anonymous

GIB = 1 << 30
SHARE_OF_COPY = 1.5  # a phase computes for so many copies of a component, so that one can be hidden whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much is measured.

    Attributes:
        switches: Bytes of a component whose switch is timed.
        tensors: In how many tensors.
        rounds: How often each way is timed.
        pinned: Bytes that are pinned in each way.
        mapped: Bytes of a file.
        phase: Bytes of a component that is copied ahead.
        requests: With prefetch, and without.
        side: Of the matrices that a phase multiplies.
    """

    switches: tuple[int, ...]
    tensors: tuple[int, ...] = (400, 8000)
    rounds: int
    pinned: int
    mapped: int
    phase: int
    requests: int
    side: int = 4096


FULL = Extent(switches=(GIB // 2, 4 * GIB), rounds=7, pinned=GIB, mapped=4 * GIB, phase=GIB, requests=10)
QUICK = Extent(switches=(GIB // 2,), rounds=3, pinned=GIB // 4, mapped=GIB // 2, phase=GIB // 4, requests=3)
SIMULATED = Extent(
    switches=(8 * MIB,),
    tensors=(40, 400),
    rounds=1,
    pinned=4 * MIB,
    mapped=8 * MIB,
    phase=4 * MIB,
    requests=3,
    side=64,
)


class Pipeline(nn.Module):
    """An encoder and one or two denoisers that take turns."""

    _dit_modules: ClassVar[list[str]] = ["transformer", "transformer_2"]
    _encoder_modules: ClassVar[list[str]] = ["encoder"]
    _vae_modules: ClassVar[list[str]] = []

    def __init__(self, encoder: nn.Module, transformer: nn.Module, second: nn.Module | None = None) -> None:
        super().__init__()
        self.encoder, self.transformer, self.transformer_2 = encoder, transformer, second


class Clock:
    """Seconds of a step, until the device has done it.

    Attributes:
        events: The device's own events tell them; else the host's clock does, and waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.events = self._tell_time()

    def __call__(self, step: Case) -> Time:
        """Run a step once."""
        torch.accelerator.synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        if self.events:
            seconds = self._between_events(step)
        else:
            step()
            torch.accelerator.synchronize()
            seconds = time.perf_counter() - wall
        return Time(seconds, time.process_time() - cpu)

    def _between_events(self, step: Case) -> float:
        start, end = (torch.Event(device=self._device, enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def _tell_time(self) -> bool:
        block = torch.zeros(MIB, device=self._device)
        try:
            return self._between_events(lambda: block.add_(1)) > 0
        except (RuntimeError, NotImplementedError):
            return False


@contextmanager
def without_collector() -> Iterator[None]:
    """As in ``timeit``; what is left of the case before goes first, on the device too."""
    gc.collect()
    torch.accelerator.empty_cache()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def in_turns(cases: Mapping[str, Case], clock: Clock, rounds: int) -> dict[str, list[Time]]:
    """All cases in every round; the first, in which memory is taken, counts for nothing."""
    taken: dict[str, list[Time]] = {name: [] for name in cases}
    with without_collector():
        for _ in range(rounds + 1):
            for name, case in cases.items():
                taken[name].append(clock(case))
    return {name: times[1:] for name, times in taken.items()}


# --- what fits -------------------------------------------------------------------------------------------


def device_memory(device: torch.device) -> tuple[int | None, int | None]:
    """Bytes of it that are free, and all of them, where it tells."""
    try:
        free, total = torch.accelerator.get_memory_info(device)
    except (AttributeError, RuntimeError, NotImplementedError):
        return None, None
    return free, total


def missing_memory(device: torch.device, on_device: int, on_host: int) -> str | None:
    """Why so many bytes do not fit, in words."""
    gc.collect()
    torch.accelerator.empty_cache()
    free, _ = device_memory(device)
    for place, needed, there in (("device", on_device, free), ("host", on_host, pinnable_bytes())):
        if there is not None and there < needed:
            return f"{there / GIB:.1f} GiB of the {place} can be had, {needed / GIB:.1f} are needed"
    return None


# --- switches --------------------------------------------------------------------------------------------


WAYS: Mapping[str, Callable[[switch.Pipeline, torch.device, ExitStack], Case]] = {
    switch.OURS: switch.ours,
    "accelerate_cpu_offload_with_hook": lambda pipe, device, _: switch.with_accelerate(pipe, device),
    "plain_to": lambda pipe, device, _: switch.plain_to(pipe, device),
}


def switches(device: torch.device, clock: Clock, nbytes: int, tensors: int, rounds: int) -> dict[str, Any]:
    """Each way's switch as a multiple of the raw copy that takes turns with it."""
    found: dict[str, Any] = {"bytes": nbytes, "tensors": tensors}
    # There: a component, and where the raw copy goes. Here: two components, the raw copy's source, a slab or two.
    lacks = missing_memory(device, int(2.1 * nbytes), int(3.5 * nbytes))
    if lacks is not None:
        return {**found, "left_out": lacks}
    raw: list[Time] = []
    for name in WAYS:
        try:
            found["bytes"], times = _beside_raw(name, device, clock, nbytes, tensors, rounds)
        except ImportError as error:
            found[name] = {"did_not_run": str(error)}
            continue
        found[name] = {"ratio": median_ratio(times[name], times["raw"]), "ms": median_ms(times[name]) / 2}
        raw += times["raw"]
    found["raw_copy"] = {"ms": median_ms(raw) / 2, "gb_per_s": 2e-6 * found["bytes"] / median_ms(raw)}
    return found


def _beside_raw(
    name: str, device: torch.device, clock: Clock, nbytes: int, tensors: int, rounds: int
) -> tuple[int, dict[str, list[Time]]]:
    with ExitStack() as stack:
        pipe = switch.Pipeline(tensors, nbytes)
        size = size_of(pipe.encoder)
        cases = {"raw": switch.raw_copy(size, device), name: WAYS[name](pipe, device, stack)}
        return size, in_turns(cases, clock, rounds)


# --- pinning, files --------------------------------------------------------------------------------------


def pinning(device: torch.device, nbytes: int) -> dict[str, Any]:
    """Seconds per GiB; a registrar is what the masters use where the device has one."""

    def seconds(step: Case) -> float:
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * GIB / nbytes

    kinds = ("registered", "registered_filled", "unregistered")
    found: dict[str, Any] = {"bytes": nbytes, **dict.fromkeys(kinds)}
    registrar = registrar_for(device)
    if registrar is not None:
        fresh, filled = anonymous(nbytes), anonymous(nbytes).fill_(1)
        pins = {"registered": fresh.data_ptr(), "registered_filled": filled.data_ptr()}
        for name, at in pins.items():
            found[name] = seconds(lambda at=at: registrar.host_register(at, nbytes))
        found["unregistered"] = seconds(lambda: [registrar.host_unregister(at) for at in pins.values()]) / 2
    return {**found, "torch": seconds(lambda: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))}


def first_load(device: torch.device, clock: Clock, nbytes: int, tensors: int) -> dict[str, Any]:
    """GB/s of weights in a mapped file: through the staging slabs, the first time and again, and by ``.to()``."""
    from safetensors.torch import load_file, save_file

    lacks = missing_memory(device, int(1.1 * nbytes), int(1.1 * nbytes))
    if lacks is not None:
        return {"bytes": nbytes, "left_out": lacks}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "weights.safetensors"
        save_file(Layers(tensors, nbytes).state_dict(), file)

        def mapped() -> Layers:
            with torch.device("meta"):
                made = Layers(tensors, nbytes)
            made.load_state_dict(load_file(file), assign=True)
            return made

        times, counts = _staged(Pipeline(mapped(), Layers(2, MIB)), device, clock)
        module = mapped()
        with without_collector():
            times["plain_to"] = clock(lambda: module.to(device))
    size = size_of(module)
    speeds = {f"{name}_gb_per_s": size / one.wall / 1e9 for name, one in times.items()}
    return {"bytes": size, **counts, **speeds}


def _staged(pipe: Pipeline, device: torch.device, clock: Clock) -> tuple[dict[str, Time], dict[str, Any]]:
    times = {}
    with without_collector(), offload(pipe, device, masters="mapped") as handle:
        for name in ("staged", "staged_again"):
            handle.release()
            times[name] = clock(lambda: handle.load("encoder"))
        loaded = [event.bytes for event in handle.events if event.kind == "load"][-2:]
        return times, {"loaded_bytes": loaded, "mapped_bytes": handle.report().facts.mapped_bytes}


# --- prefetch --------------------------------------------------------------------------------------------


def prefetch(device: torch.device, clock: Clock, extent: Extent) -> dict[str, Any]:
    """Seconds per request for which compute waits for weights, with and without copying ahead."""
    lacks = missing_memory(device, int(3.5 * extent.phase), 5 * extent.phase)
    if lacks is not None:
        return {"component_bytes": extent.phase, "left_out": lacks}
    raw = in_turns({"raw": switch.raw_copy(extent.phase, device)}, clock, 3)["raw"]
    work = _computing(device, clock, SHARE_OF_COPY * median_ms(raw) / 2e3, extent.side)
    off, on = (_served(device, clock, work, extent, ahead=ahead) for ahead in (False, True))
    alone = clock(lambda: [work() for _ in range(3 * extent.requests)]).wall / extent.requests
    return {
        "requests": extent.requests,
        "component_bytes": extent.phase,
        "compute_seconds": alone,
        "exposed_seconds_off": off["seconds"] - alone,
        "exposed_seconds_on": on["seconds"] - alone,
        "prefetched_off": off["prefetched"],
        "prefetched_on": on["prefetched"],
        "notes": on["notes"],
    }


def _computing(device: torch.device, clock: Clock, seconds: float, side: int) -> Case:
    """Work that keeps the device busy for about so long."""
    matrix, into = torch.ones(side, side, device=device), torch.empty(side, side, device=device)
    ten = [clock(lambda: [torch.mm(matrix, matrix, out=into) for _ in range(10)]).wall for _ in range(3)]
    times = max(1, round(10 * seconds / min(ten)))
    return lambda: [torch.mm(matrix, matrix, out=into) for _ in range(times)]


def _served(device: torch.device, clock: Clock, work: Case, extent: Extent, *, ahead: bool) -> dict[str, Any]:
    """Seconds per request, after two from which the order is learned."""
    pipe = Pipeline(*(Layers(extent.tensors[0], extent.phase) for _ in range(3)))
    room = 2 * size_of(pipe.encoder) + 2 * MIB
    with without_collector(), offload(pipe, device, prefetch=ahead, device_memory=room) as handle:

        def requests(count: int) -> None:
            for _ in range(count):
                for one in handle.components:
                    with handle.scope(one.name):
                        work()
                handle.release()

        requests(2)
        before = sum(row.prefetched for row in handle.report().rows)
        seconds = clock(lambda: requests(extent.requests)).wall / extent.requests
        report = handle.report()
    prefetched = sum(row.prefetched for row in report.rows) - before
    return {"seconds": seconds, "prefetched": prefetched, "notes": list(report.notes)}
