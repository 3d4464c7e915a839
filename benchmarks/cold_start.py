"""From files to the end of the first phase, and the memory it takes: ours beside diffusers' own way.

    python benchmarks/cold_start.py --json cold.json [--quick]

A diffusers pipeline with random weights, 3 GiB in bfloat16 (``--quick``: 192 MiB), is written to a temporary folder
(``TMPDIR`` chooses the disk): in float32, as Wan's transformers are published, and in bfloat16. The encoder has 29 %
of the weights, as in Wan 2.1 14B and FLUX.1 (5.7 of 20, 4.8 of 17 billion parameters). Processes of their own, in
turn, load it as bfloat16 and run its first phase (the text encoder) on the simulated accelerator:

* ``ours``: ``load_components(..., lazy=True)`` and ``offload``, what ``Omni(..., enable_cpu_offload=True)`` does;
* ``pinned``: the same with ``masters="pinned"``, all weights in pinned slabs before the first phase;
* ``diffusers``: ``from_pretrained`` and ``enable_model_cpu_offload``.

Each is run with the files on the disk, as after a restart: they are dropped from the page cache before (where that
cannot be done, only the other figures are taken), and with the files in the page cache, as in a second run.

Copies from pinned memory run on the device's copy engine while the host goes on; those from pageable memory keep the
host busy, as on CUDA. Imports are done before the clock starts. One thread computes: on a busy machine a second one
makes every operator wait for it, on either side. Garbage is collected before, and not during: whose allocation brings
a collection about is chance. Memory is taken in runs of its own, since looking takes time: it is the system's figure
``Anonymous``; what lies in the page cache is nobody's. The simulated device's own memory is host memory too, and
fresh for all: that its pages are touched for the first time costs more than the copy into them. The peak while
enabling is taken before anything is on it. Below 1 GiB what Python does for each tensor is most of the time. Exits
with 1 if a bound is missed, save with ``--quick``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.harness import MIB, machine, parser, size_of, verdict, write
from benchmarks.mapped_cpu import Watch, anonymous
from omni_components import load_components, offload
from omni_components.components.unread import Unread
from omni_components.loading.readahead import is_in_memory

ALLOWED_TIME, ALLOWED_MEMORY = 0.6, 1.02
WAYS = ("ours", "pinned", "diffusers")
STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # as which the files have the weights
PLACES = ("disk", "page cache")  # where the files are when the clock starts
ENCODER_SHARE = 0.29
TOKENS = 32


def write_pipeline(folder: Path, nbytes: int, dtype: torch.dtype) -> None:
    """PixArt: an encoder and a transformer of ``nbytes`` together in bfloat16, and a small VAE."""
    from diffusers import DDIMScheduler, PixArtAlphaPipeline, PixArtTransformer2DModel
    from tests.diffusers import tiny
    from transformers import T5Config, T5EncoderModel

    torch.set_default_dtype(dtype)
    width = 1024 if nbytes >= 1024 * MIB else 512
    encoder = int(ENCODER_SHARE * nbytes)
    per_layer = 2 * (4 * width * width + 3 * width * 4 * width)  # bytes of a T5 layer
    layers = max(1, encoder // per_layer)
    config = T5Config(
        vocab_size=len(tiny.VOCABULARY),
        d_model=width,
        d_kv=64,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=width // 64,
        feed_forward_proj="gated-gelu",
        pad_token_id=0,
        eos_token_id=1,
    )
    heads = width // 64
    transformer = PixArtTransformer2DModel(
        num_attention_heads=heads,
        attention_head_dim=64,
        num_layers=max(1, (nbytes - encoder) // (2 * 16 * width * width)),
        sample_size=8,
        cross_attention_dim=width,
        caption_channels=width,
    )
    PixArtAlphaPipeline(
        tokenizer=tiny.tokenizer(begins=False, length=TOKENS),
        text_encoder=T5EncoderModel(config),
        vae=tiny.vae(4),
        transformer=transformer,
        scheduler=DDIMScheduler(),
    ).save_pretrained(folder, max_shard_size="512MB")
    torch.set_default_dtype(torch.float32)


# --- the process that is looked at -----------------------------------------------------------------------


def child(way: str, folder: str, *, watched: bool) -> dict[str, Any]:
    """Load, enable, run the first phase; tell the time, or the memory."""
    from diffusers import PixArtAlphaPipeline

    from omni_components.testing import SimulatedAccelerator

    PixArtAlphaPipeline.load_config(folder)
    torch.set_num_threads(1)
    tokens = torch.ones(1, TOKENS, dtype=torch.long)
    with SimulatedAccelerator(capacity="64GiB", poison=False, copies="engine") as sim, torch.no_grad():
        gc.collect()
        gc.disable()
        before = anonymous()
        start = time.perf_counter()
        with Watch() if watched else nullcontext() as enabling:
            if way != "diffusers":
                masters = "pinned" if way == "pinned" else "auto"
                pipe = load_components(folder, dtype=torch.bfloat16, masters=masters, lazy=way == "ours")
                handle = offload(pipe, sim.device, masters=masters)
            else:
                pipe = PixArtAlphaPipeline.from_pretrained(folder, dtype=torch.bfloat16)
                pipe.enable_model_cpu_offload(device=sim.device)
        enabled = time.perf_counter() - start
        with Watch() if watched else nullcontext() as running:
            output = pipe.text_encoder(tokens.to(sim.device))[0]
            checksum = float(output.float().cpu().sum())
        seconds = time.perf_counter() - start
        weights = sum(size_of(one) for one in (pipe.text_encoder, pipe.transformer, pipe.vae))
        unread = sum(one.nbytes for one in pipe.transformer.parameters() if type(one) is Unread)
        if way != "diffusers":
            handle.disable()
    told = {"checksum": checksum, "weights": weights, "unread": unread}
    if enabling is None or running is None:
        return {**told, "seconds": seconds, "seconds_to_enabled": enabled}
    peak = max(enabling.peak, running.peak)
    return {**told, "peak_enabling": enabling.peak - before, "peak": peak - before}


# --- the comparison --------------------------------------------------------------------------------------


def drop(folder: Path) -> bool:
    """Have the system drop a folder's files from memory; returns whether it did."""
    files = sorted(folder.rglob("*.safetensors"))
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if is_in_memory(opened.fileno(), 0, file.stat().st_size):
                return False
    return bool(files)


