"""Kandinsky 6 and 5 with a picture, Motif, DreamLite, Fibo 2, Cosmos 3 and others.

Sizes: diffusers' tests/pipelines/{kandinsky6,motif_video,dreamlite,bria_fibo2,qwenimage21,cosmos,ltx2};
UniDiffuser's and Versatile Diffusion's are chosen to satisfy the classes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers as df
import transformers as tf
from diffusers.guiders import AdaptiveProjectedGuidance
from diffusers.pipelines.deprecated.unidiffuser import UniDiffuserModel, UniDiffuserTextDecoder

from .. import tokens
from ..case import case
from ..encoders import clip, clip_vision, qwen3_vl, qwen_vl, qwen_vl_processor
from ..images import ddim, flow, unet, vae
from ..inputs import noise, picture
from ..tokens import clip_pictures, clip_tokenizer, tokenizer
from .films import hunyuan_vae, kandinsky5
from .ltx2 import key_framed, upsampler
from .newer import flux2_vae
from .qwen_image import EDIT, GUIDED, few_pixels, qwen
from .wan import FRAMES, wan_vae


def kandinsky6() -> dict[str, Any]:
    """Kandinsky 6: film and sound."""
    return {
        "transformer": df.Kandinsky6Transformer3DModel(
            in_visual_dim=4,
            out_visual_dim=4,
            in_text_dim=16,
            in_text_dim2=8,
            time_dim=16,
            patch_size=(1, 2, 2),
            model_dim=12,
            ff_dim=24,
            num_text_blocks=1,
            num_visual_blocks=2,
            axes_dims=(2, 1, 1),
            visual_cond=True,
            in_audio_dim=4,
            out_audio_dim=4,
            visual_token_type_num_embeddings=2,
        ),
        "vae": hunyuan_vae(),
        "audio_vae": df.MMAudioVAE(
            mel_bins=8,
            latent_channels=4,
            hidden_channels=8,
            channel_multipliers=(1, 2),
            layers_per_block=1,
            sample_rate=64,
            n_fft=16,
            hop_length=4,
        ),
        "vocoder": df.MMAudioVocoder(
            num_mels=8,
            upsample_initial_channel=8,
            upsample_rates=(2, 2),
            upsample_kernel_sizes=(4, 4),
            resblock_kernel_sizes=(3,),
            resblock_dilation_sizes=((1, 3),),
        ),
        "scheduler": flow(shift=7.0),
        "text_encoder": qwen_vl(),
        "tokenizer": qwen_vl_processor(2048),
        "text_encoder_2": clip(8, num_hidden_layers=2, projection_dim=32),
        "tokenizer_2": clip_tokenizer(),
    }


def t5_gemma2() -> Any:
    """T5-Gemma 2's encoder, which sees, too."""
    return tf.T5Gemma2Encoder(
        tf.T5Gemma2EncoderConfig(
            text_config=tf.T5Gemma2TextConfig(
                hidden_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=64,
                vocab_size=tokens.SIZE,
                max_position_embeddings=128,
                head_dim=16,
                num_key_value_heads=2,
                dropout_rate=0.0,
            ),
            vision_config=tf.SiglipVisionConfig(
                hidden_size=4,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=64,
                image_size=16,
                patch_size=4,
            ),
        )
    )


def motif() -> dict[str, Any]:
    """Motif-Video."""
    return {
        "transformer": df.MotifVideoTransformer3DModel(
            in_channels=33,
            out_channels=16,
            num_attention_heads=2,
            attention_head_dim=12,
            num_layers=1,
            num_single_layers=1,
            mlp_ratio=4.0,
            patch_size=1,
            patch_size_t=1,
            qk_norm="rms_norm",
            text_embed_dim=32,
            image_embed_dim=4,
            rope_axes_dim=(4, 4, 4),
        ),
        "vae": wan_vae(),
        "scheduler": flow(shift=7.0),
        "text_encoder": t5_gemma2(),
        "tokenizer": tokenizer(),
        "feature_extractor": tf.SiglipImageProcessor(size={"height": 16, "width": 16}),
        "guider": AdaptiveProjectedGuidance(),
    }


