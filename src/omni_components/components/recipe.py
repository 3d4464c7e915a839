"""Recipe: what a class that says nothing about its components would have to declare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The declaration of a model or pipeline whose class cannot be changed; paths as in the ClassVar lists.

    Attributes:
        dit_modules: Components that exclude each other and the encoders.
        encoder_modules: Components that exclude the DiTs.
        vae_modules: Stay on the device, or take turns with ``vae="exclusive"``.
        resident_modules: Stay on the device; they may lie inside a DiT, as an embedding does that another phase
            needs too.
        entry_points: Methods besides ``forward`` that open a scope, per component.
        methods: Methods of the target itself whose tensor arguments are moved to the device: the target's
            weights may be anywhere, so that its caller cannot know where they belong.
        scratch: Names of plain tensor attributes that every run makes anew, so that nobody is warned of them.
    """

    dit_modules: tuple[str, ...] = ()
    encoder_modules: tuple[str, ...] = ()
    vae_modules: tuple[str, ...] = ()
    resident_modules: tuple[str, ...] = ()
    entry_points: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    scratch: frozenset[str] = frozenset()

    def lists(self) -> Mapping[str, list[str]]:
        """The four lists, as a class would have them."""
        return {
            "_dit_modules": list(self.dit_modules),
            "_encoder_modules": list(self.encoder_modules),
            "_vae_modules": list(self.vae_modules),
            "_resident_modules": list(self.resident_modules),
        }
