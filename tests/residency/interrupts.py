"""KeyboardInterrupt at every place in the ledger's code where Python may raise one.

CPython (from 3.11) looks for signals when a Python function begins, after a call of a C function, and at a jump
back. A profile function is called at the first two and may raise there; it is not called where no interrupt can
come, such as between the body of ``with mutex:`` and the release.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import omni_components.residency

LEDGER = str(Path(omni_components.residency.__file__).parent)


class Interrupter:
    """Raises at the n-th place; ``place`` tells where that was.

    Args:
        at: Which place; a number past the last one raises nowhere.
        places: Prefixes of file names in which places count.
    """

    def __init__(self, at: int, *places: str) -> None:
        self.at = at
        self.places = places or (LEDGER,)
        self.seen = -1
        self.place = ""

    def __enter__(self) -> Interrupter:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, kind: str, what: Any) -> None:
        code = frame.f_code
        if kind not in ("call", "c_return") or not code.co_filename.startswith(self.places):
            return
        if (kind == "call" and code.co_flags & inspect.CO_GENERATOR) or code.co_name == "<genexpr>":
            return  # what goes on may be the closing of the generator, and that swallows it
        if code.co_name == "__exit__" and kind == "call":
            return  # before the first step of __exit__ nobody can act
        if "__del__" in (code.co_name, frame.f_back and frame.f_back.f_code.co_name):
            return  # swallowed too
        self.seen += 1
        if self.seen == self.at:
            sys.setprofile(None)
            self.place = (
                f"{kind} in {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name} {what!r}"
            )
            raise KeyboardInterrupt(self.place)


def interrupt_everywhere(act: Callable[[], Callable[[], None]], afterwards: Callable[[str], None]) -> int:
    """Run ``act`` with an interrupt at each place in turn; returns how many places there were."""
    at = 0
    while True:
        run = act()
        interrupter = Interrupter(at)
        try:
            with interrupter:
                run()
        except KeyboardInterrupt:
            pass
        if not interrupter.place:
            return at
        afterwards(interrupter.place)
        at += 1
