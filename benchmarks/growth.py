"""How a switch's time grows: with the tensors, the components, and the events in the history.

    python benchmarks/growth.py --json growth.json [--quick] [--plot docs/images/growth.png]

On the simulated device (poison off), the same bytes at every point of a curve: what is not flat is not the bytes.
All points of a curve take turns, and the medians over the rounds are written, by the clock and by the processor's
time; the plot shows the latter, since the clock of a shared machine counts its other users too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import nn

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.harness import MIB, Case, Layers, Time, interleaved, machine, median_ms, parser, write
from omni_components import Offload, OffloadPolicy, ResidencyEvent, offload
from omni_components.residency.events import Cause, EventKind
from omni_components.testing import SimulatedAccelerator

TENSORS = (10, 100, 1000, 4000, 8000, 20_000)
COMPONENTS = (2, 4, 8, 16, 32, 64)
HISTORY = (10, 100, 1000, 10_000, 100_000, 1_000_000)


def pipeline(components: int, tensors: int, nbytes: int) -> nn.Module:
    """So many DiTs, which all exclude each other, and an encoder in place of the first."""
    names = [f"part_{index}" for index in range(components)]
    lists = {"_encoder_modules": names[:1], "_dit_modules": names[1:], "_vae_modules": []}
    made = type("Pipeline", (nn.Module,), lists)()
    for name in names:
        made.add_module(name, Layers(tensors, nbytes))
    return made


def switching(handle: Offload) -> Case:
    """A case that switches to the next component each time; warm."""
    names = cycle([one.name for one in handle.components])

    def case() -> None:
        with handle.scope(next(names)):
            pass
        torch.accelerator.synchronize()

    for _ in range(3 * len(handle.components)):
        case()
    return case


def raw_copy(nbytes: int, device: torch.device) -> Case:
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).fill_(1)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def case() -> None:
        target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize()

    return case


# --- the three curves ------------------------------------------------------------------------------------


def by_tensors(points: tuple[int, ...], nbytes: int, device: torch.device) -> Iterator[tuple[int, Offload]]:
    """Two components of the same bytes in more and more tensors."""
    for count in points:
        yield count, offload(pipeline(2, count, nbytes), device)


def by_components(
    points: tuple[int, ...], nbytes: int, device: torch.device
) -> Iterator[tuple[int, Offload]]:
    """More and more components, each of the same bytes."""
    for count in points:
        yield count, offload(pipeline(count, 20, nbytes), device)


def by_history(points: tuple[int, ...], nbytes: int, device: torch.device) -> Iterator[tuple[int, Offload]]:
    """The same two components after more and more events, all of them kept."""
    for count in points:
        handle = offload(
            pipeline(2, 20, nbytes), device, policy=OffloadPolicy(history=max(points) + 1_000_000)
        )
        event = ResidencyEvent(kind=EventKind.WAIT, component="part_0", cause=Cause.SCOPE)
        for _ in range(count):
            handle.ledger.history.record(event)
        yield count, handle


CURVES = {"tensors": by_tensors, "components": by_components, "history": by_history}


def curve(kind: str, points: tuple[int, ...], nbytes: int, rounds: int) -> dict[str, Any]:
    """One curve, with the raw copy of the same bytes beside it."""
    with SimulatedAccelerator(poison=False) as sim, torch.no_grad(), ExitStack() as stack:
        cases: dict[str, Case] = {"copy": raw_copy(nbytes, sim.device)}
        for count, handle in CURVES[kind](points, nbytes, sim.device):
            stack.callback(handle.disable)
            cases[str(count)] = switching(handle)
        taken = interleaved(cases, rounds)
    copy = taken.pop("copy")
    return {
        "bytes": nbytes,
        "points": [int(count) for count in taken],
        "switch_ms": [median_ms(times) for times in taken.values()],
        "switch_cpu_ms": [median_ms(times, "cpu") for times in taken.values()],
        "copy_ms": median_ms(copy),
        "copy_cpu_ms": median_ms(copy, "cpu"),
        # Of the same round, so that the machine's mood cancels out.
        "above_copy_cpu_ms": [_above(times, copy) for times in taken.values()],
    }


def _above(times: list[Time], copy: list[Time]) -> float:
    return statistics.median(one.cpu - other.cpu for one, other in zip(times, copy, strict=True)) * 1e3


def measure(quick: bool = False) -> dict[str, Any]:
    """All curves; ``quick`` takes fewer points and bytes."""
    rounds = 5 if quick else 15
    few = slice(None, None, 2)
    curves = {
        "tensors": curve(
            "tensors", TENSORS[:-1][few] if quick else TENSORS, (8 if quick else 64) * MIB, rounds
        ),
        "components": curve("components", COMPONENTS[few] if quick else COMPONENTS, 2 * MIB, rounds),
        "history": curve("history", HISTORY[:-1][few] if quick else HISTORY, 2 * MIB, rounds),
    }
    per_tensor = _slope(curves["tensors"]["points"], curves["tensors"]["above_copy_cpu_ms"]) * 1e3
    flat = {
        f"{name}_growth": curves[name]["switch_cpu_ms"][-1] / curves[name]["switch_cpu_ms"][0]
        for name in ("components", "history")
    }
    return {"cpu_us_per_tensor": per_tensor, **flat, "curves": curves, "quick": quick, **machine()}


def _slope(x: list[int], y: list[float]) -> float:
    return statistics.linear_regression(x, y).slope


# --- showing ---------------------------------------------------------------------------------------------


def plot(result: dict[str, Any], file: Path) -> None:
    """The three curves side by side, each with the copy of its bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = {
        "tensors": "tensors in each component",
        "components": "components",
        "history": "events in the history",
    }
    figure, panels = pyplot.subplots(1, 3, figsize=(12, 3.6), constrained_layout=True)
    for panel, (kind, label) in zip(panels, labels.items(), strict=True):
        one = result["curves"][kind]
        panel.plot(one["points"], one["switch_cpu_ms"], "o-", color="#1f5fa8", label="switch")
        panel.axhline(one["copy_cpu_ms"], color="#b0532c", linestyle="--", label="one raw copy of its bytes")
        panel.set(xscale="log", xlabel=label, ylim=(0, 1.35 * max(one["switch_cpu_ms"])))
        if kind == "components":  # less than two decades: name every point
            panel.set_xticks(one["points"], [str(point) for point in one["points"]], minor=False)
            panel.minorticks_off()
        panel.set_title(f"{one['bytes'] // MIB} MiB per component", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("processor time of a switch, ms")
    panels[0].legend(frameon=False, loc="upper left")
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def table(result: dict[str, Any]) -> str:
    """The figures for people."""
    lines = []
    for kind, one in result["curves"].items():
        lines.append(f"{kind} ({one['bytes'] // MIB} MiB; raw copy {one['copy_cpu_ms']:.2f} ms)")
        rows = zip(one["points"], one["switch_ms"], one["switch_cpu_ms"], strict=True)
        lines += [
            f"{point:>12,} {wall:>9.2f} ms by the clock {cpu:>9.2f} ms cpu" for point, wall, cpu in rows
        ]
    lines.append(f"per tensor: {result['cpu_us_per_tensor']:.2f} µs")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    made: argparse.ArgumentParser = parser(__doc__.partition("\n")[0])
    made.add_argument("--plot", type=Path, metavar="FILE", help="where to draw the curves")
    options = made.parse_args(arguments)
    result = measure(options.quick)
    write(options.json, result)
    if options.plot is not None:
        plot(result, options.plot)
    print(table(result))


if __name__ == "__main__":
    main()
