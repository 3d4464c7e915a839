"""OffloadScope: the ``with`` block inside which a component is guaranteed present."""

from __future__ import annotations

from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .events import Cause
    from .threads import ThreadStack


class ScopeOwner(Protocol):
    """What a scope needs of its ledger: the two decisions."""

    def enter(self, scope: OffloadScope) -> None:
        """Make the scope's component present and pin it, or raise and change nothing."""
        ...

    def leave(self, scope: OffloadScope) -> None:
        """Take the pin off and bring back what the scope displaced, or raise ``ScopeError``."""
        ...


class OffloadScope:
    """Single use, not reentrant, left by the thread that entered it, innermost first.

    Attributes:
        name: Its component.
        cause: Who opened it.
        timeout: Seconds to wait for a turn, ``None`` without limit.
        stack: The open scopes of the thread that entered it; ``None`` before and after.
        used: Whether it has been entered at least once.
        displaced: It moved an outer scope's component out, which must be back before the outer body resumes.
        call: For a hook's scope, the frame of the module call: an interrupt can end the call without its
            post-hook, and then this frame no longer runs.
        work: What the mover calls the stream of its body's work.
    """

    __slots__ = ("call", "cause", "displaced", "name", "owner", "stack", "timeout", "used", "work")
    stack: ThreadStack | None
    call: FrameType | None

    def __init__(self, owner: ScopeOwner, name: str, cause: Cause, timeout: float | None = None) -> None:
        self.owner = owner
        self.name = name
        self.cause = cause
        self.timeout = timeout
        self.stack = self.call = None
        self.work: object = None
        self.used = self.displaced = False

    def __enter__(self) -> OffloadScope:
        self.owner.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.owner.leave(self)
        except BaseException as second:
            if self.stack is not None and not isinstance(second, Exception):
                self.owner.leave(self)  # interrupted before it began; the pin would stay for ever
            raise

    def __repr__(self) -> str:
        state = "open" if self.stack is not None else "closed" if self.used else "new"
        return f"<OffloadScope {self.name!r}, {state}>"
