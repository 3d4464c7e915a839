"""From what a pipeline or split model declares to components: lists, roles, parts, residents.

Nothing is guessed: a name that is not declared is not looked for, and whatever is wrong is an error before
anything is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn

from ..errors import DeclarationError, OwnershipError, PolicyError
from ..policy import OffloadPolicy
from .area import Area, FixedArea
from .component import Role
from .declaration import REST, Declaration, Found
from .nested import refuse_nested
from .paths import MISSING, asked, modules_at, unwrapped
from .patterns import parts_of, rest_of
from .recipe import Recipe
from .seating import clear_for_those_who_stay

LISTS = {
    "_dit_modules": Role.DIT,
    "_encoder_modules": Role.ENCODER,
    "_vae_modules": Role.VAE,
    "_resident_modules": Role.RESIDENT,
}
_CALLED_BY_PARTS = (
    "is a {kind}, which is never called itself, so that no hook can bring it in. Declare the module that calls "
    "it, or make it a part of a split model and open `with self._offload_context(name):` around its use."
)


def declares_components(target: object) -> bool:
    """Whether a pipeline has the lists of ``SupportsComponentDiscovery``; ``_resident_modules`` is optional.

    Raises:
        DeclarationError: A list is a property, and that raised ``AttributeError``.
    """
    required = ("_dit_modules", "_encoder_modules", "_vae_modules")
    return all(
        isinstance(asked(target, name, type(target).__name__, name), (list, tuple)) for name in required
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
    refuse_nested(declaration)
    _name_parts(declaration.found)
    _refuse_missing_roles(declaration, policy)
    _note_entry_points(declaration, policy)
    clear_for_those_who_stay(declaration, policy)
    if isinstance(target, nn.Module):
        declaration.found += _rest(target, declaration.found)
    elif isinstance(getattr(target, "components", None), Mapping):
        declaration.found += _undeclared(target.components, declaration.found)
    return declaration


# --- lists ----------------------------------------------------------------------------------------------


def _declared(target: Any, lists: Any, owner: str, policy: OffloadPolicy) -> Iterator[Found]:
    taken: dict[int, tuple[str, Role]] = {}
    for attribute, role in LISTS.items():
        for path in _paths(lists, attribute, owner):
            modules = modules_at(target, path, owner)
            if not modules or not _first_claim(modules, path, role, taken):
                continue  # None: an optional part this checkpoint lacks; or the same module under a second name
            yield from components_of(path, role, modules, owner, policy)


def _paths(target: Any, attribute: str, owner: str) -> Sequence[str]:
    paths = asked(target, attribute, owner, attribute)
    if paths is MISSING or paths is None:
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
    rest = rest_of(model, areas.values(), path)
    if rest:
        yield Found(f"{path} {REST}".strip(), Role.RESIDENT, True, FixedArea(rest), path, split=model)


def _name_parts(found: list[Found]) -> None:
    """A part is called by its own name; by ``path.part`` where two models have parts of one name."""
    names = [one.name for one in found]
    for one in found:
        if one.role is Role.PART and names.count(one.name) > 1:
            one.name = f"{one.model}.{one.name}"


# --- the whole ------------------------------------------------------------------------------------------


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
    rest = rest_of(target, [one.area for one in found], "")
    return [Found(REST, Role.RESIDENT, True, FixedArea(rest), REST)] if rest else []


def _undeclared(components: Mapping[str, Any], found: Iterable[Found]) -> list[Found]:
    """Modules of a diffusers pipeline that its lists do not name stay on the device, too."""
    claimed = {id(module) for one in found for module in one.modules}
    return [
        Found(name, Role.RESIDENT, True, Area(unwrapped(module), [""], name), name, called=[(name, module)])
        for name, module in components.items()
        if isinstance(module, nn.Module) and id(unwrapped(module)) not in claimed
    ]
