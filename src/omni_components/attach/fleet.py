"""The components under one ledger, attached: all of an offload's or none of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from ..components.component import Component, conflict
from ..components.declaration import SHARED, Declaration, Found
from ..components.paths import unwrapped
from ..errors import DeclarationError, OwnershipError, PolicyError
from ..policy import OffloadPolicy
from ..residency.ledger import ResidencyLedger
from ..transfer.cargo import Cargo
from ..transfer.device import backend_for, data_crosses, registrar_for
from ..transfer.hostmemory import FileMappings, pinnable_bytes
from ..transfer.masters import PinBudget, align
from ..transfer.mover import ArenaMover
from ..transfer.staging import STAGING_BYTES, Staging
from .adapters import MergeWatch
from .diffusers import announce
from .hooks import CallHook, forget_compiled
from .inventory import divide, record
from .methods import Advised, EntryPoint, entry_points, other_methods
from .split import bind, unbind


@dataclass(slots=True, eq=False)
class Attached:
    """A component in service; ``users`` are the offloads that declared it."""

    found: Found
    component: Component
    users: int = 0
    undo: list[Callable[[], None]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Claim:
    """Whose a module is: its ledger, and the ledger's names by the declared ones."""

    ledger: weakref.ref[ResidencyLedger]
    names: dict[str, str]

    def name_of(self, found: Found) -> str:
        """The ledger's name; a whole module may be declared under another name elsewhere."""
        return self.names[found.name] if found.name in self.names else next(iter(self.names.values()))


