"""The Python blocks and the commands of a Markdown page, and what the page says about each.

A page's blocks run in order and share their names, as a reader would run them. What a block is, its page says
in an HTML comment on the line before it, which no reader sees:

* ``<!-- not run: REASON -->`` before a Python block: it is only compiled;
* ``<!-- raises: NAME -->`` before a Python block: it must raise that, and nothing else;
* ``<!-- prints -->`` before a text block: what the Python block before it has printed;
* ``<!-- the message -->`` before a text block: the text of what the Python block before it has raised;
* ``<!-- shows -->`` before a text block: lines that the ``omni-components`` command before it prints, in their
  order, seconds aside; others may be left out;
* ``<!-- not compared: REASON -->`` before a text block: it is of another day, or of another machine.

A Python block inside an HTML comment is run too: it is a page's hidden preparation. A page that says
``<!-- on the simulated accelerator -->`` anywhere runs where that is the accelerator.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)
_REMARK = re.compile(r"<!-- (?P<remark>[^\n]*?) -->\n\s*$")


@dataclass(slots=True)
class Block:
    """A Python block.

    Attributes:
        line: Of its first line of code in the page.
        code: Its text.
        not_run: Why it is not run; empty if it is.
        raises: The exception that it must raise; empty if none.
        prints: What the page says it prints; ``None`` if the page does not say.
        message: The text that the page gives for the exception; ``None`` if it gives none.
    """

    line: int
    code: str
    not_run: str = ""
    raises: str = ""
    prints: str | None = None
    message: str | None = None


@dataclass(slots=True)
class Command:
    """The last command of a shell block.

    Attributes:
        line: Of the block's first line in the page.
        words: The command, split as a shell does.
        shows: Lines that the page says it prints; ``None`` if the page does not say.
    """

    line: int
    words: list[str]
    shows: str | None = None


@dataclass(slots=True)
class Page:
    """A Markdown page; ``untold`` are remarks that mean nothing here, most likely misspelt."""

    path: Path
    simulated: bool = False
    blocks: list[Block] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)


def read_page(path: Path) -> Page:
    """The blocks of a page, in order."""
    text = path.read_text(encoding="utf-8")
    page = Page(path, simulated="<!-- on the simulated accelerator -->" in text)
    for found in _FENCE.finditer(text):
        remark = _REMARK.search(text[: found.start()])
        said = remark["remark"] if remark else ""
        if found["language"] == "python":
            page.blocks.append(_python_block(page, found, text, said))
        elif found["language"] == "bash":
            page.commands.append(_command(found, text))
        elif said:
            _expect(page, found["text"], said)
    return page


def _python_block(page: Page, found: re.Match[str], text: str, said: str) -> Block:
    indent = len(found["indent"])
    code = "\n".join(line[indent:] for line in found["text"].splitlines()) + "\n"
    block = Block(text[: found.start("text")].count("\n") + 1, code)
    kind, _, rest = said.partition(":")
    if kind == "not run":
        block.not_run = rest.strip()
    elif kind == "raises":
        block.raises = rest.strip()
    elif said:
        page.untold.append(said)
    return block


def _command(found: re.Match[str], text: str) -> Command:
    last = found["text"].strip().replace("\\\n", " ").splitlines()[-1]
    words = shlex.split(last.rpartition("&&")[2], comments=True)
    return Command(text[: found.start("text")].count("\n") + 1, words)


def _expect(page: Page, text: str, said: str) -> None:
    if said == "prints" and page.blocks:
        page.blocks[-1].prints = text
    elif said == "the message" and page.blocks:
        page.blocks[-1].message = text
    elif said == "shows" and page.commands:
        page.commands[-1].shows = text
    elif said.startswith("not compared: "):
        return  # the page's readers are told in its own words
    else:
        page.untold.append(said)
