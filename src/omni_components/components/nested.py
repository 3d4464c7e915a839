"""Components inside each other: refused, save for a resident, which is taken out of what it lies in."""

from __future__ import annotations

from ..errors import DeclarationError
from .area import Area, FixedArea
from .component import Role
from .declaration import Declaration, Found


def refuse_nested(declaration: Declaration) -> None:
    """A component inside another is an error, save for a resident inside a DiT, which is taken out of it.

    Raises:
        DeclarationError: It names both.
    """
    whole = [one for one in declaration.found if isinstance(one.area, Area) and one.role is not Role.PART]
    for outer in whole:
        _refuse_inside_component(declaration, outer)
    for part in declaration.found:
        if part.role is Role.PART:
            _refuse_inside_part(declaration, part, whole)
    _refuse_inside_rest(declaration, whole)


def _refuse_inside_component(declaration: Declaration, outer: Found) -> None:
    covered = _ids(outer.area)
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


def _refuse_inside_part(declaration: Declaration, part: Found, whole: list[Found]) -> None:
    covered = _ids(part.area)
    for inner in whole:
        if _inside(inner, covered):
            problem = f"{inner.name!r} lies inside the part {part.name!r}."
            raise DeclarationError(declaration.owner, problem, "Declare it as a part of the same model.")


def _refuse_inside_rest(declaration: Declaration, whole: list[Found]) -> None:
    """What is in no part of a split model is its own resident; a declared resident is taken out of that."""
    for rest in list(declaration.found):
        if rest.split is None or rest.role is Role.PART:
            continue
        covered = _ids(Area(rest.split, [""]))
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
    return any(id(module) in covered for module in inner.modules)


def _ids(area: Area | FixedArea) -> set[int]:
    return {id(module) for _, module in area.modules()}
