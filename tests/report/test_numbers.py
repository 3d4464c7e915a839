"""Faults of counting: the report's rows against the simulated device's own counters. I8 throughout."""

from __future__ import annotations

import json
import threading

import pytest
import torch

from omni_components import TransferError, offload
from omni_components.demo import DemoPipeline
from tests.helpers.pipelines import KINDS, build, kinds_of, payload


def totals(report):
    return {
        field: sum(getattr(row, field) for row in report.rows) for field in ("bytes_in", "bytes_out", "loads")
    }


def rows(report):
    return {row.name: row for row in report.rows}


@pytest.mark.parametrize("arena", ["keep", "fit"])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_loads_and_peak_are_those_of_the_device(sim, kind, arena):
    target = build(kind, width=64)
    x = torch.randn(3, 64, device=sim.device)
    sim.reset()
    with offload(target, sim.device, arena=arena) as handle:
        for _ in range(3):
            target.use("A", x)
            target.use("B", x)
        stats, report = sim.stats(), handle.report()
        assert totals(report)["bytes_in"] == stats.h2d_bytes
        assert totals(report)["bytes_out"] == stats.d2h_bytes == 0
        assert totals(report)["loads"] == len(kinds_of(handle.events, "load"))
        a, b = rows(report)[target.names["A"]], rows(report)[target.names["B"]]
        assert (a.loads, a.evictions, b.loads, b.evictions) == (3, 3, 3, 2)
        assert (a.bytes_in, b.bytes_in) == (3 * payload(target.module("A")), 3 * payload(target.module("B")))
        residents = sum(row.bytes for row in report.rows if row.resident)
        assert report.peak_bytes == residents + max(a.bytes, b.bytes) == report.predicted_peak


def test_held_device_memory_is_what_the_device_allocated(sim):
    target = build("pipeline", width=64)
    before = sim.stats().allocated
    with offload(target, sim.device) as handle:
        target.use("A", torch.randn(3, 64, device=sim.device))
        assert handle.report().facts.arena_bytes == sim.stats().allocated - before


def test_pinned_bytes_are_what_the_device_pinned(sim):
    target = build("pipeline", width=64)
    with offload(target, sim.device) as handle:
        facts = handle.report().facts
        assert facts.pinned_bytes == sim.stats().pinned > 0
        assert (facts.mapped_bytes, facts.binding) == (0, "slots")
    with offload(target, sim.device, pin_memory=False) as handle:
        facts = handle.report().facts
        assert (facts.pinned_bytes, sim.stats().pinned) == (0, 0)
        assert facts.pageable_bytes >= payload(target.A) + payload(target.B)


def test_a_weight_changed_on_the_device_counts_as_bytes_out(sim):
    """I7: written back once, when it leaves."""
    target = build("pipeline", width=64)
    with offload(target, sim.device) as handle:
        sim.reset()
        with handle.scope("A"):
            target.A.layers[0].weight.add_(1)
        handle.release()
        row = rows(handle.report())["A"]
        assert row.bytes_out == sim.stats().d2h_bytes == target.A.layers[0].weight.nbytes


def test_an_edit_without_a_trace_counts_as_bytes_out(sim):
    """I7: ``editing`` copies the whole component home, and the report says so."""
    target = build("pipeline", width=64)
    with offload(target, sim.device) as handle:
        sim.reset()
        with handle.editing("A"):
            target.A.layers[0].weight.data.add_(1)
        row = rows(handle.report())["A"]
        assert row.bytes_out == sim.stats().d2h_bytes == payload(target.A)
        assert ("write_back", "A") in kinds_of(handle.events, "write_back")


def test_a_load_that_failed_counts_no_bytes_in_and_no_load(sim):
    """I6: what a broken copy sent in vain is not in the row."""
    target = build("pipeline", width=64)
    x = torch.randn(3, 64, device=sim.device)
    with offload(target, sim.device) as handle:
        sim.fail(copy=0)
        with pytest.raises(TransferError):
            target.use("A", x)
        row = rows(handle.report())["A"]
        assert (row.loads, row.evictions, row.bytes_in) == (0, 0, 0)
        target.use("A", x)
        row = rows(handle.report())["A"]
        assert (row.loads, row.bytes_in) == (1, payload(target.A))


