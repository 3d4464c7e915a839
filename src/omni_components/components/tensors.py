"""Tensors of a component, grouped by the memory they share; the ONE place that rebinds a module's tensors.

A *slot* is where a module registers a tensor. A *member* is one tensor with all its slots. A *group* is the
members whose bytes overlap: it moves as one range of bytes, so that aliases stay aliases.

A member crosses in one of two ways, chosen once, at attach:

* ``.data =`` keeps the tensor object (``id(p)`` constant), where the device allows it;
* elsewhere (PrivateUse1) the slots change between two stable objects that share one attribute dictionary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..errors import UnsupportedTensorError
from .wrappers import cannot_be_rebuilt, is_elsewhere, is_wrapper, leaves

ALIGNMENT = 256  # bytes; what CUDA's allocator gives a fresh tensor, and kernels count on


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """Where a module registers a tensor.

    ``plain`` says that writing to the table is all there is to do: the module's class has no ``__setattr__`` of
    its own. (An RNN has: it keeps a second list of its weights.)
    """

    module: nn.Module
    table: MutableMapping[str, Any]  # its values are tensors or None
    name: str
    path: str
    plain: bool

    @property
    def tensor(self) -> torch.Tensor | None:
        """What is registered there now."""
        return self.table.get(self.name)

    def put(self, tensor: torch.Tensor) -> None:
        """Register another tensor, as the module itself would."""
        if self.plain:
            self.table[self.name] = tensor
        else:
            setattr(self.module, self.name, tensor)


def own_slots(path: str, module: nn.Module) -> Iterator[Slot]:
    """The filled slots of one module, without its children."""
    plain = type(module).__setattr__ is nn.Module.__setattr__
    for table in (module._parameters, module._buffers):
        for name, tensor in table.items():
            if tensor is not None:
                yield Slot(module, table, name, join(path, name), plain)


def join(path: str, name: str) -> str:
    """A dotted path one segment longer; an empty part adds nothing."""
    return f"{path}.{name}" if path and name else path or name


@dataclass(slots=True, eq=False)
class Member:
    """One tensor of a group.

    Attributes:
        slots: Where it is registered; nowhere by itself, if it is only an inner tensor of a wrapper.
        host: The object registered while the component is on the host.
        device: The object registered while it is on the device; ``host`` itself where ``.data =`` crosses.
        dtype: Its element type; the objects of the two sides may lag behind until they are bound.
        geometry: Size, stride and offset (elements from the start of the group), which never change.
        home: The view of the master; ``home_address`` is where it starts.
        away: The view of the device memory, ``None`` while there is none; likewise.
        version: The version counter when it was bound; a write moves it.
        inner: Its path, for an inner tensor of a wrapper.
    """

    slots: list[Slot]
    host: torch.Tensor
    device: torch.Tensor | None
    dtype: torch.dtype
    geometry: tuple[tuple[int, ...], tuple[int, ...], int]
    home: torch.Tensor
    away: torch.Tensor | None = None
    version: int = 0
    home_address: int = -1
    away_address: int = -1
    inner: str = ""

    @property
    def path(self) -> str:
        """Its first name."""
        return self.slots[0].path if self.slots else self.inner

    def view(self, raw: torch.Tensor) -> torch.Tensor:
        """This member's view of a group's bytes, whichever side they are on."""
        size, stride, offset = self.geometry
        view = torch.empty(0, dtype=self.dtype, device=raw.device)
        return view.set_(raw.untyped_storage(), offset, size, stride)

    def live_at(self, home: torch.Tensor) -> None:
        """Take a view of the master. An object of its own follows at once; a crossing one when it is bound."""
        self.home, self.home_address = home, home.data_ptr()
        if self.device is not self.host:
            self.host.data = home

    def stay_at(self, away: torch.Tensor | None) -> None:
        """Take a view of device memory, or let go of it; the objects follow likewise."""
        self.away = away
        self.away_address = -1 if away is None else away.data_ptr()
        if self.device is None or self.device is self.host:
            return  # made, or bound, when the component is
        if away is not None:
            self.device.data = away
        elif self.device.numel():  # asked of the object: an interrupt may have come after the line above
            self.device.data = torch.empty(0, dtype=self.device.dtype, device=self.device.device)

    def bind_host(self) -> None:
        """Register the master."""
        if self.device is self.host:
            self.host.data = self.home
        for slot in self.slots:
            slot.put(self.host)

    def bind_device(self) -> None:
        """Register the device memory."""
        assert self.away is not None
        if self.device is None:
            self.device = twin(self.host, self.away)
        elif self.device is self.host:
            self.device.data = self.away
        for slot in self.slots:
            slot.put(self.device)
        self.version = self.device._version

    def written(self) -> bool:
        """Whether someone wrote to it on the device since it was bound."""
        return self.device is not None and self.device._version != self.version

    def sound(self, present: bool) -> bool:
        """Whether the bound object still lies on the memory that the mover put it on."""
        bound, address = (self.device, self.away_address) if present else (self.host, self.home_address)
        return bound is not None and bound.data_ptr() == address and bound.dtype is self.dtype

    def intact(self, present: bool) -> bool:
        """Whether, besides, every slot still has the object that the mover put there."""
        bound = self.device if present else self.host
        for slot in self.slots:
            if slot.table.get(slot.name) is not bound:
                return False
        return self.sound(present)


@dataclass(slots=True, eq=False)
class Group:
    """Members that share bytes; ``source`` is the master: a uint8 tensor over exactly these bytes.

    Attributes:
        offset: Where it starts in the component's layout, in bytes.
        packed: Its master lies in a slab, which carries it; otherwise it travels by itself.
        norms: Modules whose running statistics it holds: batch_norm writes them without moving the version
            counter (torch 2.13).
    """

    members: list[Member]
    source: torch.Tensor
    offset: int = 0
    packed: bool = False
    raw: torch.Tensor | None = None
    norms: tuple[nn.Module, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the group, each once."""
        return self.source.numel()

    def rehome(self, source: torch.Tensor) -> None:
        """Make other host memory, which holds the same bytes, the master; binding is a step of its own."""
        self.source = source
        for member in self.members:
            member.live_at(member.view(source))

    def bind_host(self) -> None:
        """Register the master everywhere."""
        for member in self.members:
            member.bind_host()

    def settle(self, raw: torch.Tensor) -> None:
        """Make device memory this group's place; its views are built once for each place."""
        if self.raw is raw:
            return  # same place as last time
        for member in self.members:
            member.stay_at(member.view(raw))
        self.raw = raw  # last: an interrupt in between must not look like the same place next time

    def leave(self) -> None:
        """Let go of the device memory, so that it can be freed."""
        self.raw = None
        for member in self.members:
            member.stay_at(None)


