"""The machine over the real mover: tiny modules on the simulated accelerator, with just enough memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from hypothesis import strategies as st
from torch import nn

from omni_components import Component, OffloadPolicy, ResidencyLedger, Role
from omni_components.components.area import Area
from omni_components.components.grouping import extents, overlapping
from omni_components.protocols import Moved
from omni_components.testing import SimulatedAccelerator
from omni_components.testing.machine import NESTING, ResidencyMachine
from omni_components.testing.modules import TinyModule
from omni_components.testing.movers import Fault, FaultPlan
from omni_components.testing.strategies import ComponentSet, component_sets
from omni_components.testing.subjects import Subject
from omni_components.transfer.arena import place
from omni_components.transfer.cargo import Cargo
from omni_components.transfer.device import backend_for, data_crosses, registrar_for
from omni_components.transfer.masters import PinBudget, align
from omni_components.transfer.mover import ArenaMover

WIDTH = 24
INPUT = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)
ACTIVATIONS = 16 << 10  # bytes beside the weights


class FaultyArenaMover(ArenaMover):
    """The real mover, whose moves fail as planned: by the device where it can, in the binding where it cannot."""

    def __init__(self, sim: SimulatedAccelerator, *, keep_arena: bool) -> None:
        super().__init__(backend_for(sim.device), keep_arena=keep_arena)
        self.sim = sim
        self.faults = FaultPlan()
        self._count = 0

    def load(self, name: str) -> Moved:
        return self._struck("load", name, super().load, self._break_load)

    def evict(self, name: str) -> Moved:
        return self._struck("evict", name, super().evict, self._break_evict)

    def _struck(
        self,
        verb: str,
        name: str,
        move: Callable[[str], Moved],
        break_it: Callable[[Cargo, Fault], None],
    ) -> Moved:
        fault = self.faults.strike(verb, name)  # type: ignore[arg-type]
        if fault is None:
            return move(name)
        if fault.when == "before":
            raise fault.make(name)
        if fault.when == "inside":
            self._count += 1
            break_it(self.cargo(name), fault)
        try:
            move(name)
        finally:
            self.sim.heal()
            vars(self.cargo(name)).pop("bind_device", None)
            vars(self).pop("_settle_copies", None)
        raise fault.make(name)

    def _break_load(self, cargo: Cargo, fault: Fault) -> None:
        copies = sum(1 for group in cargo.groups if not group.packed and group.nbytes) + len(cargo.home.slabs)
        error = KeyboardInterrupt if fault.error is KeyboardInterrupt else None
        if self._count % 2 or not copies:
            cargo.bind_device = half(cargo, "bind_device", fault)  # type: ignore[method-assign]
        else:
            self.sim.fail(copy=self._count % max(1, copies - len(cargo.home.slabs)), error=error)

    def _break_evict(self, cargo: Cargo, fault: Fault) -> None:
        """After what was written is home, before anything is bound."""

        def settle(cargo: Cargo) -> None:
            raise fault.make(cargo.name)

        self._settle_copies = settle  # type: ignore[method-assign]


def half(cargo: Cargo, name: str, fault: Fault) -> Callable[[], None]:
    """Bind half of the tensors, then fail; the next time it works."""

    def bind() -> None:
        del vars(cargo)[name]
        members = list(cargo.members())
        for member in members[: len(members) // 2]:
            getattr(member, name)()
        raise fault.make(cargo.name)

    return bind


class ArenaSubject:
    """Modules with twins that stay on the host: the resident run that everything is compared with.

    Args:
        declared: Names and conflicts; the sizes are the modules'.
        make: Builds the module of a name, the same each time. (A deep copy of a parameter is no alias any more.)
        keep: Whether the arena is held.
        pinned: Most bytes that can be pinned; the rest of the masters is pageable.
        order: When late copies run, as the accelerator takes it.
    """

    def __init__(
        self,
        declared: ComponentSet,
        make: Callable[[str], nn.Module],
        *,
        policy: OffloadPolicy,
        keep: bool,
        pinned: int | None,
        order: object,
    ) -> None:
        self._declared = declared
        self.modules = {name: make(name) for name in declared.names}
        self.twins = {name: make(name) for name in declared.names}
        self.values = dict.fromkeys(declared.names, 0)
        self.sim = SimulatedAccelerator(copies=order)  # type: ignore[arg-type]
        self.sim.__enter__()
        self.sim.pinned_capacity = pinned
        self._input = INPUT.to(self.sim.device)
        self._results: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._wrong: list[str] = []
        self.mover = FaultyArenaMover(self.sim, keep_arena=keep)
        self.ledger = ResidencyLedger(self.mover, policy)
        self.components: Sequence[Component] = [self._component(one) for one in declared.components]
        self._apart: set[str] = set()
        self.admit(declared.names)
        self._apart.clear()
        self.sim.capacity = self._room() + ACTIVATIONS

    def _component(self, declared: Component) -> Component:
        cargo = self._cargo(declared.name)
        size = sum(align(group.nbytes) for group in cargo.groups)
        return Component(
            name=declared.name, role=Role.DIT, bytes=size, tensors=cargo.tensors, resident=declared.resident
        )

    def _cargo(self, name: str) -> Cargo:
        area = Area(self.modules[name], [""], name)
        cargo = Cargo(name, area, crosses=data_crosses(self.sim.device))
        cargo.declare(overlapping(extents(area.slots())))
        return cargo

    def _room(self) -> int:
        """The heaviest set, with the allocator's rounding of each block to 512 bytes; or what a kept arena may hold.

        That one cannot always place a graph that no roles make within its heaviest set. And a component that has
        grown, or was declared since, has bytes of its own until nobody is in the buffer.
        """
        sizes = {one.name: one.bytes for one in self.components}
        peak = self.ledger.predicted_peak
        if self.mover.arena.keep:
            swapped = {one.name: one.bytes for one in self.components if not one.resident}
            ends = [at + swapped[name] for name, at in place(swapped, self.conflict).items()]
            peak = max(peak, max(ends) + sum(one.bytes for one in self.components if one.resident))
            peak += sum(sizes[name] + align(4 * WIDTH) for name in self._apart)
        return peak + 512 * len(self.components)

    def _is_apart(self, *names: str) -> None:
        self._apart.update(names)
        if self.sim.capacity is not None:
            self.sim.capacity = max(self.sim.capacity, self._room() + ACTIVATIONS)

    # --- the machine's subject ----------------------------------------------------------------------------

    def conflict(self, one: str, other: str) -> bool:
        return self._declared.conflict(one, other)

    def admit(self, names: Sequence[str]) -> None:
        fresh = [one for one in self.components if one.name in names]
        taken = {one.name for one in self.ledger.components}
        cargoes = [self._cargo(one.name) for one in fresh if one.name not in taken]
        for cargo in cargoes:
            self.mover.register(cargo)
        self.ledger.admit(fresh, lambda one, other: self.conflict(one.name, other.name))
        budget = PinBudget(1 << 40, registrar_for(self.sim.device), said=True)
        for cargo in cargoes:
            cargo.master(budget)
        swapped = [one.name for one in self.ledger.components if not one.resident]
        self.mover.arrange(swapped, self.conflict)
        self._is_apart(*names)

    def retire(self, names: Sequence[str]) -> None:
        self.ledger.retire(names)
        for name in names:
            self.mover.forget(name)

    def arm(self, fault: Fault) -> None:
        self.mover.faults.arm(fault)

    def disarm(self) -> None:
        self.mover.faults.clear()

    def write(self, name: str, value: int) -> None:
        """In place, or a new parameter, where the weights are now: I7 says that they are never lost."""
        self.values[name] = value
        if value % 3 == 0:
            self._is_apart(name)
        with torch.no_grad():
            for one in (self.modules[name], self.twins[name]):
                layer = one.layers[0]
                if value % 3 == 0:
                    layer.bias = nn.Parameter(torch.full_like(layer.bias, value / 100))
                elif value % 3 == 1:
                    layer.weight[value % WIDTH].fill_(value / 100)
                else:
                    layer.weight.mul_(-1.0 + value / 200)

    def read(self, name: str) -> int:
        """Every tensor equals the twin's, wherever it is, with its shape, strides and aliases."""
        mine, theirs = dict(_tensors(self.modules[name])), dict(_tensors(self.twins[name]))
        assert list(mine) == list(theirs)
        for path, tensor in mine.items():
            other = theirs[path]
            assert (tensor.shape, tensor.stride(), tensor.dtype) == (
                other.shape,
                other.stride(),
                other.dtype,
            ), path
            assert torch.equal(tensor.cpu(), other), f"{name}.{path} is not what was written last"
        return self.values[name]

    def compute(self, name: str) -> None:
        """Enqueue work; nobody waits for it here, so that the mover has to."""
        with torch.no_grad():
            self._results.append((name, self.modules[name](self._input), self.twins[name](INPUT)))
        if len(self._results) > 12:
            self._look()  # they take device memory

    def _look(self) -> None:
        self._wrong += [
            f"{name!r} computed something else"
            for name, result, expected in self._results
            if not torch.equal(result.cpu(), expected)
        ]
        self._results.clear()

    def violations(self) -> Sequence[str]:
        """What came out (bit for bit the resident run's), races, memory beyond the predicted peak (I1, I2, I8)."""
        self._look()
        found = list(self._wrong)
        found += [str(race) for race in self.sim.races]
        home = [one.name for one in self.ledger.components if not self.mover.present(one.name)]
        absent = [name for name in home if self.mover.arena.holds(name) is not None]
        absent = [name for name in absent if name != self.ledger.arriving]
        found += [f"{name!r} is home and still holds device bytes" for name in absent]
        peak, limit = self.sim.stats().peak, self.sim.capacity
        if limit is not None and peak > limit:
            found.append(f"{peak} bytes were allocated, {limit} predicted")
        return found

    def close(self) -> None:
        self.sim.__exit__(None, None, None)


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


