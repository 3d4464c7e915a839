"""The benchmark, shortened, so that it cannot rot: what it writes, not how fast this machine is today."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks import cosmos3_split


def test_the_benchmark_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    file = tmp_path / "figures.json"
    cosmos3_split.main(["--quick", "--threads", "1", "--json", str(file)])
    figures = json.loads(file.read_text(encoding="utf-8"))
    assert [row["text_tokens"] for row in figures["rows"]] == [64, 512]
    for row in figures["rows"]:
        assert row["largest_difference"] <= 1e-5
        assert row["joint_s"] / row["split_s"] == pytest.approx(row["ratio"])
        assert figures[f"ratio_{row['text_tokens']}"] == row["ratio"]
    assert "joint/split" in capsys.readouterr().out
    assert torch.get_num_threads() == threads
