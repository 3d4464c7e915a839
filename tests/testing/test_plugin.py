"""The pytest plugin: what a project that installs the package gets."""

from __future__ import annotations

import pytest

import omni_components.attach.pipeline  # noqa: F401  # a run of pytester forgets the modules that it was first to load

pytest_plugins = ["pytester"]

RACE = """
import torch

def test_race(simulated_accelerator):
    side = torch.Stream(device=simulated_accelerator.device)
    target = torch.zeros(4, device=simulated_accelerator.device)
    with side:
        target.copy_(torch.ones(4).pin_memory(), non_blocking=True)
"""

EXPECTED = """
    assert len(simulated_accelerator.expect_races()) == 1
    side.synchronize()
"""


def test_each_test_gets_a_fresh_accelerator(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        RACE
        + EXPECTED
        + """
import pytest

kept = []

def test_first(simulated_accelerator):
    kept.append(torch.ones(10, device=simulated_accelerator.device))
    assert simulated_accelerator.stats().allocated == 512

def test_second(simulated_accelerator):
    assert simulated_accelerator.capacity is None
    assert simulated_accelerator.stats().allocated == 0

@pytest.mark.max_device_memory("1MiB")
def test_capacity(simulated_accelerator):
    assert simulated_accelerator.capacity == 2**20
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**20, device=simulated_accelerator.device)
"""
    )
    pytester.runpytest_inprocess("-p", "no:cacheprovider", "--strict-markers").assert_outcomes(passed=4)


def test_a_race_left_behind_fails_the_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(RACE)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(
        ["race: *missing wait: stream 1 of sim:0 must wait for default stream of sim:0 *"]
    )


@pytest.fixture
def no_compiler(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_COMPONENTS_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("CXX", "no-such-compiler")


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_tests_are_skipped(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    pytester.makepyfile(RACE)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*not available: no C++ compiler*install g++*"])


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_ci_fails(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    pytester.makepyfile(RACE)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*a CI run may not skip it*"])


# --- reports and timelines ------------------------------------------------------------------------------

MODEL = """
import torch
from torch import nn
from omni_components import SplitModel, offload

class Model(SplitModel):
    _offload_components = {"reader": ["one"], "writer": ["two"]}

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with self._offload_context("reader"):
            x = self.one(x)
        with self._offload_context("writer"):
            return self.two(x)

def request():
    with offload(Model()) as handle:
        return handle._target(torch.ones(1, 4))
"""


def test_a_failed_test_shows_the_timeline_of_its_own_ledgers(pytester: pytest.Pytester) -> None:
    """Also of a ledger that is gone by then, and not of those of the tests before."""
    pytester.makepyfile(
        MODEL
        + """
def test_before():
    model = Model()
    test_before.kept = offload(model)

def test_failing():
    request()
    assert False

def test_without_a_ledger():
    assert False
"""
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        [
            "*test_failing*",
            "*residency timeline*",
            "ledger of reader, writer",
            "*enable*reader*(manual)*",
            "*load*reader*(scope)*on the device",
            "*evict*reader*(scope)*0 B on the device",
            "*load*writer*(scope)*on the device",
            "*disable*writer*",
            "*test_without_a_ledger*",
        ]
    )
    assert result.stdout.str().count("residency timeline") == 1
    assert result.stdout.str().count("ledger of reader, writer") == 1


def test_a_ledger_first_used_inside_a_test_is_shown_too(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
def test_failing():
    from omni_components.testing.movers import RecordingMover
    from omni_components import Component, ResidencyLedger, Role
    ledger = ResidencyLedger(RecordingMover({"a": 1}))
    ledger.admit([Component(name="a", role=Role.DIT, bytes=1)], lambda one, other: False)
    with ledger.scope("a"):
        assert False
"""
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["ledger of a", "*enable*a*", "*load*a*1 B over the link, 1 B on the device"])


def test_long_timelines_are_cut_to_what_came_last(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        MODEL
        + """
def test_failing():
    model = Model()
    with offload(model) as handle:
        for _ in range(50):
            model(torch.ones(1, 4))
        assert False
"""
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["*... 164 events before"])
    assert len([line for line in result.stdout.lines if line.endswith("on the device")]) == 40


def test_offload_report_is_of_the_last_offload(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        MODEL
        + """
import pytest

def test_report(offload_report):
    with pytest.raises(LookupError, match="has not called offload"):
        offload_report()
    request()
    request()
    assert {row.name: row.loads for row in offload_report().rows} == {"reader": 1, "writer": 1}
    assert len(offload_report.handles) == 2
    assert offload_report(0).peak_bytes == offload_report().peak_bytes

def test_another(offload_report):
    assert offload_report.handles == []
"""
    )
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=2)


def test_the_plugin_leaves_the_ledger_as_it_was(pytester: pytest.Pytester) -> None:
    from omni_components.residency.events import History

    before = History.__init__
    pytester.makepyfile(MODEL + "\ndef test_it():\n    request()\n")
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)
    assert History.__init__ is before
