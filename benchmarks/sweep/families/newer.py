"""The newest: Flux 2, Ernie, Krea, Ideogram, Nucleus, JoyImage, Bria, Sana-Video, AnyFlow."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers as df
import transformers as tf
from diffusers.pipelines.joyimage.image_processor import BUCKETS

from .. import tokens
from ..case import case, made
from ..encoders import _causal_shape, causal, qwen3_vl, qwen_vl_processor, t5
from ..images import flow, vae16
from ..inputs import mask, picture
from ..tokens import tokenizer
from .diffusion_transformers import gemma2
from .qwen_image import qwen_vae
from .wan import FRAMES, TRANSFORMER, wan, wan_vae


def flux2_vae(channels: int = 4) -> Any:
    """Flux 2's autoencoder: two by two latents in a patch."""
    return df.AutoencoderKLFlux2(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        block_out_channels=(4,),
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def mistral(kind: str = "Mistral3ForConditionalGeneration") -> Any:
    """Mistral 3."""
    config = tf.Mistral3Config(
        text_config={
            "model_type": "mistral",
            **_causal_shape(16),
            "attention_dropout": 0.0,
            "rms_norm_eps": 1e-5,
        },
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 37,
            "image_size": 30,
            "patch_size": 6,
            "num_channels": 3,
        },
        image_token_index=tokens.number("[IMG]"),
        bos_token_id=tokens.number(tokens.BOS),
        eos_token_id=tokens.number(tokens.EOS),
        pad_token_id=0,
        vision_feature_layer=-1,
    )
    return getattr(tf, kind)(config)


FLUX2: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "timestep_guidance_channels": 256,
    "axes_dims_rope": [4, 4, 4, 4],
}


def klein(*, distilled: bool = False) -> dict[str, Any]:
    """Flux 2 Klein."""
    return {
        "transformer": df.Flux2Transformer2DModel(**FLUX2, joint_attention_dim=16, guidance_embeds=False),
        "vae": flux2_vae(),
        "scheduler": flow(),
        "text_encoder": causal("Qwen3ForCausalLM", 16),
        "tokenizer": tokenizer(ends=False, length=512),
        "is_distilled": distilled,
    }


def flux2() -> dict[str, Any]:
    """Flux 2, which Mistral 3 reads for."""
    return {
        "transformer": df.Flux2Transformer2DModel(**FLUX2, joint_attention_dim=16),
        "vae": flux2_vae(),
        "scheduler": flow(),
        "text_encoder": mistral(),
        "tokenizer": tokenizer(ends=False, length=512),
    }


def ernie() -> dict[str, Any]:
    """Ernie-Image without its prompt enhancer."""
    return {
        "transformer": df.ErnieImageTransformer2DModel(
            hidden_size=16,
            num_attention_heads=1,
            num_layers=2,
            ffn_hidden_size=16,
            in_channels=16,
            out_channels=16,
            patch_size=1,
            text_in_dim=16,
            rope_axes_dim=(8, 4, 4),
        ),
        "vae": flux2_vae(),
        "scheduler": flow(),
        "text_encoder": mistral("Mistral3Model"),
        "tokenizer": tokenizer(ends=False, length=512),
        "pe": None,
        "pe_tokenizer": None,
    }


def krea() -> dict[str, Any]:
    """Krea 2: several layers of its reader."""
    return {
        "transformer": df.Krea2Transformer2DModel(
            in_channels=16,
            num_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=32,
            timestep_embed_dim=16,
            text_hidden_dim=16,
            num_text_layers=2,
            text_num_attention_heads=2,
            text_num_key_value_heads=1,
            text_intermediate_size=32,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=(4, 2, 2),
        ),
        "vae": qwen_vae(),
        "scheduler": flow(),
        "text_encoder": qwen3_vl(kind="Qwen3VLModel"),
        "tokenizer": tokenizer(ends=False, length=1024),
        "text_encoder_select_layers": (1, 2),
    }


def ideogram() -> dict[str, Any]:
    """Ideogram 4: one transformer with a prompt and one without, in turn at every step."""
    shape: dict[str, Any] = {
        "in_channels": 16,
        "num_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "adaln_dim": 16,
        "llm_features_dim": 16 * 13,
        "mrope_section": (4, 2, 2),
    }
    return {
        "transformer": df.Ideogram4Transformer2DModel(**shape),
        "unconditional_transformer": df.Ideogram4Transformer2DModel(**shape),
        "vae": flux2_vae(),
        "scheduler": flow(),
        "text_encoder": qwen3_vl(kind="Qwen3VLModel", layers=36),
        "tokenizer": tokenizer(ends=False, length=1024),
    }


def nucleus() -> dict[str, Any]:
    """Nucleus-Image: experts in its transformer."""
    return {
        "transformer": df.NucleusMoEImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=16,
            axes_dims_rope=(8, 4, 4),
            moe_enabled=False,
            capacity_factors=[8.0, 8.0],
        ),
        "vae": qwen_vae(),
        "scheduler": flow(),
        "text_encoder": qwen3_vl(),
        "processor": qwen_vl_processor(1024, 16),
    }


