"""Each kind of fault that users of this field reported has a test that says so, in its name or its docstring."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]

CASES = {
    "C01": "alternating phases send bytes home, or twice",
    "C02": "pinning fails at some slab",
    "C03": "two that exclude each other are there together for a moment",
    "C04": "a change of denoiser moves more than the two",
    "C05": "the same phase again and again is loaded again and again",
    "C06": "a request that ends early leaves components behind",
    "C07": "healthy switches flush the allocator's cache",
    "C08": "what would fit is swapped all the same",
    "C09": "pinning rounds up to twice the bytes",
    "C10": "pinning goes beyond the container's limit",
    "C11": "enabling holds the weights twice",
    "C12": "tied weights come apart, or are counted twice",
    "C13": "a component inside another one",
    "C14": "views, strides and offsets are lost",
    "C15": "buffers and counters stay behind",
    "C16": "enabling inside inference mode spoils later requests",
    "C17": "the first call is not forward",
    "C18": "a method of an absent component fails in raw words",
    "C19": "a component that is no callable module",
    "C20": "forward raises, and the next call is wrong",
    "C21": "a copy in the middle of a switch fails",
    "C22": "enabling fails half way",
    "C23": "enabling twice attaches twice",
    "C24": "disabling needs room for all",
    "C25": "adapters that are added later stay behind",
    "C26": "weights written on the device are lost",
    "C27": "the execution device is where the weights happen to be",
    "C28": "inputs from the host work one way and not the other",
    "C29": "compiled code misses a switch",
    "C30": "saving depends on where the component is",
    "C31": "declarations that name nothing, or no module",
    "C32": "a component that is claimed twice",
    "C33": "late copies on side streams race with the computing",
    "C34": "two pipelines or threads share a component",
    "C35": "roles that cannot be selected",
    "C36": "phases in an order that thrashes, unseen",
    "C37": "a reference to weights that have left shows the rival's",
    "C38": "releasing and loading again in any order",
}


def named_by(file: Path) -> Iterator[str]:
    """The cases that the tests of a file name, by themselves: what a file says of all of it does not count."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            said = f"{node.name.upper().replace('_', ' ')} {ast.get_docstring(node) or ''}"
            yield from re.findall(r"\bC\d\d\b", said)


def test_a_kind_of_fault_without_a_test_that_names_it() -> None:
    """And none is named that is not on the list."""
    named = {case for file in TESTS.rglob("test_*.py") for case in named_by(file)}
    assert sorted(set(CASES) - named) == []
    assert sorted(named - set(CASES)) == []


def test_a_file_that_only_talks_about_a_case_names_none(tmp_path: Path) -> None:
    file = tmp_path / "test_x.py"
    file.write_text('"""C01."""\n\ndef helper():\n    """C02."""\n\ndef test_c03_x():\n    """C04, I1."""\n')
    assert sorted(named_by(file)) == ["C03", "C04"]
