"""LTX-2: film and sound together."""

from __future__ import annotations

from typing import Any

import diffusers as df
import transformers as tf
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel, LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

from .. import tokens
from ..case import case
from ..encoders import _causal_shape
from ..images import flow
from ..inputs import film, picture
from ..tokens import tokenizer


def gemma3() -> Any:
    """Gemma 3."""
    return tf.Gemma3ForConditionalGeneration(
        tf.Gemma3Config(
            text_config={**_causal_shape(32), "head_dim": 8, "sliding_window": 64},
            vision_config={
                "hidden_size": 16,
                "intermediate_size": 37,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 32,
                "patch_size": 8,
            },
            mm_tokens_per_image=4,
            image_token_index=tokens.number("<image_soft_token>"),
            boi_token_index=tokens.number("<start_of_image>"),
            eoi_token_index=tokens.number("<end_of_image>"),
        )
    )


def film_vae() -> Any:
    """The film's autoencoder: two pixels a side, two frames after the first."""
    vae = df.AutoencoderKLLTX2Video(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        layers_per_block=(1,),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatial",),
        upsample_residual=(False,),
        upsample_factor=(1,),
        timestep_conditioning=False,
        patch_size=1,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    )
    vae.use_framewise_encoding = vae.use_framewise_decoding = False
    return vae


def upsampler(**more: Any) -> Any:
    """Of latents."""
    return LTX2LatentUpsamplerModel(in_channels=4, mid_channels=32, num_blocks_per_stage=1, **more)


def ltx2(**shape: Any) -> dict[str, Any]:
    """Components of ``LTX2Pipeline``; the numbers given are for its transformer."""
    transformer = df.LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        patch_size=1,
        patch_size_t=1,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        num_layers=2,
        qk_norm="rms_norm_across_heads",
        caption_channels=32,
        rope_double_precision=False,
        rope_type="split",
        **shape,
    )
    connectors = LTX2TextConnectors(
        caption_channels=32,
        text_proj_in_factor=3,
        video_connector_num_attention_heads=4,
        video_connector_attention_head_dim=8,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=None,
        audio_connector_num_attention_heads=4,
        audio_connector_attention_head_dim=8,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=None,
        connector_rope_base_seq_len=32,
        rope_theta=10000.0,
        rope_double_precision=False,
        causal_temporal_positioning=False,
        rope_type="split",
    )
    audio = df.AutoencoderKLLTX2Audio(
        base_channels=4,
        output_channels=2,
        ch_mult=(1,),
        num_res_blocks=1,
        attn_resolutions=None,
        in_channels=2,
        resolution=32,
        latent_channels=2,
        norm_type="pixel",
        causality_axis="height",
        dropout=0.0,
        mid_block_add_attention=False,
        sample_rate=16000,
        mel_hop_length=160,
        is_causal=True,
        mel_bins=8,
    )
    vocoder = LTX2Vocoder(
        in_channels=16,
        hidden_channels=32,
        out_channels=2,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
        leaky_relu_negative_slope=0.1,
        output_sampling_rate=16000,
    )
    return {
        "transformer": transformer,
        "vae": film_vae(),
        "audio_vae": audio,
        "scheduler": flow(),
        "text_encoder": gemma3(),
        "tokenizer": tokenizer(begins=True, ends=False),
        "connectors": connectors,
        "vocoder": vocoder,
    }


def key_framed() -> dict[str, Any]:
    """With a transformer that places key frames."""
    return ltx2(vae_scale_factors=(2, 2, 2), use_keyframes_abs_pos_embedding=True)


def upsample() -> dict[str, Any]:
    """A film's latents, enlarged."""
    return {"vae": film_vae(), "latent_upsampler": upsampler()}


PLAIN: dict[str, Any] = {
    "guidance_scale": 1.0,
    "stg_scale": 0.0,
    "modality_scale": 1.0,
    "spatio_temporal_guidance_blocks": None,
    "use_cross_timestep": False,
    "num_frames": 5,
    "frame_rate": 25.0,
}
HEARD: dict[str, Any] = {
    **PLAIN,
    "audio_guidance_scale": 1.0,
    "audio_stg_scale": 0.0,
    "audio_modality_scale": 1.0,
    "audio_guidance_rescale": 0.0,
}

CASES = [
    case("LTX2Pipeline", ltx2, **{**HEARD, "guidance_scale": 3.0}),
    case("LTX2ImageToVideoPipeline", ltx2, image=picture(32), image_crf=0, **HEARD),
    case("LTX2ConditionPipeline", ltx2, **HEARD),
    case("LTX2InContextPipeline", ltx2, **HEARD),
    case("LTX2HDRPipeline", ltx2, **PLAIN),
    case(
        "LTX2DFRPipeline",
        key_framed,
        num_frames=9,
        frame_rate=25.0,
        sigmas=[1.0, 0.5],
        use_cross_timestep=False,
    ),
    case("LTX2LatentUpsamplePipeline", upsample, video=film(5, 32), num_frames=5),
]
