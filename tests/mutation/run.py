"""Mutation testing of the residency code: each mutant in a fork of one warmed process.

    python -m tests.mutation.run                     # everything in residency/, about an hour on one core
    python -m tests.mutation.run turns.py switch.py  # some files
    python -m tests.mutation.run --only ledger.py#17 # one mutant, with what the tests say

A mutant is killed when the quick tests of ``tests/residency`` fail, or do not end in time. The slow ones (over the
real mover, on the simulated accelerator) are not asked. The table at the end and the survivors are Markdown.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import hypothesis
import pytest
import torch

from .explained import reason_for
from .mutants import Mutant, mutants

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "omni_components" / "residency"
TESTS = ROOT / "tests" / "residency"

# The first find the most in the least time; every `test_*_details.py` is among them.
FIRST = ("test_scopes.py", "test_turns.py", "test_graph.py")
SECOND = (
    "test_threads.py",
    "test_interrupts.py",
    "test_orphans.py",
    "test_interleavings.py",
    "test_interrupted_offload.py",
    "test_property.py::test_random_phases_over_numbers_are_what_the_model_says",
)
EXAMPLES = 25  # of the state machine, the same ones each time, and never shrunk
_FRESH = ("omni_components", "tests", "__main__")  # packages that each fork imports for itself
PATIENCE = (15.0, 40.0)  # seconds for each step, ten times what it takes: its tests do not end


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant."""

    mutant: Mutant
    outcome: str  # killed, timeout or survived
    seconds: float


# --- a mutant in place of its module ----------------------------------------------------------------------------


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, mutant: Mutant) -> None:
        super().__init__(mutant.module, str(mutant.path))
        self._source = mutant.source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec")


class _Finder(MetaPathFinder):
    """Finds the mutant where the import system looks for its module; no file is written."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        loader = _Loader(self._mutant)
        return importlib.util.spec_from_file_location(fullname, self._mutant.path, loader=loader)


# --- a fork that runs tests -------------------------------------------------------------------------------------


class _FewExamples:
    """A plugin: after ``conftest.py`` has chosen a profile, choose this one."""

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        hypothesis.settings.register_profile(
            "mutation",
            derandomize=True,
            database=None,
            deadline=None,
            max_examples=EXAMPLES,
            stateful_step_count=40,
            phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        hypothesis.settings.load_profile("mutation")


def _run_tests(mutant: Mutant | None, tests: Sequence[str], output: int) -> int:
    """In the fork: never returns to its caller's code but through ``os._exit``."""
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # to look for them takes as long as the tests
    resource.setrlimit(resource.RLIMIT_CPU, (int(PATIENCE[-1]), int(PATIENCE[-1])))
    if mutant is not None:
        sys.meta_path.insert(0, _Finder(mutant))
        importlib.import_module(mutant.module)  # before pytest, whose own importer would come first
    known = "ignore::pytest.PytestAssertRewriteWarning"  # the parent process has imported the plugin
    arguments = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "omni_components.testing.plugin",
        "-W",
        known,
        *tests,
    ]
    return int(pytest.main(arguments, plugins=[_FewExamples()]))


def in_a_fork(work: Callable[[], int]) -> int:
    """Start a child process whose exit status is what ``work`` returns; returns its id."""
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # whatever threads a mutant has left behind


def fork(
    mutant: Mutant | None, tests: Sequence[str], output: int, patience: float = PATIENCE[-1]
) -> int | None:
    """The exit status of the tests under a mutant; ``None`` if they do not end."""
    child = in_a_fork(lambda: _run_tests(mutant, tests, output))
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def judge(mutant: Mutant, tests: Sequence[Sequence[str]], output: int) -> Verdict:
    """Run one set of tests after the other, until one of them kills."""
    start = time.monotonic()
    for some, patience in zip(tests, PATIENCE, strict=True):
        status = fork(mutant, some, output, patience)
        if status != pytest.ExitCode.OK:
            break
    outcome = {None: "timeout", pytest.ExitCode.OK: "survived"}.get(status, "killed")
    return Verdict(mutant, outcome, time.monotonic() - start)


# --- what to run ------------------------------------------------------------------------------------------------


def quick() -> list[list[str]]:
    """The tests in two steps: most mutants meet only the first."""
    details = sorted(path.name for path in TESTS.glob("test_*_details.py"))
    return [[str(TESTS / name) for name in names] for names in ((*FIRST, *details), SECOND)]


