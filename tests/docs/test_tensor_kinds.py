"""The page of tensor kinds names a test on each line, and each is there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "tensor_kinds.md").read_text(encoding="utf-8")
_NAME = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def test_a_test_that_the_page_names_and_nobody_has() -> None:
    named = _NAME.findall(PAGE)
    assert len(named) > 30
    assert [one for one in named if not has(*one)] == []


def has(file: str, test: str) -> bool:
    path = TESTS / file
    return path.exists() and f"def {test}(" in path.read_text(encoding="utf-8")


def test_a_kind_whose_line_names_no_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "| shown by |" not in line]
    assert len(rows) > 25
    assert [row for row in rows if not _NAME.search(row)] == []
