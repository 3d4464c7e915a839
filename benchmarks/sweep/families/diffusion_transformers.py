"""Image transformers after a text encoder: PixArt, Hunyuan-DiT, Sana, Lumina, Z-Image, Ovis, PRX, OmniGen, LongCat."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers as df

from .. import tokens
from ..case import case, made
from ..encoders import bert, causal, clip, qwen_vl, qwen_vl_processor, t5
from ..images import ddim, flow, vae, vae16
from ..inputs import levels, picture
from ..tokens import clip_tokenizer, tokenizer
from .qwen_image import few_pixels

BINNED = {"use_resolution_binning": False}


def pixart(scheduler: Any = df.DDIMScheduler) -> dict[str, Any]:
    """PixArt."""
    return {
        "transformer": df.PixArtTransformer2DModel(
            sample_size=8,
            num_layers=2,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=3,
            caption_channels=32,
            in_channels=4,
            cross_attention_dim=24,
            out_channels=8,
            attention_bias=True,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            norm_eps=1e-6,
        ),
        "vae": vae(),
        "scheduler": scheduler(),
        "text_encoder": t5(),
        "tokenizer": tokenizer(),
    }


HUNYUAN: dict[str, Any] = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "cross_attention_dim": 32,
    "cross_attention_dim_t5": 32,
    "pooled_projection_dim": 16,
    "hidden_size": 32,
    "text_len": 77,
    "text_len_t5": 256,
    "use_style_cond_and_image_meta_size": True,
    "activation_fn": "gelu-approximate",
}


def hunyuan_dit(**more: Any) -> dict[str, Any]:
    """Hunyuan-DiT, which reads its prompt by BERT and by T5."""
    usual = {
        "transformer": partial(df.HunyuanDiT2DModel, num_layers=2, **HUNYUAN),
        "vae": partial(
            vae, widths=(8, 8, 8, 8), norm_num_groups=4
        ),  # eight pixels a side, which it takes for granted
        "scheduler": partial(df.DDPMScheduler, beta_schedule="scaled_linear"),
        "text_encoder": bert,
        "tokenizer": partial(tokenizer, begins=True, length=77),
        "text_encoder_2": t5,
        "tokenizer_2": partial(tokenizer, length=256),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }
    return made(usual, more)


def hunyuan_control() -> Any:
    """Its ControlNet."""
    return df.HunyuanDiT2DControlNetModel(transformer_num_layers=2, **HUNYUAN)


def gemma2(width: int = 8) -> Any:
    """Gemma 2."""
    return causal("Gemma2Model", width, layers=1, heads=2, head_dim=16, attn_implementation="eager")


SANA: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 4,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 4,
    "cross_attention_dim": 8,
    "caption_channels": 8,
    "sample_size": 32,
}


def dc_vae() -> Any:
    """The deep-compression autoencoder."""
    return df.AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )


def sana(*, shape: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Sana."""
    usual = {
        "transformer": partial(df.SanaTransformer2DModel, **{**SANA, **(shape or {})}),
        "vae": dc_vae,
        "scheduler": partial(flow, shift=7.0),
        "text_encoder": gemma2,
        "tokenizer": partial(tokenizer, begins=True, ends=False),
    }
    return made(usual, more)


def sprint() -> dict[str, Any]:
    """Sana-Sprint."""
    shape = {"qk_norm": "rms_norm_across_heads", "guidance_embeds": True}
    return sana(shape=shape, scheduler=df.SCMScheduler)


def lumina() -> dict[str, Any]:
    """Lumina."""
    return {
        "transformer": df.LuminaNextDiT2DModel(
            sample_size=4,
            patch_size=2,
            in_channels=4,
            hidden_size=4,
            num_layers=2,
            num_attention_heads=1,
            num_kv_heads=1,
            multiple_of=16,
            ffn_dim_multiplier=None,
            norm_eps=1e-5,
            learn_sigma=True,
            qk_norm=True,
            cross_attention_dim=8,
            scaling_factor=1.0,
        ),
        "vae": vae(),
        "scheduler": flow(),
        "text_encoder": gemma2(),
        "tokenizer": tokenizer(begins=True, ends=False),
    }


