"""Declarations for pipelines nobody here wrote: today any diffusers pipeline, from what its class says."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import DeclarationError
from ..policy import OffloadPolicy
from .component import Role
from .discovery import Declaration, Found, components_of, declares_components, finish

# Methods besides ``forward`` through which pipelines use components; each opens a scope where it exists.
ENTRY_POINTS = (
    "encode",
    "decode",
    "generate",
    "encode_image",
    "encode_text",
    "get_text_features",
    "get_image_features",
)


def is_diffusers_pipeline(target: object) -> bool:
    """Whether a target is a ``diffusers.DiffusionPipeline``, without importing diffusers."""
    return any(
        base.__name__ == "DiffusionPipeline" and base.__module__.startswith("diffusers.")
        for base in type(target).__mro__
    )


def follows_its_sequence(target: object) -> bool:
    """Whether a diffusers pipeline is to be read by ``model_cpu_offload_seq``, having no lists of its own."""
    return is_diffusers_pipeline(target) and not declares_components(target)


def from_diffusers(pipeline: Any, policy: OffloadPolicy) -> Declaration:
    """The components of a diffusers pipeline: those of ``model_cpu_offload_seq`` first, then the others.

    Those of the sequence all exclude each other, VAEs too. What is not in it runs in alternation with what is,
    as a ControlNet does before every step of its UNet: it comes at its first call and stays to the end of the
    request. Of these, ``_exclude_from_cpu_offload`` is resident. So a pipeline never needs more room than with
    diffusers' own offload, which treats the three kinds alike.

    Raises:
        DeclarationError: The pipeline says nothing about offload, or has no component.
    """
    owner = type(pipeline).__name__
    modules = {name: one for name, one in pipeline.components.items() if isinstance(one, nn.Module)}
    sequence = getattr(pipeline, "model_cpu_offload_seq", None)
    if not modules or sequence is None:
        problem = "has no modules." if not modules else "has no model_cpu_offload_seq."
        raise DeclarationError(owner, problem, "Give it _dit_modules, _encoder_modules and _vae_modules.")
    excluded = set(getattr(pipeline, "_exclude_from_cpu_offload", None) or ())
    order = [name for name in sequence.split("->") if name in modules]
    order = order if len(order) > 1 else list(modules)
    found: list[Found] = []
    seen: set[int] = set()
    for name in [*order, *(name for name in modules if name not in order)]:
        if id(modules[name]) in seen:
            continue  # one module under two names
        seen.add(id(modules[name]))
        role = Role.RESIDENT if name in excluded and name not in order else _role(name)
        for one in components_of(name, role, [(name, modules[name])], owner, _swapping_vaes(policy)):
            one.exclusive = name in order
            found.append(one)
    return finish(Declaration(owner, found, everything=True), pipeline, policy)


def _role(name: str) -> Role:
    """For the report only: the sequence tells who excludes whom."""
    if "vae" in name or "vqvae" in name or "vqgan" in name or "movq" in name:
        return Role.VAE
    return Role.ENCODER if "encoder" in name or "tokenizer" in name else Role.DIT


def _swapping_vaes(policy: OffloadPolicy) -> OffloadPolicy:
    return OffloadPolicy.of(policy, {"vae": "exclusive"})
