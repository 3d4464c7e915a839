"""From what a pipeline or split model declares to components: paths, roles, parts, residents.

Nothing is guessed: a name that is not declared is not looked for, and whatever is wrong is an error before
anything is touched.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ..errors import ComponentNotFoundError, DeclarationError, OwnershipError, PolicyError
from ..policy import OffloadPolicy
from .area import Area, FixedArea
from .component import Role
from .patterns import parts_of, rest_of
from .recipe import Recipe
from .tensors import extents, overlapping, refuse_unmovable, span

LISTS = {
    "_dit_modules": Role.DIT,
    "_encoder_modules": Role.ENCODER,
    "_vae_modules": Role.VAE,
    "_resident_modules": Role.RESIDENT,
}
_MISSING = object()
REST = "(rest)"
SHARED = "(shared)"
_CALLED_BY_PARTS = (
    "is a {kind}, which is never called itself, so that no hook can bring it in. Declare the module that calls "
    "it, or make it a part of a split model and open `with self._offload_context(name):` around its use."
)


@dataclass(slots=True, eq=False)
class Found:
    """One component, found but not yet attached.

    Attributes:
        name: Unique in the declaration.
        role: From the list it was declared in.
        resident: It stays on the device.
        area: Its slots.
        model: The path of the split model it is a part of, else its own path.
        called: Modules whose calls open a scope; none for parts, which mark their phases themselves.
        split: The split model that this is a part, or the rest, of.
        part: For a part, the name under which the model opens its scope.
        entry_points: Methods that the policy declares for it.
        exclusive: It takes turns with others.
        beside: Encoders that it may stand beside although everything else excludes it.
        planned: It would take turns, and is resident because everything fits.
        clears: Those that go home when it is used, although they do not exclude it.
    """

    name: str
    role: Role
    resident: bool
    area: Area | FixedArea
    model: str
    called: list[tuple[str, nn.Module]] = field(default_factory=list)
    split: nn.Module | None = None
    part: str = ""
    entry_points: tuple[str, ...] = ()
    exclusive: bool = True
    beside: list[Found] = field(default_factory=list)
    planned: bool = False
    clears: list[Found] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Declaration:
    """Everything a target declares.

    Attributes:
        owner: The target's class name, for messages.
        found: Its components.
        everything: Every swappable component excludes every other.
    """

    owner: str
    found: list[Found]
    everything: bool = False


def declares_components(target: object) -> bool:
    """Whether a pipeline has the lists of ``SupportsComponentDiscovery``; ``_resident_modules`` is optional.

    Raises:
        DeclarationError: A list is a property, and that raised ``AttributeError``.
    """
    required = ("_dit_modules", "_encoder_modules", "_vae_modules")
    return all(
        isinstance(_asked(target, name, type(target).__name__, name), (list, tuple)) for name in required
    )


def is_split(module: object) -> bool:
    """Whether a module declares parts and marks its phases."""
    return isinstance(module, nn.Module) and bool(getattr(module, "_offload_components", None))


def discover(target: Any, policy: OffloadPolicy, recipe: Recipe | None = None) -> Declaration:
    """The components of a pipeline with lists, of a split model, or of whatever there is a recipe for.

    Raises:
        DeclarationError: What is declared cannot be carried out; it names the path.
    """
    owner = type(target).__name__
    if recipe is not None:
        policy = OffloadPolicy.of(policy, {"entry_points": {**recipe.entry_points, **policy.entry_points}})
        found = list(_declared(target, SimpleNamespace(**recipe.lists()), owner, policy))
    elif declares_components(target):
        found = list(_declared(target, target, owner, policy))
    elif is_split(target):
        found = list(_parts(unwrapped(target), "", owner, policy))
    else:
        raise DeclarationError(
            owner,
            "declares no components.",
            "Give it the lists _dit_modules, _encoder_modules and _vae_modules, or make it a SplitModel with "
            "_offload_components; a diffusers pipeline needs neither. For a class that you cannot change: "
            "offload(..., recipe=Recipe(...)).",
        )
    return finish(Declaration(owner, found), target, policy)


def finish(declaration: Declaration, target: Any, policy: OffloadPolicy) -> Declaration:
    """The checks that need the whole declaration, and its names made unique."""
    _refuse_nested(declaration)
    _name_parts(declaration.found)
    _refuse_missing_roles(declaration, policy)
    _note_entry_points(declaration, policy)
    if isinstance(target, nn.Module):
        declaration.found += _rest(target, declaration.found)
    elif isinstance(getattr(target, "components", None), Mapping):
        declaration.found += _undeclared(target.components, declaration.found)
    return declaration


def seat_encoders(found: Iterable[Found]) -> None:
    """Let the encoders that take turns stand beside each other if all fit into the room of the largest member.

    Guidance asks all encoders for the prompt, then all of them again: one at a time, each would be loaded twice.
    Together they never need more than the largest member does, and the peak stays what it was.
    """
    turns = [one for one in found if one.exclusive and not one.resident]
    encoders = [one for one in turns if one.role is Role.ENCODER]
    if len(encoders) < 2:
        return  # nobody to stand beside
    sizes = {id(one): _device_bytes(one) for one in turns}
    if sum(sizes[id(one)] for one in encoders) <= max(sizes.values()):
        for one in encoders:
            one.beside = [other for other in encoders if other is not one]


def _device_bytes(found: Found) -> int:
    """What a component takes on the device: its bytes, each once, every group of them aligned."""
    slots = list(found.area.slots())
    for slot in slots:
        if slot.tensor is not None and not slot.tensor.is_meta:  # a plan's has a size, too
            refuse_unmovable(found.name, slot)
    return sum(span(run) for run in overlapping(extents(slots)))


def unwrapped(module: Any) -> Any:
    """The module inside a ``torch.compile`` wrapper, for naming and weights."""
    while isinstance(module, nn.Module) and isinstance(module._modules.get("_orig_mod"), nn.Module):
        module = module._modules["_orig_mod"]
    return module


# --- paths ----------------------------------------------------------------------------------------------


def _declared(target: Any, lists: Any, owner: str, policy: OffloadPolicy) -> Iterator[Found]:
    taken: dict[int, tuple[str, Role]] = {}
    for attribute, role in LISTS.items():
        for path in _paths(lists, attribute, owner):
            modules = _modules_at(target, path, owner)
            if not modules or not _first_claim(modules, path, role, taken):
                continue  # None: an optional part this checkpoint lacks; or the same module under a second name
            yield from components_of(path, role, modules, owner, policy)


def _paths(target: Any, attribute: str, owner: str) -> Sequence[str]:
    paths = _asked(target, attribute, owner, attribute)
    if paths is _MISSING or paths is None:
        return []
    if not isinstance(paths, (list, tuple)) or not all(isinstance(path, str) for path in paths):
        raise DeclarationError(owner, f"{attribute} must be a list of dotted paths, not {paths!r}.")
    return list(paths)


def _first_claim(
    modules: list[tuple[str, nn.Module]], path: str, role: Role, taken: dict[int, tuple[str, Role]]
) -> bool:
    for _, module in modules:
        other = taken.setdefault(id(unwrapped(module)), (path, role))
        if other == (path, role):
            continue
        if other[1] is role:
            return False
        advice = "A module has one role: take it off one of the lists."
        raise OwnershipError(path, f"{other[0]!r} ({other[1]})", f"{path!r} ({role})", advice)
    return True


def components_of(
    path: str, role: Role, modules: list[tuple[str, nn.Module]], owner: str, policy: OffloadPolicy
) -> Iterator[Found]:
    """The component, or the parts, of one declared path."""
    if role is Role.DIT and len(modules) == 1 and is_split(unwrapped(modules[0][1])):
        yield from _parts(unwrapped(modules[0][1]), path, owner, policy)
        return
    resident = not policy.swaps(role.value)
    root = nn.ModuleList([unwrapped(module) for _, module in modules]) if len(modules) > 1 else None
    area = (
        Area(root, [str(i) for i in range(len(modules))], path)
        if root
        else Area(unwrapped(modules[0][1]), [""], path)
    )
    if not resident:
        _refuse_uncalled(modules, owner)
    yield Found(path, role, resident, area, path, called=modules)


def _refuse_uncalled(modules: list[tuple[str, nn.Module]], owner: str) -> None:
    for path, module in modules:
        kind = type(unwrapped(module))
        if kind.forward is nn.Module.forward:
            raise DeclarationError(owner, f"{path!r} " + _CALLED_BY_PARTS.format(kind=kind.__name__))


def _modules_at(target: Any, path: str, owner: str) -> list[tuple[str, nn.Module]]:
    found = _attribute_at(target, path, owner)
    if found is None:
        return []
    listed = list(found) if isinstance(found, (list, tuple, nn.ModuleList)) else [found]
    for one in listed:
        if not isinstance(one, nn.Module):
            what = "an empty list" if not listed else f"a {type(one).__name__}"
            raise DeclarationError(
                owner, f"{path!r} names {what}, not a module.", "Declare paths to modules."
            )
    if not listed:
        raise DeclarationError(owner, f"{path!r} names an empty list.", "Declare paths to modules.")
    if listed == [found]:
        return [(path, found)]
    return [(f"{path}.{index}", one) for index, one in enumerate(listed)]


def _attribute_at(target: Any, path: str, owner: str) -> Any:
    found = target
    for segment in path.split("."):
        if found is None:
            return None  # an optional module that this checkpoint lacks
        inner = unwrapped(found)
        found = _asked(inner, segment, owner, path)
        if found is _MISSING:
            raise ComponentNotFoundError(owner, path, segment, _module_names(inner))
    return found


def _asked(holder: Any, name: str, owner: str, path: str) -> Any:
    """An attribute or ``_MISSING``; a property's own ``AttributeError`` is told from a missing attribute."""
    try:
        return _get(holder, name)
    except AttributeError as error:
        raise DeclarationError(owner, f"{path!r}: the property {name!r} raised: {error}.") from error


