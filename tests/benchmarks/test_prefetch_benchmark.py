"""A shortened run of ``benchmarks/prefetch.py``: virtual time is exact on any machine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from benchmarks import prefetch

from omni_components.testing.plugin import require_simulated_accelerator

LOADS = ("heavy", "light", "surprising")


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    require_simulated_accelerator()
    file = tmp_path_factory.mktemp("prefetch") / "prefetch.json"
    prefetch.main(["--json", str(file), "--quick"])
    found: dict[str, Any] = json.loads(file.read_text())
    return {"heavy": found, "light": found["light"], "surprising": found["surprising"]}


def test_without_prefetch_every_copy_is_waited_for(figures: dict[str, Any]) -> None:
    """The model of time itself: bytes over the link, and nothing else."""
    one = sum(prefetch.PARAMETERS.values()) * prefetch.BYTES_PER_PARAMETER / prefetch.LINK
    for load in ("heavy", "light"):
        assert figures[load]["exposed_seconds_off"] == pytest.approx(
            one * figures[load]["requests"], rel=1e-3
        )


def test_the_exposed_wait_falls_by_four_fifths_where_phases_are_long_enough(figures: dict[str, Any]) -> None:
    assert figures["heavy"]["reduction"] >= 0.8


def test_a_phase_hides_at_most_as_much_as_it_computes_for(figures: dict[str, Any]) -> None:
    """One short prompt: only the next request's encoder is hidden wholly."""
    assert 0.3 < figures["light"]["reduction"] < 0.5
    assert figures["light"]["wasted_guesses"] == 0


def test_wrong_guesses_cost_no_more_than_was_gained(figures: dict[str, Any]) -> None:
    surprising = figures["surprising"]
    assert surprising["wasted_guesses"] > 0
    assert surprising["wasted_bytes"] > 0
    assert surprising["reduction"] > 0


@pytest.mark.parametrize("load", LOADS)
def test_switching_with_prefetch_allocates_nothing(figures: dict[str, Any], load: str) -> None:
    """I8."""
    assert figures[load]["device_allocations"] == 0
