"""The invariant as code: what is untrue in a book, one line per finding."""

from __future__ import annotations

from collections.abc import Iterator

from .book import AWAY, Book, State
from .threads import ThreadStack
from .turns import Turns

Finding = tuple[str, str]


def problems(book: Book, turns: Turns, mine: ThreadStack) -> Iterator[Finding]:
    """Findings against I1, I2, I4, I6 and I8 (the mutex is held).

    Args:
        book: The entries.
        turns: Who waits and who moves: these threads are between two states.
        mine: The calling thread's scopes.
    """
    yield from _exclusion(book)
    yield from _presence(book, turns)
    yield from _pins(book, mine)
    if turns.moving is None:
        yield from _rest(book)
    yield from _accounting(book)


def _exclusion(book: Book) -> Iterator[Finding]:
    for entry in book.entries.values():
        for rival in entry.rivals:
            if entry.state not in AWAY and rival.state not in AWAY:
                yield "I1 exclusion", f"{entry.name!r} and {rival.name!r} are both off the host"
    arriving = [entry.name for entry in book.entries.values() if entry.state is State.ARRIVING]
    if len(arriving) > book.ahead:  # one with prefetch, none without
        yield "I1 exclusion", f"{', '.join(map(repr, arriving))} arrive, {book.ahead:d} may"


def _presence(book: Book, turns: Turns) -> Iterator[Finding]:
    busy = [waiter.stack for waiter in (*turns.waiters, turns.moving) if waiter is not None]
    for stack in book.stacks():
        if stack in busy or stack.lost:
            continue
        for entry in book.needed(stack):
            if entry.state is not State.DEVICE:
                yield (
                    "I2 presence",
                    f"thread {stack.name} is inside a scope of {entry.name!r}, which is not there",
                )


def _pins(book: Book, mine: ThreadStack) -> Iterator[Finding]:
    stacks = [*book.stacks(), *([mine] if mine not in book.stacks() else [])]
    opened = [scope for stack in stacks for scope in stack.scopes]
    pinned = [scope for entry in book.entries.values() for scope in entry.scopes]
    if sorted(map(id, opened)) != sorted(map(id, pinned)):
        yield "I4 pins", f"{len(pinned)} pins, {len(opened)} open scopes"


def _rest(book: Book) -> Iterator[Finding]:
    for entry in book.entries.values():
        if entry.state in (State.LOADING, State.EVICTING):
            yield "I6 rest", f"{entry.name!r} is {entry.state.name} while nobody moves it"


def _accounting(book: Book) -> Iterator[Finding]:
    held = sum(entry.bytes for entry in book.entries.values() if entry.state is not State.HOST)
    if held != book.held:
        yield "I8 accounting", f"{book.held} bytes in the book, {held} by component"
    if book.arriving is not None and book.capacity is not None and held > book.capacity:
        yield "I8 accounting", f"{book.arriving.name!r} arrives: {held} bytes of {book.capacity}"
    if held > book.predicted_peak():
        yield "I8 accounting", f"{held} bytes on the device, {book.predicted_peak()} predicted at most"
