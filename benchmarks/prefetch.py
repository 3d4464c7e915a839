"""What prefetch hides: the time for which compute waits for weights, with and without it, in virtual time.

    python benchmarks/prefetch.py --json prefetch.json [--quick]

The pipeline is an encoder, a reasoner and a generator that take turns, as large as a 5.7 B text encoder, a 7 B
reasoner and a 7 B generator in bfloat16. Requests follow each other without a pause, each of them ends with a
``release()``, and the order is learned from the first.

Time is the simulated accelerator's: a copy takes its bytes at 25 GB/s (PCIe 4 x16), one copy at a time, and a
phase keeps the device busy for its floating-point operations, 2 for each parameter and token, at 100 TFLOP/s.
Both are models, no measurement: nothing else takes time, the host's work included, and copies do not slow compute
down. Bytes and link are scaled down by the same factor, so that the seconds are those of the full size. The
exposed wait is the time until all is done, less the time of all phases.

A phase hides at most as much copying as it computes for. So the figures depend on the work:

* ``heavy``: a batch of prompts with images and video for the reasoner, 50 steps of the generator (the keys at the top
  are of this one);
* ``light``: one short prompt; the encoder and the reasoner are over long before the next one's weights have come;
* ``surprising``: of the heavy requests, every one leaves out the reasoner or not as a coin falls: wrong guesses.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.harness import machine, parser, size_of, write
from omni_components import Offload, offload
from omni_components.testing import SimulatedAccelerator

LINK = 25e9  # bytes per second, PCIe 4 x16 as large pinned copies see it
RATE = 100e12  # floating-point operations per second that a phase sustains
PARAMETERS = {"encoder": 5.7e9, "reasoner": 7e9, "generator": 7e9}
BYTES_PER_PARAMETER = 2  # bfloat16
SCALE = 2048  # of bytes and link
STEPS = 50
# Tokens that pass through each component in one request (of the generator: in one step, guidance included).
TOKENS = {
    "heavy": {"encoder": 8 * 1024, "reasoner": 8 * 4096, "generator": 2 * 8192},
    "light": {"encoder": 512, "reasoner": 512, "generator": 2 * 8192},
}
WARM = 2  # requests before anything is counted


class Block(nn.Module):
    """A component of the scaled size; its forward keeps the simulated device busy and returns its input."""

    def __init__(self, name: str) -> None:
        super().__init__()
        nbytes = int(PARAMETERS[name] * BYTES_PER_PARAMETER / SCALE)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.zeros(nbytes // 16, dtype=torch.uint8), requires_grad=False) for _ in range(16)
        )

    def forward(self, x: torch.Tensor, sim: SimulatedAccelerator, seconds: float) -> torch.Tensor:
        """A kernel that reads the weights, so that it waits for them, and then the phase."""
        torch.add(self.weights[0][:1], 0, out=x)
        sim.spend(seconds)
        return x


class Pipeline(nn.Module):
    """An encoder, a reasoner and a generator."""

    _dit_modules: ClassVar[list[str]] = ["reasoner", "generator"]
    _encoder_modules: ClassVar[list[str]] = ["encoder"]
    _vae_modules: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.reasoner, self.generator = Block("encoder"), Block("reasoner"), Block("generator")


def seconds_of(name: str, load: str) -> float:
    """Compute seconds of one call of a component."""
    return 2 * PARAMETERS[name] * TOKENS[load][name] / RATE


def serve(
    pipe: Pipeline, handle: Offload, sim: SimulatedAccelerator, phases: Sequence[str], load: str
) -> float:
    """One request; returns its compute seconds."""
    x = torch.zeros(1, dtype=torch.uint8, device=sim.device)
    spent = 0.0
    for name in phases:
        for _ in range(STEPS if name == "generator" else 1):
            seconds = seconds_of(name, load)
            x = getattr(pipe, name)(x, sim, seconds)
            spent += seconds
    handle.release()
    return spent


def requests(count: int, *, surprising: bool) -> Iterator[tuple[str, ...]]:
    """The phases of so many requests; a surprising one has no reasoner as often as it has one."""
    coin = random.Random(1)
    for _ in range(count):
        yield ("encoder", "generator") if surprising and coin.random() < 0.5 else tuple(PARAMETERS)


def exposed(load: str, count: int, *, prefetch: bool, surprising: bool = False) -> dict[str, Any]:
    """Seconds for which compute waited for weights, over ``count`` requests."""
    with SimulatedAccelerator(poison=False, link=LINK / SCALE) as sim:
        pipe = Pipeline()
        two = 2 * max(size_of(one) for one in pipe.children())
        with offload(pipe, sim.device, prefetch=prefetch, device_memory=two + (1 << 20)) as handle:
            for phases in requests(WARM, surprising=False):
                serve(pipe, handle, sim, phases, load)
            torch.accelerator.synchronize()
            before = [(row.prefetched, row.prefetch_wasted, row.bytes_wasted) for row in handle.report().rows]
            sim.reset()
            asked = list(requests(count, surprising=surprising))
            computed = sum(serve(pipe, handle, sim, phases, load) for phases in asked)
            waited, allocations = (
                sim.seconds - computed,
                sim.stats().allocations - count,
            )  # each request has an input
            after = [(row.prefetched, row.prefetch_wasted, row.bytes_wasted) for row in handle.report().rows]
    ahead, wasted, nbytes = (sum(column) for column in zip(*after, strict=True))
    ahead_before, wasted_before, bytes_before = (sum(column) for column in zip(*before, strict=True))
    return {
        "exposed": waited,
        "compute": computed,
        "prefetched": ahead - ahead_before,
        "wasted": wasted - wasted_before,
        "wasted_bytes": (nbytes - bytes_before) * SCALE,
        "device_allocations": allocations,
    }


def compare(load: str, count: int, *, surprising: bool = False) -> dict[str, Any]:
    """With prefetch beside without."""
    off = exposed(load, count, prefetch=False, surprising=surprising)
    on = exposed(load, count, prefetch=True, surprising=surprising)
    return {
        "requests": count,
        "compute_seconds": on["compute"],
        "exposed_seconds_off": off["exposed"],
        "exposed_seconds_on": on["exposed"],
        "reduction": 1 - on["exposed"] / off["exposed"],
        "prefetched": on["prefetched"],
        "wasted_guesses": on["wasted"],
        "wasted_bytes": on["wasted_bytes"],
        "device_allocations": on["device_allocations"],
    }


def measure(quick: bool) -> dict[str, Any]:
    """All three loads."""
    count = 3 if quick else 20
    heavy = compare("heavy", count)
    return {
        **heavy,
        "light": compare("light", count),
        "surprising": compare("heavy", count * 2, surprising=True),
        "model": {
            "link_bytes_per_second": LINK,
            "flop_per_second": RATE,
            "parameters": PARAMETERS,
            "steps": STEPS,
            "tokens": TOKENS,
        },
        "machine": machine(),
    }


def table(result: dict[str, Any]) -> str:
    """The figures for people."""
    lines = []
    for name, one in (("heavy", result), ("light", result["light"]), ("surprising", result["surprising"])):
        off, on = (one[f"exposed_seconds_{key}"] / one["requests"] for key in ("off", "on"))
        lines.append(
            f"{name:<11} exposed per request {off:6.3f} s -> {on:6.3f} s ({one['reduction']:.1%} less) "
            f"beside {one['compute_seconds'] / one['requests']:.1f} s of compute; "
            f"{one['prefetched']} copied ahead, {one['wasted_guesses']} for nothing"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    result = measure(options.quick)
    write(options.json, result)
    print(table(result))


if __name__ == "__main__":
    main()
