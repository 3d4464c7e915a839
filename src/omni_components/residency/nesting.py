"""Rivals inside each other in one thread: whose place a scope takes, and whether it may."""

from __future__ import annotations

import threading
import warnings

from ..errors import NESTING_ADVICE, ResidencyWarning, ScopeError
from .book import Entry, State
from .gate import Gate
from .threads import ThreadStack

_NESTED = (
    "{inner!r} runs inside a scope of its rival {outer!r}: each such pass costs two more switches. "
    "Close the outer scope first where the order allows it."
)


class Nesting:
    """What the policy says of a rival scope inside an open one.

    Args:
        refused: It is an error.
        gate: Closes scopes that nobody can leave any more.
        mutex: The ledger's.
    """

    def __init__(self, refused: bool, gate: Gate, mutex: threading.Lock) -> None:
        self._refused = refused
        self._gate = gate
        self._mutex = mutex
        self._warned: set[tuple[str, str]] = set()

    def allow(self, entry: Entry, stack: ThreadStack) -> None:
        """Refuse a scope inside that of a rival, or warn about it, once for each pair."""
        for outer in self.displaced_by(entry, stack):
            if self._refused:
                raise ScopeError(
                    entry.name, f"its rival {outer.name!r} has an open scope here.", NESTING_ADVICE
                )
            pair = (outer.name, entry.name)
            if pair not in self._warned:
                self._warned.add(pair)
                text = _NESTED.format(inner=entry.name, outer=outer.name)
                warnings.warn(text, ResidencyWarning, stacklevel=5)

    def displaced_by(self, entry: Entry, stack: ThreadStack) -> list[Entry]:
        """Rivals that are here for this thread's own open scopes."""
        with self._mutex:
            self._gate.reap()
            mine = {scope.name for scope in stack.scopes}
            return [rival for rival in entry.rivals if rival.name in mine and rival.state is State.DEVICE]
