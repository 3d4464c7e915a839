"""Train the demo's weights from scikit-learn's handwritten digits: at most 20 minutes on 2 cores.

    python examples/train_demo.py --out src/omni_components/demo/weights

First the VAE learns to draw pictures from 4x4 latents; then text encoder and transformer learn, together,
the flow from noise to the latents of the digit that a phrase names. The adjectives are measured: within
each digit, `thin` is the third of the pictures with the least ink and `bold` the third with the most.
"""

from __future__ import annotations

import argparse
import json
import time
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from omni_components.demo import DemoPipeline, DemoVae
from omni_components.demo.config import DemoConfig
from omni_components.demo.text import ADJECTIVES, ARTICLES, NUMBER_WORDS, NUMERALS, encode_words

THREADS = 2
EMPTY_PROMPT_SHARE = 0.12  # for classifier-free guidance
LATENT_KL = 2e-4


@dataclass(frozen=True)
class Plan:
    """How long and how fast each stage learns."""

    vae_steps: int = 2000
    flow_steps: int = 5000
    vae_batch: int = 64
    flow_batch: int = 128
    vae_rate: float = 2e-3
    flow_rate: float = 1.5e-3


QUICK = Plan(vae_steps=60, flow_steps=60)


@dataclass(frozen=True)
class Digits:
    """The real pictures.

    Attributes:
        images: ink in 0..1, (N, 1, 8, 8).
        labels: 0 to 9, (N,).
        adjectives: 0 thin, 1 between, 2 bold, (N,).
    """

    images: Tensor
    labels: Tensor
    adjectives: Tensor


def load_real_digits() -> Digits:
    """All 1,797 pictures, with their ink measured against the others of the same digit."""
    raw = load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(raw.target)
    ink = images.mean((1, 2, 3))
    adjectives = torch.ones_like(labels)
    for digit in range(10):
        of_digit = labels == digit
        low, high = ink[of_digit].quantile(torch.tensor([1 / 3, 2 / 3]))
        adjectives[of_digit & (ink <= low)] = 0
        adjectives[of_digit & (ink >= high)] = 2
    return Digits(images, labels, adjectives)


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """(B, 1, 8, 8) -> (B, 1, 16, 16), each turned, scaled and shifted a little on the way."""
    count = len(images)
    angle, scale_x, scale_y, shift_x, shift_y = (2 * torch.rand(5, count, generator=generator) - 1).unbind()
    angle, scale_x, scale_y = 0.10 * angle, 1 + 0.04 * scale_x, 1 + 0.04 * scale_y
    cos, sin = angle.cos(), angle.sin()
    rows = [cos * scale_x, -sin, 0.05 * shift_x, sin, cos * scale_y, 0.05 * shift_y]
    grid = F.affine_grid(torch.stack(rows, 1).view(-1, 2, 3), [count, 1, 16, 16], align_corners=False)
    return F.grid_sample(images, grid, mode="bicubic", align_corners=False).clamp(0, 1)


def enlarge(images: Tensor) -> Tensor:
    """(B, 1, 8, 8) -> (B, 1, 16, 16), as `augment` without its chance."""
    return F.interpolate(images, scale_factor=2, mode="bicubic", align_corners=False).clamp(0, 1)