def measure(
    quick: bool = False,
    nbytes: int | None = None,
    rounds: int | None = None,
    stored: Sequence[str] = tuple(STORED),
    ways: Sequence[str] = WAYS,
) -> dict[str, Any]:
    """Write the pipelines, run the processes in turn, compare.

    Args:
        quick: 192 MiB of weights instead of 3 GiB.
        nbytes: How many, if neither.
        rounds: How often each way runs from each place.
        stored: Element types of the files.
        ways: Which ones, ``diffusers`` among them.
    """
    nbytes = nbytes or (192 if quick else 3072) * MIB
    rounds = rounds or (1 if quick else 3)
    cases = {kind: _case(kind, nbytes, rounds, ways) for kind in stored}
    return {
        "time_ratio": {
            place: {kind: case["ours"]["time_ratio"][place] for kind, case in cases.items()}
            for place in next(iter(cases.values()))["ours"]["time_ratio"]
        },
        "allowed_time_ratio": ALLOWED_TIME,
        "memory_ratio": max(
            (one["peak_enabling"] - min(256 * MIB, one["weights"])) / one["weights"]
            for case in cases.values()
            for way, one in case.items()
            if way != "diffusers"
        ),
        "allowed_memory_ratio": ALLOWED_MEMORY,
        "cases": cases,
        "equal": all(one["equal"] for case in cases.values() for one in case.values()),
        "rounds": rounds,
        "quick": quick,
        **machine(),
    }


def _case(kind: str, nbytes: int, rounds: int, ways: Sequence[str]) -> dict[str, dict[str, Any]]:
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_pipeline(folder, nbytes, STORED[kind])
        # In memory first: writing has left them there.
        taken = {"page cache": [{way: _run(way, folder) for way in ways} for _ in range(rounds)]}
        if drop(folder):
            taken["disk"] = [{way: _run(way, folder) for way in ways if drop(folder)} for _ in range(rounds)]
        memory = {way: _run(way, folder, "--watched") for way in ways}
    sums = {one["checksum"] for runs in (*taken.values(), [memory]) for each in runs for one in each.values()}
    return {way: {**memory[way], "equal": len(sums) == 1, **_times(way, taken)} for way in ways}


def _run(way: str, folder: Path, *more: str) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), "--child", way, "--folder", str(folder), *more]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return found


def _times(way: str, taken: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    def middle(of: Any) -> dict[str, float]:
        return {place: statistics.median(map(of, runs)) for place, runs in taken.items()}

    return {
        "seconds": middle(lambda one: one[way]["seconds"]),
        "seconds_to_enabled": middle(lambda one: one[way]["seconds_to_enabled"]),
        "time_ratio": middle(lambda one: one[way]["seconds"] / one["diffusers"]["seconds"]),
    }


def table(result: dict[str, Any]) -> str:
    """The figures for people."""
    lines = []
    for kind, case in result["cases"].items():
        lines.append(f"files in {kind}; first phase, enabled, of diffusers' time")
        for place in result["time_ratio"]:
            for way, one in case.items():
                times = f"{one['seconds'][place]:>8.2f} s{one['seconds_to_enabled'][place]:>8.2f} s"
                lines.append(f"  from the {place:<12}{way:<12}{times}{one['time_ratio'][place]:>8.2f} x")
        for way, one in case.items():
            sizes = f"{one['peak_enabling'] / MIB:>6.0f} MiB enabling{one['peak'] / MIB:>6.0f} MiB in all"
            lines.append(f"  most memory     {way:<12}{sizes}")
        lines.append(f"  weights in bfloat16: {one['weights'] / MIB:.0f} MiB")
    if "disk" not in result["time_ratio"]:
        lines.append("the files could not be dropped from memory: set TMPDIR to a folder on a disk")
    if not result["quick"]:  # one slab is more than all weights there
        ratio = f"{result['memory_ratio']:.3f}  (<= {ALLOWED_MEMORY})"
        lines.append(f"(peak enabling - one slab) / weights {ratio}")
    return "\n".join(lines)


def bounds(result: dict[str, Any]) -> dict[str, bool]:
    """What must hold, by name; of files in the page cache that both leave there, no time is promised."""
    ratio = result["time_ratio"]
    promised = {**{f"disk {kind}": one for kind, one in ratio.get("disk", {}).items()}}
    promised["page cache float32"] = ratio["page cache"]["float32"]
    return {
        **{f"time_ratio from {name}": one <= ALLOWED_TIME for name, one in promised.items()},
        "files dropped": "disk" in ratio,
        "memory_ratio": result["memory_ratio"] <= ALLOWED_MEMORY,
        "equal": result["equal"],
    }


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--child" in arguments:
        inner = argparse.ArgumentParser()
        inner.add_argument("--child", choices=WAYS)
        inner.add_argument("--folder")
        inner.add_argument("--watched", action="store_true")
        given = inner.parse_args(arguments)
        print(json.dumps(child(given.child, given.folder, watched=given.watched)))
        return 0
    options = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    result = measure(options.quick)
    write(options.json, result)
    print(table(result))
    return verdict(bounds(result), quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
