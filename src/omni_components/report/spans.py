"""Who was on the device when, from the events: pure functions that the timeline is drawn from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..residency.events import Cause, EventKind, ResidencyEvent

EARLIER = "(earlier)"  # bytes of components that came before the oldest event kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One stay on the device; times are ``time.perf_counter()`` seconds, as in the events.

    Attributes:
        component: Who.
        start: When its load began, be it ahead: from here on its device bytes are reserved.
        asked: When the load that somebody waited for began: ``start``, but for one that was copied ahead.
        ready: When that load ended.
        end: When it was evicted, or the end of the record if it is still there.
        cause: Who asked for the load; ``None`` if it was loaded before the oldest event kept.
    """

    component: str
    start: float
    asked: float
    ready: float
    end: float
    cause: Cause | None

    @property
    def wanted(self) -> bool:
        """Somebody asked for it; else it was copied ahead for nothing, or nobody has come for it yet."""
        return self.cause is not Cause.PREFETCH


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A component's place in the pile of device bytes, for as long as it does not change.

    Attributes:
        component: Whose bytes.
        start: Seconds, as in the events.
        end: Seconds.
        low: Bytes of those below it.
        high: ``low`` and its own bytes.
    """

    component: str
    start: float
    end: float
    low: int
    high: int


def spans(events: Iterable[ResidencyEvent], *, until: float | None = None) -> list[Span]:
    """Every stay on the device, in the order of the loads.

    Args:
        events: The history, oldest first.
        until: When the record ends; default: with its last event.
    """
    seen = list(events)
    loads: dict[str, tuple[ResidencyEvent, ResidencyEvent]] = {}  # the first and the last of a stay
    begin = starts_at(seen)
    last_end: dict[str, float] = {}
    found = []
    for event in seen:
        if event.kind is EventKind.LOAD:
            loads[event.component] = (loads.get(event.component, (event,))[0], event)
        elif event.kind is EventKind.EVICT:
            earliest = last_end.get(event.component, begin)
            found.append(_span(event.component, loads.pop(event.component, None), earliest, event.at))
            last_end[event.component] = event.at
    end = ends_at(seen, until)
    found += [_span(name, pair, begin, max(end, pair[1].at)) for name, pair in loads.items()]
    return sorted(found, key=lambda one: (one.start, one.end))


def layers(
    events: Iterable[ResidencyEvent], *, order: Sequence[str] = (), until: float | None = None
) -> list[Layer]:
    """Device bytes over time, by component: at any time they add up to the event's ``device_bytes``.

    Args:
        events: The history, oldest first.
        order: Components from the bottom of the pile to its top; others come on top.
        until: When the record ends; default: with its last event.
    """
    seen = list(events)
    pile = _Pile(order)
    # Loads and evictions only: they come from the one thread that moves, so they never overlap in time.
    for event in seen:
        if event.kind is EventKind.LOAD:
            pile.put(event)
        elif event.kind is EventKind.EVICT:
            pile.take(event)
    pile.arrange(ends_at(seen, until), {})
    return pile.layers


def starts_at(events: Sequence[ResidencyEvent]) -> float:
    """When the oldest of what the events tell began."""
    return min((event.at - event.seconds for event in events), default=0.0)


def ends_at(events: Sequence[ResidencyEvent], until: float | None) -> float:
    """When the record ends: never before its last event."""
    last = events[-1].at if events else 0.0
    return last if until is None else max(last, until)


def _span(
    name: str, loads: tuple[ResidencyEvent, ResidencyEvent] | None, earliest: float, end: float
) -> Span:
    if loads is None:
        return Span(component=name, start=earliest, asked=earliest, ready=earliest, end=end, cause=None)
    first, last = loads
    # Nobody waits for one that is copied ahead and never asked for.
    asked = last.at if last.cause is Cause.PREFETCH else last.at - last.seconds
    start = first.at - first.seconds
    return Span(component=name, start=start, asked=asked, ready=last.at, end=end, cause=last.cause)


class _Pile:
    """Components on the device, one on the other, while the time goes on."""

    def __init__(self, order: Sequence[str]) -> None:
        self.layers: list[Layer] = []
        self._rank = {name: index for index, name in enumerate((EARLIER, *order))}
        self._sizes: dict[str, int] = {}
        self._placed: dict[str, tuple[float, int, int]] = {}

    def put(self, event: ResidencyEvent) -> None:
        sizes = {name: size for name, size in self._sizes.items() if name != event.component}
        sizes[event.component] = event.device_bytes - sum(sizes.values())
        self.arrange(event.at - event.seconds, sizes)

    def take(self, event: ResidencyEvent) -> None:
        sizes = {name: size for name, size in self._sizes.items() if name not in (event.component, EARLIER)}
        rest = event.device_bytes - sum(sizes.values())
        self.arrange(event.at, {**sizes, EARLIER: rest} if rest > 0 else sizes)

    def arrange(self, now: float, sizes: dict[str, int]) -> None:
        """Close the layers whose place changes and open them at their new one."""
        self._sizes = sizes
        places, low = {}, 0
        for name in sorted(sizes, key=lambda one: self._rank.setdefault(one, len(self._rank))):
            places[name] = (low, low + sizes[name])
            low += sizes[name]
        for name, (start, bottom, top) in list(self._placed.items()):
            if places.get(name) != (bottom, top):
                del self._placed[name]
                self.layers.append(Layer(component=name, start=start, end=now, low=bottom, high=top))
        for name, (bottom, top) in places.items():
            self._placed.setdefault(name, (now, bottom, top))
