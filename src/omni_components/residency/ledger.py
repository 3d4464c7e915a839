"""The one record of who is on the device, and the only code that may change it.

The invariant. ``check()`` asserts these numbers; every test names the ones it shows.

* **I1 exclusion** Two conflicting components are never both off the host, not even for a moment: LOADING,
  DEVICE and EVICTING all count. With prefetch, and only then, it reads: one active, one arriving, within the
  budget. At most one component is ARRIVING; nobody can use it; the bytes it is copied into are nobody else's.
* **I2 presence** Inside a scope its component is on the device. After the scope it stays until a rival needs
  the room.
* **I3 one owner** Every storage belongs to exactly one component (grouped at attach, compared by ``audit``).
* **I4 pins** A component's pins equal its open scopes; a pinned component is not evicted, except an outer
  scope's by a nested rival in the same thread, and then it is back before the outer body resumes.
* **I5 truth** The ledger agrees with where the tensors are; ``audit`` compares, tensor by tensor.
* **I6 rest** Between calls nothing is half-moved. A switch that fails leaves every component whole.
* **I7 nothing lost** When a component is on the host, its master holds the latest weights.
* **I8 accounting** Device bytes held = residents + loaded and arriving ones, never above the predicted peak.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

from ..components.component import Component
from ..errors import InvariantError, ScopeError
from ..policy import OffloadPolicy
from ..protocols import Mover
from .book import Book, State
from .checks import problems
from .events import Cause, EventKind, History
from .gate import Gate
from .nesting import Nesting
from .order import Order
from .scope import OffloadScope
from .switch import Switch
from .threads import OfThread, ThreadStack
from .turns import Turns, Waiter

# Asked for at every scope; looked up on the class they take longer.
_DEVICE, _HOOK = State.DEVICE, Cause.HOOK


class ResidencyLedger:
    """Issues scopes and keeps the invariant above.

    Args:
        mover: Carries the bytes.
        policy: How rivals may nest, the device memory that may be used, and how much history is kept.
        owner: Whose ledger this is, for messages.
    """

    def __init__(
        self, mover: Mover, policy: OffloadPolicy | None = None, *, owner: str = "this ledger"
    ) -> None:
        self.mover = mover
        self.policy = policy or OffloadPolicy()
        self.owner = owner
        self.history = History(self.policy.history)
        self.attachment: object | None = None  # what offload() built on it lives as long as it does
        self._mutex = threading.Lock()
        self._book = Book(owner, self.policy.device_memory, ahead=bool(self.policy.prefetch))
        self._turns = Turns()
        order = Order.of(self.policy.prefetch)
        self._switch = Switch(self._book, mover, self.history, self._mutex, order)
        self._local = OfThread()
        self._gate = Gate(self._book, self._switch, self._turns, self._mutex, self._local)
        self._nesting = Nesting(self.policy.nesting == "error", self._gate, self._mutex)

    # --- who is declared, and where it is ---------------------------------------------------------------

    def admit(
        self, components: Sequence[Component], conflicts: Callable[[Component, Component], bool]
    ) -> None:
        """Enter components, all of them or none; they start on the host.

        Args:
            components: New components.
            conflicts: Whether two components exclude each other; asked for new-new and new-old pairs.

        Raises:
            OwnershipError: A name is taken.
            BudgetError: A component does not fit into the policy's device memory.
        """
        with self._mutex:
            self._book.admit(components, conflicts)
            self.history.predicted = max(self.history.predicted, self._book.predicted_peak())
            for one in components:
                self._switch.record(EventKind.ENABLE, one.name, Cause.MANUAL)

    def retire(self, names: Sequence[str]) -> None:
        """Bring components home and strike them out.

        Raises:
            ScopeError: A scope is open on one of them; nothing was changed.
        """
        gone = [self._book[name] for name in names]
        self._gate.in_turn(partial(self._switch.strike, gone))

    @property
    def components(self) -> tuple[Component, ...]:
        """Everything declared, in the order of declaration."""
        return tuple(entry.component for entry in self._book.entries.values())

    @property
    def present(self) -> tuple[str, ...]:
        """The components on the device, residents included."""
        return tuple(entry.name for entry in self._book.entries.values() if entry.state is State.DEVICE)

    @property
    def arriving(self) -> str | None:
        """The component that is copied ahead of its scope, if there is one; it is not present yet."""
        return next((one.name for one in self._book.entries.values() if one.state is State.ARRIVING), None)

    @property
    def device_bytes(self) -> int:
        """Bytes of residents and loaded components, and of the one that arrives."""
        return self._book.held

    @property
    def predicted_peak(self) -> int:
        """Bytes of the heaviest set of components that may be on the device together."""
        with self._mutex:
            return self._book.predicted_peak()

    def rivals(self, name: str) -> tuple[str, ...]:
        """The components that must never be on the device together with this one."""
        return tuple(rival.name for rival in self._book[name].rivals)

    def state(self, name: str) -> State:
        """Where a component is now."""
        return self._book[name].state

    def size(self, name: str) -> int:
        """Device bytes of a component now; adopted tensors count."""
        return self._book[name].bytes

    def pins(self, name: str) -> int:
        """How many scopes are open on a component."""
        with self._mutex:
            self._gate.reap()
            return len(self._book[name].scopes)

    def is_current(self, tensor: Any) -> bool:
        """Whether a tensor, or a view, still shows its component's weights; see ``Offload.is_current``."""
        return self.mover.is_current(tensor)

    # --- scopes -------------------------------------------------------------------------------------------

    def scope(self, name: str, *, cause: Cause = Cause.SCOPE, timeout: float | None = None) -> OffloadScope:
        """A single-use context manager inside which the component is on the device.

        Args:
            name: The component.
            cause: Who opens it, for the events.
            timeout: Seconds to wait for rivals held by other threads; default: the policy's.

        Raises:
            UnknownComponentError: Nobody declared ``name``.
        """
        if name not in self._book.entries:
            self._book[name]  # says which names there are
        return OffloadScope(self, name, cause, self.policy.timeout if timeout is None else timeout)

    def enter(self, scope: OffloadScope) -> None:
        """Make the scope's component present and pin it (``with`` calls this)."""
        if scope.used:
            raise ScopeError(
                scope.name, "it was entered before; a scope is single-use.", "Ask for a new scope."
            )
        scope.used = True
        stack = self._local.stack
        try:
            # The fast path, written out: the component is there, and nobody is, or comes first, in the way.
            with self._mutex:
                entry, turns = self._book.entries.get(scope.name), self._turns
                if (
                    entry is not None
                    and entry.state is _DEVICE
                    and (not (turns.moving or turns.waiters) or turns.may_share(Waiter(stack, entry)))
                    and not (entry.component.clears and self._switch.cleared_by(entry))
                ):
                    scope.stack = stack
                    stack.scopes.append(scope)
                    entry.scopes.append(scope)
                    scope.displaced = stack.lost  # what is missing outside comes back when this one leaves
                    scope.work = self.mover.touch(scope.name)
                    return
            self._enter_in_turn(scope, stack)
        except BaseException as error:
            # An interrupt may come between any two steps, and __exit__ will not be called.
            self._gate.unpin(scope)
            if scope.displaced:
                self._restore_after(error, stack, scope.cause)
            raise

    def leave(self, scope: OffloadScope) -> None:
        """Unpin, and bring back the outer component that the scope displaced (``with`` calls this)."""
        stack = scope.stack
        if stack is None:
            raise ScopeError(scope.name, "it is not open.")
        if stack is not self._local.stack:
            raise ScopeError(
                scope.name, f"thread {stack.name} opened it, {self._local.stack.name} tried to leave it."
            )
        if stack.scopes[-1] is not scope:
            self._refuse_out_of_order(scope, stack)
        if scope.displaced:
            stack.lost = True  # until it is restored, lest an interrupt hides that something is missing
        try:
            with self._mutex:  # gate.unpin of an innermost scope, written out: every scope comes this way
                stack.scopes.remove(scope)
                self._book.entries[scope.name].scopes.remove(scope)
                scope.stack = scope.call = None
                if self._turns.waiters:
                    self._gate.changed.notify_all()
        except BaseException:
            self._gate.unpin(
                scope
            )  # interrupted before it was done; a leaked pin would hold the device for ever
            raise
        finally:
            if stack.lost:
                self._restore(stack, scope.cause)

    def scope_of_call(self, name: str, call: FrameType | None) -> OffloadScope | None:
        """This thread's open scope that a hook opened for one module call.

        Args:
            name: The component.
            call: The frame of the call; where there is none (compiled code), the innermost hook's scope.
        """
        for scope in self._local.stack.scopes[::-1]:
            if scope.call is call and scope.cause is _HOOK and scope.name == name:
                return scope
        return None

    # --- on request -----------------------------------------------------------------------------------------

    def load(self, name: str, *, timeout: float | None = None) -> None:
        """Bring a component in ahead of its scope. Idempotent; it stays until a rival needs the room.

        Raises:
            ScopeError: This thread has a scope open on a rival, which must stay.
        """
        entry = self._book[name]
        outer = self._nesting.displaced_by(entry, self._local.stack)
        if outer:
            raise ScopeError(
                name, f"it cannot be loaded ahead inside the scope of its rival {outer[0].name!r}."
            )
        limit = self.policy.timeout if timeout is None else timeout
        self._gate.in_turn(partial(self._switch.bring, entry, Cause.MANUAL), entry, limit)

    def release(self, *, free_arena: bool = False) -> None:
        """Send every unpinned swappable component home (the end of a request). Idempotent.

        Args:
            free_arena: Also give the device memory in which components take turns back to the system. Otherwise
                the component that arrives for the next request goes on arriving.
        """
        self._gate.in_turn(partial(self._switch.send_home, free_arena))

    def adopt(self) -> None:
        """Adopt now, not at the next switch, what others have put into the slots of components on the device.

        Every unpinned component goes home, which adopts; the residents come back.
        """
        self._gate.in_turn(self._switch.cycle)

    def note_saved(self, name: str, nbytes: int, start: float) -> None:
        """Write down that a present component was copied home without leaving (the end of an edit).

        Args:
            name: The component.
            nbytes: Bytes over the link.
            start: ``time.perf_counter()`` when the copy began.
        """
        with self._mutex:
            self._switch.record(EventKind.WRITE_BACK, name, Cause.MANUAL, start, nbytes)

    # --- the checks -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert I1, I2, I4, I6 and I8 on the book.

        Raises:
            InvariantError: One does not hold: a bug of this package.
        """
        mine = self._local.stack
        with self._mutex:
            self._gate.reap()
            problem = next(problems(self._book, self._turns, mine), None)
        if problem is not None:
            raise InvariantError(*problem)

    def audit(self) -> None:
        """``check()``, then compare with where every tensor is (I3, I5). Slow: it looks at each tensor.

        Raises:
            InvariantError: The ledger is untrue.
        """
        self.check()
        self._gate.in_turn(self._switch.compare)

    # --- taking turns -------------------------------------------------------------------------------------------

    def _enter_in_turn(self, scope: OffloadScope, stack: ThreadStack) -> None:
        entry = self._book[scope.name]
        self._nesting.allow(entry, stack)

        def act() -> None:
            scope.displaced = stack.lost or bool(self._nesting.displaced_by(entry, stack))
            self._switch.bring(entry, scope.cause)
            with self._mutex:  # before the turn ends, so that nobody evicts it in between
                self._book.pin(scope, entry, stack)
                scope.work = self.mover.touch(scope.name)

        self._gate.in_turn(act, entry, scope.timeout, cause=scope.cause)

    def _restore(self, stack: ThreadStack, cause: Cause) -> None:
        """Bring back what the scopes still open in this thread need, before their bodies resume."""
        stack.lost = True  # until it is done: I2 knows that these bodies resume with an error
        for entry in self._book.needed(stack):
            if entry.state is not State.DEVICE:
                self._gate.in_turn(partial(self._switch.bring, entry, cause), entry, first=True, cause=cause)
            with self._mutex:  # it may have come by another stream than the one its body goes on with
                for scope in stack.scopes:
                    if scope.name == entry.name:
                        self.mover.touch(scope.name, scope.work)
        stack.lost = False

    def _restore_after(self, error: BaseException, stack: ThreadStack, cause: Cause) -> None:
        """The same after a failure, which stays the error that the user sees."""
        try:
            self._restore(stack, cause)
        except Exception as second:
            if hasattr(error, "add_note"):
                error.add_note(f"The enclosing scope's component could not be brought back: {second}")

    # --- small things -------------------------------------------------------------------------------------------

    def _refuse_out_of_order(self, scope: OffloadScope, stack: ThreadStack) -> None:
        with self._mutex:
            self._gate.reap()
        if scope.stack is None or stack.scopes[-1] is not scope:
            inner = stack.scopes[-1].name if stack.scopes else "none"
            raise ScopeError(scope.name, f"a scope of {inner!r} was opened inside it and is still open.")
