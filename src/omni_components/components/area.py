"""The slots that belong to a component, as they are now: asked again at each switch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from operator import is_, is_not, methodcaller
from typing import Any

import torch
from torch import nn

from .tensors import Slot, join, own_slots

_INSIDE = "base_layer"  # where an adapter layer (PEFT) keeps the layer whose place it took
_VALUES: Any = methodcaller("values")


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
        self._noted: _Census | None = None

    def leave_out(self, modules: Iterable[nn.Module] = (), slots: Iterable[Slot] = ()) -> None:
        """Exclude what another component owns: nested modules, and slots of shared tensors."""
        self._outside_modules |= {id(one) for one in modules}
        self._outside_slots |= {(id(one.module), one.name) for one in slots}
        self._noted = None

    def note(self) -> None:
        """Remember the modules, and how many slots are filled: what :meth:`changed` compares with."""
        self._noted = _Census(self.root, self._paths_now(), self._outside_modules)

    def changed(self) -> bool:
        """Whether a module was added, removed or replaced since, or a slot filled or emptied."""
        return self._noted is None or not self._noted.holds()

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

    def _paths_now(self) -> list[str]:
        return [now for path in self.paths for now in _meant(self.root, path)]

    def _found(self) -> tuple[list[tuple[str, nn.Module]], list[Slot]]:
        seen = set(self._outside_modules)
        modules: list[tuple[str, nn.Module]] = []
        singles = []
        for path in self._paths_now():
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

    def note(self) -> None:
        """Nothing to remember."""

    def changed(self) -> bool:
        """Never: nobody looks for new ones here."""
        return False

    def slots(self) -> Iterator[Slot]:
        """The filled slots."""
        return (slot for slot in self._slots if slot.tensor is not None)

    def modules(self) -> list[tuple[str, nn.Module]]:
        """None: it covers slots only."""
        return []

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


def _meant(root: nn.Module, path: str) -> list[str]:
    """The paths that a declared one means now: a single weight takes the adapters around its layer along."""
    parent, _, name = path.rpartition(".")
    holder = resolve(root, parent)
    if (
        not isinstance(holder, nn.Module)
        or resolve(holder, name) is not None
        or _INSIDE not in holder._modules
    ):
        return [path]  # the usual case
    around = [join(parent, one) for one in holder._modules if one != _INSIDE] if name == "weight" else []
    return [*_meant(root, join(parent, f"{_INSIDE}.{name}")), *around]


def _holder_slots(root: nn.Module, path: str, prefix: str) -> Iterator[Slot]:
    parent, _, name = path.rpartition(".")
    holder = resolve(root, parent)
    if isinstance(holder, nn.Module):
        yield from (one for one in own_slots(join(prefix, parent), holder) if one.name == name)


class _Census:
    """Module trees as they were, in flat lists that C compares with what is there now.

    The tables are kept, not the modules: a module that gets a new table altogether (none that we know does)
    would be seen by neither this nor the slots.
    """

    def __init__(self, root: nn.Module, paths: Iterable[str], outside: set[int]) -> None:
        self._root = root
        self._missing: list[str] = []
        self._steps: dict[tuple[int, str], tuple[Any, str, nn.Module]] = {}  # on the way to the paths
        self._singles: list[tuple[Any, str]] = []
        self._modules: list[nn.Module] = []
        seen = set(outside)
        for path in paths:
            end = self._walk(path)
            if end is not None:
                self._modules += [module for _, module in _tree("", end, seen)]
        self._children_of = [one._modules for one in self._modules]
        self._tables: list[Any] = [
            table for one in self._modules for table in (one._parameters, one._buffers)
        ]
        everything = (*self._children_of, *self._tables)
        # A scripted module's tables are no dictionaries.
        self._values: Any = dict.values if all(isinstance(one, dict) for one in everything) else _VALUES
        self._children = [child for table in self._children_of for child in table.values()]
        self._filled = self._count()

    def holds(self) -> bool:
        """Whether it is all as it was."""
        return (
            sum(map(len, self._children_of)) == len(self._children)
            and all(map(is_, self._each(self._children_of), self._children))
            and self._count() == self._filled
            and all(table.get(name) is module for table, name, module in self._steps.values())
            and all(table.get(name) is not None for table, name in self._singles)
            and all(resolve(self._root, path) is None for path in self._missing)
        )

    def _walk(self, path: str) -> nn.Module | None:
        """The module at the end of a path; where it ends at a tensor or nowhere, that is noted."""
        module = self._root
        for part in path.split(".") if path else ():
            child = module._modules.get(part)
            if child is not None:
                self._steps[id(module), part] = module._modules, part, child
                module = child
            elif resolve(self._root, path) is None:
                self._missing.append(path)
                return None
            else:
                table = module._parameters if part in module._parameters else module._buffers
                self._singles.append((table, part))
                return None
        return module

    def _each(self, tables: Iterable[Any]) -> Iterable[Any]:
        return chain.from_iterable(map(self._values, tables))

    def _count(self) -> int:
        return sum(map(is_not, self._each(self._tables), repeat(None)))


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
