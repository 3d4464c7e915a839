"""Faults of the trace as a file: a history that comes back changed, events that no viewer takes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from omni_components.report.account import idle, shares
from omni_components.report.html import as_html
from omni_components.report.read import read_trace
from omni_components.report.trace import chrome_trace, write_trace

from .histories import ledger_of, report_of, use

# What each phase must have, by "Trace Event Format"
# (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
NEEDED = {"X": {"dur"}, "M": {"args"}, "C": {"args"}, "i": {"s"}, "b": {"id", "cat"}, "e": {"id", "cat"}}


@given(st.lists(st.sampled_from(["a", "b", "v"]), min_size=1, max_size=8))
def test_a_history_that_comes_back_changed(tmp_path_factory, order):
    ledger = ledger_of({"a": 100, "b": 70, "v": 5}, residents=["v"])
    use(ledger, *order)
    report = replace(report_of(ledger), notes=("a note",))
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    write_trace(report, path)
    assert read_trace(path).to_dict() == report.to_dict()  # exactly, finer than the microsecond
    for event in chrome_trace(report)["traceEvents"]:
        assert {"ph", "name", "pid", "tid", "ts"} | NEEDED[event["ph"]] <= event.keys()
        assert isinstance(event["ts"], int | float)
        assert event["ts"] >= 0


def test_time_that_is_counted_twice_or_not_at_all():
    ledger = ledger_of({"a": 100, "b": 70})
    use(ledger, "a", "b", "a")
    report = report_of(ledger)
    empty, whole = idle(report)
    taken = sum(one.loading + one.loaded for one in shares(report))
    assert abs(empty + taken - whole) < 1e-3  # a and b exclude each other: I1


def test_a_name_that_is_markup():
    ledger = ledger_of({"<script>alert(1)</script>": 100})
    use(ledger, "<script>alert(1)</script>")
    page = as_html(report_of(ledger), ["<b>"])
    assert "<script" not in page
    assert "<b>" not in page