def test_a_thread_that_waits_for_its_turn_shows_in_the_row():
    target = build("pipeline")
    with offload(target, "cpu") as handle:
        done = threading.Event()

        def other():
            with handle.scope("B"):
                done.set()

        with handle.scope("A"):
            thread = threading.Thread(target=other)
            thread.start()
            assert not done.wait(0.05)
        thread.join(10)
        report = handle.report()
    assert 0.04 < rows(report)["B"].waited < 10
    assert rows(report)["A"].waited == 0
    assert "waited" in str(report)


def test_a_report_after_disable_still_has_its_rows(sim):
    """As in the README: ``with offload(pipe) as handle: ...`` and then ``print(handle.report())``."""
    target = build("pipeline", width=64)
    x = torch.randn(3, 64, device=sim.device)
    with offload(target, sim.device) as handle:
        target.use("A", x)
        target.use("B", x)
        inside = handle.report()
    after = handle.report()
    assert [row.name for row in after.rows] == ["B", "A"]
    assert (rows(after)["A"].evictions, rows(after)["B"].evictions) == (1, 1)
    assert (after.peak_bytes, after.predicted_peak) == (inside.peak_bytes, inside.predicted_peak)
    assert after.facts == inside.facts
    assert kinds_of(after.events, "disable") == [("disable", "B"), ("disable", "A")]
    assert [line.count("32.5 KiB") for line in str(after).splitlines() if line.startswith(("A ", "B "))] == [
        2,
        2,
    ]


def test_a_disabled_report_no_longer_changes(sim):
    first, second = build("pipeline", seed=1), build("pipeline", seed=2)
    x = torch.randn(3, 16, device=sim.device)
    with offload(first, sim.device) as one, offload(second, sim.device, ledger=one.ledger) as two:
        second.use("A", x)
        two.disable()
        before = two.report().to_dict()
        first.use("B", x)
        assert two.report().to_dict() == before


def test_a_report_of_a_shared_ledger_has_the_rows_of_all(sim):
    first, second = build("pipeline", seed=1), build("pipeline", seed=2)
    with offload(first, sim.device) as one, offload(second, sim.device, ledger=one.ledger) as two:
        names = [row.name for row in two.report().rows]
        assert names == [row.name for row in one.report().rows]
        assert len(set(names)) == 4


def test_every_value_of_to_dict_is_plain_and_survives_json(sim):
    target = build("pipeline")
    with offload(target, sim.device) as handle:
        target.use("A", torch.randn(2, 16, device=sim.device))
        plain = handle.report().to_dict()

    def check(value):
        if isinstance(value, dict):
            assert all(type(key) is str for key in value)
            for one in value.values():
                check(one)
        elif isinstance(value, list):
            for one in value:
                check(one)
        else:
            assert type(value) in (str, int, float, bool, type(None)), (
                value
            )  # enums are str, but not of this type

    check(plain)
    assert json.loads(json.dumps(plain)) == plain
    assert plain["events"][-1]["kind"] == "load"
    assert plain["events"][-1]["cause"] == "hook"


@pytest.mark.parametrize("place", ["cpu", "sim"])
def test_the_demo_loads_each_part_once_and_peaks_at_residents_and_the_largest(place, sim):
    """I1, I8: what the README's picture shows."""
    device = "cpu" if place == "cpu" else sim.device
    pipe = DemoPipeline.from_pretrained(mapped=place == "cpu")
    with offload(pipe, device) as handle:
        pipe("three one four", steps=2)
        report = handle.report()
    swapped = [row for row in report.rows if not row.resident]
    assert {row.name for row in swapped} == {"text_encoder", "reasoner", "generator"}
    assert [row.loads for row in swapped] == [1, 1, 1]
    assert report.peak_bytes == sum(row.bytes for row in report.rows if row.resident) + max(
        row.bytes for row in swapped
    )
    assert report.thrash == ()
    files = pipe.state_dict()
    assert totals(report)["bytes_in"] == sum(one.nbytes for one in files.values())
    assert report.facts.mapped_bytes == (totals(report)["bytes_in"] if place == "cpu" else 0)
