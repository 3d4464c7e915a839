"""examples/test_my_model.py: it passes as it is, and with a bug planted in it the failure names tensor and line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401

# A run of pytester forgets the modules that it was first to load; these two would not load twice.

pytest_plugins = ["pytester"]

EXAMPLE = Path(__file__).parents[2] / "examples" / "test_my_model.py"
READ = "            text = self.read(self.embed(ids))\n"
WAIT_FOR_STYLE = "        here.wait_stream(side)  # the generator needs the style\n"
WAIT_FOR_COMPUTE = (
    "        side.wait_stream(here)  # the last request may still compute with the last style\n"
)


def run(pytester: pytest.Pytester, *planted: tuple[str, str]) -> tuple[pytest.RunResult, Path]:
    """The example's test in a project of its own, with some text replaced by other text."""
    source = EXAMPLE.read_text(encoding="utf-8")
    for old, new in planted:
        assert source.count(old) == 1, f"the example has no longer exactly one {old!r}"
        source = source.replace(old, new)
    file = pytester.path / EXAMPLE.name
    file.write_text(source, encoding="utf-8")
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-W", "error"), file


def numbers(file: Path, text: str) -> list[int]:
    """The lines of a file that contain a text."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return [number for number, line in enumerate(lines, start=1) if text in line]


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 40


@pytest.mark.usefixtures("simulated_accelerator", "one_thread")
class TestPlanted:
    """The failure is what a user of pytest reads."""

    def test_without_a_bug_it_passes(self, pytester: pytest.Pytester) -> None:
        run(pytester)[0].assert_outcomes(passed=1)

    def test_a_projection_used_outside_its_scope(self, pytester: pytest.Pytester) -> None:
        """I2."""
        result, file = run(
            pytester,
            (READ, "            text = self.embed(ids)\n"),
            ("text.mean(1)", "self.read(text).mean(1)"),
        )
        result.assert_outcomes(failed=1)
        (line,) = numbers(file, "self.read(text).mean(1)")
        text = result.stdout.str()
        found = re.search(
            r"1\. (.*) of the part 'reasoner' is used outside its scope at (\S+) in forward", text
        )
        assert found is not None, text
        assert "'read.0.weight'" in found[1]
        assert found[2] == f"{file}:{line}"
        result.stdout.fnmatch_lines(
            ["*residency timeline*", "ledger of reasoner, generator*", "*load*generator*"]
        )

    @pytest.mark.parametrize("wait", [WAIT_FOR_STYLE, WAIT_FOR_COMPUTE])
    def test_a_missing_wait(self, wait: str, pytester: pytest.Pytester) -> None:
        result, file = run(pytester, (wait, ""))
        result.assert_outcomes(failed=1)
        (copy,) = numbers(file, "self.style.copy_(")
        (use,) = numbers(file, "+ self.style")
        text = result.stdout.str()
        found = re.search(
            r"1\. missing wait: 'style' is used at (\S+) in forward\(\) while another stream", text
        )
        assert found is not None, text
        assert found[1] == f"{file}:{use if wait is WAIT_FOR_STYLE else copy}"
        assert wait is WAIT_FOR_COMPUTE or f"The copy is issued at {file}:{copy}." in text


@pytest.fixture
def no_compiler(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_COMPONENTS_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("CXX", "/nonexistent")


@pytest.mark.usefixtures("no_compiler")
class TestWithoutCompiler:
    """One clear reason. In a process of its own: here the device is loaded already."""

    def test_the_example_is_skipped(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CI", raising=False)
        (pytester.path / EXAMPLE.name).write_text(EXAMPLE.read_text(encoding="utf-8"), encoding="utf-8")
        result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rs")
        result.assert_outcomes(skipped=1)
        result.stdout.fnmatch_lines(["*not available: no C++ compiler (/nonexistent): install g++*"])

    def test_in_ci_it_fails(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CI", "true")
        pytester.makepyfile(
            """
            from omni_components.testing import SimulatedAcceleratorUnavailable

            def test_it():
                raise SimulatedAcceleratorUnavailable("as the first use in a process does")
            """
        )
        result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["*not available: no C++ compiler*(a CI run may not skip it)"])
