"""The examples run as their users would run them: without an accelerator, and with one."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omni_components.testing import SimulatedAccelerator

EXAMPLES = Path(__file__).parents[2] / "examples"
SWITCHES = {
    "pipeline_with_lists.py": [
        "load vae",
        "load text_encoder",
        "load vision_model",
        "evict text_encoder",
        "evict vision_model",
        "load transformer",
    ],
    "split_model.py": ["load (rest)", "load reasoner", "evict reasoner", "load generator"],
}


@pytest.fixture(params=SWITCHES)
def example(request: pytest.FixtureRequest) -> tuple[str, Callable[[str], None]]:
    return request.param, runpy.run_path(str(EXAMPLES / request.param))["main"]


def test_an_example_that_moves_more_than_it_must(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    name, main = example
    main("cpu")
    assert_shown(name, capsys.readouterr().out)


def test_an_example_that_only_runs_on_the_host(
    example: Any, simulated_accelerator: SimulatedAccelerator, capsys: pytest.CaptureFixture[str]
) -> None:
    name, main = example
    main(str(simulated_accelerator.device))
    assert_shown(name, capsys.readouterr().out)
    assert simulated_accelerator.stats().h2d_bytes > 0


def test_an_example_that_needs_its_folder(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "split_model.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert "without offload: 0.0e+00" in done.stdout


def assert_shown(name: str, printed: str) -> None:
    switches = [" ".join(line.split("->")[0].split()) for line in printed.splitlines() if "->" in line]
    assert switches == SWITCHES[name]
    assert "without offload: 0.0e+00" in printed
