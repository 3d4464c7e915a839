"""The mover: loads components into the arena and evicts them. It never decides.

An eviction copies nothing: weights do not change in inference, so the tensors are bound back to their
masters. What did change on the device is copied home first, group by group.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function

from ..components.tensors import Group
from ..components.wrappers import leaves
from ..errors import OmniComponentsError, TransferError
from ..protocols import Moved, MoverFacts
from .ahead import Ahead
from .arena import Arena
from .cargo import Cargo, Pair
from .device import Backend, moving
from .inspection import audit, facts, what_hinders_prefetch
from .staging import Staging


class ArenaMover:
    """Carries components between their masters and one arena.

    Args:
        backend: The device's streams and memory.
        keep_arena: Hold one device buffer for all components that take turns; otherwise take and give back.
        ahead: Components may be copied ahead, so that the buffer needs room for one more.
    """

    def __init__(self, backend: Backend, *, keep_arena: bool, ahead: bool = False) -> None:
        self.backend = backend
        self.arena = Arena(backend.device, keep=keep_arena, ahead=ahead, free=backend.free_bytes)
        self.staging: Staging | None = None  # the way for masters that are mapped from files
        self._cargo: dict[str, Cargo] = {}
        self._ahead: dict[str, Ahead] = {}
        self._stale = False  # somebody absent may have views of a buffer that was given up
        self._users: list[object] = []  # streams that may still compute on arena memory its owner has left
        # The allocator gives bytes back to the stream they were taken on: one, whichever threads load and evict.
        self._origin = backend.touch()

    # --- who travels --------------------------------------------------------------------------------------

    def register(self, cargo: Cargo) -> None:
        """Take a component on."""
        self._cargo[cargo.name] = cargo

    def forget(self, name: str) -> None:
        """Drop a component that is on the host; its masters are unpinned and stay its tensors' memory."""
        cargo = self._cargo.get(name)
        if cargo is None:
            return  # never came so far
        self.arena.forget(name)
        with moving():
            cargo.leave(stable=False)
            cargo.restore_computed()
        for slab in cargo.home.slabs:
            slab.unpin()
        self._cargo.pop(name, None)  # last: an interrupted one is done again

    def arrange(
        self, swapped: list[str], rivals: Callable[[str, str], bool], limit: int | None = None
    ) -> None:
        """Place those that take turns in the arena, which may be as large as ``limit`` to hold one more."""
        self.arena.limit = limit
        sizes = {name: self._cargo[name].size for name in swapped}
        self._leave_absent(self.arena.arrange(sizes, rivals))

    def cargo(self, name: str) -> Cargo:
        """A component's record."""
        return self._cargo[name]

    # --- the protocol -------------------------------------------------------------------------------------

    def load(self, name: str) -> Moved:
        """Copy a component into its device bytes and bind its tensors there.

        Raises:
            TransferError: No room, or a copy failed; the component is whole on the host.
            WeightsError: What was still to be read cannot be; likewise.
        """
        cargo = self._cargo[name]
        with moving(), record_function(f"omni::load {name}"):
            adopted, copied = self._adopt(cargo)
            ahead = self._ahead.get(name)
            recopied = ahead is not None and (adopted > 0 or not ahead.up_to_date())
            if recopied:
                self.drop(name)
            with self._undone_on_failure(cargo):
                if cargo.seasoned and name not in self._ahead:
                    self._pin_pages(cargo)
                brought = self._bring_in(cargo)
        size = cargo.new_size()
        return Moved(bytes=brought, written_back=copied, adopted=adopted, size=size, recopied=recopied)

    def has_room_ahead(self, name: str) -> bool:
        """Whether a component has a pinned master, and bytes for it are proven free beside those in use."""
        cargo = self._cargo[name]
        if cargo.awaited:
            return False  # what is pinned after the copy would be taken for copied
        copies_run_alone = self.backend.touch() is not None and cargo.payload(pinned=True) > 0
        return copies_run_alone and self.arena.has_room_ahead(name, cargo.size)

    def prefetch(self, name: str) -> Moved:
        """Begin to copy an absent component into bytes of its own; what is not pinned waits for `load`."""
        cargo = self._cargo[name]
        with moving(), record_function(f"omni::prefetch {name}"):
            try:
                with self._taking():
                    ahead = self._ahead[name] = Ahead(cargo, self.arena.take_ahead(name, cargo.size))
                ahead.arrived, _ = self._copy(cargo, cargo.copies(ahead.block, pinned=True))
            except BaseException:
                try:
                    self._let_copies_end()
                finally:
                    self.drop(name)
                raise
        return Moved(bytes=cargo.payload(pinned=True))

    def drop(self, name: str) -> None:
        """Give back the bytes that an absent component was copied into ahead. Idempotent."""
        ahead = self._ahead.get(name)
        try:
            if ahead is not None:
                # The bytes are about to be anyone's, and the masters may be written to.
                self._settle(ahead.arrived)
        finally:
            self._ahead.pop(name, None)  # first: interrupted in between, the bytes are still nobody else's
            self.arena.give(name)

    def evict(self, name: str) -> Moved:
        """Bind a component's tensors back to its masters and give its device bytes back.

        Raises:
            TransferError: A changed weight could not be copied home; the component is whole on the device.
        """
        cargo = self._cargo[name]
        with moving(), record_function(f"omni::evict {name}"):
            try:
                adopted, copied = self._adopt(cargo)
                copied += self._write_back(cargo)
                self._settle_copies(cargo)
            except TransferError:
                raise
            except Exception as error:
                # Nothing is bound yet: what is in the slots, and what was written to it, stays as it is.
                raise self._error(cargo, error, to_host=True) from error
            try:
                cargo.bind_host()
                self._vacate(cargo)
            except BaseException:
                # Interrupted between two steps. The masters are up to date, and what was just adopted has no
                # bytes on the device: the way home is the one that can be finished.
                cargo.bind_host()
                self._vacate(cargo)
                raise
        return Moved(written_back=copied, adopted=adopted, size=cargo.new_size())

    def present(self, name: str) -> bool:
        """Whether a component is on the device."""
        return self._cargo[name].present

    def touch(self, name: str, stream: Any = None) -> Any:
        """Note a stream: it waits for the copies, and the component does not leave before its work."""
        if stream is None:
            stream = self.backend.touch()
        if stream is None:
            return None  # nothing is asynchronous here
        cargo = self._cargo[name]
        if stream not in cargo.streams:
            if cargo.arrived is not None:
                self.backend.wait(stream, cargo.arrived)
            cargo.streams.append(stream)
        return stream

    def release_arena(self) -> int:
        """Give the arena's memory back to the system if nobody is in it; returns the bytes."""
        freed = self.arena.release()
        self._leave_absent(freed > 0)
        if freed:
            self.backend.flush()
        return freed

    def save(self, name: str) -> int:
        """Copy all of a present component home, whether it looks changed or not; returns the bytes."""
        cargo = self._cargo[name]
        with moving():
            copied = sum(self._copy_home(cargo, group) for group in cargo.groups)
            for composite in cargo.composites:
                composite.saved()
            return copied

    def what_hinders_prefetch(self) -> list[str]:
        """Why components are not copied ahead although the policy asks for it, for the report."""
        return what_hinders_prefetch(self._cargo, self.arena, self.backend)

    def is_current(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor, or a view, shows what its component's slots hold now.

        False for one that shows memory which the component has left, and for one of no component.
        """
        with moving():
            asked = {leaf.untyped_storage()._cdata for _, leaf in leaves(tensor)}
            for cargo in self._cargo.values():
                asked -= cargo.storages()
        return not asked

    def facts(self) -> MoverFacts:
        """Memory that the masters and the arena hold, for the report."""
        staging = () if self.staging is None else self.staging.slabs
        return facts(self._cargo.values(), self.arena, staging)

    def audit(self, present: Mapping[str, bool]) -> list[str]:
        """Compare every tensor with where the ledger says it is, and look for bytes with two owners."""
        with moving():
            return audit(self._cargo, self._ahead, present, self.backend.device)

    def _leave_absent(self, given_up: bool) -> None:
        """Drop the views of a buffer that was given up, now or, if an interrupt came between, the next time."""
        self._stale = self._stale or given_up
        if not self._stale:
            return  # every view is of memory that is still there
        with moving():
            for cargo in self._cargo.values():
                if not cargo.present:
                    cargo.leave(stable=False)
        self._stale = False

    def _adopt(self, cargo: Cargo) -> tuple[int, int]:
        if not cargo.disturbed():
            return 0, 0
        if cargo.present:
            self.touch(cargo.name)  # it may copy on the current stream
        return cargo.adopt()

    # --- loading ------------------------------------------------------------------------------------------

    def _pin_pages(self, cargo: Cargo) -> None:
        if not cargo.pin_pages() or self.staging is None:
            return
        self.staging.look_again()
        if not any(one.home.mapped for one in self._cargo.values()):
            self.staging.close()  # nothing passes through it any more

    @contextmanager
    def _undone_on_failure(self, cargo: Cargo) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            try:
                self._let_copies_end()
            finally:
                cargo.bind_host()
                self._vacate(cargo)
            # The error holds the frames it came through, and these the block, whose bytes the outer scope's
            # component, or whoever tries again, may need.
            traceback.clear_frames(error.__traceback__)
            if isinstance(error, Exception) and not isinstance(error, OmniComponentsError):
                raise self._error(cargo, error, to_host=False) from error
            raise

    def _bring_in(self, cargo: Cargo) -> int:
        """Put it into its device bytes, or go on where it was copied ahead; returns the bytes copied now."""
        ahead = self._ahead.get(cargo.name)
        if ahead is None:
            block = self._room(cargo)
            cargo.arrived, brought = self._copy(cargo, cargo.copies_as_read(block))
        else:
            cargo.read()
            block, brought = ahead.block, cargo.payload(pinned=False)
            cargo.arrived = ahead.arrived
            if brought:
                cargo.arrived, brought = self._copy(cargo, cargo.copies(block, pinned=False))
        here = self.backend.touch()
        cargo.streams = [] if here is None else [here]
        if here is not None:
            self.backend.wait(here, cargo.arrived)
        cargo.settle(block)
        if self.backend.watches():
            self.backend.lend(cargo.memory())
        cargo.bind_device()
        cargo.seasoned = True
        self._ahead.pop(cargo.name, None)
        return brought

    def _room(self, cargo: Cargo) -> torch.Tensor:
        self._leave_absent(self.arena.grow(cargo.name, cargo.size))
        with self._taking():
            try:
                return self.arena.take(cargo.name, cargo.size)
            except (torch.OutOfMemoryError, MemoryError):
                # Blocks of other sizes may be cached. Once: a second failure is the truth.
                self.backend.flush()
                return self.arena.take(cargo.name, cargo.size)

    def _taking(self) -> Any:
        return nullcontext() if self._origin is None else self._origin

    def _copy(self, cargo: Cargo, pairs: Iterable[Pair]) -> tuple[Any, int]:
        """Enqueue copies to a component's device bytes; returns the event behind them, and their bytes."""
        # The block may be memory that compute, on the stream it comes from or on one of its last owner's, still uses.
        self.backend.after([*self._users, *([self._origin] if self._origin is not None else [])])
        sent = 0
        with self.backend.copies():
            if self.staging is not None:
                sent = self.staging.send(pairs)
            else:
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
                    sent += source.numel()
        arrived = self.backend.done()
        for slab in cargo.home.slabs:
            slab.reader = arrived
        self._users = []
        return arrived, sent

    def _let_copies_end(self) -> None:
        """Copies that were enqueued before a failure still read the masters and write the block."""
        self._settle(self.backend.done())

    # --- evicting -----------------------------------------------------------------------------------------

    def _write_back(self, cargo: Cargo) -> int:
        return sum(self._copy_home(cargo, group) for group in cargo.written())

    def _copy_home(self, cargo: Cargo, group: Group) -> int:
        if group.raw is None:
            return 0  # just adopted: its master is the copy
        for stream in cargo.streams:
            stream.synchronize()
        group.source.copy_(group.raw)
        for member in group.members:
            member.version = member.device._version if member.device is not None else 0
        return group.nbytes

    def _settle_copies(self, cargo: Cargo) -> None:
        self._settle(cargo.arrived)

    def _settle(self, arrived: Any) -> None:
        # Once home, the masters may be written to: no copy may still be reading them.
        if arrived is not None and not arrived.query():
            arrived.synchronize()

    def _vacate(self, cargo: Cargo) -> None:
        for stream in cargo.streams:
            if stream not in self._users:
                self._users.append(stream)
            if stream != self._origin:
                self._origin.wait_stream(stream)  # the allocator may give it these bytes next
        cargo.streams, cargo.arrived = [], None
        if self.backend.watches():
            self.backend.take_back(cargo.memory())
        cargo.leave(stable=self.arena.stable(cargo.name))
        self._ahead.pop(cargo.name, None)
        self.arena.give(cargo.name)

    def _error(self, cargo: Cargo, error: Exception, *, to_host: bool) -> TransferError:
        cause = (str(error) or type(error).__name__).splitlines()[0]
        return TransferError(cargo.name, cargo.size, self.backend.free_bytes(), cause, to_host=to_host)
