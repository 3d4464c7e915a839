"""Declarations for pipelines nobody here wrote: today any diffusers pipeline, from what its class says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ..errors import DeclarationError
from ..policy import OffloadPolicy
from .area import FixedArea
from .component import Role
from .declaration import Declaration, Found
from .discovery import components_of, declares_components, finish
from .seating import room_for, seat_encoders

# Methods besides ``forward`` through which pipelines use components; each opens a scope where it exists.
ENTRY_POINTS = (
    "encode",
    "decode",
    "generate",
    "encode_image",
    "encode_text",
    "get_text_features",
    "get_image_features",
    "_encode",  # AnyFlow's pipelines encode a given film by it
)


def is_diffusers_pipeline(target: object) -> bool:
    """Whether a target is a ``diffusers.DiffusionPipeline``, without importing diffusers."""
    return any(
        base.__name__ == "DiffusionPipeline" and base.__module__.startswith("diffusers.")
        for base in type(target).__mro__
    )


def held_pipelines(pipeline: Any) -> list[Any]:
    """The pipelines that a combined one is made of; their components are among its own."""
    return [one for one in vars(pipeline).values() if is_diffusers_pipeline(one)]


def is_modular(target: object) -> bool:
    """Whether a target is diffusers' ``ModularPipeline`` or ``ComponentsManager``, without importing diffusers."""
    return any(
        base.__name__ in ("ModularPipeline", "ComponentsManager")
        and base.__module__.startswith("diffusers.modular_pipelines")
        for base in type(target).__mro__
    )


def follows_its_sequence(target: object) -> bool:
    """Whether a target of diffusers is to be read by its own order, having no lists of its own."""
    return (is_diffusers_pipeline(target) or is_modular(target)) and not declares_components(target)


def from_diffusers(pipeline: Any, policy: OffloadPolicy) -> Declaration:
    """The components of a diffusers pipeline: those of ``model_cpu_offload_seq`` first, then the others.

    An encoder and a DiT of the sequence exclude each other. Whoever is called sends those of its role home that
    stand before it in the sequence, and a VAE, and whoever is last, sends all of them home; but when these come
    back, it stays (not a VAE with ``vae="exclusive"``, nor encoders with ``exclusive_encoders``). So one is there
    at a time while a pipeline goes through its sequence, and nothing travels twice where it goes back and forth:
    a picture that the VAE encodes first, an expert after another at each step. Encoders that fit together into
    the room of the largest, or into ``device_memory``, stay together: see :func:`~.seating.seat_encoders`.

    What is not in the sequence, such as most ControlNets, comes at its first call and stays to the end of the
    request; of these, ``_exclude_from_cpu_offload`` is resident, save in a pipeline that holds others, where it
    stands before the sequence. diffusers' own offload keeps all that is kept here, and more: a pipeline never
    needs more room than with it, and never moves more.

    Raises:
        DeclarationError: The pipeline says nothing about offload, or has no component.
    """
    owner = type(pipeline).__name__
    modules = _modules_of(pipeline)
    sequence = "" if is_modular(pipeline) else getattr(pipeline, "model_cpu_offload_seq", None)
    if not modules or sequence is None:
        problem = "has no modules." if not modules else "has no model_cpu_offload_seq."
        raise DeclarationError(owner, problem, "Give it _dit_modules, _encoder_modules and _vae_modules.")
    excluded = set(getattr(pipeline, "_exclude_from_cpu_offload", None) or ())
    order = [name for name in sequence.split("->") if name in modules]
    order = order if len(order) > 1 else sorted(modules, key=lambda name: role_of(name) is Role.VAE)
    if held_pipelines(pipeline):  # what is excluded is theirs, and they swap it before its own turn comes
        order = [*(name for name in modules if name in excluded and name not in order), *order]
        excluded.clear()
    found: list[Found] = []
    seen: set[int] = set()
    for name in [*order, *(name for name in modules if name not in order)]:
        if id(modules[name]) in seen:
            continue  # one module under two names
        seen.add(id(modules[name]))
        if name not in {*order, *excluded} and type(modules[name]).forward is nn.Module.forward:
            continue  # it is never called itself: the pipeline moves it about, as Cosmos does with its guardrail
        role = Role.RESIDENT if name in excluded and name not in order else role_of(name)
        for one in components_of(name, role, [(name, modules[name])], owner, _swapping_vaes(policy)):
            one.exclusive = name in order
            found += [one, *_taken_out(one, pipeline, policy)]
    _hoist(found, pipeline)
    declaration = finish(Declaration(owner, found, everything=True), None, policy)
    turns = [one for one in declaration.found if one.exclusive and not one.resident]
    if not policy.exclusive_encoders:
        seated = [one for one in turns[:-1] if one.role is not Role.VAE]
        seat_encoders(seated, room_for(seated, declaration, policy))
    for place, one in enumerate(turns):
        one.clears = [other for other in turns[:place] if _stays(one, other, turns, policy)]
    return declaration


