"""The mover: loads components into the arena and evicts them. It never decides.

An eviction copies nothing: weights do not change in inference, so the tensors are bound back to their
masters. What did change on the device is copied home first, group by group.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.profiler import record_function

from ..components.tensors import Group
from ..components.wrappers import leaves
from ..errors import TransferError
from ..protocols import Moved, MoverFacts
from .arena import Arena
from .cargo import Cargo
from .device import Backend, moving


class ArenaMover:
    """Carries components between their masters and one arena.

    Args:
        backend: The device's streams and memory.
        keep_arena: Hold one device buffer for all components that take turns; otherwise take and give back.
    """

    def __init__(self, backend: Backend, *, keep_arena: bool) -> None:
        self.backend = backend
        self.arena = Arena(backend.device, keep=keep_arena)
        self._cargo: dict[str, Cargo] = {}
        self._stale = False  # somebody absent may have views of a buffer that was given up
        self._users: list[object] = []  # streams that may still compute on arena memory its owner has left

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
        for slab in cargo.slabs:
            slab.unpin()
        self._cargo.pop(name, None)  # last: an interrupted one is done again

    def arrange(self, swapped: list[str], rivals: Callable[[str, str], bool]) -> None:
        """Place those that take turns in the arena."""
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
        """
        cargo = self._cargo[name]
        with moving(), record_function(f"omni::load {name}"):
            adopted, copied = self._adopt(cargo)
            with self._undone_on_failure(cargo):
                self._bring_in(cargo)
        return Moved(bytes=cargo.payload(), written_back=copied, adopted=adopted, size=cargo.new_size())

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

    def touch(self, name: str) -> None:
        """Note the current stream: it waits for the copies, and the component does not leave before its work."""
        stream = self.backend.touch()
        if stream is None:
            return  # nothing is asynchronous here
        cargo = self._cargo[name]
        if stream not in cargo.streams:
            cargo.streams.append(stream)
            if cargo.arrived is not None:
                self.backend.wait(stream, cargo.arrived)

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
        slabs = [slab for cargo in self._cargo.values() for slab in cargo.slabs]
        apart = [group for cargo in self._cargo.values() if not cargo.slabs for group in cargo.groups]
        mapped = sum(group.nbytes for group in apart) if self.backend.device.type == "cpu" else 0
        pageable = sum(slab.tensor.numel() for slab in slabs if not slab.pinned)
        pageable += 0 if mapped else sum(group.nbytes for group in apart)
        plain = [one for cargo in self._cargo.values() for one in cargo.members() if one.slots]
        same = all(one.device is one.host for one in plain)
        return MoverFacts(
            pinned_bytes=sum(slab.taken for slab in slabs),
            pageable_bytes=pageable,
            mapped_bytes=mapped,
            arena_bytes=self.arena.held,
            binding="data" if same else "slots",
        )

    def audit(self, present: Mapping[str, bool]) -> list[str]:
        """Compare every tensor with where the ledger says it is, and look for bytes with two owners."""
        found = []
        ranges: list[tuple[int, int, str]] = []
        for name, expected in present.items():
            cargo = self._cargo[name]
            if cargo.present is not expected:
                found.append(f"{name!r} is {'' if cargo.present else 'not '}on the device")
            found += cargo.misplaced(self.backend.device if cargo.present else torch.device("cpu"))
            ranges += cargo.ranges()
        ranges.sort()
        for (_, high, one), (low, _, other) in itertools.pairwise(ranges):
            if low < high:
                found.append(f"{one!r} and {other!r} share bytes")
        return found

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

    @contextmanager
    def _undone_on_failure(self, cargo: Cargo) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            try:
                # Copies that were enqueued before the failure still read the masters and write the block.
                cargo.arrived = self.backend.done()
                self._settle_copies(cargo)
            finally:
                cargo.bind_host()
                self._vacate(cargo)
            # The error holds the frames it came through, and these the block, whose bytes the outer scope's
            # component, or whoever tries again, may need.
            traceback.clear_frames(error.__traceback__)
            if isinstance(error, Exception) and not isinstance(error, TransferError):
                raise self._error(cargo, error, to_host=False) from error
            raise

    def _bring_in(self, cargo: Cargo) -> None:
        block = self._room(cargo)
        self._copy_in(cargo, block)
        cargo.settle(block)
        if self.backend.watches():
            self.backend.lend(cargo.memory())
        cargo.bind_device()

    def _room(self, cargo: Cargo) -> torch.Tensor:
        self._leave_absent(self.arena.grow(cargo.name, cargo.size))
        try:
            return self.arena.take(cargo.name, cargo.size)
        except (torch.OutOfMemoryError, MemoryError):
            # Blocks of other sizes may be cached. Once: a second failure is the truth.
            self.backend.flush()
            return self.arena.take(cargo.name, cargo.size)

    def _copy_in(self, cargo: Cargo, block: torch.Tensor) -> None:
        here = self.backend.touch()
        # The block may be memory that compute, here or on a stream of its last owner, has not finished with.
        self.backend.after([*self._users, *([here] if here is not None else [])])
        with self.backend.copies():
            for target, source in cargo.copies(block):
                target.copy_(source, non_blocking=True)
        cargo.arrived = self.backend.done()
        for slab in cargo.slabs:
            slab.reader = cargo.arrived
        cargo.streams = [] if here is None else [here]
        if here is not None:
            self.backend.wait(here, cargo.arrived)
        self._users = []

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
        # Once home, the masters may be written to: no copy may still be reading them.
        if cargo.arrived is not None and not cargo.arrived.query():
            cargo.arrived.synchronize()

    def _vacate(self, cargo: Cargo) -> None:
        here = self.backend.touch()
        for stream in cargo.streams:
            if stream not in self._users:
                self._users.append(stream)
            if here is not None and stream != here:
                here.wait_stream(stream)  # the allocator may give these bytes to the current stream next
        cargo.streams, cargo.arrived = [], None
        if self.backend.watches():
            self.backend.take_back(cargo.memory())
        cargo.leave(stable=self.arena.stable(cargo.name))
        self.arena.give(cargo.name)

    def _error(self, cargo: Cargo, error: Exception, *, to_host: bool) -> TransferError:
        cause = (str(error) or type(error).__name__).splitlines()[0]
        return TransferError(cargo.name, cargo.size, self.backend.free_bytes(), cause, to_host=to_host)