class Fleet:
    """The components under one ledger.

    Args:
        device: The resolved execution device.
        policy: Of the first offload; a shared ledger keeps it.
        keep_arena: Whether the arena's memory is held between components.
        owner: For messages.
    """

    def __init__(self, device: torch.device, policy: OffloadPolicy, *, keep_arena: bool, owner: str) -> None:
        self.device = device
        self.policy = policy
        keep = keep_arena and device.type != "cpu"
        self.mover = ArenaMover(backend_for(device), keep_arena=keep, ahead=bool(policy.prefetch))
        self.ledger = ResidencyLedger(self.mover, policy, owner=owner)
        self.attached: dict[str, Attached] = {}
        self.notes: list[str] = []  # what was decided before anything moved
        self._everything: set[str] = set()
        self._merges = MergeWatch()
        self._crosses = data_crosses(device)
        self._registrar = registrar_for(device) if policy.pin_memory else None
        _LIVE.add(self)
        self.ledger.attachment = self

    # --- taking on ----------------------------------------------------------------------------------------

    def take_on(self, declaration: Declaration) -> dict[str, str]:
        """Attach everything a target declares, or nothing; called under ``moving()``.

        Returns:
            The ledger's names by the declaration's: they differ where the ledger is shared.
        """
        names, fresh = self._sort(declaration)
        _refuse_held(fresh, declaration.owner)
        claims = [(module, found.name) for found in fresh for module in _modules(found)]
        for found in fresh:
            found.name = names[found.name]
        with ExitStack() as undo:
            cargoes, components = self._load_list(fresh)
            names |= {one.name: one.name for one in components if one.name not in names.values()}
            self._refuse_nothing_to_swap(declaration, components, names)
            undo.callback(self._forget, components)
            for cargo in cargoes:
                self.mover.register(cargo)
                undo.callback(cargo.send_back)
            if declaration.everything:
                self._everything |= {one.name for one in components}
            self.ledger.admit(components, self._conflict)
            undo.callback(self.ledger.retire, [one.name for one in components])
            self._make_masters(cargoes, components)
            self.mover.arrange(self._swapped(), self._rivals, self._limit())
            for one in components:
                if one.resident:
                    self.ledger.load(one.name)
            for found, component in zip(fresh, components, strict=True):
                self.attached[component.name] = self._attach(found, component, undo)
            self._bind_split_models(fresh, undo)
            forget_compiled()
            for found in fresh:
                for module in _modules(found):
                    self._merges.follow(module.modules())
            for module, name in claims:
                undo.callback(_CLAIMS.pop, module, None)
                _CLAIMS.setdefault(module, Claim(weakref.ref(self.ledger), {})).names[name] = names[name]
            for name in names.values():
                self.attached[name].users += 1
                undo.callback(self._leave, name)
            undo.pop_all()  # last: an interrupt before it takes everything back
        return names

    def drop(self, names: list[str]) -> None:
        """Detach components that no other offload uses; their weights end on the host.

        Raises:
            ScopeError: A scope is open on one of them; nothing was changed.
        """
        last = [name for name in names if name in self.attached and self.attached[name].users == 1]
        known = {one.name for one in self.ledger.components}
        # Those struck by a drop that was interrupted are known no more: this one goes on where it was.
        self.ledger.retire([name for name in last if name in known])
        for name in last:
            gone = self.attached[name]
            while gone.undo:
                gone.undo[-1]()
                gone.undo.pop()
            for module in _modules(gone.found):
                _CLAIMS.pop(module, None)
            self.mover.forget(name)
            del self.attached[name]
        for name in names:
            if name in self.attached:
                self.attached[name].users -= 1
        if not self.attached:
            self.mover.release_arena()
            self._merges.stop()
            if self.mover.staging is not None:
                self.mover.staging.close()

    # --- steps of taking on -------------------------------------------------------------------------------

    def _sort(self, declaration: Declaration) -> tuple[dict[str, str], list[Found]]:
        """Names under this ledger, and the components that are new to it."""
        names: dict[str, str] = {}
        fresh: list[Found] = []
        for found in declaration.found:
            claim = next((_CLAIMS[one] for one in _modules(found) if one in _CLAIMS), None)
            if claim is None:
                names[found.name] = self._free_name(found.name, names)
                fresh.append(found)
            elif claim.ledger() is self.ledger:
                names[found.name] = claim.name_of(found)
            else:
                holder = getattr(claim.ledger(), "owner", "a ledger that is gone")
                advice = (
                    "Disable that offload first, or share its ledger: offload(..., ledger=handle.ledger)."
                )
                raise OwnershipError(found.name, f"the ledger of {holder}", declaration.owner, advice)
        return names, fresh

    def _free_name(self, name: str, names: dict[str, str]) -> str:
        taken = {*self.attached, *names.values()}
        return next(one for i in range(1, 10_000) if (one := name if i == 1 else f"{name}#{i}") not in taken)

    def _load_list(self, fresh: list[Found]) -> tuple[list[Cargo], list[Component]]:
        """Cargo and records of what is new; a resident of what they share is added to it."""
        runs = divide(fresh, self._free_name(SHARED, {}))
        cargoes = []
        for found in fresh:
            cargo = Cargo(found.name, found.area, crosses=self._crosses)
            cargo.declare(runs[id(found)])
            cargoes.append(cargo)
        return cargoes, [record(found, runs[id(found)]) for found in fresh]

    def _make_masters(self, cargoes: list[Cargo], components: list[Component]) -> None:
        if self.device.type == "cpu":
            pages = FileMappings()
            for cargo in cargoes:
                cargo.master(None)
                cargo.stay(pages)
            return
        limit = pinnable_bytes() if self.policy.pinned_limit is None else self.policy.pinned_limit
        pool = self.policy.pin_memory and self._registrar is None
        budget = PinBudget(limit if self.policy.pin_memory else 0, self._registrar, pool)
        if not self.policy.pin_memory:
            budget.said = True  # as asked
        mappings, for_now = self._mapped(cargoes, limit)
        if self.mover.staging is not None:
            self.mover.staging.look_again()  # who joins has files of its own
        elif mappings is not None:
            largest = max(sum(align(one.nbytes) for one in cargo.groups) for cargo in cargoes)
            slab = min(STAGING_BYTES, largest)
            self.mover.staging = Staging(self.mover.backend, budget, mappings, slab)
        for cargo, component in zip(cargoes, components, strict=True):
            cargo.master(None if component.resident else budget, mappings, for_now=for_now)

    def _mapped(self, cargoes: list[Cargo], limit: int) -> tuple[FileMappings | None, bool]:
        """The pages of files in which weights stay, and whether only until they come a second time.

        They stay for good by the policy, or because they would not fit elsewhere.
        """
        if self.policy.masters == "pinned":
            return None, False
        mappings = FileMappings()
        sizes = [one.nbytes for cargo in cargoes for one in cargo.groups if one.source.data_ptr() in mappings]
        for_now = self.policy.masters == "auto" and sum(sizes) <= min(limit, pinnable_bytes())
        return (mappings if sizes else None), for_now

    def _attach(self, found: Found, component: Component, undo: ExitStack) -> Attached:
        attached = Attached(found, component)

        def later(step: Callable[[], None]) -> None:
            attached.undo.append(step)
            undo.callback(step)

        for _, module in found.called:
            later(announce(unwrapped(module), self.device))
            if not component.resident or found.planned or found.clears:
                self._hook(found, module, later)
        return attached

    def _bind_split_models(self, fresh: list[Found], undo: ExitStack) -> None:
        for model in {id(found.split): found.split for found in fresh if found.split is not None}.values():
            names = {found.part: found.name for found in fresh if found.split is model and found.part}
            bind(model, self.ledger, names)
            # Its first weight may be in a part that is away: it must be told where it computes, as others are.
            steps: list[Callable[[], None]] = [partial(unbind, model), announce(model, self.device)]
            for step in steps:
                undo.callback(step)
            for found in fresh:
                if found.split is model:
                    self.attached[found.name].undo += steps

    def _hook(self, found: Found, module: nn.Module, later: Callable[[Callable[[], None]], None]) -> None:
        name = found.name
        hook = CallHook(self.ledger, name, self.device)
        later(hook.detach)
        hook.attach(module)
        inner = unwrapped(module)
        opening = entry_points(inner, found.entry_points, name)
        wrappers = [EntryPoint(inner, one, self.ledger, name, self.device) for one in opening]
        plain = [one for one in other_methods(inner) if one not in opening]
        for wrapper in [*wrappers, *(Advised(inner, one, self.ledger, name, self.device) for one in plain)]:
            later(wrapper.detach)
            wrapper.attach()

    # --- small things -------------------------------------------------------------------------------------

    def _conflict(self, one: Component, other: Component) -> bool:
        everything = one.name in self._everything and other.name in self._everything
        return conflict(one, other, exclusive_encoders=self.policy.exclusive_encoders, everything=everything)

    def _rivals(self, one: str, other: str) -> bool:
        return other in self.ledger.rivals(one)

    def _swapped(self) -> list[str]:
        return [one.name for one in self.ledger.components if not one.resident]

    def _limit(self) -> int | None:
        """Device bytes for those that take turns, if the policy says how many there are for all."""
        if self.policy.device_memory is None:
            return None
        return self.policy.device_memory - sum(one.bytes for one in self.ledger.components if one.resident)

    def _leave(self, name: str) -> None:
        self.attached[name].users -= 1

    def _forget(self, components: list[Component]) -> None:
        for one in components:
            self.mover.forget(one.name)
            self.attached.pop(one.name, None)

    def _refuse_nothing_to_swap(
        self, declaration: Declaration, components: list[Component], names: dict[str, str]
    ) -> None:
        everyone = {one.name: one for one in (*self.ledger.components, *components)}
        declared = [everyone[name] for name in names.values()]  # shared ones too
        if any(found.planned for found in declaration.found):
            return  # nothing has to be swapped
        if declaration.everything:
            self._everything |= {one.name for one in components}
            if any(not one.resident for one in declared):
                return  # even one alone goes home at the end of a diffusers pipeline's call
        if any(one.clears for one in declared):
            return  # a role that stays sends them home
        if not any(self._conflict(one, other) for one in declared for other in everyone.values()):
            listed = ", ".join(f"{one.name} ({one.role})" for one in declared) or "nothing"
            raise DeclarationError(
                declaration.owner,
                f"has nothing to swap; found: {listed}.",
                "Offload needs two that exclude each other: a DiT and an encoder, two DiTs, or a split model.",
            )


