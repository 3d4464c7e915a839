"""What happens, told to whoever watches, as it happens: server-sent events."""

from __future__ import annotations

import asyncio
import json
import math
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
        self.since = 0.0
        self.skipped = 0

    def tell(self, message: str | None, at: float) -> bool:
        """Pass a message on, from any thread; ``None`` ends the stream. Returns whether somebody still listens."""
        try:
            self._loop.call_soon_threadsafe(self._put, message, at)
        except RuntimeError:
            return False  # its event loop was closed without a word
        return True

    async def next(self, left: float) -> str | None:
        """The next message; a heartbeat if there is none for long; ``None`` after so many seconds, and at the end."""
        if left <= 0:
            return None
        try:
            return await asyncio.wait_for(self._messages.get(), min(left, _HEARTBEAT))
        except asyncio.TimeoutError:
            return ": nothing new\n\n"

    def begin(self, at: float) -> None:
        """The whole state is told now: what is older would come after it, out of order."""
        self.since = at
        self._drop()

    def _put(self, message: str | None, at: float) -> None:
        if self._messages.full():
            self._drop()
        if message is None or at > self.since:
            self._messages.put_nowait(message)

    def _drop(self) -> None:
        self.skipped += self._messages.qsize()
        while not self._messages.empty():
            self._messages.get_nowait()


class Live:
    """Tells all watchers; telling is quick, never waits and never raises.

    Args:
        limit: Watchers at once.
        longest: Seconds after which a stream ends; ``None``: never.
    """

    def __init__(self, limit: int, longest: float | None = None) -> None:
        self._limit = limit
        self._longest = math.inf if longest is None else longest
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
            at = self._now()
            self._send(_message(kind, {"at": at, **facts}), at)

    def close(self) -> None:
        """End all streams, so that a server that drains need not wait for them."""
        self._closed = True
        self._send(None, self._now())

    async def follow(self, state: Callable[[], dict[str, Any]]) -> AsyncIterator[str]:
        """The stream of one watcher: the whole state first.

        Where it could not keep up, it is told how many messages it has missed, and then the whole state again.
        """
        watcher = Watcher()
        self._watchers = [*self._watchers, watcher]
        end = time.monotonic() + self._longest
        try:
            yield self._whole(watcher, state)
            while not self._closed and (message := await watcher.next(end - time.monotonic())) is not None:
                if not watcher.skipped:
                    yield message
                    continue
                whole = self._whole(watcher, state)  # newer than the message at hand
                yield _message("skipped", {"at": watcher.since, "messages": watcher.skipped + 1})
                watcher.skipped = 0
                yield whole
        finally:
            self._forget(watcher)

    def _whole(self, watcher: Watcher, state: Callable[[], dict[str, Any]]) -> str:
        watcher.begin(self._now())  # before the state is read: what comes between the two is told again
        return _message("state", {"at": watcher.since, **state()})

    def _now(self) -> float:
        return round(time.perf_counter() - self._start, 6)

    def _send(self, message: str | None, at: float) -> None:
        for watcher in self._watchers:
            if not watcher.tell(message, at):
                self._forget(watcher)

    def _forget(self, gone: Watcher) -> None:
        self._watchers = [one for one in self._watchers if one is not gone]


def _message(kind: str, facts: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps(facts)}\n\n"
