"""What a switch costs, as a multiple of one raw pinned copy of the same bytes, beside the peers.

    python benchmarks/switch.py --json switch.json [--quick]

Two components of 0.5 GiB take turns on the simulated device (poison off), with 400 and with 8,000 tensors each.
Raw copy, this package and the peers take turns in every round; the medians of the rounds' ratios are written,
by the clock and by the processor's time; a round is two switches, there and back. Counts are exact: those of the
package are over 100 switches, those of the peers over two.

The peers: diffusers' ``enable_model_cpu_offload``, the components of whose pipeline run in turn; accelerate's
``cpu_offload_with_hook`` on both components, each other's predecessor; a plain ``.to()`` of both; diffusers' group
offload (block level), where one run of a component's blocks stands for the switch, because it keeps none on the
device; and the raw copy against itself, which tells the noise. Memory that is freed, on the host or on the simulated
device, is kept and taken again, as caching allocators do. Exits with 1 if a bound is missed, save with ``--quick``.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.harness import (
    MIB,
    Case,
    Layers,
    interleaved,
    keep_freed_memory,
    machine,
    median_ms,
    median_ratio,
    parser,
    size_of,
    verdict,
    write,
)
from omni_components import offload
from omni_components.testing import SimulatedAccelerator

TENSORS = (400, 8000)
TARGETS = {"switch_ratio_400": 1.15, "switch_ratio_8000": 1.5}
OURS, RAW = "omni_components", "raw_copy"
COUNTS = {
    "device_allocations": "allocations",
    "flushes": "flushes",
    "copies": "h2d_copies",
    "bytes_to_device": "h2d_bytes",
    "bytes_to_host": "d2h_bytes",
}


class Pipeline(nn.Module):
    """Two components that exclude each other."""

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = ["encoder"]
    _vae_modules: ClassVar[list[str]] = []

    def __init__(self, tensors: int, nbytes: int) -> None:
        super().__init__()
        self.encoder, self.transformer = Layers(tensors, nbytes), Layers(tensors, nbytes)


def in_turn(one: Case, other: Case) -> Case:
    """Two switches, each waited for until the device has done it."""

    def case() -> None:
        for step in (one, other):
            step()
            torch.accelerator.synchronize()

    return case


# --- the cases -------------------------------------------------------------------------------------------


def ours(pipeline: Pipeline, device: torch.device, stack: ExitStack) -> Case:
    handle = stack.enter_context(offload(pipeline, device))

    def enter(name: str) -> Case:
        def step() -> None:
            with handle.scope(name):
                pass

        return step

    return in_turn(enter("encoder"), enter("transformer"))


def raw_copy(nbytes: int, device: torch.device) -> Case:
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).fill_(1)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    step = partial(target.copy_, source, non_blocking=True)
    return in_turn(step, step)


def with_accelerate(pipeline: Pipeline, device: torch.device) -> Case:
    from accelerate import cpu_offload_with_hook

    x = torch.ones(4, device=device)
    encoder, first = cpu_offload_with_hook(pipeline.encoder, device)
    transformer, second = cpu_offload_with_hook(pipeline.transformer, device, prev_module_hook=first)
    first.hook.prev_module_hook = second  # they take turns: a pipeline that is called again and again
    return in_turn(lambda: encoder(x), lambda: transformer(x))


def with_diffusers(pipeline: Pipeline, device: torch.device) -> Case:
    from diffusers import DiffusionPipeline

    class Peer(DiffusionPipeline):
        model_cpu_offload_seq = "encoder->transformer"

        def __init__(self, encoder: nn.Module, transformer: nn.Module) -> None:
            super().__init__()
            self.register_modules(encoder=encoder, transformer=transformer)

    x = torch.ones(4, device=device)
    pipe = Peer(pipeline.encoder, pipeline.transformer)
    pipe.enable_model_cpu_offload(device=device)

    def last() -> None:
        pipe.transformer(x)
        pipe.maybe_free_model_hooks()  # how each of its pipelines ends a call

    return in_turn(lambda: pipe.encoder(x), last)


def plain_to(pipeline: Pipeline, device: torch.device) -> Case:
    def swap(inward: nn.Module, outward: nn.Module) -> Case:
        def step() -> None:
            outward.to("cpu")
            inward.to(device)

        return step

    one, other = pipeline.encoder, pipeline.transformer
    return in_turn(swap(one, other), swap(other, one))


@contextmanager
def data_that_crosses() -> Iterator[None]:
    """Let a parameter's ``.data =`` cross to the simulated device.

    torch refuses that for PrivateUse1 devices, and diffusers' group offload moves in no other way. Two tensors
    swapped (``torch.utils.swap_tensors``) do the same; they cost it 2 to 3 µs a tensor that CUDA would not.
    """
    plain = torch.Tensor.data

    def put(self: nn.Parameter, other: torch.Tensor) -> None:
        if self.device.type == other.device.type:
            plain.__set__(self, other)
        else:
            torch.utils.swap_tensors(self, nn.Parameter(other, requires_grad=False))

    nn.Parameter.data = property(plain.__get__, put)
    try:
        yield
    finally:
        del nn.Parameter.data


def group_offload(module: nn.Module, device: torch.device, *, stream: bool) -> Case:
    from diffusers.hooks import apply_group_offloading

    x = torch.ones(4, device=device)
    # A tenth of the component at a time; with a stream only one block is allowed.
    blocks = 1 if stream else max(1, len(module.blocks) // 10)
    with data_that_crosses():
        apply_group_offloading(
            module,
            onload_device=device,
            offload_device=torch.device("cpu"),
            offload_type="block_level",
            num_blocks_per_group=blocks,
            use_stream=stream,
            non_blocking=stream,
        )

    def step() -> None:
        with data_that_crosses():
            module(x)

    return in_turn(step, step)


def peers(tensors: int, nbytes: int, device: torch.device) -> Iterator[tuple[str, Callable[[], Case]]]:
    """How to set up each peer; some do not run on every device."""
    yield "diffusers_enable_model_cpu_offload", lambda: with_diffusers(Pipeline(tensors, nbytes), device)
    yield "accelerate_cpu_offload_with_hook", lambda: with_accelerate(Pipeline(tensors, nbytes), device)
    yield "plain_to", lambda: plain_to(Pipeline(tensors, nbytes), device)
    for stream in (False, True):
        name = "diffusers_group_offload" + ("_stream" if stream else "")
        yield name, lambda stream=stream: group_offload(Layers(tensors, nbytes), device, stream=stream)


# --- counting --------------------------------------------------------------------------------------------


def counted(sim: SimulatedAccelerator, case: Case, switches: int) -> dict[str, float]:
    """What so many switches asked of the device and of the host's allocator, per switch."""
    before = sim.stats()
    for _ in range(switches // 2):
        case()
    after = sim.stats()
    found = {key: (getattr(after, name) - getattr(before, name)) / switches for key, name in COUNTS.items()}
    taken = host_allocations(case, switches) / switches
    return {**found, "switches": switches, "host_allocations": taken}


def host_allocations(case: Case, switches: int) -> int:
    """How often so many switches took host memory from torch's allocator, as torch's profiler tells."""
    activity = torch.profiler.ProfilerActivity.CPU
    with _quiet(), torch.profiler.profile(activities=[activity], profile_memory=True) as profile:
        for _ in range(switches // 2):
            case()
    events = profile.profiler.kineto_results.events()
    cpu = torch.autograd.DeviceType.CPU
    return sum(
        1 for one in events if one.name() == "[memory]" and one.device_type() == cpu and one.nbytes() > 0
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """The profiler's C++ code writes about every block that was allocated before it started."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def changed_weight(sim: SimulatedAccelerator, pipeline: Pipeline, case: Case) -> dict[str, int]:
    """Write to one weight on the device, switch, and count the bytes that go home."""
    here = next(
        one for one in (pipeline.encoder, pipeline.transformer) if next(one.parameters()).device.type != "cpu"
    )
    weight = here.blocks[0][0].weight
    with torch.no_grad():
        weight.add_(1)
    before = sim.stats().d2h_bytes
    case()
    return {"changed_bytes": weight.nbytes, "changed_bytes_to_host": sim.stats().d2h_bytes - before}


# --- measuring -------------------------------------------------------------------------------------------


@contextmanager
def all_cases(tensors: int, nbytes: int, sim: SimulatedAccelerator) -> Iterator[tuple[Any, ...]]:
    """The cases by name, warm; the pipeline of ours; and why a peer is not among them."""
    with ExitStack() as stack:
        pipeline = Pipeline(tensors, nbytes)
        size = size_of(pipeline.encoder)
        cases = {RAW: raw_copy(size, sim.device), OURS: ours(pipeline, sim.device, stack)}
        absent: dict[str, str] = {}
        for name, make in peers(tensors, nbytes, sim.device):
            case, why = _set_up(make)
            if case is not None:
                cases[name] = case
            else:
                absent[name] = why
        cases[f"{RAW}_again"] = cases[RAW]
        for _ in range(2):
            cases[OURS]()
        yield cases, pipeline, absent


def _set_up(make: Callable[[], Case]) -> tuple[Case | None, str]:
    try:
        case = make()
        case()
    except Exception as error:  # a peer that does not know this device
        return None, f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return case, ""


def figures(tensors: int, *, nbytes: int, rounds: int, switches: int) -> dict[str, Any]:
    """Everything about components of so many tensors."""
    with (
        SimulatedAccelerator(poison=False) as sim,
        torch.no_grad(),
        all_cases(tensors, nbytes, sim) as (cases, pipeline, absent),
    ):
        taken = interleaved(cases, rounds)
        base = taken[RAW]
        ratios = {
            name: {
                "ratio": median_ratio(times, base),
                "cpu_ratio": median_ratio(times, base, "cpu"),
                "ms": median_ms(times) / 2,
            }
            for name, times in taken.items()
        }
        counts = {
            name: counted(sim, case, switches if name == OURS else 2)
            for name, case in cases.items()
            if name != f"{RAW}_again"
        }
        changed = changed_weight(sim, pipeline, cases[OURS])
        size = size_of(pipeline.encoder)
        result = {"bytes": size, "most_copies": size // (64 * MIB) + 2, **changed}
    everyone = {name: {**ratios[name], **counts.get(name, {})} for name in ratios}
    everyone[RAW] |= {"again": ratios[f"{RAW}_again"]}
    everyone.pop(f"{RAW}_again")
    everyone |= {name: {"did_not_run": why} for name, why in absent.items()}
    gc.collect()
    return {**result, **everyone.pop(OURS), "peers": everyone}


def measure(quick: bool = False) -> dict[str, Any]:
    """The figures at every number of tensors, flat for ours, by number for the peers."""
    kept = keep_freed_memory()
    nbytes = 16 * MIB if quick else 512 * MIB
    rounds, switches = (1, 6) if quick else (7, 100)
    found = {one: figures(one, nbytes=nbytes, rounds=rounds, switches=switches) for one in TENSORS}
    result: dict[str, Any] = {}
    for count, one in found.items():
        result[f"switch_ratio_{count}"] = one["ratio"]
        result[f"switch_cpu_ratio_{count}"] = one["cpu_ratio"]
    for key in (*COUNTS, "host_allocations", "most_copies", "changed_bytes", "changed_bytes_to_host"):
        result[key] = max(one[key] for one in found.values())
    peer_names = {name: None for one in found.values() for name in one["peers"]}
    result["peers"] = {
        name: _peer({count: one["peers"][name] for count, one in found.items()}) for name in peer_names
    }
    details = {str(count): {key: one[key] for key in one if key != "peers"} for count, one in found.items()}
    return {
        **result,
        "by_tensors": details,
        "targets": TARGETS,
        "freed_memory_kept": kept,
        "quick": quick,
        **machine(),
    }


def _peer(found: dict[int, dict[str, Any]]) -> dict[str, Any]:
    absent = [one["did_not_run"] for one in found.values() if "did_not_run" in one]
    if absent:
        return {"did_not_run": absent[0]}
    flat: dict[str, Any] = {f"switch_ratio_{count}": one["ratio"] for count, one in found.items()}
    flat |= {f"switch_cpu_ratio_{count}": one["cpu_ratio"] for count, one in found.items()}
    flat |= {key: max(one[key] for one in found.values()) for key in (*COUNTS, "host_allocations")}
    return {**flat, "by_tensors": {str(count): one for count, one in found.items()}}


def table(result: dict[str, Any]) -> str:
    """The figures for people."""
    heads = ("400", "8000", "400 cpu", "8000 cpu", "copies", "MiB back", "dev alloc", "host alloc")
    keys = [f"switch_{kind}ratio_{count}" for kind in ("", "cpu_") for count in TENSORS]
    lines = [f"{'switch / raw copy':<34}" + "".join(f"{head:>11}" for head in heads)]
    for name, one in {OURS: result, **result["peers"]}.items():
        if "did_not_run" in one:
            lines.append(f"{name:<34} did not run: {one['did_not_run'][:80]}")
            continue
        values = [f"{one[key]:.2f}" for key in keys] + [
            f"{one['copies']:.0f}",
            f"{one['bytes_to_host'] / MIB:.0f}",
            f"{one['device_allocations']:g}",
            f"{one['host_allocations']:g}",
        ]
        lines.append(f"{name:<34}" + "".join(f"{value:>11}" for value in values))
    lines.append(f"targets: {', '.join(f'{name} ≤ {most:g}' for name, most in TARGETS.items())}")
    return "\n".join(lines)


def bounds(result: dict[str, Any]) -> dict[str, bool]:
    """What must hold, by name."""
    held = {name: result[name] <= most for name, most in TARGETS.items()}
    held |= {
        key: result[key] == 0
        for key in ("device_allocations", "host_allocations", "flushes", "bytes_to_host")
    }
    held["copies"] = result["copies"] <= result["most_copies"]
    held["changed_bytes_to_host"] = result["changed_bytes_to_host"] == result["changed_bytes"]
    return held


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    result = measure(options.quick)
    write(options.json, result)
    print(table(result))
    return verdict(bounds(result), quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