_CLAIMS: weakref.WeakKeyDictionary[nn.Module, Claim] = weakref.WeakKeyDictionary()
_LIVE: weakref.WeakSet[Fleet] = weakref.WeakSet()


def _refuse_held(fresh: list[Found], claimant: str) -> None:
    """A tensor that a component of a live offload has already cannot belong to a second one."""
    held = {
        id(slot.tensor): (name, fleet)
        for fleet in tuple(_LIVE)
        for name, attached in fleet.attached.items()
        for slot in attached.found.area.slots()
    }
    for found in fresh if held else ():
        for slot in found.area.slots():
            if id(slot.tensor) in held:
                name, fleet = held[id(slot.tensor)]
                advice = "Declare both components in one pipeline: what they share then stays on the device."
                raise OwnershipError(
                    slot.path, f"{name!r} under the ledger of {fleet.ledger.owner}", claimant, advice
                )


def fleet_of(ledger: ResidencyLedger) -> Fleet:
    """The fleet behind a handle's ledger.

    Raises:
        PolicyError: The ledger was not made by ``offload()``.
    """
    if not isinstance(ledger.attachment, Fleet):
        raise PolicyError(
            "ledger", ledger, "the ledger of another handle: offload(..., ledger=handle.ledger)"
        )
    return ledger.attachment


def _modules(found: Found) -> list[nn.Module]:
    return [unwrapped(module) for _, module in found.called] + (
        [found.split] if found.split is not None else []
    )