def describe(label: int, adjective: int, generator: torch.Generator) -> list[int]:
    """Token ids of a phrase that is true of a picture, worded by chance; sometimes of the empty prompt."""
    chance = torch.rand(4, generator=generator).tolist()
    if chance[0] < EMPTY_PROMPT_SHARE:
        return encode_words(())
    words: list[str] = []
    if chance[1] < 0.5:
        words.append(ARTICLES[int(chance[1] * 2 * len(ARTICLES))])
    if adjective != 1 and chance[2] < 0.6:
        words.append(ADJECTIVES[adjective // 2])
    words.append((NUMBER_WORDS if chance[3] < 0.5 else NUMERALS)[label])
    return encode_words(tuple(words))


def learning_rate(step: int, steps: int) -> float:
    """A short rise, then a half cosine to nearly nothing."""
    rise = min(1.0, (step + 1) / (0.03 * steps))
    fall = 0.5 * (1 + torch.cos(torch.tensor(step / steps * torch.pi)).item())
    return rise * (0.01 + 0.99 * fall)


def train_vae(vae: DemoVae, digits: Digits, plan: Plan, generator: torch.Generator) -> None:
    """Fit the autoencoder, then measure its latents so that they come out with unit deviation."""
    optimizer = torch.optim.AdamW(vae.parameters(), lr=plan.vae_rate, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, plan.vae_steps))
    for step in range(plan.vae_steps):
        index = torch.randint(len(digits.images), (plan.vae_batch,), generator=generator)
        pixels = augment(digits.images[index], generator)
        mean, log_variance = vae.encode(pixels)
        noise = torch.randn(mean.shape, generator=generator)
        drawn = vae.decoder(mean + noise * (0.5 * log_variance).exp())
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum((1, 2, 3)).mean()
        fit = F.mse_loss(drawn, pixels)
        loss = fit + LATENT_KL / 16 * divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        report("vae", step, plan.vae_steps, fit.item())
    with torch.no_grad():
        latents, _ = vae.encode(augment(digits.images, generator))
        vae.latent_mean.copy_(latents.mean((0, 2, 3))[:, None, None])
        vae.latent_std.copy_(latents.std((0, 2, 3))[:, None, None])
        error = F.mse_loss(vae(enlarge(digits.images)), enlarge(digits.images)).sqrt().item()
    print(f"vae: root mean square error {error:.4f} of full ink", flush=True)


def train_flow(pipeline: DemoPipeline, digits: Digits, plan: Plan, generator: torch.Generator) -> None:
    """Fit text encoder and transformer to the flow; they end as the running mean of their weights."""
    learners = nn.ModuleList([pipeline.text_encoder, pipeline.transformer])
    means = deepcopy(learners).requires_grad_(False)
    optimizer = torch.optim.AdamW(
        learners.parameters(), lr=plan.flow_rate, betas=(0.9, 0.99), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, plan.flow_steps))
    for step in range(plan.flow_steps):
        loss = flow_loss(pipeline, digits, plan.flow_batch, generator)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(learners.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        keep = min(0.998, (1 + step) / (10 + step))
        with torch.no_grad():
            torch._foreach_lerp_(list(means.parameters()), list(learners.parameters()), 1 - keep)
        report("flow", step, plan.flow_steps, loss.item())
    learners.load_state_dict(means.state_dict())


def flow_loss(pipeline: DemoPipeline, digits: Digits, batch: int, generator: torch.Generator) -> Tensor:
    """Squared error of the velocity at random times between picture and noise."""
    index = torch.randint(len(digits.images), (batch,), generator=generator)
    with torch.no_grad():
        mean, log_variance = pipeline.vae.encode(augment(digits.images[index], generator))
        drawn = mean + torch.randn(mean.shape, generator=generator) * (0.5 * log_variance).exp()
        latents = pipeline.vae.normalise(drawn)
    told = zip(digits.labels[index].tolist(), digits.adjectives[index].tolist(), strict=True)
    ids = torch.tensor([describe(label, adjective, generator) for label, adjective in told])
    mask = ids != 0
    noise = torch.randn(latents.shape, generator=generator)
    moment = torch.randn(batch, generator=generator).sigmoid()
    mixed = torch.lerp(latents, noise, moment[:, None, None, None])
    memory = pipeline.transformer.prefill(pipeline.text_encoder(ids, mask), mask)
    return F.mse_loss(pipeline.transformer(mixed, moment, memory), noise - latents)


def report(stage: str, step: int, steps: int, loss: float) -> None:
    """One line at the start, the end, and twenty times between."""
    if step % max(1, steps // 20) == 0 or step == steps - 1:
        print(f"{stage}: step {step + 1:5d} of {steps}, loss {loss:.4f}", flush=True)


def save(pipeline: DemoPipeline, config: DemoConfig, timing: dict[str, float], out: Path) -> None:
    """Write weights, shapes and timing."""
    out.mkdir(parents=True, exist_ok=True)
    for name, module in pipeline.named_children():
        save_file(module.state_dict(), out / f"{name}.safetensors")
    config.save(out)
    (out / "training.json").write_text(json.dumps(timing, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Train everything and save it."""
    parser = argparse.ArgumentParser(description="Train the demo's weights.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the weights")
    parser.add_argument("--quick", action="store_true", help="a few steps only, to see that the script runs")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(THREADS)
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    config, plan, digits = DemoConfig(), QUICK if args.quick else Plan(), load_real_digits()
    pipeline = DemoPipeline.from_config(config)
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in pipeline.named_children()}
    print("parameters:", sizes, flush=True)

    started = time.perf_counter()
    train_vae(pipeline.vae, digits, plan, generator)
    vae_done = time.perf_counter()
    train_flow(pipeline, digits, plan, generator)
    flow_done = time.perf_counter()
    timing = {
        "vae_seconds": round(vae_done - started, 1),
        "flow_seconds": round(flow_done - vae_done, 1),
        "seconds": round(flow_done - started, 1),
        "threads": THREADS,
        "seed": args.seed,
    }
    save(pipeline, config, timing, args.out)
    print(f"trained in {timing['seconds'] / 60:.1f} minutes -> {args.out}", flush=True)


if __name__ == "__main__":
    main()
