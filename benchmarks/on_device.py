"""What is shown on the simulated device, on a real one: the same results, the same counts, and real times.

    python benchmarks/on_device.py --device cuda --json on_device.json [--quick]

Checks, each of which ends the command with 1 if it does not hold: the demo pipeline and a small diffusers pipeline
give what their resident run gives, bit for bit; the ledger's ``check()`` and ``audit()`` find nothing; torch counts
no more device memory for weights than was predicted; the masters are pinned, as the ledger says and as torch does.

Measures, as the device's events tell, or else by the host's clock with the device waited for:

* a switch of 0.5 GiB, and without ``--quick`` of 4 GiB, in 400 and in 8,000 tensors, as a multiple of one raw pinned
  copy of the same bytes that takes turns with it; beside it accelerate's ``cpu_offload_with_hook`` and a plain
  ``.to()``. Each way stands alone with its raw copy, so that the host need not hold them all;
* pinning: memory registered where it is, fresh and already filled, beside torch's pinned allocator, whose memory is
  fresh as well;
* the first load of weights that are mapped from a file, through the staging slabs, and a plain ``.to()`` of tensors
  mapped anew; the file is in the page cache (``TMPDIR`` chooses the disk);
* the time for which compute waits for weights, with and without prefetch: requests of three components that take
  turns, each of which computes for 1.5 times as long as its copy takes, less the time of that computing alone.

What does not fit into the memory that is free is left out, which is said. ``--device sim`` runs all of it, on few
bytes, on the simulated accelerator, whose times say nothing about a link.
"""

from __future__ import annotations

import gc
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.harness import MIB, Layers, machine, parser, verdict, write
from benchmarks.on_device_times import (
    FULL,
    QUICK,
    SIMULATED,
    WAYS,
    Clock,
    Extent,
    Pipeline,
    device_memory,
    first_load,
    pinning,
    prefetch,
    switches,
)
from omni_components import InvariantError, Offload, PolicyError, offload
from omni_components.demo import DemoPipeline
from omni_components.transfer.device import resolve_device

Request = Callable[[Any], torch.Tensor]
BLOCK = 512  # the size of which allocators make their blocks a multiple, where they count blocks
KERNEL_DRIVERS = ("proc/driver/nvidia/version", "sys/module/amdgpu/version")


# --- what it runs on -------------------------------------------------------------------------------------


