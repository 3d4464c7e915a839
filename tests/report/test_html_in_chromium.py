"""Faults of the HTML report that only a browser shows."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Page

from omni_components.report.html import write_html

from .chromium import WIDTH, chromium, page_of_the_demo
from .histories import ledger_of, report_of, use

# The boxes of all text in the drawing, and the colours of text and page.
BOXES = """all => all.map(one => { const box = one.getBoundingClientRect();
    return [one.textContent, box.left, box.top, box.right, box.bottom] })"""
LUMINANCE = """css => { const [r, g, b] = css.match(/[0-9.]+/g).slice(0, 3).map(Number).map(one =>
    (one /= 255) <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4); return 0.2126*r + 0.7152*g + 0.0722*b }"""


def test_a_page_that_lacks_stays_or_asks_for_files(tmp_path):
    ledger = ledger_of({"a": 2048, "b": 70})
    use(ledger, "a", "b", "a")
    write_html(report_of(ledger), tmp_path / "report.html")
    said, asked = [], []
    with chromium() as browser:
        page = browser.new_page()
        page.on("console", lambda one: said.append(one.text))
        page.on("request", lambda one: asked.append(one.url))
        page.goto((tmp_path / "report.html").as_uri())
        assert page.locator("rect.stay").count() == 3
        assert page.locator("tbody tr").first.inner_text().split("\t")[:4] == ["a", "dit", "2.0 KiB", "2"]
        assert page.locator("svg").evaluate("one => getComputedStyle(one).width") != "auto"
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = page_of_the_demo(tmp_path_factory.mktemp("page"))
    torch.set_num_threads(threads)
    return made


def test_a_page_that_cannot_be_read_by_day_or_by_night_or_on_a_small_screen(page_file: Path) -> None:
    """I1 in the picture: of those that take turns, one bar at a time."""
    with chromium() as browser:
        for scheme, width in itertools.product(("light", "dark"), (WIDTH, 400)):
            page = browser.new_page(viewport={"width": width, "height": 700}, color_scheme=scheme)
            page.goto(page_file.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert overlapping(page) == []
            assert contrast(page, "h1", "body") >= 4.5
            assert contrast(page, "thead th", "section") >= 4.5
            assert page.locator("svg .tick").count() >= 6
            assert page.locator("rect.stay:not(.resident)").count() == 3
            assert "planned for one request" in page.locator("pre").last.inner_text()
            page.close()


def overlapping(page: Page) -> list[tuple[str, str]]:
    """Texts of the drawing that cover each other; a title within one is not drawn."""
    boxes = page.locator("svg > text").evaluate_all(BOXES)
    return [
        (one[0], other[0])
        for one, other in itertools.combinations(boxes, 2)
        if min(one[3], other[3]) - max(one[1], other[1]) > 1
        and min(one[4], other[4]) - max(one[2], other[2]) > 3
    ]


def contrast(page: Page, text: str, behind: str) -> float:
    """As WCAG 2 measures it (w3.org/TR/WCAG22, contrast ratio)."""
    ink = page.locator(text).first.evaluate("one => getComputedStyle(one).color")
    paper = page.locator(behind).first.evaluate("one => getComputedStyle(one).backgroundColor")
    lights = sorted((page.evaluate(LUMINANCE, ink), page.evaluate(LUMINANCE, paper)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)
