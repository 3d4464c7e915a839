"""A whole guided generation by diffusers' own pipelines: what offload adds to the resident run, ours beside theirs.

    python benchmarks/generation.py --json generation.json [--quick]

Real pipeline classes with random weights, as deep as the published models and narrower, on the simulated device: Wan
2.2 (two transformers, both run) and Stable Diffusion 3 (three encoders, asked for two prompts). Four ways: all
resident, diffusers' ``enable_model_cpu_offload``, ours, and ours with ``arena="keep"``.

Counts are those of one generation less the resident run's own: of the first one, and of a later one, after the
release that ends the first. They are taken with poison on, each way alone on its device. The link's seconds are
virtual, at 25 GB/s. For the times all ways take turns, with poison off; the medians of the rounds' ratios are written.

Exits with 1 if a bound is missed: outputs equal to the resident run's bit for bit; each swapped component loaded once
in each generation, its bytes over the link once, and nothing back; no more device memory than diffusers takes. A copy
may take the padding between small tensors along (each starts at a multiple of 256 bytes): link bytes are between the
weights' own and their bytes on the device. Swapped are all components that are not loaded by enabling, the VAE too in
a pipeline without lists; one case has components that travel for each prompt, which says why.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.generation_cases import QUICK, Case, Size, cases
from benchmarks.harness import MIB, Time, interleaved, machine, median_ms, median_ratio, parser, write
from benchmarks.sweep.compare import modules, weight_bytes
from omni_components import Offload, offload
from omni_components.residency.events import EventKind
from omni_components.testing import SimulatedAccelerator

LINK = 25e9  # bytes per second: PCIe 4 x16
RESIDENT, THEIRS, OURS, KEEP = "resident", "diffusers", "omni_components", "omni_components_keep"
WAYS = (RESIDENT, THEIRS, OURS, KEEP)
WHEN = ("first", "later")
COUNTS = {
    "bytes_to_device": "h2d_bytes",
    "bytes_to_host": "d2h_bytes",
    "copies": "h2d_copies",
    "copies_to_host": "d2h_copies",
    "device_allocations": "allocations",
    "flushes": "flushes",
    "host_waits": "host_waits",
}


def ways_of(case: Case) -> tuple[str, ...]:
    """Those that differ: a declared pipeline keeps its arena anyway."""
    return WAYS[:-1] if case.options else WAYS


# --- counting --------------------------------------------------------------------------------------------


@contextmanager
def prepared(way: str, case: Case, device: torch.device) -> Iterator[tuple[Any, Offload | None]]:
    """A pipeline of its own, ready for requests in one of the ways, and our handle."""
    pipeline = case.build()
    if way == RESIDENT:
        yield pipeline.to(device), None
    elif way == THEIRS:
        pipeline.enable_model_cpu_offload(device=device)
        yield pipeline, None
    else:
        arena = {"arena": "keep"} if way == KEEP else {}
        with offload(pipeline, device, **case.options, **arena) as handle:
            yield pipeline, handle
            handle.ledger.audit()


def generation(
    case: Case, pipeline: Any, handle: Offload | None, sim: SimulatedAccelerator
) -> tuple[torch.Tensor, dict[str, Any]]:
    """One request: what it gives, and all that it asked of the device."""
    sim.reset()
    before = len(handle.events) if handle is not None else 0
    output = case.request(pipeline)
    stats = sim.stats()
    events = handle.events[before:] if handle is not None else ()
    loads = Counter(event.component for event in events if event.kind is EventKind.LOAD)
    counts = {key: getattr(stats, name) for key, name in COUNTS.items()}
    link = {"link_seconds": sim.seconds, "peak_bytes": stats.peak, "races": len(sim.races)}
    return output, {**counts, **link, "loads": dict(loads)}


def counted(way: str, case: Case) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Two requests on a device of their own; ``enable_bytes`` went there before the first."""
    with (
        SimulatedAccelerator(link=LINK) as sim,
        prepared(way, case, sim.device) as (pipeline, handle),
    ):
        enable = sim.stats().h2d_bytes
        taken = {one.name: one.bytes for one in handle.components} if handle is not None else {}
        (first, of_first), (later, of_later) = (generation(case, pipeline, handle, sim) for _ in range(2))
    del pipeline, handle
    gc.collect()  # a pipeline is full of cycles
    found = {"enable_bytes": enable, "component_device_bytes": taken, "first": of_first, "later": of_later}
    return [first, later], found


