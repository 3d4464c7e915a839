"""Every command whose output a page shows prints that output, seconds aside."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from omni_components.cli import app

from .blocks import Command, Page, read_page
from .test_blocks_run import PATHS, ROOT, name_of

PAGES = [page for page in map(read_page, PATHS) if any(one.shows is not None for one in page.commands)]
README = read_page(ROOT / "README.md")
SECONDS = re.compile(r"\d+\.\d{4}\b")  # reports give seconds to a tenth of a millisecond, and nothing else so


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder in which the checkout's own can be read, and files be written."""
    for folder in ("benchmarks", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the demo's tensors are too small to share out
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_command_that_prints_something_else_than_its_page(page: Page, scratch: None) -> None:
    for command in page.commands:
        if command.shows is not None:
            assert missing(command.shows, printed(command)) == [], f"{page.path}:{command.line}"


def test_the_readme_shows_what_each_command_prints() -> None:
    text = README.path.read_text(encoding="utf-8")
    names = [one.name or one.callback.__name__ for one in app.registered_commands if one.callback]
    assert sorted(names) == ["demo", "doctor", "plan", "report", "run", "serve"]
    for name in names:
        shown = (
            rf"^(.*&& )?omni-components {name}\b[^`]*```\s+(<!-- (shows|not compared: [^\n]+) -->)\n```text\n"
        )
        assert re.search(shown, text, re.MULTILINE), name


def test_the_readme_begins_with_its_two_commands() -> None:
    first, second = README.commands[:2]
    assert first.words == ["omni-components", "demo", "three one four"]
    assert second.words == ["pytest"]


def test_a_line_that_is_not_printed_is_found() -> None:
    """The test of the commands must be able to fail."""
    assert missing("a  b 0.1234\n\nc\n", "x\na b 0.9999\ny\nc\n") == []
    assert missing("a\nb\n", "b\na\n") == ["b"]
    assert missing("1.0 MiB\n", "2.0 MiB\n") == ["1.0 MiB"]


def printed(command: Command) -> str:
    program, *words = command.words
    assert program == "omni-components"
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return result.stdout


def missing(shown: str, said: str) -> list[str]:
    """Shown lines that were not said, or not in that order; spaces and seconds do not count."""
    lines = iter(map(plain, said.splitlines()))
    return [line for line in map(plain, shown.splitlines()) if line and line not in lines]


def plain(line: str) -> str:
    return " ".join(SECONDS.sub("#", line).split())