@dataclass
class Tally:
    """What machines really did: counted as it happens, not worked out from a profile's numbers."""

    examples: int = 0
    steps: int = 0
    races: int = 0


class ArenaMachine(ResidencyMachine):
    """Random phases over the real mover. Copies run late: when somebody waits for them, or in a drawn order."""

    tally: ClassVar[Tally] = Tally()
    subject_type: ClassVar[type[ArenaSubject]] = ArenaSubject
    prefetch: ClassVar[bool] = False
    _begun = False

    def check_observers(self) -> None:
        """Each step ends with this; the first time nothing was done yet."""
        self.tally.races += len(self.subject.sim.races)
        super().check_observers()
        if self._begun:
            self.tally.steps += 1
        else:
            self._begun = True
            self.tally.examples += 1

    def make_subject(self, data: st.DataObject) -> Subject:
        declared = data.draw(component_sets(members=2), label="declared")
        traits = st.frozensets(st.sampled_from(TinyModule.TRAITS), max_size=3)
        chosen = {name: data.draw(traits, label=f"traits of {name}") for name in declared.names}

        def make(name: str) -> nn.Module:
            count = declared.names.index(name)
            return TinyModule(WIDTH, 1 + count % 2, chosen[name], torch.Generator().manual_seed(count))

        choices = data.draw(st.lists(st.integers(0, 2), max_size=60), label="copies")
        return self.subject_type(
            declared,
            make,
            policy=OffloadPolicy(nesting=data.draw(NESTING, label="nesting"), prefetch=self.prefetch),
            keep=data.draw(st.booleans(), label="keep the arena"),
            pinned=data.draw(st.sampled_from((None, 8192, 0)), label="pinnable bytes"),
            order=data.draw(st.sampled_from(("lazy", _chooser(choices)))),
        )

    def check_accounting(self) -> None:
        """I8: a component that took on a new parameter keeps the old one's place in its slab, and may grow by it."""
        ledger = self.subject.ledger
        assert ledger.device_bytes == sum(ledger.size(name) for name in self.model.present)
        assert ledger.device_bytes <= ledger.predicted_peak
        for name, expected in self.model.places.items():
            assert expected.bytes <= ledger.size(name) <= expected.bytes + align(4 * WIDTH)


def _chooser(choices: Sequence[int]) -> Callable[[int], int]:
    left = iter(choices)
    return lambda count: next(left, 0) % (count + 1)
