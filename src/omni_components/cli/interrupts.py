"""Ctrl-C that is not lost."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Raises ``KeyboardInterrupt`` as Python does, and again at the next ``check()`` if it was swallowed.

    Native code that runs Python while it is imported (torch does) may discard the exception: without this, a
    Ctrl-C in the first seconds would do nothing.
    """

    def __init__(self) -> None:
        self._pending = False
        self._previous: Any = None

    def __enter__(self) -> Interrupts:
        # Only where Python would raise: elsewhere the signal is ignored on purpose, or is another program's.
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
        if self._pending and isinstance(error, Exception):
            raise KeyboardInterrupt from error  # an import that was broken off fails in a way of its own

    def check(self) -> None:
        """Raise if an interrupt came and nobody let it through."""
        if self._pending:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pending = True
        raise KeyboardInterrupt
