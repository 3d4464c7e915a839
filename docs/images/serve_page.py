"""Makes serve.png: the live page in Chromium, after a picture was drawn on it.

    python docs/images/serve_page.py [FILE]

It needs the extras ``serve`` and ``test``, and a Chromium at /usr/bin/chromium.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import expect, sync_playwright

CHROMIUM = "/usr/bin/chromium"
SIZE = {"width": 1180, "height": 480}
COLOURS = 128  # of the palette: enough for the page, and a small file


def main() -> None:
    """Start the service, draw, take the picture."""
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("serve.png")
    with serving() as url:
        take(url, file)
    with Image.open(file) as picture:
        small = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    small.save(file, optimize=True)


def take(url: str, file: Path) -> None:
    """Draw a prompt on the page at ``url``, and keep how the page looks then."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, color_scheme="light", reduced_motion="reduce")
        page.goto(url)
        expect(page.locator("#status")).to_have_text("connected")
        page.fill("#prompt", "three one four")
        page.fill("#seed", "0")
        page.click("#go")
        expect(page.locator("#picture")).to_be_visible(timeout=60_000)
        expect(page.locator('#on-device [data-component="generator"]')).to_be_visible()
        page.locator("#model").click()  # nothing has the focus: no cursor blinks
        page.screenshot(path=file)
        browser.close()


@contextmanager
def serving() -> Iterator[str]:
    """The program as its users start it; its address."""
    code = "from omni_components.cli import main; main()"
    command = [
        sys.executable,
        "-c",
        code,
        "serve",
        "demo",
        "--enable-cpu-offload",
        "--device",
        "cpu",
        "--port",
        "0",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert " at http://" in line, line
        yield line.split(" at ")[1].strip()
    finally:
        process.terminate()
        process.communicate(timeout=60)


if __name__ == "__main__":
    main()