def _get(holder: Any, name: str) -> Any:
    computed = inspect.getattr_static(type(holder), name, None)
    if isinstance(computed, (property, cached_property)) and not isinstance(holder, type):
        if isinstance(computed, cached_property) and name in vars(holder):
            return vars(holder)[name]
        return computed.__get__(holder, type(holder))  # not getattr: a module would hide what it raises
    if name.isdigit() and isinstance(holder, (list, tuple, nn.ModuleList, nn.Sequential)):
        return holder[int(name)] if int(name) < len(holder) else _MISSING
    return getattr(holder, name, _MISSING)


def _module_names(holder: Any) -> list[str]:
    names = list(holder._modules) if isinstance(holder, nn.Module) else []
    return names + [
        name for name, value in vars(holder).items() if isinstance(value, nn.Module) and name not in names
    ]


# --- parts ----------------------------------------------------------------------------------------------


def _parts(model: nn.Module, path: str, owner: str, policy: OffloadPolicy) -> Iterator[Found]:
    label = path or owner
    if not callable(getattr(model, "_offload_context", None)):
        raise DeclarationError(
            label, "declares _offload_components but has no _offload_context.", "Inherit SplitModel."
        )
    areas = parts_of(model, model._offload_components, label)  # type: ignore[arg-type]
    resident = not policy.swaps(Role.PART.value)
    for part, area in areas.items():
        area.prefix = path
        yield Found(part, Role.PART, resident, area, path, split=model, part=part)
    rest = rest_of(model, areas, path)
    if rest:
        yield Found(f"{path} {REST}".strip(), Role.RESIDENT, True, FixedArea(rest), path, split=model)


