"""The shapes of the demo's three networks, saved as JSON beside their weights."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from omni_components.demo.text import MAX_TOKENS, VOCABULARY

if TYPE_CHECKING:
    from pathlib import Path

CONFIG_NAME = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEncoderConfig:
    """The text encoder: one row of `width` numbers per token."""

    vocab_size: int = len(VOCABULARY)
    max_tokens: int = MAX_TOKENS
    width: int = 64
    layers: int = 2
    heads: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """The transformer; its halves share `width`, `layers` and `heads`, as their keys meet."""

    text_width: int = 64
    latent_channels: int = 4
    latent_size: int = 4
    width: int = 96
    layers: int = 4
    heads: int = 4
    reasoner_mlp_width: int = 96
    generator_mlp_width: int = 288


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeConfig:
    """The autoencoder: pictures four times as wide and as high as their latents."""

    latent_channels: int = 4
    latent_size: int = 4
    width: int = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """All three networks, as they were trained together."""

    text_encoder: TextEncoderConfig = field(default_factory=TextEncoderConfig)
    transformer: TransformerConfig = field(default_factory=TransformerConfig)
    vae: VaeConfig = field(default_factory=VaeConfig)

    @classmethod
    def load(cls, folder: Path) -> DemoConfig:
        """Read `config.json` from a folder of weights."""
        raw = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        return cls(
            text_encoder=TextEncoderConfig(**raw["text_encoder"]),
            transformer=TransformerConfig(**raw["transformer"]),
            vae=VaeConfig(**raw["vae"]),
        )

    def save(self, folder: Path) -> None:
        """Write `config.json` into a folder of weights."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        (folder / CONFIG_NAME).write_text(text, encoding="utf-8")