def above(way: dict[str, Any], resident: dict[str, Any]) -> dict[str, Any]:
    """A way with the resident run's counts taken off; loads, peak and races are its own."""
    less = {*COUNTS, "link_seconds"}
    own = {
        when: {key: value - resident[when][key] if key in less else value for key, value in way[when].items()}
        for when in WHEN
    }
    return {**way, **own}


def counts(case: Case) -> dict[str, Any]:
    """Every way's counts, and what the link has to carry by a look at the weights themselves."""
    pipeline = case.build()
    sizes = {name: weight_bytes(parts) for name, parts in modules(pipeline)}
    tensors = {
        name: sum(1 for one in parts for _ in one.parameters(recurse=False))
        for name, parts in modules(pipeline)
    }
    del pipeline
    travels = {name: 1 + (name in case.per_prompt) for name in sizes if name not in case.at_enable}
    runs = {way: counted(way, case) for way in ways_of(case)}
    resident, base = runs.pop(RESIDENT)
    ways = {way: above(found, base) for way, (_, found) in runs.items()}
    for way, (outputs, _) in runs.items():
        ways[way]["equal"] = [*map(torch.equal, outputs, resident)]
    return {
        "component_bytes": sizes,
        "component_tensors": tensors,
        "travels": travels,
        "at_enable": sorted(case.at_enable),
        "why": case.why,
        "swapped_bytes": sum(sizes[name] for name in travels),
        "expected_bytes": sum(sizes[name] * times for name, times in travels.items()),
        "expected_enable_bytes": sum(sizes[name] for name in case.at_enable),
        "informative": all(bool(one.isfinite().all()) and float(one.std()) > 0 for one in resident),
        RESIDENT: base,
        "ways": ways,
    }


def ratios(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float | None]:
    """What of diffusers' count ours is; ``None`` where theirs is 0."""
    keys = [*COUNTS, "link_seconds", "peak_bytes"]
    return {key: ours[key] / theirs[key] if theirs[key] else None for key in keys}


# --- timing ----------------------------------------------------------------------------------------------


def times(case: Case, rounds: int) -> dict[str, dict[str, float]]:
    """Whole generations of all ways in turn: ratios to diffusers' own of the same round."""
    with SimulatedAccelerator(poison=False) as sim, ExitStack() as stack:
        ready = {way: stack.enter_context(prepared(way, case, sim.device)) for way in ways_of(case)}
        runs = {way: partial(case.request, pipeline) for way, (pipeline, _) in ready.items()}
        for run in runs.values():
            run()
        taken = interleaved(runs, rounds)
    del ready, runs
    gc.collect()
    added = {way: _above(taken[way], taken[RESIDENT]) for way in ways_of(case) if way != RESIDENT}
    return {
        way: {
            "ms": median_ms(taken[way]),
            "ratio": median_ratio(taken[way], taken[THEIRS]),
            "cpu_ratio": median_ratio(taken[way], taken[THEIRS], "cpu"),
            **(_added(added[way], added[THEIRS]) if way in added else {}),
        }
        for way in ways_of(case)
    }


def _added(added: list[Time], theirs: list[Time]) -> dict[str, float]:
    """What a way added to the resident run of the same round, as a multiple of what diffusers added to it."""
    return {"added_ms": median_ms(added), "added_ratio": median_ratio(added, theirs)}


def _above(taken: list[Time], base: list[Time]) -> list[Time]:
    return [Time(one.wall - other.wall, one.cpu - other.cpu) for one, other in zip(taken, base, strict=True)]


# --- the bounds ------------------------------------------------------------------------------------------


def missed(name: str, case: Case, found: dict[str, Any]) -> list[str]:
    """What does not hold, in words; empty if all does."""
    wrong = [] if found["informative"] else [f"{name}: the resident run's output proves nothing"]
    for way in ways_of(case)[2:]:
        held = {"enabling loads what stays, once": _carried(found, way, None)}
        for when in WHEN:
            held |= {f"{when}: {what}": holds for what, holds in _bounds(case, found, way, when).items()}
        wrong += [f"{name}, {way}, {what}" for what, holds in held.items() if not holds]
    return wrong


