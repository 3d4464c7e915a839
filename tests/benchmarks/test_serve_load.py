"""A shortened run of ``benchmarks/serve_load.py``: 16 clients at once against the real program."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks import serve_load


def test_many_clients_get_right_pictures_all_of_them_and_share_the_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I1, I2, I4, I6, I8 are checked by the service after each answer."""
    file = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["serve_load.py", "--quick", "--json", str(file)])
    assert serve_load.main() == 0
    result = json.loads(file.read_text())
    assert result["requests"] == serve_load.CLIENTS * 5
    assert (result["wrong"], result["lost"], result["broken_invariants"]) == (0, 0, 0)
    assert 0 < result["loads_per_request"] < 1.0
    assert 0 < result["batches"] < result["requests"]  # they were drawn together
    assert 0 < result["p50_ms"] <= result["p95_ms"]
