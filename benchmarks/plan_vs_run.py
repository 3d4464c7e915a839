"""What ``plan`` says beside what a run does, byte for byte, on the simulated accelerator.

    python benchmarks/plan_vs_run.py --json FILE [--quick]

Models in memory: the demo, and a pipeline of random weights (1 GiB; 4 MiB with ``--quick``). In files: the demo,
mapped, and a diffusers pipeline in bfloat16 (1 GiB in shards; 27 MiB) that is written for the occasion, planned from
its folder and loaded with ``load_components``, as it is stored and cast to float16.

Every policy that swaps them is planned and then run: offload is enabled, and in each of three requests every component
that takes turns is used once, in the order of a request. The first request is compared with the plan's first, the
others with its later ones. Weights only: a run that computes needs activations besides, and torch's allocators round
each block up (the simulated one to 512 bytes, as CUDA's). ``reported`` is what
``omni-components report TRACE --plan PLAN.json`` makes of a run of one request.

It exits with 1 if any figure differs. Without ``--quick`` it also plans for the models at full size, as
``benchmarks/full_size.py`` does: seconds and memory.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from torch import nn

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import full_size
from benchmarks.cold_start import write_pipeline
from benchmarks.harness import MIB, machine, parser, write
from omni_components import ResidencyWarning, load_components, offload, plan
from omni_components.demo import DemoPipeline
from omni_components.planning.plan import Option, Plan, Request, as_used, plan_for
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


Make = Callable[[], Any]
REQUESTS = 3


def ran(pipeline: Any, sim: SimulatedAccelerator, arguments: dict[str, Any]) -> dict[str, Any]:
    """Enable offload and answer requests, with the figures of each; the pipeline must be fresh.

    Args:
        pipeline: What to run.
        sim: Where, nothing else on it.
        arguments: Of ``offload``.
    """
    before = sim.stats().h2d_bytes
    with offload(pipeline, sim.device, **arguments) as handle:
        enabling = sim.stats().h2d_bytes - before
        order = [one.name for one in as_used(handle.components)]
        each = [_request(handle, sim, order) for _ in range(REQUESTS)]
        report = handle.report()
        return {
            "enabling": enabling,
            "requests": each,
            "device_peak": report.peak_bytes,
            "components": {one.name: one.bytes for one in handle.components},
        }


def _request(handle: Any, sim: SimulatedAccelerator, order: list[str]) -> dict[str, int]:
    before = sim.stats().h2d_bytes
    loads = sum(row.loads for row in handle.report().rows)
    for name in order:
        with handle.scope(name):
            pass
    handle.release()
    stats = sim.stats()
    return {
        "loads": sum(row.loads for row in handle.report().rows) - loads,
        "link_bytes": stats.h2d_bytes - before,
        "pinned_bytes": stats.pinned,
    }


def planned(option: Option, plan: Plan) -> dict[str, Any]:
    """The same figures as the plan has them."""
    later = Request(loads=option.loads, link_bytes=option.link_bytes, pinned_bytes=option.pinned_bytes)
    each = [option.first, *[later] * (REQUESTS - 1)]
    return {
        "enabling": option.resident_link_bytes,
        "requests": [
            {name: getattr(one, name) for name in ("loads", "link_bytes", "pinned_bytes")} for one in each
        ],
        "device_peak": option.device_peak,
        "components": {one.name: one.bytes for one in plan.components},
    }


def compare(make: Make, option: Option, plan: Plan) -> dict[str, Any]:
    """Run one policy, and put its figures beside the plan's."""
    with SimulatedAccelerator(poison=False) as sim:
        done = ran(make(), sim, dict(option.arguments or {}))
        back, peak = sim.stats().d2h_bytes, sim.stats().peak
    said = planned(option, plan)
    equal = {name: said[name] == done[name] for name in said}
    gc.collect()  # the weights of one run, before the next one's are made
    return {"planned": said, "ran": done, "equal": equal, "back": back, "allocated": peak}


def reported(make: Make, option: Option, plan: Plan) -> list[str]:
    """What the report makes of one request beside the plan; nothing of it differs."""
    with SimulatedAccelerator(poison=False) as sim, offload(make(), sim.device, **option.arguments) as handle:
        for one in plan.components:
            with handle.scope(one.name):
                pass
        told = beside(handle.report(), plan.to_dict(), "the plan", requests=1)
    differ = [one.what for one in told.figures if one.what != "load seconds" and one.planned != one.real]
    assert (told.option, differ) == (option.name, [])
    return list(plan_lines(told))


def models(folder: Path, quick: bool) -> Iterator[tuple[str, Plan, Make]]:
    """Names, plans, and what makes each of them anew; the files are written to the folder."""
    nbytes = (4 if quick else 1024) * MIB
    yield "demo", plan("demo"), DemoPipeline.from_pretrained
    mapped = partial(DemoPipeline.from_pretrained, mapped=True)
    yield "demo, mapped", plan_for(mapped()), mapped
    made = partial(RandomPipeline, nbytes)
    yield "random", plan_for(made()), made
    write_pipeline(folder, nbytes, torch.bfloat16)
    for name, dtype in (("files", torch.bfloat16), ("files, cast", torch.float16)):
        yield name, plan(folder, dtype=dtype), partial(load_components, folder, dtype=dtype, lazy=True)


def measure(quick: bool) -> dict[str, Any]:
    """Every model under every policy that moves bytes by itself."""
    found: dict[str, Any] = {}
    with TemporaryDirectory() as place, warnings.catch_warnings():
        # Said where weights must be cast, which they must here.
        warnings.filterwarnings("ignore", ".*have to be converted", ResidencyWarning)
        for name, told, make in models(Path(place), quick):
            for option in told.options:
                if option.arguments is not None:
                    found[f"{name}, {option.name}"] = compare(make, option, told)
    found["all_equal"] = all(all(one["equal"].values()) for one in found.values())
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns 1 where a plan and its run differ."""
    given = parser(__doc__ or "").parse_args(arguments)
    found = {"machine": machine(), **measure(given.quick)}
    demo = DemoPipeline.from_pretrained()
    told = plan_for(demo)
    found["reported"] = reported(lambda: demo, told.options[1], told)
    if not given.quick:
        found["full_size"] = full_size.measure(rounds=5)
    write(given.json, found)
    for name, one in found.items():
        if isinstance(one, dict) and "ran" in one:
            done = one["ran"]
            first, *_, last = done["requests"]
            print(f"{name}: {'equal' if all(one['equal'].values()) else one['equal']}")
            print(f"  device peak {done['device_peak']} B, enabling moves {done['enabling']} B")
            print(f"  link: first {first['link_bytes']} B, later {last['link_bytes']} B")
            print(f"  pinned: first {first['pinned_bytes']} B, later {last['pinned_bytes']} B")
    print("\n".join(f"  {line}" for line in found["reported"]))
    print("all equal" if found["all_equal"] else "NOT all equal")
    if not given.quick:
        print("\n".join(full_size.lines(found["full_size"])))
    return 0 if found["all_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