def hardware(device: torch.device) -> dict[str, Any]:
    """The device, its driver, the software and the day."""
    name = getattr(torch.get_device_module(device), "get_device_name", lambda index: str(device))
    return {
        "device": str(device),
        "hardware": name(device.index),
        "device_memory": device_memory(device)[1],
        "driver": driver(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "date": date.today().isoformat(),
        **machine(),
    }


def driver(root: Path = Path("/")) -> str | None:
    """What the system says of the device's driver; tests give another root."""
    files = [root / one for one in KERNEL_DRIVERS if (root / one).is_file()]
    return files[0].read_text().partition("\n")[0].strip() if files else None


@contextmanager
def opened(name: str, options: ArgumentParser) -> Iterator[torch.device]:
    """The device, current; a mistake in its name ends the command as any other of its options would."""
    if name == "sim":
        from omni_components.testing import SimulatedAccelerator

        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the layers are tiny: two threads would wait for each other
        try:
            with SimulatedAccelerator(poison=False, copies="engine") as sim:
                yield sim.device
        finally:
            torch.set_num_threads(threads)
        return
    try:
        device = resolve_device(name)
    except PolicyError as error:
        options.error(str(error))
    if device.type == "cpu":
        options.error("device='cpu' is no accelerator; without one, take --device sim")
    torch.accelerator.set_device_index(device.index)
    yield device


# --- the same results, in no more memory -----------------------------------------------------------------


def demo() -> tuple[Any, Request]:
    """The package's own pipeline."""
    return DemoPipeline.from_pretrained(), lambda pipe: pipe("three one", steps=2).ink


def from_diffusers() -> tuple[Any, Request]:
    """A Stable Diffusion of a few MiB with random weights."""
    from tests.diffusers import tiny

    def request(pipe: Any) -> torch.Tensor:
        arguments = {"height": 32, "width": 32, "num_inference_steps": 2, "output_type": "pt"}
        made: torch.Tensor = pipe("a lighthouse", generator=tiny.seeded(), **arguments)[0].cpu()
        return made

    return tiny.stable_diffusion(), request


def compared(build: Callable[[], tuple[Any, Request]], device: torch.device) -> dict[str, Any]:
    """Two requests with offload beside one of the resident run, and the memory of each as torch counts it."""
    try:
        pipe, request = build()
    except ImportError as error:
        return {"did_not_run": str(error)}
    with Peak(device) as resident:
        expected = request(pipe.to(device))
    pipe, request = build()
    tensors = sum(1 for one in modules_of(pipe) for _ in (*one.parameters(), *one.buffers()))
    with (
        Peak(device) as weights,
        offload(pipe, device) as handle,
    ):  # nothing computes: torch counts weights alone
        for one in handle.components:
            with handle.scope(one.name):
                pass
    with Peak(device) as running, offload(pipe, device) as handle:
        outputs = [request(pipe) for _ in range(2)]
        wrong = found_wrong(handle)
        report = handle.report()
    return {
        "equal": [torch.equal(one, expected) for one in outputs],
        "wrong": wrong,
        "loads": sum(event.kind == "load" for event in report.events),
        "predicted_peak": report.predicted_peak,
        "ledger_peak": report.peak_bytes,
        "weights_peak": weights.bytes,
        "rounding": tensors * BLOCK,
        "running_peak": running.bytes,
        "resident_peak": resident.bytes,
    }


def modules_of(pipe: Any) -> list[nn.Module]:
    """A pipeline's modules; a diffusers pipeline is no module itself."""
    return (
        [pipe]
        if isinstance(pipe, nn.Module)
        else [one for one in vars(pipe).values() if isinstance(one, nn.Module)]
    )


def found_wrong(handle: Offload) -> str | None:
    """What the ledger finds between its book and the tensors."""
    try:
        handle.ledger.check()
        handle.ledger.audit()
    except InvariantError as error:
        return str(error)
    return None


class Peak:
    """The most device memory that torch was asked for in a block, above what was taken before.

    Attributes:
        bytes: As asked, where the allocator tells that apart from its blocks; ``None`` where it tells nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes: int | None = None

    def __enter__(self) -> Peak:
        gc.collect()
        torch.accelerator.synchronize()
        self._before = self._counted("current")
        with suppress(RuntimeError, NotImplementedError):
            torch.accelerator.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *error: object) -> None:
        torch.accelerator.synchronize()
        peak = self._counted("peak")
        self.bytes = None if peak is None or self._before is None else peak - self._before

    def _counted(self, which: str) -> int | None:
        try:
            stats = torch.accelerator.memory_stats(self._device)
        except (RuntimeError, NotImplementedError):
            return None
        asked = stats.get(f"requested_bytes.all.{which}")
        return stats.get(f"allocated_bytes.all.{which}") if asked is None else int(asked)


def masters(device: torch.device, nbytes: int, tensors: int) -> dict[str, Any]:
    """Whether the masters of two components are pinned, by the ledger's account and by torch's."""
    pipe = Pipeline(Layers(tensors, nbytes), Layers(tensors, nbytes))
    with offload(pipe, device) as handle:
        handle.release()
        torch.empty(1, pin_memory=True)  # before it has pinned something itself, torch calls nothing pinned
        weights = list(pipe.parameters())
        pinned = sum(one.is_pinned() for one in weights)
        return {**asdict(handle.report().facts), "tensors": len(weights), "is_pinned": pinned}


# --- all of it -------------------------------------------------------------------------------------------


def measure(device: torch.device, extent: Extent) -> dict[str, Any]:
    """Everything, on a device that is current."""
    with torch.no_grad():
        clock = Clock(device)
        few = extent.tensors[0]
        return {
            **hardware(device),
            "timed_by": "device events" if clock.events else "the host's clock",
            "pipelines": {"demo": compared(demo, device), "diffusers": compared(from_diffusers, device)},
            "masters": masters(device, extent.phase, few),
            "switches": [
                switches(device, clock, nbytes, tensors, extent.rounds)
                for nbytes in extent.switches
                for tensors in extent.tensors
            ],
            "pinning_seconds_per_gib": pinning(device, extent.pinned),
            "first_load": first_load(device, clock, extent.mapped, few),
            "prefetch": prefetch(device, clock, extent),
        }


def bounds(result: Mapping[str, Any]) -> dict[str, bool]:
    """What must hold, by name; no time is promised."""
    held = {}
    for name, one in result["pipelines"].items():
        if "did_not_run" in one:
            continue
        held[f"{name} equal"] = all(one["equal"])
        held[f"{name} ledger"] = one["wrong"] is None
        counted = one["weights_peak"]
        held[f"{name} peak"] = counted is None or counted <= one["predicted_peak"] + one["rounding"]
    found = result["masters"]
    held["masters pinned"] = found["pageable_bytes"] == 0
    held["masters is_pinned"] = found["is_pinned"] == found["tensors"]
    return held


def table(result: Mapping[str, Any]) -> str:
    """The figures for people."""
    found = result["masters"]
    lines = [
        f"{result['hardware']}, driver {result['driver']}, torch {result['torch']}, {result['date']}",
        *(f"{name}: {_pipeline(one)}" for name, one in result["pipelines"].items()),
        f"masters: by torch {found['is_pinned']} of {found['tensors']} tensors are pinned",
        f"times by {result['timed_by']}",
        *map(_switch, result["switches"]),
        *(f"{key}: {_flat(result[key])}" for key in ("pinning_seconds_per_gib", "first_load", "prefetch")),
    ]
    return "\n".join([*lines, "these times say nothing about a link"] if result["simulated"] else lines)


def _pipeline(one: Mapping[str, Any]) -> str:
    if "did_not_run" in one:
        return f"did not run, {one['did_not_run']}"
    sizes = {key: one[f"{key}_peak"] for key in ("weights", "predicted", "running", "resident")}
    shown = ", ".join(f"{key} {'?' if size is None else f'{size / MIB:.1f}'}" for key, size in sizes.items())
    return f"equal {one['equal']}, wrong {one['wrong']}; peak in MiB: {shown}"


def _switch(one: Mapping[str, Any]) -> str:
    head = f"switch of {one['bytes'] / MIB:.0f} MiB in {one['tensors']} tensors:"
    if "left_out" in one:
        return f"{head} left out, {one['left_out']}"
    ran = ", ".join(f"{name} {one[name]['ratio']:.2f}" for name in WAYS if "ratio" in one[name])
    return f"{head} {ran} of a raw copy at {one['raw_copy']['gb_per_s']:.1f} GB/s"


def _flat(found: Mapping[str, Any]) -> str:
    shown = {key: f"{one:.3g}" if isinstance(one, float) else one for key, one in found.items()}
    return ", ".join(f"{key} {one}" for key, one in shown.items())


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__.partition("\n")[0])
    options.add_argument(
        "--device", required=True, help="cuda, cuda:1, xpu, ..., or sim, the simulated accelerator"
    )
    given = options.parse_args(arguments)
    simulated = given.device == "sim"
    extent = SIMULATED if simulated else QUICK if given.quick else FULL
    with opened(given.device, options) as device:
        result = {**measure(device, extent), "simulated": simulated, "quick": given.quick}
    write(given.json, result)
    print(table(result))
    return verdict(bounds(result), quick=False)  # what is checked does not depend on the extent


if __name__ == "__main__":
    sys.exit(main())
