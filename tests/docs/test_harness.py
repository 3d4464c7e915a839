"""The test of the docs must be able to fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from .blocks import Page, read_page
from .test_blocks_run import run

FENCE = "`" * 3


def page(folder: Path, text: str) -> Page:
    path = folder / "page.md"
    path.write_text(text.replace("'''", FENCE), encoding="utf-8")
    return read_page(path)


def test_a_block_that_raises_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run(page(tmp_path, "'''python\n1 / 0\n'''\n"))


def test_blocks_share_their_names(tmp_path: Path) -> None:
    run(page(tmp_path, "'''python\nx = 1\n'''\ntext\n'''python\nassert x == 1\n'''\n"))


def test_wrong_output_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        run(page(tmp_path, "'''python\nprint(1)\n'''\n<!-- prints -->\n'''text\n2\n'''\n"))


def test_an_exception_that_does_not_come_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        run(page(tmp_path, "<!-- raises: ValueError -->\n'''python\n1\n'''\n"))


def test_another_exception_than_the_page_says_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        run(page(tmp_path, "<!-- raises: ValueError -->\n'''python\n{}[1]\n'''\n"))


def test_a_message_that_has_changed_fails(tmp_path: Path) -> None:
    text = "<!-- raises: ValueError -->\n'''python\nraise ValueError('b')\n'''\n<!-- the message -->\n'''text\na\n'''\n"
    with pytest.raises(AssertionError):
        run(page(tmp_path, text))


def test_a_block_that_is_not_run_must_still_compile(tmp_path: Path) -> None:
    with pytest.raises(SyntaxError):
        run(page(tmp_path, "<!-- not run: it needs a GPU -->\n'''python\nx = = 1\n'''\n"))


def test_a_misspelt_remark_is_found(tmp_path: Path) -> None:
    assert page(tmp_path, "<!-- rises: ValueError -->\n'''python\n1\n'''\n").untold == ["rises: ValueError"]


def test_hidden_and_indented_blocks_are_seen(tmp_path: Path) -> None:
    found = page(
        tmp_path, "<!--\n'''python\nx = 1\n'''\n-->\n!!! note\n    '''python\n    assert x\n    '''\n"
    )
    assert [(block.line, block.code) for block in found.blocks] == [(3, "x = 1\n"), (8, "assert x\n")]
