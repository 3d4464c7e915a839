"""The demo's autoencoder: 16x16 pictures of ink, to and from 4x4 latents of four channels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from omni_components.demo.config import VaeConfig

_GROUPS = 4


class ConvBlock(nn.Module):
    """Normalise, activate, convolve; on top of the input where the shapes allow it."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(_GROUPS, channels_in)
        self.conv = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.residual = channels_in == channels_out

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels_in, H, W) -> (B, channels_out, H, W)."""
        out: Tensor = self.conv(F.silu(self.norm(x)))
        return x + out if self.residual else out


class DemoVae(nn.Module):
    """A convolutional variational autoencoder.

    The pipeline only ever calls `decode`; `encode` and `forward` serve the training.
    """

    latent_mean: Tensor
    latent_std: Tensor

    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        small, large, channels = config.width, 2 * config.width, config.latent_channels
        self.encoder = nn.Sequential(
            nn.Conv2d(1, small, 3, padding=1, stride=2),
            ConvBlock(small, large),
            nn.Conv2d(large, large, 2, stride=2),
            ConvBlock(large, large),
            nn.Conv2d(large, 2 * channels, 1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(channels, large, 1),
            ConvBlock(large, large),
            nn.Upsample(scale_factor=2.0),
            ConvBlock(large, large),
            nn.Upsample(scale_factor=2.0),
            ConvBlock(large, small),
            ConvBlock(small, small),
            nn.Conv2d(small, 1, 3, padding=1),
        )
        # Measured over the training pictures. Persistent, so that weights read from a file bring them along.
        self.register_buffer("latent_mean", torch.zeros(channels, 1, 1))
        self.register_buffer("latent_std", torch.ones(channels, 1, 1))

    def encode(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 1, 16, 16) ink in 0..1 -> mean and log-variance of the raw latents, each (B, 4, 4, 4)."""
        mean, log_variance = self.encoder(2 * pixels - 1).chunk(2, dim=1)
        return mean, log_variance.clamp(-12, 6)

    def decode(self, latents: Tensor) -> Tensor:
        """Normalised latents (B, 4, 4, 4) -> ink (B, 1, 16, 16) in 0..1."""
        pixels: Tensor = self.decoder(latents * self.latent_std + self.latent_mean)
        return pixels.clamp(0, 1)

    def normalise(self, raw_latents: Tensor) -> Tensor:
        """Raw latents, as `encode` gives them, to zero mean and unit deviation per channel."""
        return (raw_latents - self.latent_mean) / self.latent_std

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode and decode: (B, 1, 16, 16) -> (B, 1, 16, 16)."""
        mean, _ = self.encode(pixels)
        return self.decode(self.normalise(mean))
