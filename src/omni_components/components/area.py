"""The slots that belong to a component, as they are now: asked again at each switch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from .tensors import Slot, join, own_slots

Signature = tuple[list[int], int]


class Area:
    """The part of some module trees that one component covers.

    Args:
        root: The module that the paths start from.
        paths: Concrete dotted paths below it: modules (with all below them) or single tensors. An empty
            path is the root itself. They are resolved anew each time, since adapters replace modules.
        prefix: What the root is called, for messages.
    """

    def __init__(self, root: nn.Module, paths: Iterable[str], prefix: str = "") -> None:
        self.root = root
        self.paths = tuple(paths)
        self.prefix = prefix
        self._outside_modules: set[int] = set()
        self._outside_slots: set[tuple[int, str]] = set()

    def leave_out(self, modules: Iterable[nn.Module] = (), slots: Iterable[Slot] = ()) -> None:
        """Exclude what another component owns: nested modules, and slots of shared tensors."""
        self._outside_modules |= {id(one) for one in modules}
        self._outside_slots |= {(id(one.module), one.name) for one in slots}

    def signature(self) -> Signature:
        """Changes when a module is added, removed or replaced, or a slot filled or emptied."""
        seen = set(self._outside_modules)
        found: list[int] = []
        count = 0
        for path in self.paths:
            one = resolve(self.root, path)
            if isinstance(one, nn.Module):
                count += _fingerprint(one, seen, found)
            elif one is not None:
                count += 1
        return found, count

    def slots(self) -> Iterator[Slot]:
        """The filled slots."""
        modules, singles = self._found()
        for path, module in modules:
            for slot in own_slots(path, module):
                if (id(module), slot.name) not in self._outside_slots:
                    yield slot
        yield from (slot for slot in singles if (id(slot.module), slot.name) not in self._outside_slots)

    def modules(self) -> list[tuple[str, nn.Module]]:
        """The modules it covers, with their paths."""
        return self._found()[0]

    def _found(self) -> tuple[list[tuple[str, nn.Module]], list[Slot]]:
        seen = set(self._outside_modules)
        modules: list[tuple[str, nn.Module]] = []
        singles = []
        for path in self.paths:
            found = resolve(self.root, path)
            if isinstance(found, nn.Module):
                modules += _tree(join(self.prefix, path), found, seen)
            elif isinstance(found, torch.Tensor):
                singles += [one for one in _holder_slots(self.root, path, self.prefix) if one.tensor is found]
        return modules, singles


class FixedArea:
    """Slots that were found once: what is left of a model when its parts are taken out, and shared tensors."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._slots = list(slots)

    def signature(self) -> Signature:
        """Never changes: nobody looks for new ones here."""
        return [], 0

    def slots(self) -> Iterator[Slot]:
        """The filled slots."""
        return (slot for slot in self._slots if slot.tensor is not None)

    def leave_out(self, modules: Iterable[nn.Module] = (), slots: Iterable[Slot] = ()) -> None:
        """Exclude slots of shared tensors."""
        gone = {(id(one.module), one.name) for one in slots}
        self._slots = [one for one in self._slots if (id(one.module), one.name) not in gone]


def resolve(root: nn.Module, path: str) -> nn.Module | torch.Tensor | None:
    """What a dotted path names below a module: a module, a parameter or buffer, or nothing."""
    found: nn.Module | torch.Tensor | None = root
    for part in path.split(".") if path else ():
        if not isinstance(found, nn.Module):
            return None
        children = found._modules
        found = children[part] if part in children else found._parameters.get(part, found._buffers.get(part))
    return found


def _holder_slots(root: nn.Module, path: str, prefix: str) -> Iterator[Slot]:
    parent, _, name = path.rpartition(".")
    holder = resolve(root, parent)
    if isinstance(holder, nn.Module):
        yield from (one for one in own_slots(join(prefix, parent), holder) if one.name == name)


def _fingerprint(root: nn.Module, seen: set[int], found: list[int]) -> int:
    """Appends the ids of a tree's modules to ``found``; returns the number of filled slots."""
    todo = [root]
    count = 0
    while todo:
        module = todo.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found.append(id(module))
        for table in (module._parameters, module._buffers):
            for tensor in table.values():
                if tensor is not None:
                    count += 1
        todo.extend(child for child in module._modules.values() if child is not None)
    return count


def _tree(path: str, root: nn.Module, seen: set[int]) -> list[tuple[str, nn.Module]]:
    found = []
    todo = [(path, root)]
    while todo:
        path, module = todo.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found.append((path, module))
        todo += [
            (join(path, name), child)
            for name, child in reversed(module._modules.items())
            if child is not None
        ]
    return found
