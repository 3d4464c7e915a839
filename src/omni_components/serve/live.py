"""What happens, told to whoever watches, as it happens: server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

_BACKLOG = 1000  # messages that a slow watcher may be behind
_HEARTBEAT = 10.0  # seconds: a comment, so that a watcher that is gone is noticed


class Watcher:
    """One open stream: messages from any thread, read in the event loop of its request."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[str | None] = asyncio.Queue(_BACKLOG)
        self.lagged = False

    def tell(self, message: str | None) -> bool:
        """Pass a message on, from any thread; ``None`` ends the stream. Returns whether somebody still listens."""
        try:
            self._loop.call_soon_threadsafe(self._put, message)
        except RuntimeError:
            return False  # its event loop was closed without a word
        return True

    async def next(self) -> str | None:
        """The next message; a heartbeat if there is none for long."""
        try:
            return await asyncio.wait_for(self._messages.get(), _HEARTBEAT)
        except asyncio.TimeoutError:
            return ": nothing new\n\n"

    def _put(self, message: str | None) -> None:
        if self._messages.full():
            # It gets the whole state instead of what it missed.
            while not self._messages.empty():
                self._messages.get_nowait()
            self.lagged = True
        self._messages.put_nowait(message)


class Live:
    """Tells all watchers; telling is quick, never waits and never raises.

    Args:
        limit: Watchers at once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._watchers: list[Watcher] = []
        self._start = time.perf_counter()
        self._closed = False

    @property
    def full(self) -> bool:
        """Whether there is no place for another watcher."""
        return len(self._watchers) >= self._limit

    def tell(self, kind: str, facts: dict[str, object]) -> None:
        """Tell all watchers. From any thread, also from inside the ledger."""
        if self._watchers:
            at = round(time.perf_counter() - self._start, 6)
            self._send(_message(kind, {"at": at, **facts}))

    def close(self) -> None:
        """End all streams, so that a server that drains need not wait for them."""
        self._closed = True
        self._send(None)

    async def follow(self, state: Callable[[], dict[str, Any]]) -> AsyncIterator[str]:
        """The stream of one watcher: the whole state first, and again where it could not keep up."""
        watcher = Watcher()
        self._watchers = [*self._watchers, watcher]
        try:
            yield _message("state", state())
            while not self._closed and (message := await watcher.next()) is not None:
                if watcher.lagged:
                    watcher.lagged = False
                    yield _message("state", state())
                yield message
        finally:
            self._forget(watcher)

    def _send(self, message: str | None) -> None:
        for watcher in self._watchers:
            if not watcher.tell(message):
                self._forget(watcher)

    def _forget(self, gone: Watcher) -> None:
        self._watchers = [one for one in self._watchers if one is not gone]


def _message(kind: str, facts: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps(facts)}\n\n"
