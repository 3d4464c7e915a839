"""Requests on their way to the device: a bounded queue from which like ones are taken together."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to draw; requests that agree in it can be drawn together. ``None`` is the model's own choice."""

    steps: int | None = None
    size: tuple[int, int] | None = None
    guidance_scale: float | None = None
    negative_prompt: str | None = None


@dataclass(slots=True, eq=False)
class Job:
    """One request.

    Attributes:
        prompt: What to draw.
        seeds: One per picture.
        sampling: How to draw.
        drawn: The pictures, or an ``ApiError``; the worker fills it.
        abandoned: Nobody waits for it any more.
    """

    prompt: str
    seeds: tuple[int, ...]
    sampling: Sampling
    drawn: Future[list[Image]] = field(default_factory=Future)
    abandoned: bool = False

    def __post_init__(self) -> None:
        # It counts as running from the start: an asyncio future made of it cannot cancel it behind our back.
        self.drawn.set_running_or_notify_cancel()


class QueueFullError(Exception):
    """There is no place for one more."""


class QueueClosedError(Exception):
    """Nothing is taken any more."""


class JobQueue:
    """First come first served, but what can be drawn with the first goes with it.

    Args:
        limit: Jobs that may wait.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def closed(self) -> bool:
        """Whether new jobs are refused."""
        return self._closed

    def put(self, job: Job) -> None:
        """Append a job.

        Raises:
            QueueFullError: As many wait as may.
            QueueClosedError: It was closed.
        """
        with self._changed:
            if self._closed:
                raise QueueClosedError
            if len(self._jobs) >= self.limit:
                raise QueueFullError
            self._jobs.append(job)
            self._changed.notify()

    def discard(self, job: Job) -> None:
        """Take a job out that nobody waits for; its place is free at once."""
        with self._changed:
            job.abandoned = True
            if job in self._jobs:
                self._jobs.remove(job)

    def take(self, most: int, timeout: float | None) -> list[Job] | None:
        """The first job, and those behind it that can be drawn with it.

        Args:
            most: Pictures in all; a first job that asks for more comes alone.
            timeout: Seconds to wait for a first job.

        Returns:
            The jobs; none if the time has passed; ``None`` if it is closed and empty.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._jobs:
                left = None if until is None else until - time.monotonic()
                if self._closed:
                    return None
                if left is not None and left <= 0:
                    return []
                self._changed.wait(left)
            return self._take_like_the_first(most)

    def close(self) -> None:
        """Refuse new jobs; those that wait are still taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _take_like_the_first(self, most: int) -> list[Job]:
        first = self._jobs.popleft()
        taken, pictures = [first], len(first.seeds)
        for job in list(self._jobs):
            if job.sampling == first.sampling and pictures + len(job.seeds) <= most:
                self._jobs.remove(job)
                taken.append(job)
                pictures += len(job.seeds)
        return taken