def _name_parts(found: list[Found]) -> None:
    """A part is called by its own name; by ``path.part`` where two models have parts of one name."""
    names = [one.name for one in found]
    for one in found:
        if one.role is Role.PART and names.count(one.name) > 1:
            one.name = f"{one.model}.{one.name}"


# --- the whole ------------------------------------------------------------------------------------------


def _refuse_nested(declaration: Declaration) -> None:
    """A component inside another is an error, save for a resident inside a DiT, which is taken out of it."""
    whole = [one for one in declaration.found if isinstance(one.area, Area) and one.role is not Role.PART]
    for outer in whole:
        assert isinstance(outer.area, Area)
        covered = {id(module) for _, module in outer.area.modules()}
        for inner in declaration.found:
            if inner is outer or not _inside(inner, covered):
                continue
            if outer.role is Role.DIT and inner.role is Role.RESIDENT and isinstance(inner.area, Area):
                outer.area.leave_out(modules=[module for _, module in inner.area.modules()])
                continue
            problem = f"{inner.name!r} lies inside {outer.name!r}; they would move each other's weights."
            raise DeclarationError(
                declaration.owner, problem, "Declare one of them, or make them parts of a split model."
            )
    parts = [one for one in declaration.found if one.role is Role.PART]
    for part in parts:
        for inner in whole:
            covered = (
                {id(module) for _, module in part.area.modules()} if isinstance(part.area, Area) else set()
            )
            if _inside(inner, covered):
                problem = f"{inner.name!r} lies inside the part {part.name!r}."
                raise DeclarationError(declaration.owner, problem, "Declare it as a part of the same model.")
    _refuse_inside_rest(declaration, whole)


