"""Wan, and what was built upon it: animation, VACE, Lucy, ChronoEdit, SkyReels, AnyFlow, Helios."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers as df

from ..case import case, made
from ..encoders import clip_vision, umt5
from ..images import flow
from ..inputs import film, mask, picture
from ..tokens import clip_pictures, tokenizer

TRANSFORMER: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 32,
    "freq_dim": 256,
    "ffn_dim": 32,
    "num_layers": 2,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 32,
}


def wan_vae(channels: int = 16, **more: Any) -> Any:
    """The causal video autoencoder: eight pixels a side, four frames after the first."""
    shape: dict[str, Any] = {
        "base_dim": 3,
        "z_dim": channels,
        "dim_mult": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
    }
    return df.AutoencoderKLWan(**{**shape, **more})


def wan(
    transformer: Any = df.WanTransformer3DModel, *, shape: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """Components of ``WanPipeline`` with one transformer."""
    usual = {
        "transformer": partial(transformer, **{**TRANSFORMER, **(shape or {})}),
        "vae": wan_vae,
        "scheduler": partial(flow, shift=7.0),
        "text_encoder": umt5,
        "tokenizer": tokenizer,
    }
    return made(usual, more)


def two(**more: Any) -> dict[str, Any]:
    """Wan 2.2: one transformer for high noise and one for low."""
    return wan(transformer_2=partial(df.WanTransformer3DModel, **TRANSFORMER), boundary_ratio=0.875, **more)


def small_vision() -> Any:
    """A picture encoder of width 4 on four by four pixels."""
    return clip_vision(
        4,
        projected=False,
        projection=4,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=4,
        intermediate_size=16,
        patch_size=1,
    )


FROM_PICTURE = {"in_channels": 36, "image_dim": 4}
SEEN = {"image_encoder": small_vision, "image_processor": partial(clip_pictures, 4)}


def vace() -> dict[str, Any]:
    """VACE: control by a film, a mask and pictures."""
    shape = {**TRANSFORMER, "vace_layers": [0], "vace_in_channels": 96}
    second = partial(df.WanVACETransformer3DModel, **{**shape, "num_layers": 2})
    return wan(df.WanVACETransformer3DModel, shape=shape, transformer_2=second, boundary_ratio=0.875)


def animate() -> dict[str, Any]:
    """Animation: a face and a pose."""
    shape = {
        **FROM_PICTURE,
        "latent_channels": 16,
        "motion_encoder_channel_sizes": {"4": 16, "8": 16, "16": 16},
        "motion_encoder_size": 16,
        "motion_style_dim": 8,
        "motion_dim": 4,
        "motion_encoder_dim": 16,
        "face_encoder_hidden_dim": 16,
        "face_encoder_num_heads": 2,
        "inject_face_latents_blocks": 2,
        "rope_max_seq_len": 32,
    }
    return wan(df.WanAnimateTransformer3DModel, shape=shape, **SEEN)


def sky(**shape: Any) -> dict[str, Any]:
    """SkyReels."""
    return wan(
        df.SkyReelsV2Transformer3DModel,
        shape=shape,
        scheduler=partial(df.UniPCMultistepScheduler, flow_shift=8.0, use_flow_sigmas=True),
    )


FRAMES = {"num_frames": 9, "height": 16, "width": 16}

CASES = [
    case("WanPipeline", two, **FRAMES),
    case(
        "WanImageToVideoPipeline",
        partial(wan, shape=FROM_PICTURE, transformer_2=None, **SEEN),
        image=picture(16),
        **FRAMES,
    ),
    case("WanVideoToVideoPipeline", wan, video=film(9, 16), strength=0.9, height=16, width=16),
    case("WanVACEPipeline", vace, video=film(9, 16), mask=[mask(16)] * 9, **FRAMES),
    case(
        "WanAnimatePipeline",
        animate,
        image=picture(16),
        pose_video=film(9, 16),
        face_video=film(9, 16),
        segment_frame_length=5,
        height=16,
        width=16,
    ),
    case(
        "LucyEditPipeline",
        partial(wan, shape={"in_channels": 32}, transformer_2=None),
        video=film(9, 16),
        **FRAMES,
    ),
    case(
        "ChronoEditPipeline",
        partial(wan, df.ChronoEditTransformer3DModel, shape=FROM_PICTURE, **SEEN),
        image=picture(16),
        **{**FRAMES, "num_frames": 5},
    ),
    case("SkyReelsV2Pipeline", sky, **FRAMES),
    case(
        "SkyReelsV2ImageToVideoPipeline",
        lambda: {**sky(**FROM_PICTURE), **made(SEEN)},
        image=picture(16),
        **FRAMES,
    ),
    case(
        "SkyReelsV2DiffusionForcingPipeline",
        partial(sky, inject_sample_info=False),
        **FRAMES,
        base_num_frames=9,
        ar_step=0,
    ),
    case(
        "SkyReelsV2DiffusionForcingImageToVideoPipeline",
        sky,
        image=picture(16),
        **FRAMES,
        base_num_frames=9,
    ),
    case(
        "SkyReelsV2DiffusionForcingVideoToVideoPipeline",
        sky,
        video=film(9, 16),
        height=16,
        width=16,
        num_frames=17,
        base_num_frames=9,
        overlap_history=5,
    ),
]
