"""The mutants that no test can tell from the code, each with the reason."""

from __future__ import annotations

from .mutants import Mutant

# By file, function, what was there and what came instead.
EXPLAINED: dict[tuple[str, str, str, str], str] = {
    ("gate.py", "Gate.unpin", "self.changed.notify_all()", "pass"): (
        "a waiter that nobody tells looks by itself within half a second"
    ),
}


def reason_for(mutant: Mutant) -> str | None:
    """Why a mutant may survive; ``None`` if nobody has said."""
    return EXPLAINED.get((mutant.path.name, mutant.function, mutant.before, mutant.after))
