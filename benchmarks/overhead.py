"""What a scope, a hook and the import cost when nothing has to move.

    python benchmarks/overhead.py --json overhead.json [--quick]

Each figure is for a component that is on the simulated device already, with 10 and with 8,000 tensors in the
component behind the name. A hook's figure is a hooked module's call minus the same call of a module without
hooks; its forward returns its input. accelerate's ``cpu_offload_with_hook`` stands beside it, set up as
diffusers does, with the hook of the component before.

All cases take turns, one batch each per round, so that a busy moment of the machine hits all of them; the
medians over the rounds are written. A batch is so short that on a crowded machine most of them run without being
interrupted by another process. The garbage collector runs between the rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, ClassVar

import torch
from torch import nn

from omni_components import ResidencyLedger, SplitModel, offload
from omni_components.testing import SimulatedAccelerator

TENSORS = (10, 8000)
# Most that each figure may be; the design's section 11.
TARGETS = {
    **{f"scope_us_{count}": 2.0 for count in TENSORS},
    **{f"hook_us_{count}": 5.0 for count in TENSORS},
    "context_disabled_us": 1.0,
    "import_ms": 50.0,
}
# What nobody pays for who only imports the package.
HEAVY = ("diffusers", "transformers", "accelerate", "matplotlib", "rich", "typer", "PIL", "torch._dynamo")
MICROSECONDS = 1e6

Batch = Callable[[int], float]  # runs its case so many times and answers the seconds


class Layers(nn.Module):
    """A component of many small tensors whose forward costs nothing."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ParameterList(torch.randn(16) for _ in range(min(100, tensors)))
            for _ in range(-(-tensors // 100))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Nothing at all."""
        return x


class Pipeline(nn.Module):
    """The smallest pipeline with something to swap."""

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = ["encoder"]
    _vae_modules: ClassVar[list[str]] = []

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.encoder, self.transformer = Layers(10), Layers(tensors)


class Split(SplitModel):
    """A split model that is not offloaded."""

    _offload_components: ClassVar[dict[str, list[str]]] = {"reasoner": ["reason"], "generator": ["generate"]}

    def __init__(self) -> None:
        super().__init__()
        self.reason, self.generate = nn.Linear(4, 4), nn.Linear(4, 4)


# --- the cases -------------------------------------------------------------------------------------------


def scopes(ledger: ResidencyLedger) -> Batch:
    def batch(count: int) -> float:
        start = perf_counter()
        for _ in repeat(None, count):
            with ledger.scope("transformer"):
                pass
        return perf_counter() - start

    return batch


def contexts(model: SplitModel) -> Batch:
    def batch(count: int) -> float:
        start = perf_counter()
        for _ in repeat(None, count):
            with model._offload_context("reasoner"):
                pass
        return perf_counter() - start

    return batch


def calls(module: nn.Module, x: torch.Tensor) -> Batch:
    def batch(count: int) -> float:
        start = perf_counter()
        for _ in repeat(None, count):
            module(x)
        return perf_counter() - start

    return batch


def with_accelerate(tensors: int, device: torch.device) -> nn.Module:
    """The same component under accelerate's hook, after the component before it has run."""
    from accelerate import cpu_offload_with_hook

    pipeline = Pipeline(tensors)
    _, before = cpu_offload_with_hook(pipeline.encoder, device)
    module, _ = cpu_offload_with_hook(pipeline.transformer, device, prev_module_hook=before)
    return module


@contextmanager
def cases(device: torch.device) -> Iterator[dict[str, Batch]]:
    """All cases by name, warm: what is measured is on the device."""
    x = torch.ones(16, device=device)
    found = {"context_disabled": contexts(Split()), "plain": calls(Layers(10).to(device), x)}
    handles = []
    for tensors in TENSORS:
        pipeline = Pipeline(tensors)
        handles.append(offload(pipeline, device))
        found[f"scope_{tensors}"] = scopes(handles[-1].ledger)
        found[f"hook_{tensors}"] = calls(pipeline.transformer, x)
        found[f"accelerate_hook_{tensors}"] = calls(with_accelerate(tensors, device), x)
    for batch in found.values():
        batch(10)
    yield found
    for handle in handles:
        assert handle.ledger.present == ("transformer",)
        handle.disable()


# --- measuring -------------------------------------------------------------------------------------------


def interleaved(batches: dict[str, Batch], rounds: int, count: int) -> dict[str, list[float]]:
    """Microseconds per run of every case, one value per round."""
    taken: dict[str, list[float]] = {name: [] for name in batches}
    gc.collect()
    gc.freeze()  # so that a collection between two rounds looks at these batches' garbage only
    gc.disable()
    try:
        for _ in range(rounds):
            for name, batch in batches.items():
                taken[name].append(batch(count) / count * MICROSECONDS)
            gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
    return taken


def overheads(quick: bool) -> dict[str, float]:
    """Medians in microseconds; of a hook, of the difference to the plain call in the same round."""
    with SimulatedAccelerator() as sim, torch.no_grad(), cases(sim.device) as batches:
        taken = interleaved(batches, rounds=50 if quick else 800, count=50)
    plain = taken.pop("plain")
    result = {"plain_call_us": statistics.median(plain)}
    for name, values in taken.items():
        label, _, tensors = name.rpartition("_")
        key = f"{label}_us_{tensors}" if tensors.isdigit() else f"{name}_us"
        base = plain if "hook" in name else repeat(0.0)
        result[key] = statistics.median(value - less for value, less in zip(values, base, strict=False))
    return result


IMPORT = f"""
import json, sys, time, torch
before, start = set(sys.modules), time.perf_counter()
import omni_components
imported = time.perf_counter() - start
omni_components.offload
usable = time.perf_counter() - start
print(json.dumps([imported, usable, [one for one in {HEAVY!r} if one in sys.modules and one not in before]]))
"""


def import_cost(runs: int) -> dict[str, Any]:
    """Milliseconds that the import adds to that of torch, and what it brings along that it should not.

    The package loads its parts at their first use: ``import_ms`` is the bare import, ``import_offload_ms`` the
    import with all that ``offload()`` needs. Each run is a process of its own, after one that compiles.
    """
    with TemporaryDirectory() as compiled:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": compiled}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-c", IMPORT]
        answers = [
            json.loads(subprocess.run(command, check=True, capture_output=True, env=environment).stdout)
            for _ in range(runs + 1)
        ][1:]
    return {
        "import_ms": statistics.median(bare for bare, _, _ in answers) * 1e3,
        "import_offload_ms": statistics.median(usable for _, usable, _ in answers) * 1e3,
        "heavy_imports": sorted({name for _, _, names in answers for name in names}),
    }


def measure(quick: bool = False) -> dict[str, Any]:
    """Everything, with what it was measured on."""
    machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    return {
        **overheads(quick),
        **import_cost(1 if quick else 7),
        "targets": TARGETS,
        **machine,
        "quick": quick,
    }


def table(result: dict[str, Any]) -> str:
    """The figures for people."""
    lines = [f"{'figure':<26} {'median':>8} {'target':>8}"]
    for name, value in result.items():
        if isinstance(value, float):
            target = f"≤ {TARGETS[name]:g}" if name in TARGETS else ""
            lines.append(f"{name:<26} {value:>8.2f} {target:>8}")
    lines.append(f"imported along: {', '.join(result['heavy_imports']) or 'nothing heavy'}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where to write the figures")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args(arguments)
    result = measure(options.quick)
    options.json.write_text(json.dumps(result, indent=2) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