def joy(transformer: str = "JoyImageEditTransformer3DModel") -> dict[str, Any]:
    """JoyImage-Edit."""
    return {
        "transformer": getattr(df, transformer)(
            patch_size=(1, 2, 2),
            in_channels=16,
            out_channels=16,
            hidden_size=32,
            num_attention_heads=2,
            text_dim=16,
            num_layers=2,
            rope_dim_list=(4, 6, 6),
            mlp_width_ratio=2.0,
            theta=256,
        ),
        "vae": wan_vae(),
        "scheduler": flow(),
        "text_encoder": qwen3_vl(),
        "tokenizer": tokenizer(ends=False, length=2048),
        "processor": qwen_vl_processor(2048, 16),
        "text_token_max_length": 1024,
    }


def small(pipeline: Any) -> None:
    """It enlarges a picture to its usual size."""
    pipeline.image_processor.register_to_config(basesize=min(BUCKETS))


def bria() -> dict[str, Any]:
    """Bria."""
    return {
        "transformer": df.BriaTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=None,
            axes_dims_rope=[0, 4, 4],
        ),
        "vae": vae16(channels=4),
        "scheduler": flow(),
        "text_encoder": t5(),
        "tokenizer": tokenizer(),
        "image_encoder": None,
        "feature_extractor": None,
    }


def fibo() -> dict[str, Any]:
    """Fibo: every layer of its reader."""
    return {
        "transformer": df.BriaFiboTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=32,
            text_encoder_dim=16,
            pooled_projection_dim=None,
            axes_dims_rope=[0, 4, 4],
        ),
        "vae": wan_vae(latents_mean=[0.0] * 16, latents_std=[1.0] * 16),
        "scheduler": flow(),
        "text_encoder": causal(
            "SmolLM3ForCausalLM", 16, vocab_size=128_256
        ),  # it begins a text by number 128,000
        "tokenizer": tokenizer(ends=False, length=512),
    }


def sana_video(**more: Any) -> dict[str, Any]:
    """Sana-Video."""
    usual = {
        "transformer": partial(
            df.SanaVideoTransformer3DModel,
            in_channels=16,
            out_channels=16,
            num_attention_heads=2,
            attention_head_dim=12,
            num_layers=2,
            num_cross_attention_heads=2,
            cross_attention_head_dim=12,
            cross_attention_dim=24,
            caption_channels=8,
            mlp_ratio=2.5,
            sample_size=8,
            patch_size=(1, 2, 2),
            rope_max_seq_len=32,
        ),
        "vae": wan_vae,
        "scheduler": flow,
        "text_encoder": gemma2,
        "tokenizer": partial(tokenizer, begins=True, ends=False),
    }
    return made(usual, more)


def any_flow(transformer: Any, **more: Any) -> dict[str, Any]:
    """AnyFlow: Wan with steps of any length."""
    shape = {key: one for key, one in TRANSFORMER.items() if key != "qk_norm"}
    return wan(
        transformer=lambda **_: transformer(**shape, **more), scheduler=df.FlowMapEulerDiscreteScheduler
    )


CHI = {"complex_human_instruction": None}
PICTURE = picture(32)
LAYERS = {"text_encoder_out_layers": (1,)}

CASES = [
    case("Flux2Pipeline", flux2, max_sequence_length=512, **LAYERS),
    case("Flux2KleinPipeline", klein, max_sequence_length=512, **LAYERS),
    case(
        "Flux2KleinInpaintPipeline",
        klein,
        max_sequence_length=512,
        **LAYERS,
        image=PICTURE,
        mask_image=mask(),
        strength=0.9,
    ),
    case(
        "Flux2KleinKVPipeline",
        partial(klein, distilled=True),
        max_sequence_length=512,
        **LAYERS,
        image=picture(64),
    ),
    case("ErnieImagePipeline", ernie),
    case("Krea2Pipeline", krea),
    case("Ideogram4Pipeline", ideogram, guidance_schedule=(7.0, 3.0), max_sequence_length=512),
    case("NucleusMoEImagePipeline", nucleus, max_sequence_length=512, return_index=-1),
    case("JoyImageEditPipeline", joy, prepare=small, image=PICTURE),
    case(
        "JoyImageEditPlusPipeline",
        partial(joy, "JoyImageEditPlusTransformer3DModel"),
        prepare=small,
        images=[PICTURE, picture(32, seed=8)],
    ),
    case("BriaPipeline", bria),
    case("BriaFiboPipeline", fibo, max_sequence_length=256),
    case(
        "BriaFiboEditPipeline",
        fibo,
        image=PICTURE,
        prompt='{"edit_instruction": "a boat"}',
        max_sequence_length=256,
    ),
    case("SanaVideoPipeline", sana_video, frames=9, use_resolution_binning=False, **CHI),
    case(
        "SanaImageToVideoPipeline", sana_video, image=PICTURE, frames=9, use_resolution_binning=False, **CHI
    ),
    case("AnyFlowPipeline", partial(any_flow, df.AnyFlowTransformer3DModel), **FRAMES),
    case(
        "AnyFlowFARPipeline",
        partial(any_flow, df.AnyFlowFARTransformer3DModel, chunk_partition=(1, 2)),
        **FRAMES,
    ),
]
