"""Many members bound and checked at once: flat lists, walked by C, so that a switch costs little per tensor.

What is asked of each tensor, and what is done with it, is that of :class:`~.tensors.Member`, which stays the
record; nothing is skipped. Only the order differs: one question to all tensors, then the next question.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from operator import attrgetter, is_, setitem
from typing import Any

import torch

from .tensors import Member

# Looked up on the C class: an attribute's getter called from ``map`` takes a third of the time of a method's line.
_address: Any = torch.Tensor.data_ptr
_version: Any = attrgetter("_version")
_dtype: Any = attrgetter("dtype")
_set_data: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class Side:
    """The objects of one side, host or device, of many members; valid while they and their places stay as they are.

    Args:
        members: Whose; on the device side each must have been bound there before.
        present: The device side.
    """

    def __init__(self, members: Iterable[Member], present: bool) -> None:
        members = list(members)
        self._present = present
        # A slot that a class guards, or a table of another kind, is asked and written through the member.
        self._apart = [one for one in members if not _flat(one)]
        self._members = [one for one in members if _flat(one)]
        self._objects = [self._bound(one) for one in self._members]
        self._dtypes = [one.dtype for one in self._members]
        self._addresses = array(
            "q", ((one.away_address if present else one.home_address) for one in self._members)
        )
        slots = [(slot, self._bound(one)) for one in self._members for slot in one.slots]
        self._tables: list[Any] = [slot.table for slot, _ in slots]  # dicts; _flat says so
        self._names = [slot.name for slot, _ in slots]
        self._registered = [tensor for _, tensor in slots]
        crossing = [one for one in self._members if one.device is one.host]
        self._crossing = [one.host for one in crossing]
        self._places = [one.away if present else one.home for one in crossing]
        self._versions: array[int] | None = None

    def intact(self) -> bool:
        """Whether every slot has the object that the mover put there, and each lies where the mover put it."""
        return (
            all(map(is_, map(dict.get, self._tables, self._names), self._registered))
            and array("q", map(_address, self._objects)) == self._addresses
            and all(map(is_, map(_dtype, self._objects), self._dtypes))
            and all(one.intact(self._present) for one in self._apart)
        )

    def bind(self) -> None:
        """Register this side everywhere."""
        _run(map(_set_data, self._crossing, self._places))
        _run(map(setitem, self._tables, self._names, self._registered))
        for one in self._apart:
            one.bind_device() if self._present else one.bind_host()
        if self._present and self._versions is None:
            self._note_versions()

    def written(self) -> bool:
        """Whether someone may have written to one on the device; members tell which.

        Versions that stayed as they were until now need not be noted again at the next binding: a write in
        between, by someone who kept the device's object, would only be copied home for nothing.
        """
        if self._versions_now() == self._versions:
            return any(one.written() for one in self._apart)
        self._versions = None
        return True

    def _note_versions(self) -> None:
        self._versions = self._versions_now()
        for member, version in zip(self._members, self._versions, strict=True):
            member.version = version

    def _versions_now(self) -> array[int]:
        return array("q", map(_version, self._objects))

    def _bound(self, member: Member) -> torch.Tensor:
        bound = member.device if self._present else member.host
        assert bound is not None
        return bound


def _flat(member: Member) -> bool:
    return all(slot.plain and type(slot.table) is dict for slot in member.slots)


def _run(steps: Iterable[Any]) -> None:
    """Do all steps, without a line of Python between them."""
    deque(steps, maxlen=0)
