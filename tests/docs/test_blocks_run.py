"""Every Python block in README, CONTRIBUTING, CHANGELOG and docs runs, or its page says why not."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_components.testing import SimulatedAccelerator

from .blocks import Block, Page, read_page

ROOT = Path(__file__).parents[2]
PATHS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PAGES = [page for page in map(read_page, PATHS) if page.blocks]


def name_of(page: Page) -> str:
    return page.path.relative_to(ROOT).as_posix()


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)  # a block may write files
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the demo's tensors are too small to share out
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_whose_code_does_not_run(page: Page, request: pytest.FixtureRequest) -> None:
    run(page, sim=request.getfixturevalue("simulated_accelerator") if page.simulated else None)


def test_the_readme_on_a_machine_with_an_accelerator(simulated_accelerator: SimulatedAccelerator) -> None:
    run(read_page(ROOT / "README.md"))
    assert simulated_accelerator.stats().h2d_bytes > 0  # it was really used


@pytest.mark.parametrize("page", [read_page(path) for path in PATHS], ids=name_of)
def test_a_remark_that_nobody_reads(page: Page) -> None:
    assert page.untold == []
    assert [block.line for block in page.blocks if len(block.not_run) < 10 and block.not_run] == []


def run(page: Page, **given: Any) -> None:
    """Run a page's blocks in order, in one namespace, and compare with what the page says of each.

    Args:
        page: The blocks.
        given: Names that the blocks find.
    """
    names: dict[str, Any] = {"__name__": "__main__", **given}
    for block in page.blocks:
        code = compile("\n" * (block.line - 1) + block.code, str(page.path), "exec", dont_inherit=True)
        if block.not_run:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            message = execute(block, code, names)
        if block.prints is not None:
            assert printed.getvalue() == block.prints, f"{page.path}:{block.line}"
        if block.message is not None:
            assert " ".join(message.split()) == " ".join(block.message.split()), f"{page.path}:{block.line}"


def execute(block: Block, code: Any, names: dict[str, Any]) -> str:
    """Run a block; returns the text of what it was to raise."""
    try:
        exec(code, names)
    except BaseException as error:
        if not block.raises or block.raises not in [cls.__name__ for cls in type(error).__mro__]:
            raise
        return str(error)
    assert not block.raises, f"line {block.line} did not raise {block.raises}"
    return ""
