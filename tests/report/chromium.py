"""The page of the report in a real browser, and its picture for the docs.

    OMP_NUM_THREADS=1 python -m tests.report.chromium docs/images/report.png

runs the demo, plans for it, and takes a picture of the page that ``omni-components report`` makes of both.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright
from typer.testing import CliRunner

from omni_components.cli import app

CHROMIUM = Path("/usr/bin/chromium")
WIDTH = 1000


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's, without a window."""
    if not CHROMIUM.exists():
        if os.environ.get("CI"):
            pytest.fail(f"{CHROMIUM} is not here, and a CI run may not skip it: apt-get install chromium")
        pytest.skip(f"{CHROMIUM} is not here: apt-get install chromium")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def page_of_the_demo(folder: Path) -> Path:
    """What the four commands of docs/omni.md make, from a real run."""
    trace, plan, page = (folder / name for name in ("digits.json", "plan.json", "report.html"))
    said("run", "demo", "three one four", "--device", "cpu", "--out", folder / "digits.png", "--trace", trace)
    plan.write_text(said("plan", "demo", "--json"), encoding="utf-8")
    said("report", trace, "--plan", plan, "--html", page)
    return page


def said(*words: object) -> str:
    """What a command prints."""
    ran = CliRunner().invoke(app, list(map(str, words)))
    assert ran.exit_code == 0, ran.output
    return ran.stdout


def picture(target: Path) -> None:
    """Take the picture for the docs."""
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        shown = browser.new_page(viewport={"width": WIDTH, "height": 700}, color_scheme="light")
        shown.goto(page_of_the_demo(Path(folder)).as_uri())
        shown.screenshot(path=target, full_page=True)


if __name__ == "__main__":
    picture(Path(sys.argv[1]))
