"""A pipeline from files larger than it may hold in memory: ``device="cpu"``, weights mapped from safetensors.

    python benchmarks/mapped_cpu.py --json mapped.json [--quick]

Random weights, 6 GiB (``--quick``: 600 MiB), are written to a temporary folder as three exclusive components. A
process of its own maps them, enables offload and runs the pipeline twice, while a thread of it reads the
operating system's own figure: ``Anonymous`` in ``/proc/self/smaps_rollup``. Its most may be the largest component
and 15 %. What Python and torch take themselves before anything is mapped is told apart, since at ``--quick``
size it is more than the 15 %. Exits with 1 if that, or that the outputs stay the same, does not hold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import nn

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.harness import MIB, machine, parser, size_of, verdict, write
from omni_components import offload

NAMES = ("encoder", "high_noise", "low_noise")
WIDTH = 1024  # a layer is 4 MiB
SHARD = 64  # layers in a file
ALLOWED = 1.15
INTERVAL = 0.005  # seconds between looks


class Layers(nn.Module):
    """A chain of layers without biases."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Read every weight once; the scale keeps the values where they are."""
        for layer in self.layers:
            x = torch.nn.functional.normalize(layer(x), dim=-1)
        return x


class Pipeline(nn.Module):
    """An encoder and two transformers, of which at most one is in memory."""

    _dit_modules: ClassVar[list[str]] = ["high_noise", "low_noise"]
    _encoder_modules: ClassVar[list[str]] = ["encoder"]
    _vae_modules: ClassVar[list[str]] = []

    def __init__(self, count: int) -> None:
        super().__init__()
        self.encoder, self.high_noise, self.low_noise = (Layers(count) for _ in NAMES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        return self.low_noise(self.high_noise(self.encoder(x)))


def write_weights(folder: Path, layers: int) -> None:
    """Each component as files of at most ``SHARD`` layers, written one by one."""
    generator = torch.Generator().manual_seed(0)
    for name in NAMES:
        for start in range(0, layers, SHARD):
            indices = range(start, min(layers, start + SHARD))
            tensors = {
                f"layers.{index}.weight": torch.rand(WIDTH, WIDTH, generator=generator) - 0.5
                for index in indices
            }
            save_file(tensors, folder / f"{name}-{start:05}.safetensors")


def mapped(folder: Path, layers: int) -> Pipeline:
    """The pipeline over the files' pages; nothing is read yet."""
    with torch.device("meta"):
        pipeline = Pipeline(layers)
    for name in NAMES:
        weights: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob(f"{name}-*.safetensors")):
            weights |= load_file(file)
        getattr(pipeline, name).load_state_dict(weights, assign=True)
    return pipeline.requires_grad_(False)


# --- the process that is looked at -----------------------------------------------------------------------


def anonymous() -> int:
    """Bytes that are this process's own, as the system tells."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the system does not tell")


class Watch:
    """The most anonymous memory inside a ``with`` block, looked at from a thread."""

    def __init__(self) -> None:
        self.peak = 0
        self.looks = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            self.peak = max(self.peak, anonymous())
            self.looks += 1
            if self._stop.wait(INTERVAL):
                return


def child(folder: Path, layers: int) -> dict[str, Any]:
    """Run the pipeline twice and tell what memory it took."""
    x = torch.ones(2, WIDTH)
    x @ torch.ones(WIDTH, 8)  # the matrix library takes its buffers
    before = anonymous()
    start = time.perf_counter()
    with torch.no_grad(), Watch() as watch:
        pipeline = mapped(folder, layers)
        largest = max(size_of(getattr(pipeline, name)) for name in NAMES)
        weights = size_of(pipeline)
        with torch.no_grad(), offload(pipeline, "cpu") as handle:
            enabled = anonymous()
            outputs = [pipeline(x) for _ in range(2)]
            loads = sum(event.kind == "load" for event in handle.events)
            moved = sum(event.bytes for event in handle.events if event.kind == "load")
            handle.release()
            released = anonymous()
        resident = pipeline(x)  # the same weights, straight from the page cache
    return {
        "weights": weights,
        "largest_component": largest,
        "anonymous_before": before,
        "anonymous_enabled": enabled,
        "anonymous_peak": watch.peak,
        "anonymous_released": released,
        "looks": watch.looks,
        "loads": loads,
        "bytes_loaded": moved,
        "equal": all(torch.equal(one, resident) for one in outputs),
        "seconds": time.perf_counter() - start,
    }


def measure(quick: bool = False, component: int | None = None) -> dict[str, Any]:
    """Write the weights, run the process, compare.

    Args:
        quick: 200 MiB instead of 2 GiB per component.
        component: Bytes per component, if neither.
    """
    layers = (component or (200 if quick else 2048) * MIB) // (WIDTH * WIDTH * 4)
    with TemporaryDirectory() as folder:
        write_weights(Path(folder), layers)
        command = [sys.executable, str(Path(__file__).resolve()), "--child", folder, "--layers", str(layers)]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = json.loads(answer.splitlines()[-1])
    peak, largest = found["anonymous_peak"], found["largest_component"]
    ratios = {
        "peak_ratio": peak / largest,
        "peak_ratio_above_before": (peak - found["anonymous_before"]) / largest,
    }
    return {**ratios, "allowed": ALLOWED, **found, "quick": quick, **machine()}


def table(result: dict[str, Any]) -> str:
    """The figures for people."""
    keys = ("weights", "largest_component", *(key for key in result if key.startswith("anonymous")))
    lines = [f"{key:<24} {result[key] / MIB:>9.1f} MiB" for key in keys]
    lines += [
        f"{key:<24} {result[key]:>9.3f}  (≤ {ALLOWED})" for key in result if key.startswith("peak_ratio")
    ]
    lines.append(f"outputs equal to the run without offload: {result['equal']}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--child" in arguments:
        inner = argparse.ArgumentParser()
        inner.add_argument("--child", type=Path)
        inner.add_argument("--layers", type=int)
        given = inner.parse_args(arguments)
        print(json.dumps(child(given.child, given.layers)))
        return 0
    options = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    result = measure(options.quick)
    write(options.json, result)
    print(table(result))
    bounds = {"peak_ratio": result["peak_ratio"] <= ALLOWED, "equal": result["equal"]}
    return verdict(bounds, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