# Weights that a pipeline's class reads itself, and uses after the component that they belong to has left.
_READ_BETWEEN_CALLS = {
    "AceStepPipeline": (
        "condition_encoder.null_condition_emb",
    ),  # diffusers 0.42: a view of it, for guidance
}


# Modules that a pipeline's class calls past the component that they lie in, which is away by then.
_CALLED_ALONE = {
    "MotifVideoImage2VideoPipeline": (
        "text_encoder.vision_tower",
    ),  # diffusers 0.42: it sees the picture after the VAE has
}


def called_alone(pipeline: Any) -> list[str]:
    """The modules inside components of a diffusers pipeline that are components of their own, by path."""
    return sorted(_of_class(_CALLED_ALONE, pipeline))


def _taken_out(outer: Found, pipeline: Any, policy: OffloadPolicy) -> Iterator[Found]:
    """What is called alone of a component: so it comes by itself, and the rest need not come back for it."""
    modules = dict(outer.area.modules())
    for path in (one for one in called_alone(pipeline) if one in modules):
        outer.area.leave_out(modules=modules[path].modules())
        owner = type(pipeline).__name__
        for one in components_of(path, outer.role, [(path, modules[path])], owner, _swapping_vaes(policy)):
            one.exclusive = outer.exclusive
            one.beside, outer.beside = [outer], [*outer.beside, one]  # the component may call it, too
            yield one


def _of_class(known: Mapping[str, tuple[str, ...]], pipeline: Any) -> set[str]:
    return {path for base in type(pipeline).__mro__ for path in known.get(base.__name__, ())}


def _hoist(found: list[Found], pipeline: Any) -> None:
    """Keep on the device what the pipeline reads between the calls of its components."""
    wanted = _of_class(_READ_BETWEEN_CALLS, pipeline)
    for one in list(found) if wanted else ():
        for slot in [slot for slot in one.area.slots() if slot.path in wanted]:
            one.area.leave_out(slots=[slot])
            found.append(Found(slot.path, Role.RESIDENT, True, FixedArea([slot]), slot.path))


def _modules_of(pipeline: Any) -> dict[str, nn.Module]:
    """By name; a components manager calls them by name and number, which stays where a name is taken twice."""
    modules = {name: one for name, one in pipeline.components.items() if isinstance(one, nn.Module)}
    plain = [name.rpartition("_")[0] for name in modules]
    if not hasattr(pipeline, "enable_auto_cpu_offload") or len(set(plain)) < len(plain):
        return modules
    return dict(zip(plain, modules.values(), strict=True))


def _stays(later: Found, earlier: Found, turns: list[Found], policy: OffloadPolicy) -> bool:
    """Whether the later of two in the sequence stays when the earlier one comes back; parts of a model never do."""
    if later.role is Role.PART and earlier.role is Role.PART:
        return False
    if later is turns[-1] or later.role is Role.VAE:
        return later.role is not Role.VAE or policy.vae != "exclusive"
    if later.role is Role.ENCODER:
        return earlier.role is Role.ENCODER and earlier not in later.beside and not policy.exclusive_encoders
    return later.role is earlier.role


def role_of(name: str) -> Role:
    """What a component of diffusers is for, by its name: those of one role make way for each other in order."""
    if "vae" in name or "vqvae" in name or "vqgan" in name or "movq" in name:
        return Role.VAE
    return Role.ENCODER if "encoder" in name or "tokenizer" in name else Role.DIT


def _swapping_vaes(policy: OffloadPolicy) -> OffloadPolicy:
    return OffloadPolicy.of(policy, {"vae": "exclusive"})
