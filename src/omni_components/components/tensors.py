"""Tensors of a component in their two places, host and device; the ONE place that rebinds a module's tensors.

A *slot* is where a module registers a tensor. A *member* is one tensor with all its slots. A *group* is the
members whose bytes overlap: it moves as one range of bytes, so that aliases stay aliases.

A member crosses in one of two ways, chosen once, at attach:

* ``.data =`` keeps the tensor object (``id(p)`` constant), where the device allows it;
* elsewhere (PrivateUse1) the slots change between two stable objects that share one attribute dictionary.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

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