def warm(tests: Sequence[str]) -> None:
    """Import what the tests import, but nothing of ours, which each fork has to import for itself."""
    torch.set_num_threads(1)
    read, write = os.pipe()

    def collect() -> int:
        status = _run_tests(None, ["--collect-only", *tests], os.open(os.devnull, os.O_WRONLY))
        loaded = [name for name in sys.modules if name.split(".")[0] not in _FRESH]
        os.write(write, json.dumps(loaded).encode())
        return status

    child = in_a_fork(collect)
    os.close(write)
    with os.fdopen(read) as answer:
        loaded = json.load(answer)
    os.waitpid(child, 0)
    for name in loaded:
        try:
            importlib.import_module(name)
        except ImportError:
            pass  # a name that some package made up


def chosen(names: Sequence[str]) -> Iterator[Mutant]:
    paths = [PACKAGE / name for name in names] or sorted(PACKAGE.glob("*.py"))
    for path in paths:
        yield from mutants(path, f"omni_components.residency.{path.stem}")


# --- what to say ------------------------------------------------------------------------------------------------


def table(verdicts: Sequence[Verdict]) -> str:
    lines = [
        "| file | mutants | killed | of these by timeout | survived | score |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    files = list(dict.fromkeys(one.mutant.path.name for one in verdicts))
    for file in [*files, "**all**"]:
        mine = [one.outcome for one in verdicts if file in (one.mutant.path.name, "**all**")]
        lost, late = mine.count("survived"), mine.count("timeout")
        score = 100 * (1 - lost / len(mine))
        lines.append(f"| {file} | {len(mine)} | {len(mine) - lost} | {late} | {lost} | {score:.1f} % |")
    return "\n".join(lines)


def survivor(verdict: Verdict) -> str:
    one = verdict.mutant
    reason = reason_for(one) or "**not explained**"
    return f"* `{one.name}` line {one.line}: `{one.before}` → `{one.after}`: {reason}"


def record(verdict: Verdict) -> dict[str, Any]:
    one = verdict.mutant
    return {
        "name": one.name,
        "line": one.line,
        "before": one.before,
        "after": one.after,
        "outcome": verdict.outcome,
        "seconds": round(verdict.seconds, 2),
    }


def remembered(todo: Sequence[Mutant], path: Path | None) -> Iterator[Verdict]:
    """The verdicts of an earlier run on the same mutants."""
    if path is None or not path.exists():
        return
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    known = {(one["name"], one["line"], one["before"], one["after"]): one for one in lines}
    for mutant in todo:
        one = known.get((mutant.name, mutant.line, mutant.before, mutant.after))
        if one is not None:
            yield Verdict(mutant, one["outcome"], one["seconds"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="*", help="file names in residency/; none: all")
    parser.add_argument("--only", action="append", default=[], help="FILE#NUMBER; the tests' output is shown")
    parser.add_argument(
        "--json", type=Path, help="keep verdicts there, one a line; those that are there stand"
    )
    options = parser.parse_args()

    files = options.files or list(dict.fromkeys(name.split("#")[0] for name in options.only))
    todo = [one for one in chosen(files) if not options.only or one.name in options.only]
    tests = quick()
    everything = [name for some in tests for name in some]
    warm(everything)
    output = 1 if options.only else os.open(os.devnull, os.O_WRONLY)
    start = time.monotonic()
    if fork(None, everything, output) != pytest.ExitCode.OK:
        raise SystemExit("the tests fail as the code is: run them with pytest first")
    print(f"{len(todo)} mutants; the tests take {time.monotonic() - start:.1f} s as the code is", flush=True)
    verdicts = list(remembered(todo, options.json))
    judged = {one.mutant for one in verdicts}
    left = [one for one in todo if one not in judged]
    random.Random(0).shuffle(left)  # so that a run that is cut short has judged a fair sample
    for one in left:
        verdicts.append(judge(one, tests, output))
        if options.json:
            with options.json.open("a") as lines:
                lines.write(json.dumps(record(verdicts[-1])) + "\n")
    verdicts.sort(key=lambda verdict: (verdict.mutant.path.name, verdict.mutant.number))
    print(table(verdicts))
    survivors = [one for one in verdicts if one.outcome == "survived"]
    print("\n".join(survivor(one) for one in survivors))
    return 1 if any(reason_for(one.mutant) is None for one in survivors) else 0


if __name__ == "__main__":
    raise SystemExit(main())
