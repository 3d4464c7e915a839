"""Stable Diffusion 3: three texts, of which guidance asks twice; ControlNets and PAG."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers as df

from ..case import case, made
from ..encoders import clip, t5
from ..images import flow, vae16
from ..inputs import levels, mask, picture
from ..tokens import clip_tokenizer, tokenizer

TRANSFORMER: dict[str, Any] = {
    "sample_size": 32,
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "caption_projection_dim": 32,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 64,
    "out_channels": 16,
}


def sd3(**more: Any) -> dict[str, Any]:
    """Components of ``StableDiffusion3Pipeline``."""
    usual = {
        "transformer": partial(df.SD3Transformer2DModel, **TRANSFORMER),
        "scheduler": flow,
        "vae": vae16,
        "text_encoder": partial(clip, 16, projected=True, projection=32),
        "tokenizer": clip_tokenizer,
        "text_encoder_2": partial(clip, 16, projected=True, projection=32),
        "tokenizer_2": clip_tokenizer,
        "text_encoder_3": t5,
        "tokenizer_3": tokenizer,
    }
    return made(usual, more)


def control(**more: Any) -> Any:
    """A ControlNet of the same kind."""
    shape = {key: one for key, one in TRANSFORMER.items() if key != "out_channels"}
    return df.SD3ControlNetModel(**{**shape, "num_layers": 1, **more})


PICTURE = picture(32)

CASES = [
    case("StableDiffusion3Pipeline", sd3),
    case("StableDiffusion3Img2ImgPipeline", sd3, image=PICTURE, strength=0.9),
    case("StableDiffusion3InpaintPipeline", sd3, image=PICTURE, mask_image=mask(), strength=0.9),
    case(
        "StableDiffusion3ControlNetPipeline",
        partial(sd3, controlnet=control),
        control_image=levels(1, 3, 32, 32),
    ),
    case(
        "StableDiffusion3ControlNetInpaintingPipeline",
        partial(sd3, controlnet=partial(control, extra_conditioning_channels=1)),
        control_image=levels(1, 3, 32, 32),
        control_mask=levels(1, 1, 32, 32),
    ),
    case("StableDiffusion3PAGPipeline", sd3, pag_scale=3.0),
    case("StableDiffusion3PAGImg2ImgPipeline", sd3, image=PICTURE, strength=0.9, pag_scale=3.0),
]
