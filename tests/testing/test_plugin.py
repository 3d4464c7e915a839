"""The pytest plugin: what a project that installs the package gets."""

from __future__ import annotations

import pytest

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
