"""offload(): the public face. One handle per target; enable is all or nothing, disable idempotent."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields as fields_of
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import torch

from ..components.component import Component
from ..components.declaration import Declaration
from ..components.discovery import discover
from ..components.omni_models import recipe_for
from ..components.paths import unwrapped
from ..components.recipe import Recipe
from ..components.recipes import follows_its_sequence, from_diffusers, is_diffusers_pipeline
from ..components.unmovable import loose_tensors
from ..errors import DeclarationError, PolicyError, ResidencyWarning, ScopeError, UnknownComponentError
from ..policy import PAIRS_WORDS, OffloadPolicy
from ..protocols import SupportsOmniOffload
from ..report.report import ResidencyReport
from ..residency.events import ResidencyEvent
from ..residency.ledger import ResidencyLedger
from ..residency.scope import OffloadScope
from ..transfer.device import moving, resolve_device
from .auto import check_order, make_resident_if_all_fits
from .diffusers import adapt, refuse_other_offload
from .fleet import Fleet, fleet_of
from .methods import TakesInputs
from .mixin import HANDLE, OmniOffloadMixin

_DELEGATING: set[int] = set()
_LEDGER_FIELDS = (  # of a policy; the others are about the target's own components
    "pin_memory",
    "pinned_limit",
    "nesting",
    "exclusive_encoders",
    "arena",
    "device_memory",
    "prefetch",
    "timeout",
    "history",
)


def offload(
    target: Any,
    device: torch.device | str | None = None,
    *,
    policy: OffloadPolicy | Literal["auto"] | None = None,
    ledger: ResidencyLedger | None = None,
    recipe: Recipe | None = None,
    **fields: Any,
) -> Offload:
    """Keep exactly one of each exclusive set of a target's components on the device.

    Args:
        target: A pipeline with the lists of ``SupportsComponentDiscovery``, a ``SplitModel``, any diffusers
            pipeline, an omni model of transformers that there is a recipe for, or whatever brings
            ``enable_omni_model_cpu_offload`` itself.
        device: Where it computes; ``None`` takes the accelerator if there is one, else the CPU.
        policy: How components take turns; ``"auto"`` is ``OffloadPolicy(mode="auto")``: only if they have to.
        ledger: Another handle's ledger, to share it: modules that both declare are one component.
        recipe: The declaration of a target whose class cannot be changed; it goes before what the class says.
        **fields: Single fields of the policy, such as ``vae="exclusive"``.

    Returns:
        The handle, also a context manager that disables at its end. For a target that is enabled with the
        same device and policy: its handle. With others: the first is undone, then the new one holds.

    Raises:
        DeclarationError: What the target declares cannot be carried out.
        PolicyError: A field or the device is not possible.
        UnsupportedTensorError: A tensor that cannot be moved.
        OwnershipError: A module belongs to another ledger.
        TransferError: The residents do not fit on the device.
    """
    target = unwrapped(target)
    wanted = OffloadPolicy.of(policy, fields)
    place = resolve_device(device)
    existing: Offload | None = vars(target).get(HANDLE)
    if existing is not None and existing.enabled:
        if existing.serves(place, wanted, ledger, recipe):
            return existing
        existing.disable()
    if recipe is None and _brings_its_own(target):
        return _delegated(target, place, wanted, ledger)
    return _enable(target, place, wanted, ledger, recipe)


class Offload:
    """A handle on an offloaded target; as a context manager it disables at the end.

    Attributes:
        ledger: The one record of who is on the device.
        execution_device: Where the target computes, whatever is on it now.
        policy: The policy in force.
    """

    def __init__(self, target: Any, device: torch.device, policy: OffloadPolicy, fleet: Fleet | None) -> None:
        self._target = target
        self._fleet = fleet
        self._names: dict[str, str] = {}
        self._modules: list[torch.nn.Module] = []
        self._recipe: Recipe | None = None
        self._undo = ExitStack()
        self.execution_device = device
        self.policy = policy
        self.enabled = False
        self._last_report: ResidencyReport | None = None

    # --- what it tells ------------------------------------------------------------------------------------

    @property
    def ledger(self) -> ResidencyLedger:
        """The ledger; a target that brings its own offload has none."""
        if self._fleet is None:
            owner = type(self._target).__name__
            raise DeclarationError(
                owner, "brings its own offload and keeps no ledger.", "Ask the target itself."
            )
        return self._fleet.ledger

    @property
    def components(self) -> tuple[Component, ...]:
        """This target's components, in the order of declaration."""
        if self._fleet is None:
            return ()
        mine = set(self._names.values())
        return tuple(one for one in self.ledger.components if one.name in mine)

    @property
    def events(self) -> tuple[ResidencyEvent, ...]:
        """The history, oldest first."""
        return () if self._fleet is None else tuple(self.ledger.history)

    def report(self) -> ResidencyReport:
        """What moved, what it cost, and who was there when; once disabled, as it was at the end."""
        if self._last_report is not None:
            return self._last_report
        if self._fleet is None:
            return ResidencyReport.empty(str(self.execution_device))
        mover = self._fleet.mover
        notes = (*self._fleet.notes, *mover.what_hinders_prefetch())
        device, policy = str(self.execution_device), self._fleet.policy
        return ResidencyReport.of(self.ledger, mover.facts(), device, notes, policy)

    # --- what it does -------------------------------------------------------------------------------------

    def scope(self, name: str, *, timeout: float | None = None) -> OffloadScope:
        """A ``with`` block inside which a component is on the device."""
        return self.ledger.scope(self._name(name), timeout=timeout)

    def load(self, name: str) -> None:
        """Bring a component in ahead of its scope."""
        self.ledger.load(self._name(name))

    def release(self, *, free_arena: bool = False) -> None:
        """Send every unpinned component home (the end of a request)."""
        if self._fleet is not None:
            self.ledger.release(free_arena=free_arena)

    @contextmanager
    def editing(self, name: str) -> Iterator[None]:
        """A scope for edits that leave no trace (``.data`` arithmetic): at its end the master takes the values.

        Also when the body raises: what was written so far is kept, as it would be without offload.
        """
        with self.scope(name):
            try:
                yield
            finally:
                assert self._fleet is not None
                start = time.perf_counter()
                saved = self._fleet.mover.save(self._name(name))
                self.ledger.note_saved(self._name(name), saved, start)

    def is_current(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor, or a view of one, still shows its component's weights.

        A reference to a weight on the device goes stale when the component leaves: then its memory is a rival's.
        So does one to a weight on the host when the component is loaded, in case someone writes to it there.
        False also for a tensor that belongs to no component.
        """
        return self._fleet is not None and self._fleet.mover.is_current(tensor)

    def disable(self, to: torch.device | str | None = None) -> None:
        """Take everything off. Idempotent.

        Args:
            to: Where the weights go afterwards; ``None`` leaves them on the host. Going there needs room for
                all of them.

        Raises:
            ScopeError: A scope is open; nothing was changed.
        """
        if self.enabled:
            if self._fleet is not None:
                report = self.report()  # while the ledger still knows the components
                self._fleet.drop(list(self._names.values()))
                self._last_report = report.brought_up_to_date(self.ledger.history)
            self.enabled = False
            self._undo.close()
            vars(self._target).pop(HANDLE, None)
        if to is not None:
            self._move(torch.device(to))

    def _move(self, device: torch.device) -> None:
        movable = [self._target] if callable(getattr(self._target, "to", None)) else self._modules
        if not movable:
            owner = type(self._target).__name__
            raise DeclarationError(
                owner, "has no method 'to', and no module that is known.", "Move it yourself."
            )
        for one in movable:
            one.to(device)

    def serves(
        self,
        device: torch.device,
        policy: OffloadPolicy,
        ledger: ResidencyLedger | None,
        recipe: Recipe | None,
    ) -> bool:
        """Whether it already is what a second ``offload()`` asks for."""
        same_ledger = ledger is None or (self._fleet is not None and ledger is self._fleet.ledger)
        same_recipe = recipe is None or recipe == self._recipe
        return same_ledger and same_recipe and device == self.execution_device and policy == self.policy

    def __enter__(self) -> Offload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.disable()
        except ScopeError as second:
            if error is None:
                raise
            if hasattr(error, "add_note"):  # the body's own error goes on untouched
                error.add_note(f"Offload is still enabled: {second}")

    def __repr__(self) -> str:
        state = "enabled" if self.enabled else "disabled"
        names = ", ".join(one.name for one in self.components) if self.enabled else ""
        return f"<Offload of {type(self._target).__name__} on {self.execution_device}, {state}: {names}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the target is not offloaded

    def __reduce__(self) -> Any:
        return _no_handle, ()

    def _name(self, name: str) -> str:
        if name not in self._names:
            raise UnknownComponentError(name, tuple(self._names), type(self._target).__name__)
        return self._names[name]


def _no_handle() -> None:
    return None


# --- enabling -------------------------------------------------------------------------------------------


def _enable(
    target: Any,
    device: torch.device,
    policy: OffloadPolicy,
    ledger: ResidencyLedger | None,
    recipe: Recipe | None,
) -> Offload:
    recipe = recipe or recipe_for(target)
    if recipe is None and follows_its_sequence(target):
        # Of what the device has, others of a shared ledger have their share.
        declaration = from_diffusers(
            target, policy if ledger is None else replace(policy, device_memory=None)
        )
    else:
        declaration = discover(target, policy, recipe)
    for found in declaration.found:
        for path, module in [
            *found.called,
            *([(found.model, found.split)] if found.split is not None else []),
        ]:
            refuse_other_offload(path, module)
    _warn_of_loose_tensors(declaration, recipe)  # before anything is touched: a warning may be an error
    decided = make_resident_if_all_fits(declaration, device, policy)
    fleet = _fleet(declaration, device, policy, ledger)
    check_order(declaration, policy, fleet)
    handle = Offload(target, device, policy, fleet)
    handle._recipe = recipe
    with moving():  # else masters made under inference mode could not be written later
        handle._names = fleet.take_on(declaration)
        fleet.notes += [decided] if decided is not None else []
        handle.enabled = True
        try:
            handle._modules = [module for found in declaration.found for _, module in found.called]
            handle._modules += [found.split for found in declaration.found if found.split is not None]
            if is_diffusers_pipeline(target):
                handle._undo.callback(adapt(target, fleet.ledger))
            for name in recipe.methods if recipe is not None else ():
                wrapper = TakesInputs(target, name, device)
                handle._undo.callback(wrapper.detach)
                wrapper.attach()
            vars(target)[HANDLE] = handle
        except BaseException:
            handle.disable()
            raise
    return handle


def _fleet(
    declaration: Declaration, device: torch.device, policy: OffloadPolicy, ledger: ResidencyLedger | None
) -> Fleet:
    if ledger is None:
        # Who is sent home by one that stays leaves no successor: kept, its bytes would be of use to nobody.
        fit = declaration.everything or any(one.clears for one in declaration.found)
        keep = policy.arena == "keep" or (policy.arena is None and not fit)
        return Fleet(device, policy, keep_arena=keep, owner=declaration.owner)
    fleet = fleet_of(ledger)
    if fleet.device != device:
        raise PolicyError("device", str(device), f"{fleet.device}, the device of the shared ledger")
    for name in _LEDGER_FIELDS:
        asked, theirs = getattr(policy, name), getattr(fleet.policy, name)
        if asked not in (theirs, getattr(OffloadPolicy(), name)):
            raise PolicyError(name, asked, f"{theirs!r}, which the shared ledger keeps")
    return fleet


def _warn_of_loose_tensors(declaration: Declaration, recipe: Recipe | None) -> None:
    scratch = recipe.scratch if recipe is not None else ()
    loose = [path for path in loose_tensors(declaration.found) if path.rpartition(".")[2] not in scratch]
    if loose:
        shown = ", ".join(loose[:5]) + (f" and {len(loose) - 5} more" if len(loose) > 5 else "")
        text = f"{declaration.owner}: tensors that are neither parameters nor buffers stay where they are: {shown}. "
        warnings.warn(
            text + "Register them as buffers if the forward pass uses them.", ResidencyWarning, stacklevel=4
        )


# --- delegating -----------------------------------------------------------------------------------------


def _brings_its_own(target: Any) -> bool:
    if id(target) in _DELEGATING or not isinstance(target, SupportsOmniOffload):
        return False
    own = getattr(type(target), "enable_omni_model_cpu_offload", None)
    return own is not OmniOffloadMixin.enable_omni_model_cpu_offload


def _refuse_what_the_pair_cannot_take(
    target: Any, policy: OffloadPolicy, ledger: ResidencyLedger | None
) -> None:
    known = {"pin_memory", "offload_components"}
    asked = {one.name: getattr(policy, one.name) for one in fields_of(policy) if one.name not in known}
    if ledger is not None:
        asked["ledger"] = ledger
    for name, value in asked.items():
        if value != getattr(OffloadPolicy(), name, None):
            owner = type(target).__name__
            raise PolicyError(name, value, f"{' or '.join(sorted(known))}: {owner} brings its own offload")


def _delegated(
    target: Any, device: torch.device, policy: OffloadPolicy, ledger: ResidencyLedger | None
) -> Offload:
    """The target enables itself; if it does so through ``offload(self)``, that handle is the answer."""
    _refuse_what_the_pair_cannot_take(target, policy, ledger)
    asked = policy.offload_components
    roles = (
        {} if asked is None else {"offload_components": frozenset(PAIRS_WORDS.get(one, one) for one in asked)}
    )
    _DELEGATING.add(id(target))
    try:
        # `use_hsdp` has no default in vLLM-Omni's protocol.
        target.enable_omni_model_cpu_offload(
            device=device, pin_memory=policy.pin_memory, use_hsdp=False, **roles
        )
    finally:
        _DELEGATING.discard(id(target))
    inner: Offload | None = vars(target).get(HANDLE)
    if inner is not None and inner.enabled:
        return inner
    handle = Offload(target, device, policy, None)
    handle.enabled = True
    handle._undo.callback(target.disable_omni_model_cpu_offload)
    vars(target)[HANDLE] = handle
    return handle
