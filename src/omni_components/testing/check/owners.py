"""Whose a tensor is: a component's, on the host or on the device; a module's that nobody declared; or nobody's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

import torch
from torch import nn
from torch.multiprocessing import reductions

from ...components.component import Role
from ...components.tensors import Member, join
from ...components.wrappers import leaves
from ...residency.events import EventKind, ResidencyEvent
from ..simulated.accelerator import SimulatedAccelerator
from .lines import callers
from .search import Owned, cells, described, functions, same_memory, search, variable
from .targets import modules, tensors

_Storage: Any = reductions.StorageWeakRef  # it has no types


@dataclass(slots=True)
class _Place:
    low: int
    high: int
    owned: Owned


class Owners:
    """Finds names for the tensors that a request computes with.

    Args:
        target: The pipeline or model.
        handle: Its offload; ``None`` for a resident run.
        sim: Gets the names of device memory, for its race reports.
    """

    def __init__(self, target: Any, handle: Any, sim: SimulatedAccelerator) -> None:
        self.handle = handle
        self._target = target
        self._sim = sim
        self._host: dict[int, list[_Place]] = {}
        self._lent: dict[int, tuple[Any, list[_Place]]] = {}
        self._made: dict[int, tuple[Any, str]] = {}
        self._stop: Callable[[], None] = lambda: None
        if handle is not None:
            self._ledger = handle.ledger
            self._roles = {one.name: one.role for one in self._ledger.components}
            self._stop = self._ledger.history.listen(self._moved)
            for one in self._ledger.components:
                self._note(one.name)
        else:
            for path, tensor in tensors(target).items():
                sim.label(tensor, path) if tensor.device == sim.device else None

    def close(self) -> None:
        """Stop listening."""
        self._stop()

    # --- what it tells ------------------------------------------------------------------------------------

    def of_component(self, tensor: torch.Tensor) -> Owned | None:
        """The component that a tensor on the host, or lent device memory, belongs to."""
        storage = tensor.untyped_storage()._cdata
        if tensor.device.type == "cpu":
            return _at(self._host.get(storage, ()), tensor)
        lent = self._lent.get(storage)
        return None if lent is None or lent[0].expired() else _at(lent[1], tensor)

    def is_away(self, name: str) -> bool:
        """Whether a component is on the host."""
        return not self._ledger.mover.present(name)

    def is_part(self, name: str) -> bool:
        """Whether a component is a part of a split model."""
        return self.handle is not None and self._roles.get(name) is Role.PART

    @property
    def present(self) -> tuple[str, ...]:
        """Who takes turns and is on the device."""
        if self.handle is None:
            return ()
        resident = {one.name for one in self._ledger.components if one.resident}
        return tuple(name for name in self._ledger.present if name not in resident)

    def name(self, tensor: torch.Tensor, frame: FrameType | None) -> Owned:
        """The best name for a tensor, in the order in which its author would call it."""
        found = self._of_modules(tensor) or self.of_component(tensor) or self._of_attributes(tensor)
        return found or self._of_locals(tensor, frame) or Owned("unknown", described(tensor))

    def made_at(self, tensor: torch.Tensor) -> str:
        """The line that made a host tensor in this request; empty if it was there before."""
        made = self._made.get(tensor.untyped_storage()._cdata)
        return "" if made is None or made[0].expired() else made[1]

    def note_made(self, tensor: torch.Tensor, line: str) -> None:
        """Remember the line that made a host tensor."""
        storage = tensor.untyped_storage()
        self._made[storage._cdata] = _Storage(storage), line

    # --- components ---------------------------------------------------------------------------------------

    def _moved(self, event: ResidencyEvent) -> None:
        if event.kind in (EventKind.LOAD, EventKind.EVICT):
            self._note(event.component)

    def _note(self, name: str) -> None:
        cargo = self._ledger.mover.cargo(name)
        here = cargo.present
        for member in cargo.members():
            _remember(self._host, member.home, _owned(name, member))
            if here and member.away is not None and member.away.device == self._sim.device:
                places: dict[int, list[_Place]] = {}
                _remember(places, member.away, _owned(name, member))
                self._lend(member.away, places)
                self._sim.label(member.away, f"{name}: {member.path}")

    def _lend(self, tensor: torch.Tensor, places: Mapping[int, list[_Place]]) -> None:
        storage = tensor.untyped_storage()
        old = self._lent.get(storage._cdata)
        known = old[1] if old is not None and not old[0].expired() else []
        fresh = [one for one in places[storage._cdata] if one not in known]
        self._lent[storage._cdata] = _Storage(storage), [*known, *fresh]

    # --- everybody else -----------------------------------------------------------------------------------

    def _of_modules(self, tensor: torch.Tensor) -> Owned | None:
        """A module's that is in no component, be it tied to one's; in a resident run, any module's."""
        declared = self._declared()
        for path, module in modules(self._target).items():
            for table in (module._parameters, module._buffers):
                for name, one in table.items():
                    if one is None or (id(module), name) in declared:
                        continue
                    if any(same_memory(leaf, tensor) for _, leaf in leaves(one)):
                        return Owned("module", join(path, name), dim=one.dim())
        return None

    def _declared(self) -> set[tuple[int, str]]:
        if self.handle is None:
            return set()
        attached: Any = self._ledger.attachment
        areas = [one.found.area for one in attached.attached.values()]
        return {(id(slot.module), slot.name) for area in areas for slot in area.slots()}

    def _of_attributes(self, tensor: torch.Tensor) -> Owned | None:
        for path, holder in {"": self._target, **modules(self._target)}.items():
            for name, value in list(vars(holder).items()):
                if isinstance(holder, nn.Module) and name in ("_parameters", "_buffers", "_modules"):
                    continue
                found = next(search(value, f"{path}.{name}" if path else name, tensor), None)
                if found is not None:
                    return found
            for name, function in functions(holder):
                if any(same_memory(one, tensor) for one in cells(function)):
                    called = f"{path}.{name}" if path else name
                    return Owned("closure", f"{variable(function, tensor)} in the closure of {called}")
        return None

    def _of_locals(self, tensor: torch.Tensor, frame: FrameType | None) -> Owned | None:
        for one in callers(frame):
            for name, value in list(one.f_locals.items()):
                if isinstance(value, torch.Tensor) and same_memory(value, tensor):
                    kind: Literal["closure", "local"] = (
                        "closure" if name in one.f_code.co_freevars else "local"
                    )
                    return Owned(kind, f"{name} in {one.f_code.co_name}")
            for name in one.f_code.co_names:  # a module's global, which no module of the model holds either
                value = one.f_globals.get(name)
                if isinstance(value, torch.Tensor) and same_memory(value, tensor):
                    return Owned("closure", f"the global {name} of {one.f_code.co_filename}")
        return None


def _owned(name: str, member: Member) -> Owned:
    return Owned("component", member.path, name, len(member.geometry[0]))


def _remember(table: dict[int, list[_Place]], view: torch.Tensor, owned: Owned) -> None:
    low, high = _reach(view)
    places = table.setdefault(view.untyped_storage()._cdata, [])
    place = _Place(low, high, owned)
    if place not in places:
        places.append(place)


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size() * bool(tensor.numel())


def _at(places: Any, tensor: torch.Tensor) -> Owned | None:
    address = tensor.data_ptr()
    return next((one.owned for one in places if one.low <= address < one.high), None)
