"""Faults of ``report``: tracebacks for wrong files, figures that are not compared."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from omni_components.cli import app
from omni_components.report.trace import write_trace
from tests.report.histories import ledger_of, report_of, use


def run(*words):
    return CliRunner().invoke(app, ["report", *map(str, words)])


@pytest.fixture
def trace(tmp_path):
    ledger = ledger_of({"a": 100, "b": 70})
    use(ledger, "a", "b", "a", "b", "a")
    write_trace(report_of(ledger), tmp_path / "t.json")
    return tmp_path / "t.json"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "is not a trace"),
        ('{"traceEvents": [', "cut short"),
        ('{"traceEvents": []}', "another program"),
        ('{"traceEvents": [], "otherData": {"omni_components": {"version": 1}}}', "damaged"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_trace(tmp_path, text, said):
    path = tmp_path / "t.json"
    if text is not None:
        path.write_text(text)
    result = run(path)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert said in result.stderr


def test_an_empty_trace(tmp_path):
    write_trace(report_of(ledger_of({"a": 1})), tmp_path / "t.json")
    assert "nothing moved" in run(tmp_path / "t.json").stderr


def test_thrash_that_is_not_named_and_files_that_are_not_written(trace, tmp_path):
    result = run(trace, "--html", tmp_path / "r.html", "--svg", tmp_path / "r.svg")
    assert result.exit_code == 0, result.stderr
    assert "avoidable: 270 B in 3 reloads" in result.stdout
    assert (tmp_path / "r.html").exists()
    assert (tmp_path / "r.svg").exists()


def test_a_difference_to_the_plan_that_is_not_told(trace, tmp_path):
    option = {"name": "model level", "device_peak": 100, "loads": 2, "link_bytes": 170, "link_seconds": 0.0}
    plan = {"options": [option], "components": [{"name": "a", "bytes": 100}, {"name": "b", "bytes": 60}]}
    (tmp_path / "p.json").write_text(json.dumps(plan))
    said = run(trace, "--plan", tmp_path / "p.json").stdout
    assert "peak bytes: 100 planned, 100 real (equal)" in said
    assert "loads: 2 planned, 5 real (+3)" in said
    assert "bytes of b: 60 planned, 70 real (+10)" in said


def test_a_plan_that_is_none(trace, tmp_path):
    (tmp_path / "p.json").write_text("{}")
    assert "is not a plan" in run(trace, "--plan", tmp_path / "p.json").stderr
