"""What it takes to plan for a model at full size: seconds and memory of ``omni-components plan``, a process each.

    python benchmarks/full_size.py --json FILE [--quick]

The configurations beside this file, bfloat16. The processor's seconds (user and system) are those of the whole
process, from start to end; on a machine that others use too, the clock's also count their turns. Most of them pass
while the libraries are imported that define the models' classes; ``imports`` is that alone.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.harness import machine, parser, write

CONFIGURATIONS = Path(__file__).with_name("configurations")
IMPORTS = "imports"
# Not ru_maxrss: on Linux a child begins with the memory of the process that it was forked from.
_COMMAND = """
import sys
from omni_components.cli import main
try:
    main()
finally:
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
    print(peak.split()[1], file=sys.stderr)
"""
_IMPORTS = """
import atexit, gc
gc.disable()
atexit.register(gc.freeze)
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from transformers import UMT5EncoderModel
"""


def names() -> list[str]:
    """The models."""
    return sorted(one.name for one in CONFIGURATIONS.iterdir() if one.is_dir())


def planned(name: str) -> dict[str, Any]:
    """Plan for one model in a process of its own.

    Returns:
        ``wall_seconds``, ``cpu_seconds``, ``peak_rss_bytes``, and ``plan``: what it printed.
    """
    words = ["plan", str(CONFIGURATIONS / name), "--dtype", "bfloat16", "--json"]
    ran, wall, cpu = _timed([sys.executable, "-c", _COMMAND, *words])
    return {
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "peak_rss_bytes": int(ran.stderr.split()[-1]) << 10,
        "plan": json.loads(ran.stdout),
    }


def imported() -> dict[str, Any]:
    """Import the classes of one model, and nothing else: no plan of it can take less."""
    _, wall, cpu = _timed([sys.executable, "-c", _IMPORTS])
    return {"wall_seconds": wall, "cpu_seconds": cpu}


def _timed(words: list[str]) -> tuple[subprocess.CompletedProcess[str], float, float]:
    import resource  # imported here: Windows has none, and this module's docstring is read there, too

    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    ran = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return ran, wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(rounds: int) -> dict[str, Any]:
    """Medians; the models in turn, round by round, so that a busy moment of the machine hits them all."""
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in (*names(), IMPORTS)}
    for _ in range(rounds):
        for name in names():
            taken[name].append({key: value for key, value in planned(name).items() if key != "plan"})
        taken[IMPORTS].append(imported())
    return {"rounds": rounds, **{name: _medians(runs) for name, runs in taken.items()}}


def _medians(runs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    runs = list(runs)
    return {key: statistics.median(one[key] for one in runs) for key in runs[0]}


def lines(found: dict[str, Any]) -> list[str]:
    """For people."""
    told = [f"{'plan of':16} {'seconds':>8} {'processor':>10} {'peak RSS':>9}"]
    for name in (*names(), IMPORTS):
        one = found[name]
        peak = f"{one['peak_rss_bytes'] / 1e6:.0f} MB" if "peak_rss_bytes" in one else "-"
        told.append(f"{name:16} {one['wall_seconds']:8.2f} {one['cpu_seconds']:10.2f} {peak:>9}")
    return told


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    given = parser(__doc__ or "").parse_args(arguments)
    found = {"machine": machine(), **measure(1 if given.quick else 5)}
    write(given.json, found)
    print("\n".join(lines(found)))


if __name__ == "__main__":
    main()