def dream_lite() -> dict[str, Any]:
    """DreamLite: a UNet that Qwen3-VL reads for."""
    return {
        "unet": df.DreamLiteUNetModel(
            sample_size=8,
            in_channels=4,
            out_channels=4,
            down_block_types=("DreamLiteCrossAttnNoSelfAttnDownBlock2D", "DreamLiteCrossAttnDownBlock2D"),
            up_block_types=("DreamLiteCrossAttnUpBlock2D", "DreamLiteUpBlock2D"),
            block_out_channels=(32, 64),
            cross_attention_dim=16,
            attention_head_dim=8,
            layers_per_block=1,
            norm_num_groups=8,
            transformer_layers_per_block=1,
        ),
        "vae": df.AutoencoderTiny(
            encoder_block_out_channels=(32, 32),
            decoder_block_out_channels=(32, 32),
            num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1),
        ),
        "scheduler": flow(),
        "text_encoder": qwen3_vl(),
        "tokenizer": tokenizer(ends=False, length=1024),
        "processor": qwen_vl_processor(1024, 16),
    }


def fibo2() -> dict[str, Any]:
    """Fibo 2: three of its reader's 36 layers."""
    return {
        "transformer": df.BriaFibo2Transformer2DModel(
            in_channels=1,
            patch_size=2,
            dim=32,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            cap_feat_dim=48,
            injection_layer_ids=(1,),
            perceiver_num_layers=1,
            min_num_gist_tokens=4,
            max_num_gist_tokens=8,
            gist_step=4,
            gist_min_text_len=4,
            gist_max_text_len=16,
            axes_dims=(4, 6, 6),
            axes_lens=(16, 16, 16),
        ),
        "vae": flux2_vae(1),
        "scheduler": flow(),
        "text_encoder": qwen3_vl(layers=36),
        "processor": qwen_vl_processor(4096, 16),
    }


def qwen_21() -> dict[str, Any]:
    """Qwen-Image 2.1: pictures with an alpha channel."""
    return {
        "transformer": df.QwenImage21Transformer2DModel(
            patch_size=1,
            in_channels=8,
            out_channels=8,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            context_in_dim=16,
            mlp_ratio=2,
            axes_dims_rope=(4, 6, 6),
        ),
        "vae": df.AutoencoderKLQwenImage21(
            base_dim=4,
            decoder_base_dim=4,
            z_dim=8,
            dim_mult=[1, 1, 1, 1, 1],
            num_res_blocks=1,
            attn_scales=[],
            temperal_downsample=[False, True, True, True],
            latents_mean=[0.0] * 8,
            latents_std=[1.0] * 8,
        ),
        "scheduler": flow(),
        "text_encoder": qwen3_vl(),
        "processor": qwen_vl_processor(1024, 16),
    }


def cosmos3() -> dict[str, Any]:
    """Cosmos 3: both halves in one transformer."""
    return {
        "transformer": df.Cosmos3OmniTransformer(
            head_dim=6,
            hidden_act="relu2",
            hidden_size=6,
            intermediate_size=12,
            latent_channel=16,
            latent_patch_size=1,
            num_attention_heads=1,
            num_hidden_layers=1,
            num_key_value_heads=1,
            patch_latent_dim=16,
            qk_norm_for_text=False,
            rms_norm_eps=1e-5,
            rope_axes_dim=[1, 1, 1],
            vocab_size=tokens.SIZE,
        ),
        "vae": wan_vae(),
        "text_tokenizer": tokenizer(ends=False, length=512),
        "scheduler": df.UniPCMultistepScheduler(),
        "sound_tokenizer": None,
        "safety_checker": None,
        "enable_safety_checker": False,
    }


