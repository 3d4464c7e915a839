"""One record per transition of the ledger."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum


class EventKind(str, Enum):
    """What happened to a component."""

    LOAD = "load"
    EVICT = "evict"
    WRITE_BACK = "write_back"
    ADOPT = "adopt"
    ROLLBACK = "rollback"
    WAIT = "wait"
    ENABLE = "enable"
    DISABLE = "disable"

    def __str__(self) -> str:
        return self.value


class Cause(str, Enum):
    """Who asked for it."""

    SCOPE = "scope"
    HOOK = "hook"
    ENTRY_POINT = "entry_point"
    MANUAL = "manual"
    PREFETCH = "prefetch"
    RELEASE = "release"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyEvent:
    """One transition.

    Attributes:
        kind: What happened.
        component: To whom.
        cause: Who asked.
        bytes: Bytes that travelled over the link for it (0 for an eviction that copied nothing).
        seconds: Host time it took; for a load the time to enqueue the copies.
        at: ``time.perf_counter()`` when it ended.
        device_bytes: Bytes of residents and loaded components after it.
    """

    kind: EventKind
    component: str
    cause: Cause
    bytes: int = 0
    seconds: float = 0.0
    at: float = 0.0
    device_bytes: int = 0


@dataclass(slots=True)
class Totals:
    """What a component has cost so far; kept apart from the history so that a full history loses nothing.

    A load that found its bytes copied ahead is a load like any other; ``prefetched`` counts those copies.
    ``prefetch_wasted`` are those of which nothing came: the guess was wrong, or the master changed meanwhile.
    """

    loads: int = 0
    evictions: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    prefetched: int = 0
    prefetch_wasted: int = 0
    prefetch_failed: int = 0
    bytes_wasted: int = 0


class History:
    """The last ``limit`` events, totals per component, and the peaks; cost per event is constant.

    Attributes:
        totals: What each component has cost, whether the events are still there or not.
        peak: Most device bytes after any event.
        predicted: Most that the declarations have allowed so far.
    """

    def __init__(self, limit: int) -> None:
        self._events: deque[ResidencyEvent] = deque(maxlen=limit)
        self._listeners: list[Callable[[ResidencyEvent], None]] = []
        self.totals: dict[str, Totals] = {}
        self._ahead: dict[str, int] = {}  # bytes copied ahead, of whose use nothing is known yet
        self.peak = 0
        self.predicted = 0

    def record(self, event: ResidencyEvent) -> None:
        """Append an event and tell the listeners."""
        self._events.append(event)
        self._count(event)
        for listener in self._listeners:
            listener(event)

    def listen(self, listener: Callable[[ResidencyEvent], None]) -> Callable[[], None]:
        """Call ``listener`` with each event from now on; returns the function that stops it.

        The listener runs inside the ledger: it must be quick, must not raise and must not call the ledger.
        """
        self._listeners = [*self._listeners, listener]

        def stop() -> None:
            self._listeners = [one for one in self._listeners if one is not listener]

        return stop

    def __iter__(self) -> Iterator[ResidencyEvent]:
        return iter(tuple(self._events))

    def __len__(self) -> int:
        return len(self._events)

    def _count(self, event: ResidencyEvent) -> None:
        self.peak = max(self.peak, event.device_bytes)
        totals = self.totals.setdefault(event.component, Totals())
        if event.cause is Cause.PREFETCH:
            self._count_ahead(event, totals)
        elif event.kind is EventKind.LOAD:
            totals.loads += 1
            totals.bytes_in += event.bytes
            self._ahead.pop(event.component, None)
        elif event.kind is EventKind.EVICT:
            totals.evictions += 1
        elif event.kind is EventKind.WRITE_BACK:
            totals.bytes_out += event.bytes
        elif event.kind is EventKind.ROLLBACK:
            self._waste(event.component, totals)  # a load that had its bytes already has failed
        if event.kind is EventKind.WAIT:
            totals.waited += event.seconds
        elif event.kind is not EventKind.ENABLE:
            totals.seconds += event.seconds

    def _count_ahead(self, event: ResidencyEvent, totals: Totals) -> None:
        if event.kind is EventKind.LOAD:
            totals.prefetched += 1
            totals.bytes_in += event.bytes
            self._ahead[event.component] = event.bytes
        elif event.kind is EventKind.EVICT:
            self._waste(event.component, totals)
        else:
            totals.prefetch_failed += 1

    def _waste(self, name: str, totals: Totals) -> None:
        if name in self._ahead:
            totals.prefetch_wasted += 1
            totals.bytes_wasted += self._ahead.pop(name)
