"""What ``plan`` says beside what a run does, byte for byte, on the simulated accelerator.

    python benchmarks/plan_vs_run.py --json FILE [--quick]

Two models, both in memory: the demo, and a pipeline of random weights (1 GiB; 4 MiB with ``--quick``). Every policy
that swaps them is planned and then run (``mapped`` is for weights in files): each component that takes turns is used
once, in the order of a request. Weights only: a run that computes needs activations besides, and torch's allocators
round each block up (the simulated one to 512 bytes, as CUDA's).
``reported`` is what ``omni-components report TRACE --plan PLAN.json`` makes of the same run.

Without ``--quick`` it also plans for the models at full size, as ``benchmarks/full_size.py`` does: seconds and memory.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import full_size
from benchmarks.harness import MIB, machine, parser, write
from omni_components import offload
from omni_components.demo import DemoPipeline
from omni_components.planning.plan import Option, Plan, plan_for
from omni_components.report.compare import compare as beside
from omni_components.report.lines import plan_lines
from omni_components.testing import SimulatedAccelerator


class Random(nn.Module):
    """A component of random weights: matrices, and biases of ragged sizes."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        side = 512
        layers = max(1, nbytes // (4 * side * side))
        self.layers = nn.ModuleList(nn.Linear(side, side) for _ in range(layers))
        self.scale = nn.Parameter(torch.randn(37))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Nothing: bytes are what is measured."""
        return x


class RandomPipeline(nn.Module):
    """A text encoder, two denoisers and a VAE."""

    _dit_modules: ClassVar[list[str]] = ["transformer", "transformer_2"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vae"]

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.text_encoder = Random(nbytes // 4)
        self.transformer, self.transformer_2 = Random(nbytes * 3 // 8), Random(nbytes // 4)
        self.vae = Random(nbytes // 8)


def compare(pipeline: Any, option: Option, plan: Plan) -> dict[str, Any]:
    """Run one policy, and put its figures beside the plan's."""
    with SimulatedAccelerator() as sim, offload(pipeline, sim.device, **(option.arguments or {})) as handle:
        swapped = [one.name for one in handle.components if not one.resident]
        order = [one.name for one in plan.components if one.name in swapped]
        sim.reset()
        for name in [*order, *(one for one in swapped if one not in order)]:
            with handle.scope(name):
                pass
        report = handle.report()
        stats = sim.stats()
        ran = {
            "device_peak": report.peak_bytes,
            "link_bytes": stats.h2d_bytes,
            "pinned_bytes": stats.pinned,
            "components": {one.name: one.bytes for one in handle.components},
            "allocated": stats.peak,
        }
    planned = {
        "device_peak": option.device_peak,
        "link_bytes": option.link_bytes,
        "pinned_bytes": option.pinned_bytes,
        "components": {one.name: one.bytes for one in plan.components},
    }
    equal = {name: planned[name] == ran[name] for name in planned}
    told = beside(report, plan.to_dict(), "the plan", requests=1)
    equal["reported"] = told.option == option.name and all(
        one.planned == one.real for one in told.figures if one.what != "load seconds"
    )
    lines = list(plan_lines(told))
    return {"planned": planned, "ran": ran, "equal": equal, "back": stats.d2h_bytes, "reported": lines}


def measure(quick: bool) -> dict[str, Any]:
    """Both models under both policies that move bytes by themselves."""
    found: dict[str, Any] = {}
    for name, make in (
        ("demo", DemoPipeline.from_pretrained),
        ("random", lambda: RandomPipeline((4 if quick else 1024) * MIB)),
    ):
        pipeline = make()
        plan = plan_for(pipeline)
        for option in plan.options:
            if option.arguments is not None and option.name != "mapped":
                found[f"{name}, {option.name}"] = compare(pipeline, option, plan)
    found["all_equal"] = all(all(one["equal"].values()) for one in found.values())
    return found


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    given = parser(__doc__ or "").parse_args(arguments)
    found = {"machine": machine(), **measure(given.quick)}
    if not given.quick:
        found["full_size"] = full_size.measure(rounds=5)
    write(given.json, found)
    for name, one in found.items():
        if isinstance(one, dict) and "ran" in one:
            ran = one["ran"]
            print(f"{name}: {one['equal']}, peak {ran['device_peak']} B, link {ran['link_bytes']} B")
            print("\n".join(f"  {line}" for line in one["reported"]))
    print("all equal" if found["all_equal"] else "NOT all equal")
    if not given.quick:
        print("\n".join(full_size.lines(found["full_size"])))


if __name__ == "__main__":
    main()
