"""Rows as lines, as a summary, and as the page of the documentation."""

from __future__ import annotations

import statistics
from typing import Any

FLAGS = ("runs_resident", "runs_diffusers", "equal_diffusers", "runs_ours", "equal", "second_equal")


def line(row: dict[str, Any]) -> str:
    """One row for the terminal."""
    flags = "".join("y" if row.get(flag) else "-" for flag in FLAGS)
    sizes = [row.get(name, 0) for name in ("bytes_in", "bytes_in_diffusers", "bytes_back", "bytes_back_diffusers")]
    peaks = f"{row.get('peak', 0)}/{row.get('peak_diffusers', 0)}"
    worse = "" if no_worse(row) else " WORSE"
    counts = f"{sizes[0]}/{sizes[1]} {sizes[2]}/{sizes[3]} {peaks}"
    return f"{flags} {row['class']} {counts} {row.get('seconds', 0)}s{worse} {row.get('reason', '')}"


def no_worse(row: dict[str, Any]) -> bool:
    """No byte more than diffusers' own offload, where that runs; and none back."""
    if not row.get("runs_ours"):
        return not row.get("runs_resident")
    if not row["runs_diffusers"]:
        return row["bytes_back"] <= 0
    return (
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
        "bytes_back": sum(row["bytes_back"] for row in ran),
        "in_to_weights": _median(row["bytes_in"] / 2 / row["weights"] for row in both),
        "in_to_weights_diffusers": _median(row["bytes_in_diffusers"] / 2 / row["weights"] for row in both),
        "back_to_weights_diffusers": _median(row["bytes_back_diffusers"] / 2 / row["weights"] for row in both),
    }


def _median(numbers: Any) -> float:
    known = list(numbers)
    return round(statistics.median(known), 3) if known else 0.0


def text(rows: list[dict[str, Any]]) -> str:
    """The page."""
    return ""
