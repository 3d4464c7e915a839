"""AnimateDiff: Stable Diffusion's UNet with motion modules; also PIA."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers as df

from ..case import case, made
from ..encoders import clip, clip_vision
from ..images import XL, controlnet, ddim, unet, vae
from ..inputs import film, picture
from ..tokens import clip_pictures, clip_tokenizer


def motion(**more: Any) -> Any:
    """Motion modules for ``unet``."""
    return df.MotionAdapter(
        block_out_channels=(32, 64),
        motion_layers_per_block=2,
        motion_norm_num_groups=2,
        motion_num_attention_heads=4,
        **more,
    )


def animate(**more: Any) -> dict[str, Any]:
    """Components of ``AnimateDiffPipeline``."""
    usual = {
        "unet": unet,
        "scheduler": partial(ddim, beta_schedule="linear"),
        "vae": vae,
        "motion_adapter": motion,
        "text_encoder": clip,
        "tokenizer": clip_tokenizer,
        "feature_extractor": None,
        "image_encoder": None,
    }
    return made(usual, more)


def xl() -> dict[str, Any]:
    """The same for XL."""
    return animate(
        unet=partial(unet, 64, **{**XL, "norm_num_groups": 8}),
        motion_adapter=partial(motion, use_motion_mid_block=False),
        text_encoder_2=partial(clip, projected=True),
        tokenizer_2=clip_tokenizer,
        text_encoder=clip,
    )


def sparse() -> Any:
    """A ControlNet for some of the frames."""
    return df.SparseControlNetModel(
        block_out_channels=(32, 64),
        layers_per_block=2,
        in_channels=4,
        conditioning_channels=3,
        down_block_types=("DownBlockMotion", "CrossAttnDownBlockMotion"),
        cross_attention_dim=32,
        conditioning_embedding_out_channels=(16, 32),
        norm_num_groups=8,
        use_simplified_condition_embedding=False,
        concat_conditioning_mask=False,
    )


FRAMES = {"num_frames": 2}

CASES = [
    case(
        "AnimateDiffPipeline",
        partial(animate, image_encoder=clip_vision, feature_extractor=clip_pictures),
        **FRAMES,
    ),
    case("AnimateDiffPAGPipeline", animate, **FRAMES, pag_scale=3.0),
    case(
        "AnimateDiffControlNetPipeline",
        partial(animate, controlnet=controlnet),
        **FRAMES,
        conditioning_frames=film(2),
    ),
    case("AnimateDiffSDXLPipeline", xl, **FRAMES),
    case(
        "AnimateDiffSparseControlNetPipeline",
        partial(animate, controlnet=sparse),
        **FRAMES,
        conditioning_frames=film(1),
    ),
    case("AnimateDiffVideoToVideoPipeline", animate, video=film(2)),
    case(
        "AnimateDiffVideoToVideoControlNetPipeline",
        partial(animate, controlnet=controlnet),
        video=film(2),
        conditioning_frames=film(2),
    ),
    case("PIAPipeline", partial(animate, unet=partial(unet, in_channels=9)), **FRAMES, image=picture(32)),
]
