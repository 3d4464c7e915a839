"""From files to the end of the first phase, and the memory it takes: ours beside diffusers' own way.

    python benchmarks/cold_start.py --json cold.json [--quick]

A diffusers pipeline with random bfloat16 weights, 3 GiB (``--quick``: 192 MiB), is written to a temporary folder.
Processes of their own, in turn, load it and run its first phase (the text encoder) on the simulated accelerator:
``load_components`` and ``offload``, with pinned and with mapped masters;
``from_pretrained`` and ``enable_model_cpu_offload``. Imports are done before
the clock starts, and the files are in the page cache for both. One thread computes: on a busy machine a second one
makes every operator wait for it, on either side. Garbage is collected first: whose allocation brings a collection
about is chance. Memory is the system's figure ``Anonymous``, looked
at from a thread: what lies in the page cache is nobody's. The simulated device's own memory is host memory too; the
peak while enabling is taken before anything is on it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.harness import MIB, machine, parser, size_of, write
from benchmarks.mapped_cpu import Watch, anonymous
from omni_components import load_components, offload

ALLOWED_TIME, ALLOWED_MEMORY = 0.6, 1.02
WAYS = ("ours", "mapped", "diffusers")
TOKENS = 32


def write_pipeline(folder: Path, component: int) -> None:
    """PixArt: an encoder and a transformer of ``component`` bytes each, and a small VAE."""
    from diffusers import DDIMScheduler, PixArtAlphaPipeline, PixArtTransformer2DModel
    from tests.diffusers import tiny
    from transformers import T5Config, T5EncoderModel

    torch.set_default_dtype(torch.bfloat16)
    width = 1024 if component >= 512 * MIB else 512
    per_layer = 2 * (4 * width * width + 3 * width * 4 * width)  # bytes of a T5 layer
    layers = max(1, component // per_layer)
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
        num_layers=max(1, component // (2 * 16 * width * width)),
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


def child(way: str, folder: str) -> dict[str, Any]:
    """Load, enable, run the first phase; tell the time and the memory."""
    from diffusers import PixArtAlphaPipeline

    from omni_components.testing import SimulatedAccelerator

    PixArtAlphaPipeline.load_config(folder)
    torch.set_num_threads(1)
    tokens = torch.ones(1, TOKENS, dtype=torch.long)
    with SimulatedAccelerator(capacity="64GiB", poison=False) as sim, torch.no_grad():
        gc.collect()
        before = anonymous()
        start = time.perf_counter()
        with Watch() as enabling:
            if way != "diffusers":
                masters = "mapped" if way == "mapped" else "pinned"
                pipe = load_components(folder, dtype=torch.bfloat16, masters=masters)
                handle = offload(pipe, sim.device, masters=masters)
            else:
                pipe = PixArtAlphaPipeline.from_pretrained(folder, dtype=torch.bfloat16)
                pipe.enable_model_cpu_offload(device=sim.device)
        enabled = time.perf_counter() - start
        with Watch() as running:
            output = pipe.text_encoder(tokens.to(sim.device))[0]
            checksum = float(output.float().cpu().sum())
        seconds = time.perf_counter() - start
        weights = sum(size_of(one) for one in (pipe.text_encoder, pipe.transformer, pipe.vae))
        if way != "diffusers":
            handle.disable()
    return {
        "seconds": seconds,
        "seconds_to_enabled": enabled,
        "peak_enabling": enabling.peak - before,
        "peak": max(enabling.peak, running.peak) - before,
        "weights": weights,
        "checksum": checksum,
    }


def measure(quick: bool = False, component: int | None = None, rounds: int | None = None) -> dict[str, Any]:
    """Write the pipeline, run the processes in turn, compare.

    Args:
        quick: 96 MiB instead of 1.5 GiB in each of the two large components.
        component: Bytes of each, if neither.
        rounds: How often each way runs.
    """
    component = component or (96 if quick else 1536) * MIB
    rounds = rounds or (3 if quick else 5)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with TemporaryDirectory() as folder:
        write_pipeline(Path(folder), component)
        for number in range(rounds + 1):
            for way in WAYS:
                command = [sys.executable, str(Path(__file__).resolve()), "--child", way, "--folder", folder]
                answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                if number:  # the first round fills the page cache
                    found[way].append(json.loads(answer.splitlines()[-1]))
    ours, theirs = found["ours"], found["diffusers"]
    weights = ours[0]["weights"]
    slab = min(256 * MIB, weights)
    median = {
        way: {key: statistics.median(one[key] for one in runs) for key in runs[0]}
        for way, runs in found.items()
    }
    return {
        "time_ratio": _median_ratio(ours, theirs),
        "time_ratio_mapped": _median_ratio(found["mapped"], theirs),
        "allowed_time_ratio": ALLOWED_TIME,
        "memory_ratio": (max(one["peak_enabling"] for one in ours) - slab) / weights,
        "allowed_memory_ratio": ALLOWED_MEMORY,
        "slab": slab,
        "equal": len({one["checksum"] for runs in found.values() for one in runs}) == 1,
        **median,
        "rounds": rounds,
        "quick": quick,
        **machine(),
    }


def _median_ratio(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    return statistics.median(
        one["seconds"] / other["seconds"] for one, other in zip(mine, theirs, strict=True)
    )


def table(result: dict[str, Any]) -> str:
    """The figures for people."""
    lines = [f"{'':<12}{'first phase':>14}{'enabled':>12}{'peak enabling':>16}{'peak':>12}   weights"]
    for way in WAYS:
        one = result[way]
        sizes = f"{one['peak_enabling'] / MIB:>12.0f} MiB{one['peak'] / MIB:>8.0f} MiB"
        lines.append(
            f"{way:<12}{one['seconds']:>12.2f} s{one['seconds_to_enabled']:>10.2f} s{sizes}"
            f"   {one['weights'] / MIB:.0f} MiB"
        )
    keys = ("time_ratio", "time_ratio_mapped")
    lines += [f"{key} {result[key]:.2f}  (≤ {ALLOWED_TIME})" for key in keys]
    lines.append(f"(peak enabling - one slab) / weights {result['memory_ratio']:.3f}  (≤ {ALLOWED_MEMORY})")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--child" in arguments:
        inner = argparse.ArgumentParser()
        inner.add_argument("--child", choices=WAYS)
        inner.add_argument("--folder")
        given = inner.parse_args(arguments)
        print(json.dumps(child(given.child, given.folder)))
        return
    options = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    result = measure(options.quick)
    write(options.json, result)
    print(table(result))


if __name__ == "__main__":
    main()
