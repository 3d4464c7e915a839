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
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith(f"omni-components: Invalid value for TRACE: '{path}' ")
    assert said in result.stderr


def test_an_empty_trace(tmp_path):
    write_trace(report_of(ledger_of({"a": 1})), tmp_path / "t.json")
    result = run(tmp_path / "t.json")
    assert result.exit_code == 2
    assert "nothing moved" in result.stderr


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


@pytest.mark.parametrize(("text", "said"), [("{}", "is not a plan"), (None, "cannot be read")])
def test_a_plan_that_is_none(trace, tmp_path, text, said):
    if text is not None:
        (tmp_path / "p.json").write_text(text)
    result = run(trace, "--plan", tmp_path / "p.json")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("omni-components: Invalid value for --plan: ")
    assert said in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--html", "t.html"), "'t.html' is the trace"),
        (("--html", "./sub/../t.html"), "is the trace"),
        (("--html", "link.html"), "'link.html' is the trace"),
        (("--plan", "p.svg", "--svg", "p.svg"), "'p.svg' is the plan"),
        (("--png", "x.svg"), "does not end in .png; did you mean --svg?"),
        (("--svg", "x.htm"), "did you mean --html?"),
        (("--html", "x.txt"), "'x.txt' does not end in .html or .htm."),
        (("--htm", "x.htm"), "--html"),
        (("--requests", "2"), "give --plan"),
        (("--plan", "p.svg", "--requests", "0"), "--requests"),
    ],
)
def test_names_that_would_overwrite_what_is_read_or_that_say_something_else(
    trace, tmp_path, monkeypatch, words, said
):
    monkeypatch.chdir(tmp_path)
    trace.rename("t.html")
    (tmp_path / "link.html").symlink_to("t.html")
    (tmp_path / "sub").mkdir()
    (tmp_path / "p.svg").write_text("{}")
    before = {one.name: one.read_bytes() for one in tmp_path.iterdir() if one.is_file()}
    result = run("t.html", *words)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert said in result.stderr
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir() if one.is_file()} == before


def test_two_pictures_under_one_name(trace, tmp_path, monkeypatch):
    """Suffixes keep the options apart, but not on a file system where one file has two names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.png").write_bytes(b"old")
    (tmp_path / "two.svg").hardlink_to(tmp_path / "one.png")
    result = run(trace, "--png", "one.png", "--svg", "two.svg")
    assert result.exit_code == 2
    assert "'two.svg' is written by --png" in result.stderr
    assert (tmp_path / "one.png").read_bytes() == b"old"


def test_a_trace_of_before_the_policy_was_recorded(trace, tmp_path):
    """It is read as ever, and what is guessed is called a guess."""
    old = json.loads(trace.read_text())
    del old["otherData"]["omni_components"]["policy"], old["otherData"]["omni_components"]["requests"]
    trace.write_text(json.dumps(old))
    option = {"name": "model level", "device_peak": 100, "loads": 2, "link_bytes": 170, "link_seconds": 0.0}
    (tmp_path / "p.json").write_text(json.dumps({"options": [option], "components": []}))
    result = run(trace, "--plan", tmp_path / "p.json")
    assert result.exit_code == 0, result.stderr
    assert "'model level' is a guess" in result.stdout
    assert "not recorded how many" in result.stdout
    facts = json.loads(run(trace, "--json").stdout)
    assert (facts["policy"], facts["requests"], facts["plan"]) == (None, [], None)
