"""Tiny autoencoders, UNets, ControlNets and schedulers that families share."""

from __future__ import annotations

from typing import Any

import diffusers as df


def vae(channels: int = 4, widths: tuple[int, ...] = (32, 64), **more: Any) -> Any:
    """The image autoencoder of Stable Diffusion; halves a side once for each width after the first."""
    shape: dict[str, Any] = {
        "block_out_channels": widths,
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ["DownEncoderBlock2D"] * len(widths),
        "up_block_types": ["UpDecoderBlock2D"] * len(widths),
        "latent_channels": channels,
        "norm_num_groups": 8,
    }
    return df.AutoencoderKL(**{**shape, **more})


def vae16(**more: Any) -> Any:
    """The same with 16 channels, as Flux and Stable Diffusion 3 have it."""
    shape: dict[str, Any] = {
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "shift_factor": 0.0609,
        "scaling_factor": 1.5035,
    }
    return vae(**{"channels": 16, **shape, **more})


def unet(context: int = 32, **more: Any) -> Any:
    """The UNet of Stable Diffusion."""
    shape: dict[str, Any] = {
        "block_out_channels": (32, 64),
        "layers_per_block": 2,
        "sample_size": 32,
        "in_channels": 4,
        "out_channels": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": context,
        "norm_num_groups": 8,
    }
    return df.UNet2DConditionModel(**{**shape, **more})


XL = {
    "attention_head_dim": (2, 4),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "transformer_layers_per_block": (1, 2),
    "projection_class_embeddings_input_dim": 80,  # 6 times 8 of the sizes, 32 of the text
}
"""What makes that UNet Stable Diffusion XL's."""


def controlnet(context: int = 32, **more: Any) -> Any:
    """A ControlNet beside ``unet``."""
    shape: dict[str, Any] = {
        "block_out_channels": (32, 64),
        "layers_per_block": 2,
        "in_channels": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "cross_attention_dim": context,
        "conditioning_embedding_out_channels": (16, 32),
        "norm_num_groups": 8,
    }
    return df.ControlNetModel(**{**shape, **more})


def ddim(**more: Any) -> Any:
    """The scheduler most of them take."""
    shape: dict[str, Any] = {
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "clip_sample": False,
        "set_alpha_to_one": False,
        "steps_offset": 1,
    }
    return df.DDIMScheduler(**{**shape, **more})


def flow(**more: Any) -> Any:
    """The scheduler of flow matching."""
    return df.FlowMatchEulerDiscreteScheduler(**more)
