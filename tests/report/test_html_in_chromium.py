"""Faults of the HTML report that only a browser shows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from omni_components.report.html import write_html

from .histories import ledger_of, report_of, use

CHROMIUM = Path("/usr/bin/chromium")


def test_a_page_that_lacks_stays_or_asks_for_files(tmp_path):
    if not CHROMIUM.exists():
        if os.environ.get("CI"):
            pytest.fail(f"{CHROMIUM} is not here, and a CI run may not skip it: apt-get install chromium")
        pytest.skip(f"{CHROMIUM} is not here: apt-get install chromium")
    ledger = ledger_of({"a": 2048, "b": 70})
    use(ledger, "a", "b", "a")
    write_html(report_of(ledger), tmp_path / "report.html")
    said, asked = [], []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("console", lambda one: said.append(one.text))
        page.on("request", lambda one: asked.append(one.url))
        page.goto((tmp_path / "report.html").as_uri())
        assert page.locator("rect.stay").count() == 3
        assert page.locator("tbody tr").first.inner_text().split("\t")[:4] == ["a", "dit", "2.0 KiB", "2"]
        assert page.locator("svg").evaluate("one => getComputedStyle(one).width") != "auto"
        browser.close()
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
