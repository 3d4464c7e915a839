"""Time of a denoising loop: Cosmos3 split in two beside diffusers' joint class, same weights, same machine, same run.

    python benchmarks/cosmos3_split.py --json FILE [--quick]

The joint class runs the reasoner's and the generator's half of every layer at every step. The split one runs the
reasoner's half at the first step only. With N text tokens, M generated ones and S steps it pushes N + S * M tokens
through half a layer instead of S * (N + M); `by_tokens` is that ratio, what to expect where attention is cheap.

Steps of the two take turns, so that whatever else the machine does slows both. The time of a loop is made of medians
over all its steps: S joint ones; the first split one, which reads the text, and S - 1 later ones.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# On a busy machine a thread that spins while it waits takes the time of the one it waits for.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from diffusers.models.transformers.transformer_cosmos3 import Cosmos3OmniTransformer

from omni_components.models.cosmos3 import Cosmos3SplitTransformer

LATENT = {"latent_channel": 16, "latent_patch_size": 2, "patch_latent_dim": 64}
VOCABULARY = 1024


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    hidden: int = 512
    layers: int = 8
    steps: int = 20
    grid: int = 16  # patches on a side of the picture
    texts: tuple[int, ...] = (64, 512, 2048)
    short_loops: int = 2  # of two steps each, besides the whole one: more than one sample of a first step


QUICK = Plan(hidden=128, layers=2, steps=4, grid=4, texts=(64, 512))


@dataclass(frozen=True, slots=True)
class Row:
    """One length of text: seconds of all steps, and the medians that they are made of."""

    text_tokens: int
    generated_tokens: int
    joint_s: float
    split_s: float
    joint_step_s: float
    first_step_s: float
    later_step_s: float
    ratio: float
    by_tokens: float
    largest_difference: float


def build(plan: Plan) -> tuple[Cosmos3OmniTransformer, Cosmos3SplitTransformer]:
    """The joint class with random weights, in Cosmos3's proportions, and the split one over the same weights."""
    torch.manual_seed(0)
    joint = Cosmos3OmniTransformer(
        hidden_size=plan.hidden,
        intermediate_size=3 * plan.hidden,
        num_hidden_layers=plan.layers,
        head_dim=64,
        num_attention_heads=plan.hidden // 64,
        num_key_value_heads=max(plan.hidden // 256, 1),
        rope_axes_dim=[12, 10, 10],
        vocab_size=VOCABULARY,
        **LATENT,
    )
    joint.eval().requires_grad_(False)
    return joint, Cosmos3SplitTransformer.from_joint(joint)


def call(plan: Plan, text: int) -> dict[str, Any]:
    """The arguments that stay the same from step to step, as the pipeline packs them."""
    side = torch.arange(plan.grid)
    picture = plan.grid**2
    places = torch.stack([torch.full((picture,), text), *torch.cartesian_prod(side, side).T])
    indexes = torch.arange(text, text + picture)
    return {
        "input_ids": torch.randint(VOCABULARY, (text,)),
        "text_indexes": torch.arange(text),
        "position_ids": torch.cat([torch.arange(text).expand(3, -1), places], dim=1),
        "und_len": text,
        "sequence_length": text + picture,
        "vision_token_shapes": [(1, plan.grid, plan.grid)],
        "vision_sequence_indexes": indexes,
        "vision_mse_loss_indexes": indexes,
        "vision_noisy_frame_indexes": [torch.tensor([0])],
    }


def measure(plan: Plan, models: dict[str, Any], text: int) -> Row:
    """The loop over one length of text."""
    lengths = [plan.steps] + [2] * plan.short_loops
    runs = [_loop(plan, models, text, steps) for steps in lengths]
    joint_step = statistics.median(second for run, _ in runs for second in run["joint"])
    first = statistics.median(run["split"][0] for run, _ in runs)
    later = statistics.median(second for run, _ in runs for second in run["split"][1:])
    picture, steps = plan.grid**2, plan.steps
    joint, split = steps * joint_step, first + (steps - 1) * later
    return Row(
        text_tokens=text,
        generated_tokens=picture,
        joint_s=joint,
        split_s=split,
        joint_step_s=joint_step,
        first_step_s=first,
        later_step_s=later,
        ratio=joint / split,
        by_tokens=steps * (text + picture) / (text + steps * picture),
        largest_difference=max(difference for _, difference in runs),
    )


def _loop(plan: Plan, models: dict[str, Any], text: int, steps: int) -> tuple[dict[str, list[float]], float]:
    """One request of each model, step by step in turns; every request reads its prompt anew."""
    models["split"].forget()
    same = call(plan, text)
    latents = torch.randn(1, 16, 1, 2 * plan.grid, 2 * plan.grid)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    difference = 0.0
    for step in range(steps):
        noise = 1.0 - step / steps
        outputs = {}
        order = list(models) if step % 2 else list(models)[::-1]
        for name in order:
            changing = {
                "vision_tokens": [latents],
                "vision_timesteps": torch.full((plan.grid**2,), 1000.0 * noise),
            }
            start = time.perf_counter()
            outputs[name] = models[name](**same, **changing, return_dict=False)[0][0]
            seconds[name].append(time.perf_counter() - start)
        difference = max(difference, float((outputs["joint"] - outputs["split"]).abs().max()))
        latents = latents - outputs["split"] / steps
    return seconds, difference


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print a table, write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument(
        "--quick", action="store_true", help="small and short: shows that it runs, not how fast"
    )
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args(arguments)
    plan = QUICK if given.quick else Plan()
    threads = torch.get_num_threads()
    torch.set_num_threads(given.threads)
    try:
        with torch.inference_mode(False), torch.no_grad():
            joint, split = build(plan)
            models = {"joint": joint, "split": split}
            _loop(plan, models, 16, 1)  # warm up
            print(_head(plan), flush=True)
            rows = []
            for text in plan.texts:
                rows.append(measure(plan, models, text))
                print(_line(rows[-1]), flush=True)
    finally:
        torch.set_num_threads(threads)
    figures: dict[str, Any] = {
        **{f"ratio_{row.text_tokens}": row.ratio for row in rows},
        "plan": asdict(plan),
        "threads": given.threads,
        "torch": torch.__version__,
        "rows": [asdict(row) for row in rows],
    }
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return figures


def _head(plan: Plan) -> str:
    what = f"{plan.steps} steps, {plan.hidden} wide, {plan.layers} layers, {plan.grid**2} generated tokens"
    return f"{what}\ntext tokens   joint s   split s   joint/split   by tokens   largest difference"


def _line(row: Row) -> str:
    return (
        f"{row.text_tokens:11d} {row.joint_s:9.2f} {row.split_s:9.2f} {row.ratio:13.2f} {row.by_tokens:11.2f}"
        f" {row.largest_difference:20.1e}"
    )


if __name__ == "__main__":
    main()
