"""What the transfer benchmarks share: cases that take turns, medians of ratios, the command line."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch
from torch import nn

MIB = 1 << 20
Case = Callable[[], object]


class Time(NamedTuple):
    """Seconds of one run: by the clock, and of the processor.

    On a machine that others use too, the clock also counts their turns; the processor's seconds do not.
    """

    wall: float
    cpu: float


def timed(case: Case) -> Time:
    """Run a case once."""
    wall, cpu = perf_counter(), process_time()
    case()
    return Time(perf_counter() - wall, process_time() - cpu)


def interleaved(cases: Mapping[str, Case], rounds: int) -> dict[str, list[Time]]:
    """Run all cases in turn, round by round, so that a busy moment of the machine hits them all.

    As in ``timeit``, the garbage collector waits meanwhile.
    """
    taken: dict[str, list[Time]] = {name: [] for name in cases}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, case in cases.items():
                taken[name].append(timed(case))
    finally:
        gc.enable()
    return taken


def median_ratio(taken: Sequence[Time], base: Sequence[Time], clock: str = "wall") -> float:
    """The median over the rounds of one case's time as a multiple of another's in the same round."""
    pairs = zip(taken, base, strict=True)
    return statistics.median(getattr(one, clock) / getattr(other, clock) for one, other in pairs)


def median_ms(taken: Sequence[Time], clock: str = "wall") -> float:
    """The median in milliseconds."""
    return statistics.median(getattr(one, clock) for one in taken) * 1e3


class Leaf(nn.Module):
    """A weight and a bias, written to, so that their pages are real."""

    def __init__(self, numel: int, bias: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((numel,), 0.5), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(bias), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Nothing at all: the cost of moving is what is measured."""
        return x


class Layers(nn.Module):
    """A component of so many tensors and so many bytes, in blocks of 20 tensors; its forward runs the blocks.

    Args:
        tensors: An even number.
        nbytes: Bytes in all; the last few that do not divide are left out.
    """

    def __init__(self, tensors: int, nbytes: int) -> None:
        super().__init__()
        bias = 64
        numel = max(64, nbytes // 4 // (tensors // 2) - bias) // 64 * 64
        leaves = [Leaf(numel, bias) for _ in range(tensors // 2)]
        self.blocks = nn.ModuleList(nn.Sequential(*leaves[at : at + 10]) for at in range(0, len(leaves), 10))

    @property
    def dtype(self) -> torch.dtype:
        """As diffusers' models have it: its pipelines ask."""
        return torch.float32

    @property
    def device(self) -> torch.device:
        """Likewise."""
        return next(self.parameters()).device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Every block, in order."""
        for block in self.blocks:
            x = block(x)
        return x


def keep_freed_memory() -> bool:
    """Let freed memory be taken again instead of going back to the system; returns whether the C library can.

    The simulated device has no caching allocator, as real ones have. Without this a way that takes memory for each
    tensor pays for fresh pages at each switch, which is a matter of this host and not of the way. (mallopt(3), glibc.)
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    trim_threshold, mmap_threshold, largest = -1, -3, 32 * MIB
    return bool(mallopt(mmap_threshold, largest)) and bool(mallopt(trim_threshold, (1 << 31) - 1))


def size_of(module: nn.Module) -> int:
    """Bytes of a module's tensors."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def machine() -> dict[str, Any]:
    """What a figure was measured on."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "load": load,  # above the number of processors, times say little
    }


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", type=Path, required=True, metavar="FILE", help="where to write the figures")
    made.add_argument("--quick", action="store_true", help="fewer rounds, fewer bytes")
    return made


def verdict(bounds: Mapping[str, bool], *, quick: bool) -> int:
    """The exit status: 1 if a bound does not hold, which is printed; a shortened run says nothing about bounds."""
    missed = [name for name, holds in bounds.items() if not holds]
    if quick or not missed:
        return 0
    print(f"missed: {', '.join(missed)}")
    return 1


def write(file: Path, result: Mapping[str, Any]) -> None:
    """The figures as JSON."""
    file.write_text(json.dumps(result, indent=2) + "\n")