def _bounds(case: Case, found: dict[str, Any], way: str, when: str) -> dict[str, bool]:
    ours, theirs = found["ways"][way][when], found["ways"][THEIRS][when]
    held = {
        "equal to the resident run": found["ways"][way]["equal"][WHEN.index(when)],
        "no race": ours["races"] == 0,
        "each swapped component loaded as often as said": ours["loads"] == found["travels"],
        "each load's bytes once over the link": _carried(found, way, when),
        "nothing back to the host": ours["bytes_to_host"] == 0 == ours["copies_to_host"],
        "no flush": ours["flushes"] == 0,
        "no wait of the host": ours["host_waits"] == 0,
        "no more to the device than diffusers": ours["bytes_to_device"] <= theirs["bytes_to_device"],
    }
    if way == KEEP or case.options:  # which may ask for more room: a declaration lets all encoders stay
        kept = when == "first" or ours["device_allocations"] == 0
        return {**held, "weights take no memory after the first generation": kept}
    return {**held, "no more room than diffusers": ours["peak_bytes"] <= theirs["peak_bytes"]}


def _carried(found: dict[str, Any], way: str, when: str | None) -> bool:
    """Whether the bytes were those of the weights, with at most the padding between small ones."""
    one, sizes = found["ways"][way], found["component_bytes"]
    expected = dict.fromkeys(found["at_enable"], 1) if when is None else found["travels"]
    sent = one["enable_bytes"] if when is None else one[when]["bytes_to_device"]
    least = sum(sizes[name] * times for name, times in expected.items())
    most = sum(one["component_device_bytes"][name] * times for name, times in expected.items())
    return least <= sent <= most


# --- all of it -------------------------------------------------------------------------------------------


def measure(quick: bool = False, rounds: int = 5) -> dict[str, Any]:
    """All cases."""
    everything, wrong = {}, []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are small: on a busy machine a second thread is mostly waited for
    gc.freeze()  # what was imported; the collections between the ways need not walk over it
    try:
        for name, case in cases(QUICK if quick else Size()).items():
            found = counts(case)
            wrong += missed(name, case, found)
            of_later = {
                way: ratios(one["later"], found["ways"][THEIRS]["later"])
                for way, one in found["ways"].items()
            }
            everything[name] = {**found, "ratios": of_later, "times": times(case, 1 if quick else rounds)}
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)
    return {"cases": everything, "missed": wrong, "link": LINK, "quick": quick, **machine()}


def table(result: dict[str, Any]) -> str:
    """The figures for people."""
    heads = (
        "MiB in",
        "of once",
        "MiB out",
        "copies",
        "back",
        "allocs",
        "flushes",
        "waits",
        "peak MiB",
        "link ms",
    )
    lines = []
    for name, case in result["cases"].items():
        once = case["swapped_bytes"]
        lines += ["", f"{name}: {once / MIB:.1f} MiB swapped ({', '.join(case['travels'])})"]
        lines += [f"{case['why']}"] if case["why"] else []
        lines.append(f"{'':<34}" + "".join(f"{head:>9}" for head in (*heads, "time", "added")))
        for way, when in ((way, when) for when in WHEN for way in case["ways"]):
            one, time = case["ways"][way][when], case["times"][way]
            values = [
                f"{one['bytes_to_device'] / MIB:.1f}",
                f"{one['bytes_to_device'] / once:.3f}",
                f"{one['bytes_to_host'] / MIB:.1f}",
                *(f"{one[key]}" for key in [*COUNTS][2:]),
                f"{one['peak_bytes'] / MIB:.1f}",
                f"{one['link_seconds'] * 1e3:.2f}",
            ]
            if when == "later":
                values += [f"{time['ratio']:.2f}", f"{time['added_ratio']:.2f}"]
            lines.append(f"{f'{way}, {when}':<34}" + "".join(f"{value:>9}" for value in values))
    return "\n".join([*lines[1:], "", *(f"missed: {one}" for one in result["missed"])])


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    result = measure(options.quick)
    write(options.json, result)
    print(table(result))
    return 1 if result["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
