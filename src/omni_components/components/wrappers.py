"""Tensors that hold their bytes in other tensors: quantised weights, and any other wrapper subclass.

A *leaf* is a plain tensor inside a wrapper, however deep. Leaves move as all tensors do, but as two objects each,
one per side: a wrapper's own device is fixed when it is made, so that a leaf of it must never cross. A *composite*
is the wrapper: one object per side, each over that side's leaves, made the way its class says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from .grouping import Extent
    from .tensors import Group, Member, Slot

_WRAPS = {torch.Tensor: False, nn.Parameter: False}  # by class: asked for each tensor, and answered slowly


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes are those of other tensors, and its class says which (``__tensor_flatten__``)."""
    kind = type(tensor)
    if kind not in _WRAPS:
        _WRAPS[kind] = bool(is_traceable_wrapper_subclass(tensor))
    return _WRAPS[kind]


def leaves(tensor: torch.Tensor, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors inside a tensor, with their paths, always in the same order; a plain tensor is its own."""
    if not is_wrapper(tensor):
        yield path, tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from leaves(getattr(tensor, name), f"{path}.{name}" if path else name)


def shells(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A wrapper, and the wrappers inside it."""
    if is_wrapper(tensor):
        yield tensor
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from shells(getattr(tensor, name))


def is_elsewhere(tensor: torch.Tensor) -> str | None:
    """Why a wrapper's inner tensors are not all of it, in words that follow its name; ``None`` if they are."""
    kind = type(tensor)
    if kind.__module__.startswith("torch.distributed."):
        return f"is a {kind.__name__}, whose bytes lie in several processes"
    return None


def cannot_be_rebuilt(tensor: torch.Tensor) -> str | None:
    """Why a wrapper cannot be made anew over other memory, likewise.

    It is tried on the meta device, which takes no memory and shows a class that keeps its device by itself.
    """
    kind = type(tensor)
    inner = [leaf for _, leaf in leaves(tensor)]
    try:
        trial = rebuilt(tensor, [torch.empty_like(leaf, device="meta") for leaf in inner])
        if trial.device.type != "meta":
            return f"is a {kind.__name__}, which stays on {trial.device} wherever its inner tensors are"
    except Exception:
        try:
            trial = rebuilt(tensor, inner)  # some classes look at the values
        except Exception as error:
            return f"is a {kind.__name__}, which cannot be rebuilt from its inner tensors ({error})"
    if type(trial) is not kind:
        return f"is a {kind.__name__}, which its inner tensors make a {type(trial).__name__}"
    return None


def rebuilt(like: torch.Tensor, inner: Sequence[torch.Tensor]) -> torch.Tensor:
    """A wrapper like another one, attributes included, over other leaves in the order of :func:`leaves`."""
    with torch.inference_mode(False), torch.no_grad(), torch._C._EnableTorchFunction():
        made = _rebuilt(like, iter(inner))
        if made.requires_grad is not like.requires_grad:
            made.requires_grad_(like.requires_grad)
        return made


def _rebuilt(like: Any, inner: Iterator[torch.Tensor]) -> torch.Tensor:
    if not is_wrapper(like):
        return next(inner)
    names, context = like.__tensor_flatten__()
    parts = {name: _rebuilt(getattr(like, name), inner) for name in names}
    made: torch.Tensor = type(like).__tensor_unflatten__(parts, context, like.size(), like.stride())
    for name, value in like.__dict__.items():
        if name not in made.__dict__:  # what the class itself does not pass on: `_is_param`, a loader's marks
            made.__dict__[name] = value
    return made


@dataclass(slots=True, eq=False)
class Composite:
    """One wrapper with all its slots.

    Attributes:
        slots: Where it is registered.
        leaves: Its inner tensors, in the order of :func:`leaves`.
        host: The object registered while the component is on the host; ``None`` until it is first needed.
        device: Likewise on the device; made anew whenever a leaf has got another place there.
        like: The one last seen, from which the others are made.
    """

    slots: list[Slot]
    leaves: list[Member]
    host: torch.Tensor | None
    device: torch.Tensor | None
    like: torch.Tensor
    _shells: list[torch.Tensor] = field(
        default_factory=list
    )  # of `device`: itself and the wrappers inside it
    _versions: list[int] = field(default_factory=list)
    _places: list[torch.Tensor | None] = field(default_factory=list)
    _attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Its first name."""
        return self.slots[0].path

    def bind_host(self) -> None:
        """Register the wrapper over the masters."""
        if self.host is None:
            self.host = rebuilt(self.like, self._inner(False))
        self._put(self.host)

    def bind_device(self) -> None:
        """Register the wrapper over the device memory."""
        places = [leaf.away for leaf in self.leaves]
        if self.device is None or any(new is not old for new, old in zip(places, self._places, strict=True)):
            self.device, self._places = rebuilt(self.like, self._inner(True)), places
            self._shells = list(shells(self.device))
        self._put(self.device)
        self.saved()

    def written(self) -> bool:
        """Whether someone wrote to it on the device: to the wrapper itself, which moves no leaf's version counter."""
        return [one._version for one in self._shells] != self._versions

    def saved(self) -> None:
        """The masters have what the device has."""
        self._versions = [one._version for one in self._shells]

    def leave(self) -> None:
        """Let go of the device's object: it may keep views of the device memory."""
        self.device, self._places, self._shells, self._versions = None, [], [], []

    def bound(self, present: bool) -> torch.Tensor | None:
        """The object that the mover registers on a side."""
        return self.device if present else self.host

    def sound(self, present: bool) -> bool:
        """Whether the bound object still consists of the leaves that the mover gave it, where it put them."""
        travelling = (leaf for leaf in self.leaves if not present or leaf.device is not None)
        return self._whole(present) and all(leaf.sound(present) for leaf in travelling)

    def intact(self, present: bool) -> bool:
        """Whether every slot has the bound object, and that its leaves; where these lie is asked of them."""
        bound = self.bound(present)
        return all(slot.table.get(slot.name) is bound for slot in self.slots) and self._whole(present)

    def _whole(self, present: bool) -> bool:
        bound = self.bound(present)
        if bound is None:
            return False
        found = [leaf for _, leaf in leaves(bound)]
        mine = self._inner(present)
        return len(found) == len(mine) and all(map(is_, found, mine))

    def _inner(self, present: bool) -> list[torch.Tensor]:
        # With device="cpu", a leaf that is no page of a file has no second object: it is there already.
        return [leaf.device if present and leaf.device is not None else leaf.host for leaf in self.leaves]

    def _put(self, wrapper: torch.Tensor) -> None:
        if wrapper is not self.like:
            self._pass_on(self.like, wrapper)
            self.like = wrapper
        self._attributes = dict(wrapper.__dict__)
        for slot in self.slots:
            slot.put(wrapper)

    def _pass_on(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Attributes that someone set or deleted on one side since it was bound; its leaves are not among them."""
        now = source.__dict__
        for name, value in now.items():
            if self._attributes.get(name, target) is not value and not isinstance(value, torch.Tensor):
                target.__dict__[name] = value
        for name in self._attributes.keys() - now.keys():
            target.__dict__.pop(name, None)


def compose(runs: Iterable[list[Extent]], groups: Iterable[Group]) -> list[Composite]:
    """The wrappers among the tensors of some groups, each made from a run of extents in the same order."""
    members: dict[int, Member] = {}
    slots: dict[int, dict[tuple[int, str], Slot]] = {}
    wrappers: dict[int, torch.Tensor] = {}
    for run, group in zip(runs, groups, strict=True):
        for extent, member in zip(run, group.members, strict=True):
            members[id(extent.tensor)] = member
            for slot in extent.slots:
                wrapper = slot.tensor
                if wrapper is None or wrapper is extent.tensor:
                    continue
                wrappers[id(wrapper)] = wrapper
                slots.setdefault(id(wrapper), {})[id(slot.module), slot.name] = slot
    return [_composite(one, list(slots[key].values()), members) for key, one in wrappers.items()]


def _composite(wrapper: torch.Tensor, slots: list[Slot], members: dict[int, Member]) -> Composite:
    found = [leaf for _, leaf in leaves(wrapper)]
    inner = [members[id(leaf)] for leaf in found]
    # A leaf made under inference mode got a normal tensor in its place: then the wrapper is made anew, too.
    on_host = all(member.host is leaf for member, leaf in zip(inner, found, strict=True))
    on_device = all(member.device is leaf for member, leaf in zip(inner, found, strict=True))
    composite = Composite(slots, inner, wrapper if on_host else None, wrapper if on_device else None, wrapper)
    composite._attributes = dict(wrapper.__dict__)
    composite._places = [leaf.away for leaf in inner]
    if on_device:
        composite._shells = list(shells(wrapper))
    return composite
