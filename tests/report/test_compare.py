"""Faults of a plan beside a run: the wrong policy, the wrong number of requests, waits that nobody had."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_components import ModelError, Omni, offload
from omni_components.planning.plan import plan_for
from omni_components.report.account import shares
from omni_components.report.compare import compare
from omni_components.report.lines import plan_lines, time_lines
from omni_components.report.read import read_trace
from omni_components.report.report import ResidencyReport
from omni_components.report.trace import write_trace
from omni_components.residency.events import Cause, EventKind, ResidencyEvent
from tests.diffusers import tiny
from tests.helpers.pipelines import build

from .histories import ledger_of, report_of, use


def figures(found: Any) -> dict[str, tuple[Any, Any]]:
    return {one.what: (one.planned, one.real) for one in found.figures}


def planned(target: Any) -> Any:
    return json.loads(json.dumps(plan_for(target).to_dict()))


def back(report: ResidencyReport, folder: Path) -> ResidencyReport:
    """Through the file, as ``omni-components report`` gets it."""
    write_trace(report, folder / "t.json")
    return read_trace(folder / "t.json")


# --- the policy -------------------------------------------------------------------------------------------


def test_a_policy_that_the_trace_forgets(sim: Any, tmp_path: Path) -> None:
    fields = {"prefetch": ["A", "B"], "offload_components": {"encoder", "dit"}, "timeout": 2.5}
    target = build("pipeline", width=16)
    with offload(target, sim.device, **fields) as handle:
        handle.load("A")
        report = handle.report()
    found = back(report, tmp_path)
    assert found.policy == report.policy
    assert found.policy["prefetch"] == ["A", "B"]
    assert found.policy["offload_components"] == ["dit", "encoder"]
    assert found.policy["vae"] == "resident"


@pytest.mark.parametrize("vae", ["resident", "exclusive"])
def test_an_option_that_is_guessed_from_what_moved(sim: Any, tmp_path: Path, vae: str) -> None:
    """The VAEs of a diffusers pipeline take turns under either policy: only the record tells which it was."""
    pipe = tiny.stable_diffusion_3()
    plan = planned(pipe)
    with offload(pipe, sim.device, vae=vae) as handle:
        for name in ("text_encoder", "transformer", "vae"):
            with handle.scope(name):
                pass
        found = compare(back(handle.report(), tmp_path), plan, "a plan")
    assert found.option == {"resident": "model level", "exclusive": "exclusive VAE"}[vae]
    assert (found.recorded, found.apart) == (True, {})


def test_a_policy_that_was_not_planned_for_and_is_not_told(sim: Any) -> None:
    target = build("pipeline", width=16)
    plan = planned(target)
    with offload(target, sim.device, exclusive_encoders=True) as handle:
        handle.load("A")
        found = compare(handle.report(), plan, "a plan")
    assert found.apart == {"exclusive_encoders": True}
    assert any("run with exclusive_encoders=True" in line for line in plan_lines(found))


def test_a_run_in_which_nothing_took_turns_beside_one_that_did(sim: Any) -> None:
    target = build("pipeline", width=16)
    plan = planned(target)
    with offload(target, sim.device, mode="auto") as handle:
        report = handle.report()
    assert all(row.resident for row in report.rows)
    assert compare(report, plan, "a plan").option == "all resident"


# --- the requests -----------------------------------------------------------------------------------------


def test_several_requests_beside_a_plan_for_one(sim: Any, tmp_path: Path) -> None:
    """I8: each of three requests moves what the plan says, and so do the three together."""
    with Omni("demo", enable_cpu_offload=True, device=sim.device) as omni:
        plan = planned(omni.pipeline)
        for seed in range(3):
            omni.generate("one", seed=seed, steps=1)
            omni.handle.release()
        report = omni.report()
    found = compare(back(report, tmp_path), plan, "a plan")
    assert (found.requests, found.counted, len(found.each), found.unlike) == (3, True, 3, ())
    for what in ("peak bytes", "loads", "link bytes"):
        assert figures(found)[what][0] == figures(found)[what][1], what
    assert sum(one.loads for one in found.each) == figures(found)["loads"][1] == 9
    assert sum(one.load_seconds for one in found.each) == pytest.approx(figures(found)["load seconds"][1])
    assert any("3 moved what was planned" in line for line in plan_lines(found))


def test_a_request_that_is_unlike_the_others_and_is_not_named(sim: Any) -> None:
    with Omni("demo", enable_cpu_offload=True, device=sim.device) as omni:
        plan = planned(omni.pipeline)
        omni.generate("one", seed=0, steps=1)
        omni.handle.load("text_encoder")  # so that the second finds it there
        omni.generate("two", seed=0, steps=1)
        found = compare(omni.report(), plan, "a plan")
    assert [(one.number, one.loads) for one in found.unlike] == [(2, 2)]
    assert figures(found)["loads"] == (6, 6)  # the sum alone would not show it
    assert any(line.strip().startswith("request 2: 2 loads") for line in plan_lines(found))


def test_requests_of_which_the_beginning_is_forgotten(sim: Any) -> None:
    with Omni("demo", enable_cpu_offload=True, device=sim.device, history=7) as omni:
        plan = planned(omni.pipeline)
        for _ in range(3):
            omni.generate("one", seed=0, steps=1)
            omni.handle.release()
        found = compare(omni.report(), plan, "a plan")
    assert [one.number for one in found.each] == [3]
    assert figures(found)["loads"] == (9, 9)  # the totals forget nothing


def test_a_number_of_requests_that_is_guessed() -> None:
    ledger = ledger_of({"a": 100, "b": 70})
    use(ledger, "a", "b", "a", "b")
    option = {"name": "model level", "device_peak": 100, "loads": 2, "link_bytes": 170, "link_seconds": 0.0}
    plan = {"options": [option], "components": []}
    alone, told = (compare(report_of(ledger), plan, "a plan", number) for number in (None, 2))
    assert (alone.requests, alone.counted, figures(alone)["loads"]) == (1, False, (2, 4))
    assert (told.requests, told.counted, figures(told)["loads"]) == (2, True, (4, 4))
    assert "--requests says it" in next(plan_lines(alone))


@pytest.mark.parametrize("plan", [{}, [], None, 7, {"options": [{}]}, {"options": [], "components": []}])
def test_a_plan_that_is_none(plan: Any) -> None:
    ledger = ledger_of({"a": 100})
    use(ledger, "a")
    with pytest.raises(ModelError, match="is not a plan"):
        compare(report_of(ledger), plan, "p.json")


# --- copies ahead -----------------------------------------------------------------------------------------


def event(kind: str, name: str, at: float, seconds: float = 0.0, cause: Cause = Cause.HOOK) -> ResidencyEvent:
    held = 10 if kind == "load" else 0
    return ResidencyEvent(
        kind=EventKind(kind), component=name, cause=cause, seconds=seconds, at=at, device_bytes=held
    )


def test_a_wait_that_nobody_had() -> None:
    """b is copied while a computes, from 2 to 3; it is asked for at 6, and found there in a tenth of a second."""
    ledger = ledger_of({"a": 10, "b": 10})
    events = (
        event("load", "a", 1.0, 1.0),
        event("load", "b", 3.0, 1.0, Cause.PREFETCH),
        event("evict", "a", 6.0),
        event("load", "b", 6.1, 0.1),
        event("load", "a", 7.0, 0.5, Cause.PREFETCH),
    )
    report = replace(report_of(ledger), events=events, taken_at=10.0)
    a, b = shares(report)
    assert (a.loading, a.ahead, a.loaded) == pytest.approx(
        (1.0, 3.5, 5.0)
    )  # the second time, nobody came for it
    assert (b.loading, b.ahead, b.loaded) == pytest.approx((0.1, 4.0, 3.9))
    assert any("b: loading 0.1000 s, copied ahead in 4.0000 s" in line for line in time_lines(report))


def test_a_copy_ahead_that_counts_as_time_that_was_waited_for(sim: Any) -> None:
    target = build("pipeline", width=64)
    x = torch.randn(3, 64, device=sim.device)
    with offload(target, sim.device, prefetch=["A", "B"]) as handle:
        for name in ("A", "B", "A", "B"):
            target.use(name, x)
        report = handle.report()
    assert sum(row.prefetched for row in report.rows) > 0
    waited = sum(
        one.seconds for one in report.events if one.kind == "load" and one.cause is not Cause.PREFETCH
    )
    assert sum(one.loading for one in shares(report)) == pytest.approx(waited)
    assert sum(one.ahead for one in shares(report)) > 0