def own_storage(raw: torch.Tensor) -> torch.Tensor:
    """The same bytes as a tensor with a storage of its own, exactly as large, which keeps the memory alive.

    Saving, copying or counting one weight then never takes the whole slab or arena with it.
    """
    if raw.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=raw.device)
    return torch.from_dlpack(torch.utils.dlpack.to_dlpack(raw))  # type: ignore[attr-defined]


def twin(original: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """A second object of the same class over other data; both share one attribute dictionary."""
    copy: torch.Tensor
    if isinstance(original, nn.Parameter):
        copy = torch.Tensor._make_subclass(type(original), data, original.requires_grad)
    elif type(original) is torch.Tensor:
        copy = data.detach()
    else:
        copy = data.as_subclass(type(original))
    if hasattr(original, "__dict__"):
        copy.__dict__ = original.__dict__  # an attribute set on one side is seen on the other
    return copy


def refuse_unmovable(component: str, slot: Slot) -> None:
    """Raise for a tensor that has no bytes of its own to move, nor of inner tensors.

    Raises:
        UnsupportedTensorError: It names the tensor, the reason and what to do.
    """
    tensor: Any = slot.tensor
    if not is_wrapper(tensor):
        _refuse_unmovable(component, slot.path, tensor)
        return
    reason = is_elsewhere(tensor)
    if reason is None:
        for path, leaf in leaves(tensor, slot.path):
            _refuse_unmovable(component, path, leaf)
        reason = cannot_be_rebuilt(tensor)
    if reason is not None:
        raise UnsupportedTensorError(component, slot.path, reason, _BY_HAND)


_BY_HAND = "Put it on the device yourself, as a plain attribute instead of a parameter or buffer."


def _refuse_unmovable(component: str, path: str, tensor: Any) -> None:
    kind = type(tensor).__name__
    if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
        raise UnsupportedTensorError(
            component, path, "is not initialised", "Run the module once before enabling."
        )
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedTensorError(component, path, f"is a {kind}, not a tensor", _BY_HAND)
    if type(tensor).__torch_dispatch__ not in (
        torch.Tensor.__torch_dispatch__,
        nn.Parameter.__torch_dispatch__,
    ):
        reason = f"is a {kind}, which does not say where its bytes are (no __tensor_flatten__)"
        raise UnsupportedTensorError(component, path, reason, _BY_HAND)
    if type(tensor).__module__.partition(".")[0] == "bitsandbytes":
        reason = f"is a {kind}, whose quantisation state lies outside of it"
        raise UnsupportedTensorError(component, path, reason, _BY_HAND)
    if tensor.is_meta:
        raise UnsupportedTensorError(
            component, path, "is on the meta device", "Load the weights before enabling."
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        reason = f"is not a plain strided tensor ({tensor.layout})"
        raise UnsupportedTensorError(component, path, reason, _BY_HAND)


# --- grouping -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Extent:
    """The bytes ``[low, high)`` of a storage that one tensor covers; its slots hold it, or a wrapper around it."""

    storage: tuple[str, int]
    low: int
    high: int
    tensor: torch.Tensor
    slots: list[Slot]
    path: str


def extents(slots: Iterable[Slot]) -> list[Extent]:
    """One extent per distinct tensor, with all its slots, sorted by place in memory; wrappers by their leaves."""
    found: dict[int, Extent] = {}
    for slot in slots:
        if slot.tensor is None:
            continue
        for path, tensor in leaves(slot.tensor, slot.path):
            if id(tensor) in found:
                found[id(tensor)].slots.append(slot)
            else:
                found[id(tensor)] = _extent(tensor, slot, path)
    return sorted(found.values(), key=lambda one: (one.storage, one.low))


def _extent(tensor: torch.Tensor, slot: Slot, path: str) -> Extent:
    storage = tensor.untyped_storage()
    size = tensor.element_size()
    low = int(tensor.storage_offset()) * size
    reach = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    high = low + (reach + 1) * size if tensor.numel() else low
    # An empty tensor has no address: it is alone in its group. One without memory (a plan's) is known by its storage.
    place = -id(tensor) if not storage.nbytes() else storage._cdata if tensor.is_meta else storage.data_ptr()
    return Extent((str(tensor.device), place), low, high, tensor, [slot], path)


def overlapping(found: Iterable[Extent]) -> Iterator[list[Extent]]:
    """Sorted extents in runs whose bytes overlap."""
    run: list[Extent] = []
    high = 0
    for one in found:
        if run and (one.storage != run[0].storage or one.low >= high):
            yield run
            run, high = [], 0
        run.append(one)
        high = max(high, one.high)
    if run:
        yield run


def span(run: Iterable[Extent]) -> int:
    """Bytes that a group of these extents takes on the device, the rounding up to the next place included."""
    low, high = reach(run)
    return -(-(high - low) // ALIGNMENT) * ALIGNMENT


def reach(run: Iterable[Extent]) -> tuple[int, int]:
    """From where to where the extents reach; it starts at a multiple of every element size."""
    run = list(run)
    return min(one.low for one in run) // 16 * 16, max(one.high for one in run)


def make_group(
    run: list[Extent], *, crosses: bool, partners: Mapping[int, torch.Tensor] | None = None
) -> Group:
    """A group over the memory where its tensors are now; nothing moves or is rebound.

    Args:
        run: Extents whose bytes overlap.
        crosses: Whether ``.data =`` can carry a host tensor object to the device and back.
        partners: The object of the other side for tensors (by ``id``) that have one already.
    """
    low, high = reach(run)
    members = []
    for one in run:
        tensor = one.tensor
        offset = int(tensor.storage_offset()) - low // tensor.element_size()
        geometry = (tuple(tensor.shape), tuple(tensor.stride()), offset)
        slots = [slot for slot in one.slots if slot.tensor is tensor]
        # A wrapper's device is fixed when it is made: its inner tensors never cross.
        alone = len(slots) == len(one.slots)
        host, device = _objects(tensor, crosses and alone, (partners or {}).get(id(tensor)))
        member = Member(slots, host, device, tensor.dtype, geometry, home=tensor.detach(), inner=one.path)
        if tensor.device.type != "cpu":
            member.away, member.away_address = member.home, tensor.data_ptr()
            member.version = 0 if tensor.is_inference() else tensor._version
        members.append(member)
    return Group(
        members, _bytes_of(run[0].tensor, low, high), norms=_norms(slot for one in run for slot in one.slots)
    )


def _norms(slots: Iterable[Slot]) -> tuple[nn.Module, ...]:
    running = ("running_mean", "running_var")
    return tuple(one.module for one in slots if one.name in running and isinstance(one.module, _NormBase))


def _bytes_of(tensor: torch.Tensor, low: int, high: int) -> torch.Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return whole[low:high]


def _objects(
    tensor: torch.Tensor, crosses: bool, partner: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The objects for the two sides; ``None`` for one that is made at its first use."""
    on_host = tensor.device.type == "cpu"
    if tensor.is_inference():
        # It has no version counter, so that a write would go unseen: a normal tensor takes its place.
        tensor = twin(tensor, torch.empty_like(tensor))
    if crosses:
        return tensor, tensor
    if on_host:
        return tensor, partner
    return partner if partner is not None else twin(tensor, torch.empty(0, dtype=tensor.dtype)), tensor
