"""Show that the demo's pictures are the digits that were asked for.

    python examples/check_demo.py

The judge is a support vector machine from scikit-learn. It has seen three quarters of the real digits and
nothing else; the last quarter says how far to trust it. It looks at the finished pictures: each tile is
shrunk to the 8x8 counts of ink that scikit-learn's digits are made of. Exits with 1 where a figure is
below its bound.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.svm import SVC

from omni_components.demo import DemoPipeline
from omni_components.demo.render import MARGIN, SIDE, TILE, tile_boxes
from omni_components.demo.text import NUMBER_WORDS

RECOGNISED_BOUND = 0.98
FULL_INK = 16  # scikit-learn's digits count ink from 0 to 16


@dataclass(frozen=True)
class Verdict:
    """What the judge found.

    Attributes:
        recognised: share of the digits in which it sees the digit asked for.
        mistakes: (asked for, seen) of the others.
    """

    recognised: float
    mistakes: list[tuple[int, int]]


def train_judge() -> tuple[SVC, float]:
    """A classifier of real digits, and its accuracy on real digits that it has not seen."""
    pixels, labels = load_digits(return_X_y=True)
    seen, held_out, seen_labels, held_out_labels = train_test_split(
        pixels / FULL_INK, labels, test_size=0.25, random_state=0, stratify=labels
    )
    judge = SVC(C=10, gamma=0.1).fit(seen, seen_labels)
    return judge, float(judge.score(held_out, held_out_labels))


def read_tiles(picture: Image.Image, count: int) -> np.ndarray:
    """The digits of a picture, shrunk to (count, 8, 8) ink in 0..1."""
    margin = round(TILE * MARGIN / (SIDE + 2 * MARGIN))
    grey = picture.convert("L")
    paper, ink = grey.getextrema()[1], 32
    tiles = []
    for left, top, right, bottom in tile_boxes(count):
        inner = (left + margin, top + margin, right - margin, bottom - margin)
        tiles.append(np.asarray(grey.crop(inner).resize((8, 8), Image.Resampling.BOX), dtype=np.float64))
    return ((paper - np.stack(tiles)) / (paper - ink)).clip(0, 1)


def judge_digits(pipeline: DemoPipeline, judge: SVC, per_digit: int, seed: int = 0) -> Verdict:
    """Ask for every digit `per_digit` times, half of them in words, and compare."""
    asked = np.repeat(np.arange(10), per_digit)
    prompts = [NUMBER_WORDS[digit] if place % 2 else str(digit) for place, digit in enumerate(asked)]
    pictures = pipeline(prompts, seed=seed).images
    ink = np.concatenate([read_tiles(picture, 1) for picture in pictures])
    seen = judge.predict(ink.reshape(len(ink), -1))
    mistakes = [(int(a), int(s)) for a, s in zip(asked, seen, strict=True) if a != s]
    return Verdict(1 - len(mistakes) / len(asked), mistakes)


def measure_adjectives(pipeline: DemoPipeline, per_digit: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Mean ink of each digit, (10,), as `thin`, plain and `bold`; all three start from the same noise."""
    digits = [word for word in NUMBER_WORDS for _ in range(per_digit)]
    kinds = {"thin": "thin ", "plain": "", "bold": "bold "}
    return {
        kind: pipeline([prefix + word for word in digits], seed=seed)
        .ink.mean((1, 2))
        .view(10, -1)
        .mean(1)
        .numpy()
        for kind, prefix in kinds.items()
    }


def main() -> int:
    """Print the figures; 0 where all hold."""
    parser = argparse.ArgumentParser(description="Check the demo's digits with an independent classifier.")
    parser.add_argument("--weights", type=Path, help="a folder of weights (default: those in the package)")
    parser.add_argument("--per-digit", type=int, default=20, help="pictures of each digit (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sheet", type=Path, help="also save a page of digits here")
    args = parser.parse_args()

    pipeline = DemoPipeline.from_pretrained(args.weights)
    judge, accuracy = train_judge()
    print(f"judge: right on {accuracy:.2%} of real digits that it has not seen")
    verdict = judge_digits(pipeline, judge, args.per_digit, args.seed)
    total = 10 * args.per_digit
    print(f"demo: {verdict.recognised:.2%} of {total} pictures recognised (bound: {RECOGNISED_BOUND:.0%})")
    for asked, seen in verdict.mistakes:
        print(f"  asked for {asked}, seen as {seen}")
    ink = measure_adjectives(pipeline, args.per_digit, args.seed)
    print("ink: " + ", ".join(f"{kind} {values.mean():.3f}" for kind, values in ink.items()))
    ordered = bool((ink["thin"] < ink["plain"]).all() and (ink["plain"] < ink["bold"]).all())
    print(f"ink: thin < plain < bold for {'every digit' if ordered else 'NOT every digit'}")
    if args.sheet:
        pipeline(" ".join("0123456789" * 2), seed=args.seed).images[0].save(args.sheet)
    return 0 if verdict.recognised >= RECOGNISED_BOUND and ordered else 1


if __name__ == "__main__":
    sys.exit(main())
