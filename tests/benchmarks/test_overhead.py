"""A shortened run of ``benchmarks/overhead.py``, so that it cannot rot; the bounds leave room for a busy machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import overhead

from omni_components.testing.plugin import require_simulated_accelerator

ROOM = 4  # times the target: it tells a changed order of growth, not a slow minute


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    require_simulated_accelerator()
    file: Path = tmp_path_factory.mktemp("overhead") / "figures.json"
    overhead.main(["--json", str(file), "--quick"])
    return json.loads(file.read_text())


@pytest.mark.parametrize("figure", overhead.TARGETS)
def test_each_figure_is_within_reach_of_its_target(result: dict[str, Any], figure: str) -> None:
    assert 0 < result[figure] <= ROOM * overhead.TARGETS[figure]


@pytest.mark.parametrize("figure", ["scope_us", "hook_us"])
def test_the_cost_does_not_grow_with_the_tensors(result: dict[str, Any], figure: str) -> None:
    """800 times the tensors behind the name: nothing is asked of them."""
    assert result[f"{figure}_8000"] <= 2 * result[f"{figure}_10"]


def test_accelerates_hook_stands_beside_ours(result: dict[str, Any]) -> None:
    for tensors in overhead.TENSORS:
        assert result[f"accelerate_hook_us_{tensors}"] > 0


def test_the_import_brings_nothing_heavy_along(result: dict[str, Any]) -> None:
    assert result["heavy_imports"] == []


def test_a_missing_file_name_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        overhead.main([])
    assert "--json" in capsys.readouterr().err
