"""The one thread that draws: what can be drawn together is, and what fails alone fails alone."""

from __future__ import annotations

import gc
import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..errors import BudgetError, PolicyError, TransferError
from .errors import ApiError, refused, shutting_down, unexpected
from .jobs import Job, JobQueue
from .model import PictureModel

log = logging.getLogger("omni_components.serve")

_FULL = (torch.OutOfMemoryError, TransferError, BudgetError)
_OUT_OF_MEMORY = "The device has not enough free memory for this request now."


class Abandoned(Exception):
    """Raised between two denoising steps: nobody waits for the pictures any more."""


@dataclass(slots=True)
class Tally:
    """What the worker has done so far; written by its thread only.

    Attributes:
        requests: Answered, whatever the answer.
        pictures: Drawn.
        batches: Runs of the pipeline.
        running: Requests in the run that goes on.
        pace: Seconds that a run takes, of late.
    """

    requests: int = 0
    pictures: int = 0
    batches: int = 0
    running: int = 0
    pace: float = 1.0


class Worker:
    """Draws what is in the queue, in a thread of its own.

    Args:
        model: Draws.
        queue: Gives the jobs.
        most: Pictures at once, at most.
        idle: Seconds without a job after which the device's memory is given back; ``None``: never.
        tell: Called with a kind and facts: of each run its start, its steps and its end.
    """

    def __init__(
        self,
        model: PictureModel,
        queue: JobQueue,
        *,
        most: int,
        idle: float | None,
        tell: Callable[[str, dict[str, object]], None],
    ) -> None:
        self.tally = Tally()
        self._model = model
        self._queue = queue
        self._most = most
        self._idle = idle
        self._tell = tell
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def start(self) -> None:
        """Begin; once."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="omni-components worker", daemon=True)
                self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it draws, or will when it is started."""
        return self._thread is None or self._thread.is_alive()

    def stop_between_steps(self) -> None:
        """Give up what is being drawn, at its next denoising step, and what waits."""
        self._stopping = True
        self._queue.close()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the closed queue is empty; returns whether it is."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    # --- its thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        idle, given_back = self._idle, True
        while (jobs := self._queue.take(self._most, None if given_back else idle)) is not None:
            if jobs:
                self._serve(jobs)
                given_back = idle is None
            else:
                self._give_back()
                given_back = True

    def _serve(self, jobs: Sequence[Job]) -> None:
        self.tally.running = len(jobs)
        start = time.perf_counter()
        failure = self._attempt(jobs)
        if failure is not None and len(jobs) > 1:
            failures = [self._attempt([job]) for job in jobs]  # one of them may have spoilt it for all
            if not any(failures):
                self._most = max(1, self._most // 2)
                log.warning("what failed together works alone: at most %d pictures at once now", self._most)
            for job, own in zip(jobs, failures, strict=True):
                _fail(job, own)
        else:
            _fail(jobs[0], failure)
        self.tally.pace += 0.3 * (time.perf_counter() - start - self.tally.pace)
        self.tally.running = 0
        self.tally.requests += len(jobs)

    def _attempt(self, jobs: Sequence[Job]) -> ApiError | None:
        """Draw; returns what went wrong. No exception stays: its frames would hold tensors of the device."""
        try:
            self._draw(jobs)
        except Abandoned:
            self._tell("stopped", {"requests": len(jobs)})
            return shutting_down()
        except Exception as error:
            self._tell("failed", {"requests": len(jobs)})
            told, full = _told(error), isinstance(error, _FULL)
            traceback.clear_frames(error.__traceback__)
        else:
            return None
        if full:
            gc.collect()  # what the failed run has left in cycles
            self._give_back()
        return told

    def _draw(self, jobs: Sequence[Job]) -> None:
        wanted = [(job.prompt, seed) for job in jobs for seed in job.seeds]

        def go_on() -> None:
            if self._stopping or all(job.abandoned for job in jobs):
                raise Abandoned

        def stepped(done: int, total: int) -> None:
            go_on()
            self._tell("step", {"done": done, "total": total})

        go_on()
        self._tell("started", {"requests": len(jobs), "pictures": len(wanted)})
        pictures = []
        for at in range(0, len(wanted), self._most):
            pictures += self._model.draw(wanted[at : at + self._most], jobs[0].sampling, stepped)
            self.tally.batches += 1
        self.tally.pictures += len(pictures)
        self._tell("finished", {"requests": len(jobs), "pictures": len(pictures)})
        for job in jobs:
            job.drawn.set_result(pictures[: len(job.seeds)])
            pictures = pictures[len(job.seeds) :]

    def _give_back(self) -> None:
        handle = self._model.omni.handle
        if handle is not None:
            try:
                handle.release(free_arena=True)
            except Exception:
                log.exception("the device's memory could not be given back")


def _fail(job: Job, failure: ApiError | None) -> None:
    if failure is not None:
        job.drawn.set_exception(failure)


def _told(error: Exception) -> ApiError:
    """What the client is told; what it is not, goes to the log."""
    if isinstance(error, _FULL):
        log.warning("out of memory: %s", str(error).partition("\n")[0])
        return ApiError(503, _OUT_OF_MEMORY, "out_of_memory", retry_after=1)
    if isinstance(error, PolicyError):
        return refused(str(error), error.field)
    if isinstance(error, ValueError):  # how diffusers' pipelines refuse arguments
        return refused(f"The model refuses this request: {error}")
    log.error("a request failed", exc_info=error)
    return unexpected()
