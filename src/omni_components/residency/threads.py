"""The open scopes of each thread, and which of them are still alive."""

from __future__ import annotations

import sys
import threading
from types import FrameType

from .scope import OffloadScope


class ThreadStack:
    """The open scopes of one thread, outermost first."""

    __slots__ = ("lost", "scopes", "thread")

    def __init__(self) -> None:
        # The thread object, not its ident: an ident is given to the next thread once this one has ended.
        self.thread = threading.current_thread()
        self.scopes: list[OffloadScope] = []
        self.lost = False  # a component of an open scope could not be brought back; its body got the error

    @property
    def name(self) -> str:
        """The thread's name, for messages."""
        return self.thread.name

    def dead(self) -> list[OffloadScope]:
        """Scopes that nobody can leave any more: their thread has ended, or their module call has.

        A ``KeyboardInterrupt`` ends a module's call without its post-hook, so that a hook's scope stays open.
        The call's frame then runs no more. Scopes of ``with`` blocks always leave by themselves.
        """
        if not self.scopes:
            return []
        if not self.thread.is_alive():
            return list(self.scopes)
        if all(scope.call is None for scope in self.scopes):
            return []
        running = _running_frames(self.thread.ident)
        return [scope for scope in self.scopes if scope.call is not None and scope.call not in running]


class OfThread(threading.local):
    """Each thread's own stack, made when the thread first asks."""

    def __init__(self) -> None:
        self.stack = ThreadStack()


def _running_frames(ident: int | None) -> set[FrameType]:
    frame = sys._current_frames().get(ident) if ident is not None else None
    frames = set()
    while frame is not None:
        frames.add(frame)
        frame = frame.f_back
    return frames