def refine() -> dict[str, Any]:
    """LTX-2 that doubles a film's frames."""
    more = upsampler(dims=3, spatial_upsample=False, temporal_upsample=True)
    scheduler = df.LTXEulerAncestralRFScheduler(eta=0.5)
    return {**key_framed(), "scheduler": scheduler, "temporal_latent_upsampler": more}


def uni_diffuser() -> dict[str, Any]:
    """UniDiffuser: pictures and texts, from each other or together."""
    return {
        "unet": UniDiffuserModel(
            text_dim=32,
            clip_img_dim=32,
            num_text_tokens=77,
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            sample_size=16,
            patch_size=2,
            norm_num_groups=8,
            norm_type="layer_norm",
            block_type="unidiffuser",
            use_patch_pos_embed=False,
            use_data_type_embedding=True,
        ),
        "scheduler": df.DDIMScheduler(),
        "vae": vae(),
        "text_encoder": clip(),
        "clip_tokenizer": clip_tokenizer(),
        "image_encoder": clip_vision(),
        "clip_image_processor": clip_pictures(),
        "text_decoder": UniDiffuserTextDecoder(
            prefix_length=77,
            prefix_inner_dim=32,
            prefix_hidden_dim=32,
            vocab_size=tokens.SIZE,
            n_positions=1024,
            n_embd=32,
            n_layer=2,
            n_head=4,
        ),
        "text_tokenizer": tokenizer(),
    }


def small(pipeline: Any) -> None:
    """It knows sizes of a million pixels only."""
    pipeline.resolutions = [(64, 64)]


def versatile(*, text: bool) -> dict[str, Any]:
    """Versatile Diffusion, from a text or from a picture, by the UNet for pictures."""
    reader: dict[str, Any] = (
        {"tokenizer": clip_tokenizer(), "text_encoder": clip(projected=True), "text_unet": None}
        if text
        else {"image_feature_extractor": clip_pictures(), "image_encoder": clip_vision()}
    )
    return {**reader, "image_unet": unet(), "vae": vae(), "scheduler": ddim()}


PLAIN_COSMOS = {"use_system_prompt": False, "add_resolution_template": False, "add_duration_template": False}

CASES = [
    case("Kandinsky6TI2VAPipeline", kandinsky6, image=picture(16), height=16, width=16, num_frames=5),
    case("MotifVideoPipeline", motif, **FRAMES),
    case("DreamLitePipeline", dream_lite),
    case("DreamLiteMobilePipeline", dream_lite),
    case("BriaFibo2Pipeline", fibo2, height=8, width=8),
    case("QwenImage21Pipeline", qwen_21),
    case(
        "QwenImageLayeredPipeline",
        partial(qwen, **EDIT),
        prepare=few_pixels,
        image=picture(32),
        layers=2,
        **GUIDED,
    ),
    case(
        "Kandinsky5I2IPipeline",
        partial(kandinsky5, image=True, seen=True),
        prepare=small,
        image=picture(64),
        max_sequence_length=1024,
    ),
    case("Kandinsky5I2VPipeline", partial(kandinsky5, seen=True), image=picture(32), num_frames=21),
    case("UniDiffuserPipeline", uni_diffuser, image=picture(32), without=("output_type",)),
    case("VersatileDiffusionTextToImagePipeline", partial(versatile, text=True)),
    case("VersatileDiffusionImageVariationPipeline", partial(versatile, text=False), image=picture(32)),
    case("Cosmos3OmniPipeline", cosmos3, height=16, width=16, num_frames=1, **PLAIN_COSMOS),
    case(
        "LTX2DFRTemporalRefinePipeline",
        refine,
        latents=noise(1, 4, 5, 16, 16),
        keyframes_latents=noise(1, 4, 1, 16, 16, seed=8),
        keyframe_positions=[8],
        audio_latents=noise(1, 2, 8, 2),
        num_frames=9,
        frame_rate=25.0,
        sigmas=[0.75, 0.25],
        use_cross_timestep=False,
    ),
]
