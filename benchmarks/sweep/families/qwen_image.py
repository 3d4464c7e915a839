"""Qwen-Image: text, pictures, ControlNets, edits, layers."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import diffusers as df

from ..case import case, made
from ..encoders import qwen_vl, qwen_vl_processor
from ..images import flow
from ..inputs import mask, picture
from ..tokens import tokenizer

TRANSFORMER: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": 16,
    "guidance_embeds": False,
    "axes_dims_rope": (8, 4, 4),
}


def qwen_vae(**more: Any) -> Any:
    """The autoencoder; four pixels a side here."""
    shape: dict[str, Any] = {
        "base_dim": 24,
        "z_dim": 4,
        "dim_mult": [1, 2, 4],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True],
        "latents_mean": [0.0] * 4,
        "latents_std": [1.0] * 4,
    }
    return df.AutoencoderKLQwenImage(**{**shape, **more})


def qwen(*, shape: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Components of ``QwenImagePipeline``."""
    usual = {
        "transformer": partial(df.QwenImageTransformer2DModel, **{**TRANSFORMER, **(shape or {})}),
        "vae": qwen_vae,
        "scheduler": flow,
        "text_encoder": qwen_vl,
        "tokenizer": partial(tokenizer, ends=False, length=512),
    }
    return made(usual, more)


def control(extra: int = 0) -> Any:
    """A ControlNet of the same kind."""
    shape = {key: one for key, one in TRANSFORMER.items() if key not in ("guidance_embeds",)}
    return df.QwenImageControlNetModel(**{**shape, "num_layers": 1}, extra_condition_channels=extra)


def few_pixels(pipeline: Any) -> None:
    """An edit enlarges its picture to a million pixels, whatever is asked: here to a thousand."""
    module = vars(sys.modules[type(pipeline).__module__])
    original = module["calculate_dimensions"]
    if not isinstance(original, partial):
        module["calculate_dimensions"] = partial(_fewer, original)


def _fewer(original: Any, area: int, ratio: float) -> Any:
    return original(min(area, 64 * 64), ratio)


EDIT = {"processor": qwen_vl_processor}
GUIDED = {"true_cfg_scale": 2.0, "negative_prompt": "bad quality"}
PICTURE = picture(32)

CASES = [
    case("QwenImagePipeline", qwen, **GUIDED),
    case("QwenImageImg2ImgPipeline", qwen, image=PICTURE, strength=0.9, **GUIDED),
    case("QwenImageInpaintPipeline", qwen, image=PICTURE, mask_image=mask(), strength=0.9, **GUIDED),
    case("QwenImageControlNetPipeline", partial(qwen, controlnet=control), control_image=PICTURE, **GUIDED),
    case(
        "QwenImageControlNetInpaintPipeline",
        partial(qwen, controlnet=partial(control, 4)),
        control_image=PICTURE,
        control_mask=mask(),
        **GUIDED,
    ),
    case("QwenImageEditPipeline", partial(qwen, **EDIT), prepare=few_pixels, image=PICTURE, **GUIDED),
    case(
        "QwenImageEditInpaintPipeline",
        partial(qwen, **EDIT),
        prepare=few_pixels,
        image=PICTURE,
        mask_image=mask(),
        strength=0.9,
        **GUIDED,
    ),
    case(
        "QwenImageEditPlusPipeline",
        partial(qwen, **EDIT),
        prepare=few_pixels,
        image=[PICTURE, picture(32, seed=8)],
        **GUIDED,
    ),
]
