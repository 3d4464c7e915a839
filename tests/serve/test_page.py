"""The live page in a real browser: a picture, and the components that move meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from omni_components import Omni
from tests.report.chromium import chromium
from tests.serve.running import Running, running


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with chromium() as browser:
        yield browser.new_page()


def test_the_page_makes_a_picture_and_shows_reasoner_then_generator(page: Page, service: Running) -> None:
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(service.url)
    expect(page.locator("#status")).to_have_text("connected")
    expect(page.locator("#key")).to_be_hidden()  # none is needed
    page.fill("#prompt", "three one four")
    page.fill("#steps", "8")
    page.click("#go")
    expect(page.locator("#picture")).to_be_visible(timeout=30_000)
    assert page.locator("#picture").evaluate("picture => picture.naturalWidth") == 384
    expect(page.locator('#on-device [data-component="generator"]')).to_be_visible()
    expect(page.locator('#host [data-component="reasoner"]')).to_be_visible()
    moves = page.locator("#log li").evaluate_all(
        "lines => lines.map(line => line.dataset.kind + ' ' + line.dataset.of).reverse()"
    )
    order = ["load text_encoder", "load reasoner", "evict reasoner", "load generator"]
    assert [one for one in moves if one in order][-4:] == order
    assert problems == []


def test_the_page_tells_what_is_wrong_with_a_prompt(page: Page, service: Running) -> None:
    page.goto(service.url)
    page.fill("#prompt", "a lighthouse")
    page.click("#go")
    expect(page.locator("#problem")).to_contain_text("'lighthouse' is not a word")


def test_the_page_asks_for_a_key(page: Page, omni: Omni) -> None:
    with running(omni, api_keys=(b"secret",)) as up:
        page.goto(up.url)
        expect(page.locator("#key")).to_be_visible()
        page.fill("#key", "secret")
        page.locator("#key").dispatch_event("change")
        expect(page.locator("#status")).to_have_text("connected", timeout=15_000)
        page.goto("about:blank")
