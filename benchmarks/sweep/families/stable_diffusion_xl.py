"""Stable Diffusion XL, its ControlNets, PAG, adapters, Kolors."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers as df

from ..case import case, made
from ..encoders import clip, clip_vision
from ..images import XL, controlnet, ddim, unet, vae
from ..inputs import levels, mask, picture
from ..tokens import clip_pictures, clip_tokenizer
from .stable_diffusion import invert, sde

UNET = partial(unet, 64, **XL)
CONTROL = partial(controlnet, 64, **XL)


def xl(**more: Any) -> dict[str, Any]:
    """Components of ``StableDiffusionXLPipeline``; two texts of width 32 make a context of 64."""
    usual = {
        "unet": UNET,
        "scheduler": ddim,
        "vae": vae,
        "text_encoder": partial(clip, projection=32),
        "tokenizer": clip_tokenizer,
        "text_encoder_2": partial(clip, projected=True, projection=32),
        "tokenizer_2": clip_tokenizer,
        "add_watermarker": False,
    }
    return made(usual, more)


def pictured() -> dict[str, Any]:
    """With an encoder for pictures, which only an IP adapter would use: a component that is skipped."""
    return xl(image_encoder=clip_vision, feature_extractor=clip_pictures)


def scored(**more: Any) -> dict[str, Any]:
    """With aesthetics scores: five sizes instead of six for each of two scores."""
    return xl(
        **{"unet": partial(unet, 64, **{**XL, "projection_class_embeddings_input_dim": 72}), **more},
        requires_aesthetics_score=True,
    )


def union() -> Any:
    """A ControlNet for several kinds of control."""
    return df.ControlNetUnionModel(
        block_out_channels=(32, 64),
        layers_per_block=2,
        in_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        cross_attention_dim=64,
        conditioning_embedding_out_channels=(16, 32),
        norm_num_groups=8,
        **XL,
        num_control_type=6,
        num_trans_channel=32,
        num_trans_head=4,
        num_proj_channel=32,
    )


def xs() -> dict[str, Any]:
    """ControlNet-XS for XL."""
    model = df.UNet2DConditionModel(
        block_out_channels=(4, 8),
        layers_per_block=2,
        sample_size=16,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        use_linear_projection=True,
        norm_num_groups=4,
        attention_head_dim=(2, 4),
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=56,
        cross_attention_dim=8,
    )
    adapter = df.ControlNetXSAdapter.from_unet(
        unet=model, size_ratio=0.5, learn_time_embedding=True, conditioning_embedding_out_channels=(2, 2)
    )
    return xl(
        unet=lambda: model,
        controlnet=lambda: adapter,
        vae=partial(vae, widths=(4, 8), norm_num_groups=2),
        text_encoder=partial(clip, 4, projection=8, num_attention_heads=2),
        text_encoder_2=partial(clip, 4, projected=True, projection=8, num_attention_heads=2),
    )


def adapter() -> Any:
    """A T2I adapter for XL."""
    return df.T2IAdapter(
        in_channels=3, channels=[32, 64], num_res_blocks=2, downscale_factor=4, adapter_type="full_adapter_xl"
    )


def adapted() -> dict[str, Any]:
    """With a T2I adapter."""
    parts = xl(adapter=adapter)
    del parts["add_watermarker"]
    return parts


PICTURE = picture(32)
SMALL = levels(1, 3, 32, 32)
INPAINT = {"image": PICTURE, "mask_image": mask()}
NINE = partial(unet, 64, **XL, in_channels=9)

CASES = [
    case("StableDiffusionXLPipeline", pictured),
    case("StableDiffusionXLImg2ImgPipeline", scored, image=PICTURE, strength=0.9),
    case("StableDiffusionXLInpaintPipeline", partial(xl, unet=NINE), **INPAINT),
    case(
        "StableDiffusionXLInstructPix2PixPipeline",
        partial(xl, unet=partial(unet, 64, **XL, in_channels=8)),
        image=PICTURE,
    ),
    case("StableDiffusionXLControlNetPipeline", partial(xl, controlnet=CONTROL), image=SMALL),
    case(
        "StableDiffusionXLControlNetImg2ImgPipeline",
        partial(xl, controlnet=CONTROL),
        image=PICTURE,
        control_image=SMALL,
    ),
    case(
        "StableDiffusionXLControlNetInpaintPipeline",
        partial(xl, unet=NINE, controlnet=CONTROL),
        **INPAINT,
        control_image=SMALL,
    ),
    case(
        "StableDiffusionXLControlNetUnionPipeline",
        partial(xl, controlnet=union),
        control_image=SMALL,
        control_mode=0,
    ),
    case(
        "StableDiffusionXLControlNetUnionImg2ImgPipeline",
        partial(xl, controlnet=union),
        image=PICTURE,
        control_image=SMALL,
        control_mode=0,
    ),
    case(
        "StableDiffusionXLControlNetUnionInpaintPipeline",
        partial(xl, controlnet=union),
        **INPAINT,
        control_image=SMALL,
        control_mode=0,
    ),
    case("StableDiffusionXLPAGPipeline", xl, pag_scale=3.0),
    case("StableDiffusionXLPAGImg2ImgPipeline", scored, image=PICTURE, strength=0.9, pag_scale=3.0),
    case("StableDiffusionXLPAGInpaintPipeline", partial(xl, unet=NINE), **INPAINT, pag_scale=3.0),
    case(
        "StableDiffusionXLControlNetPAGPipeline", partial(xl, controlnet=CONTROL), image=SMALL, pag_scale=3.0
    ),
    case(
        "StableDiffusionXLControlNetPAGImg2ImgPipeline",
        partial(xl, controlnet=CONTROL),
        image=PICTURE,
        control_image=SMALL,
        pag_scale=3.0,
    ),
    case("StableDiffusionXLControlNetXSPipeline", xs, image=SMALL),
    case("StableDiffusionXLAdapterPipeline", adapted, image=PICTURE),
    case(
        "LEditsPPPipelineStableDiffusionXL",
        partial(xl, scheduler=sde),
        first=invert,
        editing_prompt=["a boat"],
        edit_threshold=[0.7],
        edit_warmup_steps=[0],
    ),
    case("TextToVideoZeroSDXLPipeline", xl, video_length=3, num_inference_steps=4, t0=1, t1=3),
]
