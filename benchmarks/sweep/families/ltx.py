"""LTX-Video and its upsampler."""

from __future__ import annotations

from typing import Any

import diffusers as df
from diffusers.pipelines.ltx.modeling_latent_upsampler import LTXLatentUpsamplerModel

from ..case import case
from ..encoders import t5
from ..images import flow
from ..inputs import film, picture
from ..tokens import tokenizer


def ltx_vae() -> Any:
    """The video autoencoder."""
    vae = df.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False, False, False, False, False),
        upsample_residual=(False, False, False, False),
        upsample_factor=(1, 1, 1, 1),
        timestep_conditioning=False,
        patch_size=1,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    )
    vae.use_framewise_encoding = vae.use_framewise_decoding = False
    return vae


def ltx() -> dict[str, Any]:
    """Components of ``LTXPipeline``."""
    return {
        "transformer": df.LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            patch_size=1,
            patch_size_t=1,
            num_attention_heads=4,
            attention_head_dim=8,
            cross_attention_dim=32,
            num_layers=1,
            caption_channels=32,
        ),
        "vae": ltx_vae(),
        "scheduler": flow(),
        "text_encoder": t5(),
        "tokenizer": tokenizer(),
    }


def long() -> dict[str, Any]:
    """With the scheduler that films in pieces take."""
    return {**ltx(), "scheduler": df.LTXEulerAncestralRFScheduler()}


def upsample() -> dict[str, Any]:
    """A film's latents, enlarged."""
    model = LTXLatentUpsamplerModel(
        in_channels=8,
        mid_channels=32,
        num_blocks_per_stage=1,
        dims=3,
        spatial_upsample=True,
        temporal_upsample=False,
    )
    return {"vae": ltx_vae(), "latent_upsampler": model}


FRAMES = {"num_frames": 9}

CASES = [
    case("LTXPipeline", ltx, **FRAMES),
    case("LTXImageToVideoPipeline", ltx, image=picture(32), **FRAMES),
    case("LTXConditionPipeline", ltx, image=picture(32), strength=1.0, **FRAMES),
    case(
        "LTXI2VLongMultiPromptPipeline",
        long,
        **FRAMES,
        cond_image=picture(32),
        temporal_tile_size=16,
        temporal_overlap=8,
    ),
    case("LTXLatentUpsamplePipeline", upsample, video=film(5, 16), height=16, width=16),
]
