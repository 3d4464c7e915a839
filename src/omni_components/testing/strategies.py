"""Hypothesis strategies: sets of components with their conflicts, faults, programs of nested phases, modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hypothesis import strategies as st

from ..components.component import Component, Role
from ..errors import TransferError
from .movers import Fault

if TYPE_CHECKING:
    from torch import nn

    from .pipelines import PipelineShape

NAMES = "abcdefghij"


@dataclass(frozen=True)
class ComponentSet:
    """Components, and which of them must never be on the device together.

    Attributes:
        components: In the order of declaration.
        edges: Pairs of names that conflict.
    """

    components: tuple[Component, ...]
    edges: frozenset[frozenset[str]]

    def __repr__(self) -> str:
        sizes = " ".join(f"{one.name}:{one.bytes}" for one in self.components)
        return f"<{sizes}; {' '.join(sorted('-'.join(sorted(edge)) for edge in self.edges))}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # Hypothesis would print every field of every component

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order of declaration."""
        return tuple(one.name for one in self.components)

    def conflict(self, one: str, other: str) -> bool:
        """Whether two names conflict."""
        return frozenset((one, other)) in self.edges

    def of(self, name: str) -> Component:
        """The component of a name."""
        return next(one for one in self.components if one.name == name)


@st.composite
def component_sets(draw: st.DrawFn, *, sets: int = 2, members: int = 3) -> ComponentSet:
    """At least ``sets`` exclusive sets, some conflicts between them, perhaps a resident.

    Args:
        draw: Given by Hypothesis.
        sets: Fewest exclusive sets.
        members: Most members of one.
    """
    sizes = draw(st.lists(st.integers(2, members), min_size=sets, max_size=sets + draw(st.integers(0, 1))))
    names = list(NAMES[: sum(sizes)])
    edges, start = set(), 0
    for size in sizes:
        group = names[start : start + size]
        edges |= {frozenset((one, other)) for one in group for other in group if one != other}
        start += size
    extra = [frozenset((one, other)) for one in names for other in names if one < other]
    edges |= set(draw(st.lists(st.sampled_from(extra), max_size=2)))
    components = [
        Component(name=name, role=Role.DIT, bytes=draw(st.integers(1, 64)), tensors=1, model=name)
        for name in names
    ]
    if draw(st.booleans()):
        components.append(Component(name="resident", role=Role.RESIDENT, bytes=7, tensors=1, resident=True))
    return ComponentSet(tuple(components), frozenset(edges))


def faults(names: Sequence[str], errors: Sequence[type[BaseException]] = ()) -> st.SearchStrategy[Fault]:
    """A failure of the next move of one component.

    Args:
        names: The components.
        errors: What may be raised; default: a ``TransferError`` or a ``KeyboardInterrupt``.
    """
    return st.builds(
        Fault,
        verb=st.sampled_from(("load", "evict")),
        name=st.sampled_from(sorted(names)),
        when=st.sampled_from(("before", "inside", "after")),
        error=st.sampled_from(tuple(errors) or (TransferError, KeyboardInterrupt)),
    )


@dataclass(frozen=True)
class Phase:
    """One scope of a program and what happens in it.

    Attributes:
        name: The component.
        body: Phases inside it, one after the other.
        ends: Whether its body ends by itself or raises.
        hint: A manual ``load`` of the same component comes first.
    """

    name: str
    body: tuple[Phase, ...] = ()
    ends: Literal["normally", "raises"] = "normally"
    hint: bool = False


def programs(names: Sequence[str], *, depth: int = 3, length: int = 3) -> st.SearchStrategy[list[Phase]]:
    """Phases with nested phases and raising bodies.

    Args:
        names: The components.
        depth: Most scopes inside each other.
        length: Most phases in one body.
    """
    return st.lists(_phases(tuple(names), depth, length), min_size=1, max_size=length)


def _phases(names: tuple[str, ...], depth: int, length: int) -> st.SearchStrategy[Phase]:
    ends = st.sampled_from(("normally", "normally", "normally", "raises"))
    inside = (
        st.lists(_phases(names, depth - 1, length), max_size=length).map(tuple) if depth > 1 else st.just(())
    )
    return st.builds(Phase, name=st.sampled_from(names), body=inside, ends=ends, hint=st.booleans())


@st.composite
def tiny_modules(draw: st.DrawFn, *, width: int = 4) -> nn.Module:
    """A tiny module with what real ones have: mixed dtypes, tied weights, views, buffers, odd strides.

    It computes on and returns a float32 tensor whose last dimension is ``width``, with the same result on
    every device that computes as the CPU does.

    Args:
        draw: Given by Hypothesis.
        width: Features in and out.
    """
    import torch

    from .modules import TinyModule

    traits = draw(st.frozensets(st.sampled_from(TinyModule.TRAITS)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    return TinyModule(width, draw(st.integers(1, 2)), traits, generator)


def pipeline_shapes() -> st.SearchStrategy[PipelineShape]:
    """Declared pipelines: roles, conflicts, parts by pattern, weights tied across components, odd tensors."""
    from .modules import TinyModule
    from .pipelines import PipelineShape

    return st.builds(
        PipelineShape,
        encoders=st.integers(1, 2),
        dits=st.integers(1, 2),
        split=st.booleans(),
        vae=st.booleans(),
        tied=st.booleans(),
        traits=st.frozensets(st.sampled_from(TinyModule.TRAITS)),
        seed=st.integers(0, 1000),
    )