def lumina2() -> dict[str, Any]:
    """Lumina 2."""
    return {
        "transformer": df.Lumina2Transformer2DModel(
            sample_size=4,
            patch_size=2,
            in_channels=4,
            hidden_size=8,
            num_layers=2,
            num_attention_heads=1,
            num_kv_heads=1,
            multiple_of=16,
            ffn_dim_multiplier=None,
            norm_eps=1e-5,
            scaling_factor=1.0,
            axes_dim_rope=[4, 2, 2],
            cap_feat_dim=8,
        ),
        "vae": vae(shift_factor=0.0609),
        "scheduler": flow(),
        "text_encoder": gemma2(),
        "tokenizer": tokenizer(begins=True, ends=False),
    }


def z_vae() -> Any:
    """Sixteen channels, four pixels a side."""
    return vae16(widths=(32, 64))


Z: dict[str, Any] = {
    "all_patch_size": (2,),
    "all_f_patch_size": (1,),
    "in_channels": 16,
    "dim": 32,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "norm_eps": 1e-5,
    "qk_norm": True,
    "cap_feat_dim": 16,
    "rope_theta": 256.0,
    "t_scale": 1000.0,
    "axes_dims": [8, 4, 4],
    "axes_lens": [256, 32, 32],
}


def z_image(*, shape: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Z-Image."""
    usual = {
        "transformer": partial(df.ZImageTransformer2DModel, **{**Z, **(shape or {})}),
        "vae": z_vae,
        "scheduler": flow,
        "text_encoder": partial(causal, "Qwen3Model", 16),
        "tokenizer": partial(tokenizer, ends=False, length=256),
    }
    return made(usual, more)


def z_control(channels: int = 16) -> Any:
    """Its ControlNet."""
    return df.ZImageControlNetModel(
        control_layers_places=[0],
        control_refiner_layers_places=[0],
        control_in_dim=channels,
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        dim=32,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        add_control_noise_refiner="control_noise_refiner",
    )


def z_controlled(channels: int = 16) -> dict[str, Any]:
    """With a ControlNet."""
    return z_image(controlnet=partial(z_control, channels))


def ovis() -> dict[str, Any]:
    """Ovis-Image."""
    return {
        "transformer": df.OvisImageTransformer2DModel(
            patch_size=1,
            in_channels=16,
            out_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=(4, 4, 8),
        ),
        "vae": vae16(channels=4),
        "scheduler": flow(),
        "text_encoder": causal("Qwen3Model"),
        "tokenizer": tokenizer(ends=False, length=512),
    }


def prx(*, pixel: bool = False) -> dict[str, Any]:
    """PRX, on latents or on pixels."""
    channels = 3 if pixel else 16
    parts: dict[str, Any] = {
        "transformer": df.PRXTransformer2DModel(
            in_channels=channels,
            patch_size=2,
            context_in_dim=16 if pixel else 8,
            hidden_size=8,
            mlp_ratio=2.0,
            num_heads=2,
            depth=1,
            axes_dim=[2, 2],
        ),
        "scheduler": flow(),
        "text_encoder": causal("Qwen3Model", 16) if pixel else t5_gemma(),
        "tokenizer": tokenizer(begins=True),
    }
    return parts if pixel else {**parts, "vae": vae16()}


def t5_gemma() -> Any:
    """T5-Gemma's encoder."""
    from transformers.models.t5gemma.configuration_t5gemma import T5GemmaConfig
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

    shape = {
        "vocab_size": tokens.SIZE,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "max_position_embeddings": 64,
        "layer_types": ["full_attention"],
    }
    return T5GemmaEncoder(
        T5GemmaConfig(encoder=shape, decoder=shape, is_encoder_decoder=True, vocab_size=tokens.SIZE).encoder
    )


def longcat() -> dict[str, Any]:
    """LongCat-Image."""
    return {
        "transformer": df.LongCatImageTransformer2DModel(
            patch_size=1,
            in_channels=64,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            pooled_projection_dim=16,
            axes_dims_rope=[4, 4, 8],
        ),
        "vae": vae16(),
        "scheduler": flow(),
        "text_encoder": qwen_vl(),
        "tokenizer": tokenizer(ends=False, length=1024),
        "text_processor": qwen_vl_processor(2048),
    }


def aura_like() -> dict[str, Any]:
    """Latte: a film from T5's reading."""
    return {
        "transformer": df.LatteTransformer3DModel(
            sample_size=8,
            num_layers=1,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=3,
            caption_channels=32,
            in_channels=4,
            cross_attention_dim=24,
            out_channels=8,
            attention_bias=True,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            norm_eps=1e-6,
            video_length=2,
        ),
        "vae": vae(),
        "scheduler": df.DDIMScheduler(),
        "text_encoder": t5(),
        "tokenizer": tokenizer(),
    }


def hidream() -> dict[str, Any]:
    """HiDream: four texts."""
    return {
        "transformer": df.HiDreamImageTransformer2DModel(
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_channels=[32, 16],
            text_emb_dim=64,
            num_routed_experts=4,
            num_activated_experts=2,
            axes_dims_rope=(4, 2, 2),
            max_resolution=(32, 32),
            llama_layers=(0, 1),
        ),
        "vae": vae(scaling_factor=0.3611, shift_factor=0.1159),
        "scheduler": flow(),
        "text_encoder": clip(projected=True, max_position_embeddings=128),
        "tokenizer": clip_tokenizer(128),
        "text_encoder_2": clip(projected=True, max_position_embeddings=128),
        "tokenizer_2": clip_tokenizer(128),
        "text_encoder_3": t5(),
        "tokenizer_3": tokenizer(length=128),
        "text_encoder_4": causal("LlamaForCausalLM", 16),
        "tokenizer_4": tokenizer(length=128),
    }


def ldm() -> dict[str, Any]:
    """The first latent diffusion."""
    from diffusers.pipelines.latent_diffusion.pipeline_latent_diffusion import LDMBertConfig, LDMBertModel

    from ..images import unet

    bert = LDMBertModel(
        LDMBertConfig(
            vocab_size=tokens.SIZE,
            d_model=32,
            encoder_layers=2,
            encoder_ffn_dim=37,
            encoder_attention_heads=4,
            head_dim=8,
            max_position_embeddings=77,
        )
    )
    return {"unet": unet(), "vqvae": vae(), "bert": bert, "tokenizer": clip_tokenizer(), "scheduler": ddim()}


def small(pipeline: Any) -> None:
    """It enlarges whatever is asked to its usual size."""
    pipeline.default_sample_size = 16


PICTURE = picture(32)
CHI = {"complex_human_instruction": None}
PLAIN = {"clean_caption": False}

CASES = [
    case("PixArtAlphaPipeline", pixart, **BINNED),
    case("PixArtSigmaPipeline", pixart, **BINNED),
    case("PixArtSigmaPAGPipeline", pixart, **BINNED, pag_scale=3.0),
    case("HunyuanDiTPipeline", hunyuan_dit, **BINNED),
    case("HunyuanDiTPAGPipeline", hunyuan_dit, **BINNED, pag_scale=3.0),
    case(
        "HunyuanDiTControlNetPipeline",
        partial(hunyuan_dit, controlnet=hunyuan_control),
        **BINNED,
        control_image=levels(1, 3, 32, 32),
    ),
    case("SanaPipeline", sana, **BINNED, **CHI),
    case("SanaPAGPipeline", sana, **BINNED, **CHI, pag_scale=3.0),
    case(
        "SanaControlNetPipeline",
        partial(sana, controlnet=partial(df.SanaControlNetModel, **SANA)),
        **BINNED,
        **CHI,
        control_image=levels(1, 3, 32, 32),
    ),
    case("SanaSprintPipeline", sprint, **BINNED, **CHI),
    case("SanaSprintImg2ImgPipeline", sprint, **BINNED, **CHI, image=PICTURE, strength=0.9),
    case("LuminaPipeline", lumina, **PLAIN),
    case("Lumina2Pipeline", lumina2),
    case("ZImagePipeline", z_image),
    case("ZImageImg2ImgPipeline", z_image, image=PICTURE, strength=0.9),
    case(
        "ZImageInpaintPipeline", z_image, image=PICTURE, mask_image=levels(1, 1, 32, 32).round(), strength=0.9
    ),
    case("ZImageControlNetPipeline", z_controlled, control_image=PICTURE),
    case(
        "ZImageControlNetInpaintPipeline",
        partial(z_controlled, 33),
        image=PICTURE,
        mask_image=levels(1, 1, 32, 32).round(),
        control_image=PICTURE,
    ),
    case("OvisImagePipeline", ovis),
    case("PRXPipeline", prx, **BINNED),
    case("PRXPixelPipeline", partial(prx, pixel=True), **BINNED),
    case("LongCatImagePipeline", longcat, enable_prompt_rewrite=False),
    case("LongCatImageEditPipeline", longcat, prepare=few_pixels, image=PICTURE),
    case("LattePipeline", aura_like, video_length=2, **PLAIN),
    case("HiDreamImagePipeline", hidream, prepare=small),
    case("LDMTextToImagePipeline", ldm),
]
