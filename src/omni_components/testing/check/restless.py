"""A ledger whose components leave as soon as they may, so that none is there by luck."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...residency.ledger import ResidencyLedger
from ...residency.scope import OffloadScope


@contextmanager
def restless(ledger: ResidencyLedger | None) -> Iterator[None]:
    """After each scope, whatever no scope needs goes home, as if another thread's request came in between."""
    if ledger is None:
        yield
        return
    leave = ledger.leave

    def and_go(scope: OffloadScope) -> None:
        leave(scope)
        ledger.release()

    ledger.leave = and_go  # type: ignore[method-assign]
    try:
        yield
    finally:
        del ledger.leave