def _refuse_inside_rest(declaration: Declaration, whole: list[Found]) -> None:
    """What is in no part of a split model is its own resident; a declared resident is taken out of that."""
    for rest in list(declaration.found):
        if rest.split is None or rest.role is Role.PART:
            continue
        covered = {id(module) for _, module in Area(rest.split, [""]).modules()}
        for inner in whole:
            if not _inside(inner, covered):
                continue
            if inner.role is not Role.RESIDENT:
                problem = f"{inner.name!r} lies inside the split model {rest.model!r}, in none of its parts."
                advice = "Make it a part of that model, or declare it in _resident_modules."
                raise DeclarationError(declaration.owner, problem, advice)
            rest.area.leave_out(slots=inner.area.slots())
            if next(rest.area.slots(), None) is None:
                declaration.found.remove(rest)


def _inside(inner: Found, covered: set[int]) -> bool:
    modules = [unwrapped(module) for _, module in inner.called] + (
        [inner.split] if inner.split is not None else []
    )
    return any(id(module) in covered for module in modules)


def _refuse_missing_roles(declaration: Declaration, policy: OffloadPolicy) -> None:
    there = {"dit" if one.role is Role.PART else one.role.value for one in declaration.found}
    for role in policy.offload_components or ():
        if role not in there:
            raise PolicyError(
                "offload_components", role, f"from what {declaration.owner} has: {', '.join(sorted(there))}"
            )


def _note_entry_points(declaration: Declaration, policy: OffloadPolicy) -> None:
    called = {one.name: one for one in declaration.found if one.called}
    for name, methods in policy.entry_points.items():
        if name not in called:
            raise PolicyError(
                "entry_points", name, f"from the components that are called: {', '.join(called)}"
            )
        called[name].entry_points = methods


def _rest(target: nn.Module, found: Iterable[Found]) -> list[Found]:
    """What a module pipeline holds besides its components stays on the device."""
    claimed = {(id(slot.module), slot.name) for one in found for slot in one.area.slots()}
    rest = [slot for slot in Area(target, [""]).slots() if (id(slot.module), slot.name) not in claimed]
    return [Found(REST, Role.RESIDENT, True, FixedArea(rest), REST)] if rest else []


def _undeclared(components: Mapping[str, Any], found: Iterable[Found]) -> list[Found]:
    """Modules of a diffusers pipeline that its lists do not name stay on the device, too."""
    claimed = {id(module) for one in found for module in _covered(one)}
    return [
        Found(name, Role.RESIDENT, True, Area(unwrapped(module), [""], name), name, called=[(name, module)])
        for name, module in components.items()
        if isinstance(module, nn.Module) and id(unwrapped(module)) not in claimed
    ]


def _covered(one: Found) -> list[nn.Module]:
    return [unwrapped(module) for _, module in one.called] + ([one.split] if one.split is not None else [])


def loose_tensors(found: Iterable[Found]) -> list[str]:
    """Paths of tensors that are plain attributes of a component's modules: nothing can move them."""
    loose = []
    for one in found:
        registered = {id(slot.tensor) for slot in one.area.slots()}
        for path, module in one.area.modules() if isinstance(one.area, Area) else ():
            # torch's old weight_norm and spectral_norm compute it anew before each call, where the module is.
            renewed = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor) and id(value) not in registered and name not in renewed:
                    loose.append(f"{path}.{name}" if path else name)
    return loose
