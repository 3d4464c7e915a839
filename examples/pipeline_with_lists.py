"""A pipeline that declares its components by four lists; hooks do the rest.

    python examples/pipeline_with_lists.py [DEVICE]

The networks are real classes from transformers and diffusers, small and with random weights, since this is
about where they are and not about what they draw. Without a device it takes the accelerator, else the CPU.
"""

from __future__ import annotations

import sys
from typing import ClassVar

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SanaTransformer2DModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPVisionConfig, CLIPVisionModel

from omni_components import SupportsComponentDiscovery, offload

WIDTH = 64
ENCODER = {"hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}


class ReferencePipeline(nn.Module, SupportsComponentDiscovery):
    """Draws after a text and a reference picture."""

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "vision_model"]
    _vae_modules: ClassVar[list[str]] = ["vae"]
    _resident_modules: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        words = CLIPTextConfig(vocab_size=1000, bos_token_id=998, eos_token_id=999, **ENCODER)
        self.text_encoder = CLIPTextModel(words)
        self.vision_model = CLIPVisionModel(CLIPVisionConfig(image_size=32, patch_size=8, **ENCODER))
        self.transformer = SanaTransformer2DModel(
            in_channels=4,
            out_channels=4,
            sample_size=8,
            num_layers=6,
            num_attention_heads=4,
            attention_head_dim=16,
            num_cross_attention_heads=4,
            cross_attention_head_dim=16,
            cross_attention_dim=WIDTH,
            caption_channels=WIDTH,
        )
        self.vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(16, 16),
            norm_num_groups=8,
        )
        self.scheduler = FlowMatchEulerDiscreteScheduler()

    @torch.no_grad()
    def __call__(self, ids: torch.Tensor, reference: torch.Tensor, steps: int = 4) -> torch.Tensor:
        """Pictures for token ids (B, T) and reference pictures (B, 3, 32, 32)."""
        device = self.vae.device  # the VAE is never swapped: it stands where the pipeline computes
        text = self.text_encoder(ids).last_hidden_state
        picture = self.vision_model(reference).last_hidden_state
        condition = torch.cat([text, picture], dim=1)

        generator = torch.Generator("cpu").manual_seed(0)  # on the CPU: the same noise for every device
        latents = torch.randn(len(ids), 4, 8, 8, generator=generator).to(device)
        self.scheduler.set_timesteps(steps, device=device)
        for time in self.scheduler.timesteps:
            velocity = self.transformer(latents, condition, time.expand(len(ids))).sample
            latents = self.scheduler.step(velocity, time, latents).prev_sample
        return self.vae.decode(latents / self.vae.config.scaling_factor).sample.cpu()


def main(device: str | None = None) -> None:
    """Draw once with everything in one place, once with components taking turns, and compare."""
    torch.manual_seed(0)
    pipeline = ReferencePipeline().requires_grad_(False).eval()
    ids, reference = torch.randint(1000, (1, 12)), torch.rand(1, 3, 32, 32)
    expected = pipeline(ids, reference)

    with offload(pipeline, device) as handle:
        picture = pipeline(ids, reference)
        for event in handle.events:
            if event.kind in ("load", "evict"):
                print(f"{event.kind!s:5} {event.component:12} -> {event.device_bytes:>9,} bytes there")
        print(handle.report())
    print(f"largest difference to the run without offload: {(picture - expected).abs().max():.1e}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
