"""The service behind the routes: it takes requests in, waits for them, and says how things stand."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from ..errors import DeclarationError, InvariantError
from ..residency.events import ResidencyEvent, Totals
from .errors import CLIENT_GONE, ApiError, refused, shutting_down
from .jobs import Job, JobQueue, QueueClosedError, QueueFullError, Sampling
from .live import Live
from .metrics import Metrics
from .model import PictureModel
from .pictures import LONGEST_SIDE
from .schemas import MOST_SEED, ComponentState, ImageRequest, Invariant, Residency, Work
from .settings import ServeSettings
from .worker import Worker

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..omni import Omni
    from ..residency.ledger import ResidencyLedger


class Service:
    """One model, one queue, one thread that draws.

    Args:
        omni: The model; whoever made it closes it.
        settings: The limits.
    """

    def __init__(self, omni: Omni, settings: ServeSettings) -> None:
        self.settings = settings
        self.model = PictureModel(omni, settings.name)
        self.created = int(time.time())
        self.live = Live(settings.max_watchers, settings.watch_timeout)
        self.metrics = Metrics(settings.replica or "")
        self.queue = JobQueue(settings.max_queue)
        self.worker = Worker(
            self.model, self.queue, most=settings.max_batch, idle=settings.idle_release, tell=self.live.tell
        )
        self.ledger = _ledger_of(omni)
        self.metrics.watch(self.ledger, self.queue, self.worker)
        self._stop_listening = self.ledger.history.listen(self._moved) if self.ledger else _nothing

    # --- its life -----------------------------------------------------------------------------------------

    @property
    def status(self) -> Literal["ok", "draining", "stopped"]:
        """Whether it takes requests."""
        if not self.worker.alive and not self.queue.closed:
            return "stopped"
        return "draining" if self.queue.closed else "ok"

    def drain(self) -> None:
        """Take no more requests; those that are here are answered, and streams end."""
        self.queue.close()
        self.live.close()

    def abort(self, timeout: float) -> bool:
        """Give up what is being drawn at its next step; returns whether that came in time."""
        self.drain()
        self.worker.stop_between_steps()
        return self.worker.join(timeout)

    async def close(self) -> None:
        """Drain, and wait for the worker."""
        self.drain()
        await asyncio.to_thread(self.worker.join)
        self._stop_listening()

    # --- a request ----------------------------------------------------------------------------------------

    def admit(self, asked: ImageRequest) -> Job:
        """Check a request and put it into the queue.

        Raises:
            ApiError: 400, 404, 429 or 503.
        """
        sampling = self._sampling(asked)
        self.model.check(asked.prompt, sampling)
        first = secrets.randbelow(2**32) if asked.seed is None else asked.seed
        job = Job(asked.prompt, tuple((first + at) % (MOST_SEED + 1) for at in range(asked.n or 1)), sampling)
        try:
            self.queue.put(job)
        except QueueFullError:
            text = f"{self.queue.limit} requests wait already. Try again later."
            raise ApiError(429, text, "queue_full", retry_after=self._time_to_wait()) from None
        except QueueClosedError:
            raise shutting_down() from None
        self.worker.start()
        return job

    async def pictures(self, job: Job, gone: Callable[[], Awaitable[None]]) -> list[Image]:
        """Wait for a job.

        Args:
            job: As admitted.
            gone: Returns when the client is gone.

        Raises:
            ApiError: It failed, its time is over, or the client is gone.
        """
        drawn = asyncio.wrap_future(job.drawn)
        drawn.add_done_callback(lambda done: done.cancelled() or done.exception())  # somebody has looked
        leaving = asyncio.ensure_future(gone())
        try:
            await asyncio.wait(
                (drawn, leaving), timeout=self.settings.timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if drawn.done():
                return drawn.result()
            if leaving.done():
                raise ApiError(CLIENT_GONE, "The client is gone.")
            text = f"The request took longer than {self.settings.timeout:g} s."
            raise ApiError(503, text, "timeout", retry_after=self._time_to_wait())
        finally:
            leaving.cancel()
            if not drawn.done():
                self.queue.discard(job)

    def _sampling(self, asked: ImageRequest) -> Sampling:
        limits = self.settings
        if asked.model not in (None, self.model.name):
            text = f"The model '{asked.model}' does not exist; there is '{self.model.name}'."
            raise ApiError(404, text, "model_not_found", param="model")
        for name, text in (("prompt", asked.prompt), ("negative_prompt", asked.negative_prompt or "")):
            if len(text) > limits.max_prompt:
                message = f"The {name} has {len(text)} characters; {limits.max_prompt} are possible."
                raise refused(message, name, "string_above_max_length")
        if (asked.n or 1) > limits.max_pictures:
            raise refused(f"n={asked.n} is not possible; choose 1 to {limits.max_pictures}.", "n")
        if (asked.num_inference_steps or 1) > limits.max_steps:
            text = f"{asked.num_inference_steps} steps are not possible; choose 1 to {limits.max_steps}."
            raise refused(text, "num_inference_steps")
        return Sampling(
            steps=asked.num_inference_steps,
            size=self._size(asked.size, asked.output_format or "png"),
            guidance_scale=asked.guidance_scale,
            negative_prompt=asked.negative_prompt,
        )

    def _size(self, asked: str | None, form: str) -> tuple[int, int] | None:
        if asked in (None, "auto"):
            return None
        width, height = (int(one) for one in asked.split("x"))
        if width * height > self.settings.max_pixels:
            text = f"{asked} is not possible; {self.settings.max_pixels} pixels in all are."
            raise refused(text, "size")
        if max(width, height) > LONGEST_SIDE[form]:
            text = f"{asked} is not possible as {form}; {LONGEST_SIDE[form]} pixels a side are."
            raise refused(text, "size")
        return width, height

    def _time_to_wait(self) -> int:
        runs = 1 + len(self.queue) / self.settings.max_batch
        return min(60, max(1, math.ceil(runs * self.worker.tally.pace)))

    # --- what it tells ------------------------------------------------------------------------------------

    def residency(self) -> Residency:
        """Who is where, what it has cost, and whether the invariant holds."""
        ledger, tally = self.ledger, self.worker.tally
        return Residency(
            replica=self.settings.replica,
            model=self.model.name,
            device=str(self.model.omni.device),
            offload=ledger is not None,
            device_bytes=ledger.device_bytes if ledger else 0,
            peak_bytes=ledger.history.peak if ledger else 0,
            predicted_peak=ledger.predicted_peak if ledger else 0,
            invariant=_checked(ledger),
            components=_components(ledger) if ledger else [],
            work=Work(
                waiting=len(self.queue),
                running=tally.running,
                max_queue=self.queue.limit,
                requests=tally.requests,
                pictures=tally.pictures,
                batches=tally.batches,
            ),
        )

    def state(self) -> dict[str, Any]:
        """The same as plain values."""
        return self.residency().model_dump()

    def _moved(self, event: ResidencyEvent) -> None:
        facts: dict[str, object] = {
            "kind": str(event.kind),
            "component": event.component,
            "cause": str(event.cause),
            "bytes": event.bytes,
            "seconds": event.seconds,
            "device_bytes": event.device_bytes,
        }
        self.live.tell("moved", facts)


def _nothing() -> None:
    return


def _ledger_of(omni: Omni) -> ResidencyLedger | None:
    if omni.handle is None:
        return None
    try:
        return omni.handle.ledger
    except DeclarationError:
        return None  # the pipeline brings an offload of its own


def _checked(ledger: ResidencyLedger | None) -> Invariant:
    try:
        if ledger is not None:
            ledger.check()
    except InvariantError as error:
        return Invariant(holds=False, problem=str(error))
    return Invariant(holds=True)


def _components(ledger: ResidencyLedger) -> list[ComponentState]:
    totals = dict(ledger.history.totals)
    return [
        ComponentState(
            name=one.name,
            role=one.role.value,
            resident=one.resident,
            state=ledger.state(one.name).name.lower(),  # type: ignore[arg-type]
            bytes=ledger.size(one.name),
            pins=ledger.pins(one.name),
            **asdict(totals.get(one.name, Totals())),
        )
        for one in ledger.components
    ]
