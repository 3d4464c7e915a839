"""Thrash: rivals that take the device from each other again and again within one request.

A component *displaces* those that are evicted to make room for its load. A load is a *reload* if, since the
component was displaced, no rival but its displacer has had the device (nor any that the displacer excludes:
text encoder, reasoner, generator, and then the text encoder again is a second request's plain course, not a
reload). ``release()`` ends a request, so nothing is carried over it. ``REPEATS`` reloads of one pair are thrash:
A-B-A-B is, A-B-A is not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..residency.events import Cause, EventKind, ResidencyEvent

REPEATS = 2  # one trip out and back may be worth its price; a second one is a loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Thrash:
    """What it cost that two rivals took turns more often than their work asked for.

    Attributes:
        pair: The two components, by name.
        reloads: Loads of either after nothing but the other had displaced it.
        bytes: Bytes over the link for these loads.
    """

    pair: tuple[str, str]
    reloads: int
    bytes: int


def find_thrash(events: Iterable[ResidencyEvent], *, repeats: int = REPEATS) -> tuple[Thrash, ...]:
    """The pairs that thrash, the costliest first.

    Args:
        events: The history, oldest first.
        repeats: From how many reloads on a pair is named.
    """
    watch = _Watch()
    for event in events:
        watch.see(event)
    found = [
        Thrash(pair=(pair[0], pair[1]), reloads=reloads, bytes=size)
        for pair, (reloads, size) in watch.cost.items()
        if reloads >= repeats
    ]
    return tuple(sorted(found, key=lambda one: (-one.bytes, -one.reloads, one.pair)))


@dataclass(slots=True)
class _Absence:
    """A component is away: who displaced it, and who was loaded since."""

    by: str
    since: set[str] = field(default_factory=set)


class _Watch:
    """Reads a history and charges reloads to pairs."""

    def __init__(self) -> None:
        self.cost: dict[tuple[str, ...], tuple[int, int]] = {}
        self._leaving: list[str] = []  # evicted for the load that comes next
        self._away: dict[str, _Absence] = {}
        self._rivals: set[tuple[str, ...]] = set()
        self._ahead: dict[str, int] = {}

    def see(self, event: ResidencyEvent) -> None:
        if event.cause is Cause.PREFETCH:
            self._ahead[event.component] = event.bytes  # it displaces nobody until it is asked for
        elif event.kind is EventKind.LOAD:
            self._load(event)
        elif event.kind is EventKind.EVICT and event.cause is not Cause.RELEASE:
            self._leaving.append(event.component)
        elif event.kind is EventKind.EVICT:
            self._away.clear()  # the next request starts afresh
        elif event.kind is EventKind.DISABLE:
            self._leaving.clear()
            self._away.pop(event.component, None)
        elif event.kind is EventKind.ROLLBACK:
            self._leaving.clear()  # whoever they made room for has not come

    def _load(self, event: ResidencyEvent) -> None:
        name, size = event.component, event.bytes + self._ahead.pop(event.component, 0)
        for left in self._leaving:
            self._rivals.add(_pair(left, name))
            self._away[left] = _Absence(name)
        self._leaving.clear()
        absence = self._away.pop(name, None)
        for other in self._away.values():
            other.since.add(name)
        if absence is not None and not self._others(name, absence):
            pair = _pair(name, absence.by)
            reloads, moved = self.cost.get(pair, (0, 0))
            self.cost[pair] = (reloads + 1, moved + size)

    def _others(self, name: str, absence: _Absence) -> bool:
        """Whether a third one, rival of both, had the device meanwhile."""
        return any(
            _pair(one, name) in self._rivals and _pair(one, absence.by) in self._rivals
            for one in absence.since - {absence.by}
        )


def _pair(one: str, other: str) -> tuple[str, ...]:
    return tuple(sorted((one, other)))
