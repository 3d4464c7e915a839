"""Sound: Stable Audio, AudioLDM; Stable Audio 3, ACE-Step, LongCat-Audio.

Sizes of the last three: diffusers' tests/pipelines/{stable_audio_3,ace_step,longcat_audio_dit}.
"""

from __future__ import annotations

from typing import Any

import diffusers as df
import transformers as tf
from diffusers.pipelines.ace_step import AceStepConditionEncoder
from diffusers.pipelines.stable_audio import StableAudioProjectionModel
from diffusers.pipelines.stable_audio_3.modeling_stable_audio_3 import StableAudio3DurationEmbedder

from .. import tokens
from ..case import case
from ..encoders import causal, t5, umt5
from ..images import ddim, flow, unet, vae
from ..inputs import noise
from ..tokens import tokenizer


def oobleck(latents: int) -> Any:
    """The autoencoder of sound that several take, at 4 samples a second."""
    return df.AutoencoderOobleck(
        encoder_hidden_size=6,
        downsampling_ratios=[1, 2],
        decoder_channels=3,
        decoder_input_channels=latents,
        audio_channels=2,
        channel_multiples=[2, 4],
        sampling_rate=4,
    )


def stable_audio() -> dict[str, Any]:
    """Stable Audio."""
    return {
        "transformer": df.StableAudioDiTModel(
            sample_size=4,
            in_channels=3,
            num_layers=2,
            attention_head_dim=4,
            num_key_value_attention_heads=2,
            out_channels=3,
            cross_attention_dim=4,
            time_proj_dim=8,
            global_states_input_dim=8,
            cross_attention_input_dim=4,
            num_attention_heads=2,
        ),
        "vae": oobleck(3),
        "scheduler": df.EDMDPMSolverMultistepScheduler(
            solver_order=2, prediction_type="v_prediction", sigma_data=1.0
        ),
        "text_encoder": t5(4, d_kv=4, num_heads=2),
        "tokenizer": tokenizer(length=32),
        "projection_model": StableAudioProjectionModel(
            text_encoder_dim=4, conditioning_dim=4, min_value=0, max_value=32
        ),
    }


def audio_ldm() -> dict[str, Any]:
    """AudioLDM: a spectrum, and a vocoder after it."""
    text = tf.ClapTextModelWithProjection(
        tf.ClapTextConfig(
            vocab_size=tokens.SIZE,
            hidden_size=32,
            intermediate_size=37,
            num_attention_heads=4,
            num_hidden_layers=2,
            max_position_embeddings=80,
            type_vocab_size=1,
            projection_dim=32,
            pad_token_id=0,
        )
    )
    vocoder = tf.SpeechT5HifiGan(
        tf.SpeechT5HifiGanConfig(
            model_in_dim=8,
            sampling_rate=16000,
            upsample_initial_channel=16,
            upsample_rates=[2, 2],
            upsample_kernel_sizes=[4, 4],
            resblock_kernel_sizes=[3, 7],
            resblock_dilation_sizes=[[1, 3, 5], [1, 3, 5]],
            normalize_before=False,
        )
    )
    return {
        "unet": unet(
            None,
            cross_attention_dim=(32, 64),
            class_embed_type="simple_projection",
            projection_class_embeddings_input_dim=32,
            class_embeddings_concat=True,
        ),
        "scheduler": ddim(),
        "vae": vae(in_channels=1, out_channels=1),
        "text_encoder": text,
        "tokenizer": tokenizer(begins=True, length=77),
        "vocoder": vocoder,
    }


def t5_gemma() -> Any:
    """T5-Gemma's encoder."""
    shape = {
        "vocab_size": tokens.SIZE,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "sliding_window": 64,
        "layer_types": ["full_attention", "full_attention"],
    }
    return tf.T5GemmaEncoderModel(tf.T5GemmaConfig(encoder=shape, decoder=shape, is_encoder_decoder=False))


def stable_audio_3() -> dict[str, Any]:
    """Stable Audio 3, at 16 samples a second."""
    return {
        "transformer": df.StableAudio3DiTModel(
            io_channels=8,
            patch_size=1,
            embed_dim=32,
            depth=2,
            num_heads=4,
            cond_token_dim=16,
            global_cond_dim=16,
            local_add_cond_dim=9,  # a mask, and the eight channels of what is kept
            timestep_features_dim=16,
            ff_mult=2,
            num_memory_tokens=3,
            use_differential_attention=False,
        ),
        "scheduler": flow(),
        "vae": df.AutoencoderSAME(
            audio_channels=2,
            patch_size=2,
            encoder_channels=8,
            encoder_c_mults=(2,),
            encoder_strides=(2,),
            encoder_transformer_depths=(1,),
            latent_dim=8,
            use_differential_attention=False,
            dim_heads=4,
            ff_mult=2,
            sampling_rate=16,
        ),
        "text_encoder": t5_gemma(),
        "tokenizer": tokenizer(begins=True, ends=False),
        "duration_embedder": StableAudio3DurationEmbedder(output_dim=16, fourier_dim=16),
    }


def ace_step() -> dict[str, Any]:
    """ACE-Step: songs."""
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_theta": 10000.0,
        "sliding_window": 16,
    }
    return {
        "transformer": df.AceStepTransformer1DModel(
            **shape, num_hidden_layers=2, in_channels=24, audio_acoustic_hidden_dim=8, patch_size=2
        ),
        "condition_encoder": AceStepConditionEncoder(
            **shape,
            text_hidden_dim=32,
            timbre_hidden_dim=8,
            num_lyric_encoder_hidden_layers=2,
            num_timbre_encoder_hidden_layers=2,
        ),
        "vae": oobleck(8),
        "scheduler": flow(num_train_timesteps=1, shift=1.0),
        "text_encoder": causal("Qwen3Model"),
        "tokenizer": tokenizer(ends=False, length=512),
    }


def longcat_audio() -> dict[str, Any]:
    """LongCat-Audio."""
    return {
        "transformer": df.LongCatAudioDiTTransformer(
            dit_dim=64, dit_depth=2, dit_heads=4, dit_text_dim=32, latent_dim=8, text_conv=False
        ),
        "vae": df.LongCatAudioDiTVae(
            in_channels=1,
            channels=16,
            c_mults=[1, 2],
            strides=[2],
            latent_dim=8,
            encoder_latent_dim=16,
            downsampling_ratio=2,
            sample_rate=24000,
        ),
        "text_encoder": umt5(),
        "tokenizer": tokenizer(),
    }


SOUND = {"audio": noise(1, 2, 16), "duration": 1.0}

CASES = [
    case("StableAudioPipeline", stable_audio),
    case("AudioLDMPipeline", audio_ldm, audio_length_in_s=0.01),
    case("StableAudio3Pipeline", stable_audio_3, duration=1.0),
    case("StableAudio3AudioToAudioPipeline", stable_audio_3, **SOUND, init_noise_level=0.9),
    case(
        "StableAudio3InpaintPipeline", stable_audio_3, **SOUND, mask_start_seconds=0.25, mask_end_seconds=0.75
    ),
    case("AceStepPipeline", ace_step, lyrics="[verse]\nThe sea", audio_duration=0.4, max_text_length=32),
    case("LongCatAudioDiTPipeline", longcat_audio, audio_duration_s=0.1),
]
