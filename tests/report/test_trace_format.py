"""Faults of the trace that a viewer would trip over: fields that are missing, pairs and slices that do not fit."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from omni_components import Omni
from omni_components.cli import app
from omni_components.report.trace import write_trace

from .trace_format import problems


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The trace of ``omni-components run demo``."""
    place = tmp_path_factory.mktemp("trace")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    words = ["run", "demo", "one", "two", "--steps", "2", "--device", "cpu", "--out", str(place / "d.png")]
    ran = CliRunner().invoke(app, [*words, "--trace", str(place / "d.json")])
    torch.set_num_threads(threads)
    assert ran.exit_code == 0, ran.output
    return (place / "d.json").read_text(encoding="utf-8")


def test_a_trace_of_a_real_run_that_a_viewer_would_not_show(text: str) -> None:
    assert problems(text) == []
    phases = {one["ph"] for one in json.loads(text)["traceEvents"]}
    assert {"M", "X", "C"} <= phases  # a file without events would pass as well


def test_a_trace_of_two_requests_with_copies_ahead_and_weights_that_changed(sim: Any, tmp_path: Path) -> None:
    """I7 in between: what was written back is an instant."""
    with Omni("demo", enable_cpu_offload=True, device=sim.device, prefetch=True) as omni:
        omni.generate("one", steps=1)
        with omni.handle.scope("reasoner"), torch.no_grad():
            next(one for one in omni.pipeline.parameters() if one.device.type == sim.device.type).add_(1)
        omni.generate("two", steps=1)
        omni.handle.release()
        write_trace(omni.report(), tmp_path / "t.json")
    text = (tmp_path / "t.json").read_text(encoding="utf-8")
    assert problems(text) == []
    assert {"M", "X", "C", "i"} <= {one["ph"] for one in json.loads(text)["traceEvents"]}


def first(events: list[dict[str, Any]], phase: str, name: str | None = None) -> dict[str, Any]:
    return next(one for one in events if one["ph"] == phase and name in (None, one["name"]))


def without(field: str, phase: str) -> Callable[[list[dict[str, Any]]], None]:
    return lambda events: first(events, phase).pop(field)


def having(phase: str, **fields: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda events: first(events, phase).update(fields)


def more(*added: dict[str, Any]) -> Callable[[list[dict[str, Any]]], None]:
    common = {"pid": 1, "tid": 1, "ts": 1e9, "name": "more", "cat": "more"}
    return lambda events: events.extend({**common, **one} for one in added)


def too_long(events: list[dict[str, Any]]) -> None:
    load = first(events, "X", "load")
    load["dur"] = max(one["ts"] + one.get("dur", 0) for one in events) + 1e6


BROKEN = {
    "no phase": (without("ph", "X"), '"ph" is a required property'),
    "a phase that there is not": (having("X", ph="Y"), "is not one of"),
    "no duration": (without("dur", "X"), '"dur" is a required property'),
    "a negative duration": (having("X", dur=-1), "less than the minimum"),
    "a negative time": (having("X", ts=-1), "less than the minimum"),
    "a time in words": (having("X", ts="now"), 'is not of type "number"'),
    "no time": (without("ts", "C"), '"ts" is a required property'),
    "a counter in words": (having("C", args={"bytes": "many"}), 'is not of type "number"'),
    "a counter of nothing": (having("C", args={}), "less than 1 property"),
    "metadata of an unknown kind": (having("M", name="colour"), "not valid under any"),
    "a name that is a number": (having("M", args={"name": 7}), "not valid under any"),
    "an instant without a scope": (more({"ph": "i"}), '"s" is a required property'),
    "a beginning without an end": (more({"ph": "B"}), "never ends"),
    "an end without a beginning": (more({"ph": "E"}), "without a beginning"),
    "ends in the wrong order": (
        more(
            {"ph": "B", "name": "a"},
            {"ph": "B", "name": "b"},
            {"ph": "E", "name": "a"},
            {"ph": "E", "name": "b"},
        ),
        "ends inside another",
    ),
    "a wait that never ends": (more({"ph": "b", "id": 1}), "'b' without 'e'"),
    "a wait that ends before it begins": (
        more({"ph": "b", "id": 1, "ts": 2e9}, {"ph": "e", "id": 1, "tid": 2}),
        "ends before it begins",
    ),
    "a wait without an id": (more({"ph": "b"}, {"ph": "e"}), '"id" is a required property'),
    "a flow to nowhere": (more({"ph": "s", "id": 1}), "'s' without 'f'"),
    "a flow from nowhere": (more({"ph": "f", "id": 1}), "'f' without 's'"),
    "a track that goes back in time": (
        more({"ph": "X", "dur": 0}, {"ph": "X", "dur": 0, "ts": 9e8}),
        "comes after",
    ),
    "slices that overlap": (too_long, "overlaps the one before it"),
    "a track without a name": (more({"ph": "X", "dur": 1, "tid": 99}), "has no name"),
    "a track with two names": (
        more({"ph": "M", "name": "thread_name", "args": {"name": "again"}}),
        "has two names",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_trace_that_passes(text: str, name: str) -> None:
    """The check must be able to fail, and say why."""
    spoil, said = BROKEN[name]
    trace = copy.deepcopy(json.loads(text))
    spoil(trace["traceEvents"])
    assert any(said in one for one in problems(json.dumps(trace))), problems(json.dumps(trace))


@pytest.mark.parametrize("broken", ["", "[", '{"traceEvents": [{"ph": "C", "ts": NaN}]}', "{}", "7"])
def test_a_file_that_is_no_trace_and_passes(broken: str) -> None:
    assert problems(broken) != []
