"""DeepFloyd IF: pixels in three stages."""

from __future__ import annotations

from typing import Any

import diffusers as df

from ..case import case
from ..encoders import t5
from ..inputs import mask, picture
from ..tokens import tokenizer


def unet(channels: int, **more: Any) -> Any:
    """A UNet on pixels that also gives the variance."""
    return df.UNet2DConditionModel(
        sample_size=32,
        layers_per_block=1,
        block_out_channels=[32, 64],
        down_block_types=["ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"],
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=["SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"],
        in_channels=channels,
        out_channels=6,
        cross_attention_dim=32,
        encoder_hid_dim=32,
        attention_head_dim=8,
        addition_embed_type="text",
        addition_embed_type_num_heads=2,
        cross_attention_norm="group_norm",
        resnet_time_scale_shift="scale_shift",
        act_fn="gelu",
        **more,
    )


def scheduler(**more: Any) -> Any:
    """Of the first stage."""
    return df.DDPMScheduler(
        num_train_timesteps=1000, beta_schedule="squaredcos_cap_v2", beta_start=0.0001, beta_end=0.02, **more
    )


def first() -> dict[str, Any]:
    """The first stage."""
    return {
        "text_encoder": t5(),
        "tokenizer": tokenizer(length=77),
        "unet": unet(3),
        "scheduler": scheduler(
            thresholding=True,
            dynamic_thresholding_ratio=0.95,
            sample_max_value=1.0,
            prediction_type="epsilon",
            variance_type="learned_range",
        ),
        "watermarker": None,
        "safety_checker": None,
        "feature_extractor": None,
    }


def second() -> dict[str, Any]:
    """The second, which takes the first one's picture and noise upon it."""
    return {
        **first(),
        "unet": unet(
            6,
            class_embed_type="timestep",
            mid_block_scale_factor=1.414,
            time_embedding_act_fn="gelu",
            resnet_skip_time_act=True,
        ),
        "image_noising_scheduler": scheduler(),
    }


PICTURE = picture(32)

CASES = [
    case("IFPipeline", first),
    case("IFImg2ImgPipeline", first, image=PICTURE, strength=0.9),
    case("IFInpaintingPipeline", first, image=PICTURE, mask_image=mask()),
    case("IFSuperResolutionPipeline", second, image=picture(16)),
    case(
        "IFImg2ImgSuperResolutionPipeline",
        second,
        image=picture(32),
        original_image=picture(16),
        strength=0.9,
    ),
    case(
        "IFInpaintingSuperResolutionPipeline",
        second,
        image=picture(16),
        original_image=picture(32),
        mask_image=mask(),
        strength=0.9,
    ),
]
