"""Rows as lines, as a summary, and as the page of the documentation."""

from __future__ import annotations

import datetime
import importlib.metadata
import statistics
from collections.abc import Iterable
from typing import Any

from .reasons import REASONS

FLAGS = ("runs_resident", "runs_diffusers", "equal_diffusers", "runs_ours", "equal", "second_equal")
VERSIONS = ("diffusers", "transformers", "accelerate", "torch")

HEAD = """# diffusers pipelines

<!-- Written by `python benchmarks/diffusers_sweep.py --docs`: change that, not this. -->

Every pipeline class of diffusers that declares an offload order (`model_cpu_offload_seq`), with tiny random
weights, on the simulated accelerator: all resident; under diffusers' own `enable_model_cpu_offload`; under
`offload(pipe, device=...)`. Two requests in a row each. *Equal* means `torch.equal` with the resident run, both
times, every number of the output.

```bash
python benchmarks/diffusers_sweep.py --json sweep.json          # all: about ten minutes on two cores
python benchmarks/diffusers_sweep.py --only FluxPipeline        # one
python benchmarks/diffusers_sweep.py --json sweep.json --docs   # this page
```

{date}, {versions}.

| | |
|---|---|
| classes that declare an order | {classes} |
| run resident here | {run} |
| of these under diffusers' own offload | {run_diffusers} |
| under ours | {run_ours} |
| equal, both requests | {equal} |
| no more bytes in, none back, no higher peak | {no_worse} |
| weights in per request, as a multiple of all (median): ours | {in_to_weights} |
| diffusers' own | {in_to_weights_diffusers} |
| weights back, likewise: diffusers' own | {back_to_weights_diffusers} |
| ours: bytes back, of all classes together | {bytes_back} |

Bytes are KiB of weights in two requests, ours / diffusers'. The peak is that of weights on the device together. Our
copies are packed: each tensor begins at a multiple of 256 bytes, so that a component of many tiny tensors carries
some bytes between them, which are not counted here and vanish at real sizes.

## How a pipeline is read

An encoder and a DiT of the order exclude each other. A component that is called sends those of its role home that
stand before it in the order; a VAE, and whoever is last, sends all of them home. When these come back, it stays, as
with diffusers' own offload: a picture that the VAE encodes before the denoiser runs, two experts that alternate.
`vae="exclusive"` and `exclusive_encoders=True` do without: less room, more traffic. Encoders that all fit into the
room of the largest component stay together. What is outside of the order comes at its first call and leaves at the
end of the request; what is excluded from offload is resident; what has no `forward` is left to its pipeline. A
pipeline that holds others (Kandinsky's combined ones, VisualCloze) frees each one's components when that one's call
ends. A pipeline of one component has it home between requests. What a pipeline calls past the component that it lies
in (the eyes of Motif-Video's text encoder) is a component of its own. With `offload_components` only the roles that
it names take turns; the others stay, and send these home when they are used.

## The classes

| class | runs | equal | in | back | peak | why not |
|---|---|---|---:|---:|---:|---|
"""


def line(row: dict[str, Any]) -> str:
    """One row for the terminal."""
    flags = "".join("y" if row.get(flag) else "-" for flag in FLAGS)
    sizes = [
        row.get(name, 0) for name in ("bytes_in", "bytes_in_diffusers", "bytes_back", "bytes_back_diffusers")
    ]
    peaks = f"{row.get('peak', 0)}/{row.get('peak_diffusers', 0)}"
    worse = "" if no_worse(row) else " WORSE"
    counts = f"{sizes[0]}/{sizes[1]} {sizes[2]}/{sizes[3]} {peaks}"
    return f"{flags} {row['class']} {counts} {row.get('seconds', 0)}s{worse} {row.get('reason', '')}"


def no_worse(row: dict[str, Any]) -> bool:
    """No byte more than diffusers' own offload, where that runs; and none back."""
    if not row.get("runs_ours"):
        return not row.get("runs_resident")
    if not row["runs_diffusers"]:
        return bool(row["bytes_back"] <= 0)
    return bool(
        row["bytes_back"] <= 0
        and row["bytes_in"] <= row["bytes_in_diffusers"]
        and row["peak"] <= row["peak_diffusers"]
    )


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The sweep in a few numbers."""
    ran = [row for row in rows if row.get("runs_resident")]
    both = [row for row in ran if row["runs_diffusers"] and row["runs_ours"] and row["weights"]]
    return {
        "classes": len(rows),
        "run": len(ran),
        "run_diffusers": sum(row["runs_diffusers"] for row in ran),
        "run_ours": sum(row["runs_ours"] for row in ran),
        "equal": sum(row["equal"] and row["second_equal"] for row in ran),
        "no_worse": sum(map(no_worse, ran)),
        "bytes_back": sum(max(0, row["bytes_back"]) for row in ran),
        "in_to_weights": _median(row["bytes_in"] / 2 / row["weights"] for row in both),
        "in_to_weights_diffusers": _median(row["bytes_in_diffusers"] / 2 / row["weights"] for row in both),
        "back_to_weights_diffusers": _median(
            row["bytes_back_diffusers"] / 2 / row["weights"] for row in both
        ),
    }


def _median(numbers: Iterable[float]) -> float:
    known = list(numbers)
    return round(statistics.median(known), 3) if known else 0.0


def text(rows: list[dict[str, Any]]) -> str:
    """The page."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in VERSIONS)
    today = datetime.date.today().isoformat()
    listed = "".join(map(_listed, sorted(rows, key=lambda row: str(row["class"]))))
    return HEAD.format(date=today, versions=versions, **summary(rows)) + listed


def _listed(row: dict[str, Any]) -> str:
    name = f"| `{row['class']}` "
    reason = REASONS.get(row["class"], row.get("reason", "")).replace("|", "\\|").strip()
    if not row.get("runs_resident"):
        return f"{name}| no | | | | | {reason} |\n"
    equal = "yes" if row["equal"] and row["second_equal"] else "**no**"
    theirs = row["runs_diffusers"]
    pairs = [
        f"{_kib(row[ours])} / {_kib(row[f'{ours}_diffusers']) if theirs else '-'}"
        for ours in ("bytes_in", "bytes_back", "peak")
    ]
    return f"{name}| yes | {equal} | {' | '.join(pairs)} | {reason} |\n"


def _kib(size: int) -> str:
    return f"{max(0, size) / 1024:,.0f}"
