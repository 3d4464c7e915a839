"""Readers and encoders that see: GLM-Image, HunyuanVideo and Motif-Video with a picture, Z-Image Omni, BLIP-Diffusion,
Versatile Diffusion from both, Pix2Pix Zero.

Sizes: diffusers' tests/pipelines/{glm_image,hunyuan_video,motif_video,z_image,blipdiffusion}, and for the others what
satisfies the class.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import diffusers as df
import torch
import transformers as tf
from diffusers.pipelines.deprecated.blip_diffusion.blip_image_processing import BlipImageProcessor
from diffusers.pipelines.deprecated.blip_diffusion.modeling_blip2 import Blip2QFormerModel
from diffusers.pipelines.deprecated.blip_diffusion.modeling_ctx_clip import ContextCLIPTextModel

from .. import tokens
from ..case import case
from ..encoders import _causal_shape, clip, clip_vision, t5
from ..images import controlnet, ddim, flow, unet, vae
from ..inputs import noise, picture, seeded
from ..tokens import clip_pictures, clip_tokenizer, tokenizer
from .diffusion_transformers import z_image
from .films import hunyuan
from .remaining import motif
from .wan import FRAMES

CODES = 24
"""Numbers that GLM-Image's language model writes a picture with."""


def glm_reader() -> Any:
    """GLM-Image's language model, which writes a picture as numbers of its codebook."""
    config = tf.GlmImageConfig(
        text_config={
            **{name: one for name, one in _causal_shape(16, heads=2).items() if name != "head_dim"},
            "vision_vocab_size": CODES,
            "eos_token_id": tokens.SIZE - 1,  # never written: a picture has so many numbers
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "image_size": 64,
            "patch_size": 8,
            "intermediate_size": 16,
        },
        vq_config={"embed_dim": 8, "num_embeddings": CODES, "latent_channels": 16},
        image_token_id=tokens.number("<|image_pad|>"),
        image_start_token_id=tokens.number(tokens.BOS),
        image_end_token_id=tokens.SIZE - 1,
    )
    return tf.GlmImageForConditionalGeneration(config)


def glm_processor() -> Any:
    """Pictures and text for it."""
    words = tokenizer(ends=False, length=1024)
    words.image_token, words.grid_bos_token, words.grid_eos_token = "<|image_pad|>", "[INST]", "[/INST]"
    pictures = tf.GlmImageImageProcessor(patch_size=8, merge_size=1, temporal_patch_size=1)
    return tf.GlmImageProcessor(pictures, words, chat_template=tokens.CHAT)


def glm_image() -> dict[str, Any]:
    """GLM-Image, from a text: from a picture, diffusers 0.42 and transformers 5.24 differ about `get_image_tokens`."""
    return {
        "tokenizer": tf.ByT5Tokenizer(extra_ids=0),
        "processor": glm_processor(),
        "text_encoder": t5(vocab_size=300),
        "vision_language_encoder": glm_reader(),
        "vae": vae(
            4,
            widths=(32, 32, 32, 64),
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        "transformer": df.GlmImageTransformer2DModel(
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            text_embed_dim=32,
            time_embed_dim=16,
            condition_dim=8,
            prior_vq_quantizer_codebook_size=CODES,
        ),
        "scheduler": flow(),
    }


def llava() -> Any:
    """LLaVA: CLIP's eyes, Llama's words."""
    config = tf.LlavaConfig(
        text_config={"model_type": "llama", **_causal_shape(16)},
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 16,
            "image_size": 16,
            "patch_size": 8,
            "projection_dim": 16,
            "intermediate_size": 37,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
        },
        image_token_index=tokens.number("<image>"),
        image_seq_length=4,
    )
    config.pad_token_id = tokens.number(tokens.PAD)
    return tf.LlavaForConditionalGeneration(config)


def hunyuan_seeing() -> dict[str, Any]:
    """HunyuanVideo from a picture."""
    shape = {"in_channels": 9, "image_condition_type": "latent_concat", "guidance_embeds": False}
    return hunyuan(shape=shape, text_encoder=llava, image_processor=lambda: clip_pictures(16))


_HEADER = "<|start_header_id|>{}<|end_header_id|>"
HUNYUAN_TEMPLATE: dict[str, Any] = {
    "template": f"{_HEADER.format('s')}<image>:{_HEADER.format('u')}{{}}<|eot_id|>{_HEADER.format('a')}",
    "crop_start": 9,  # a token for each letter: where the prompt begins
    "image_emb_start": 4,
    "image_emb_end": 8,
    "image_emb_len": 4,
}


def z_seeing() -> dict[str, Any]:
    """Z-Image Omni. Its pipeline gives its autoencoder pictures in bfloat16."""
    eyes = tf.Siglip2VisionModel(
        tf.Siglip2VisionConfig(
            hidden_size=16,
            intermediate_size=37,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_patches=16,
            patch_size=8,
        )
    )
    parts = z_image(shape={"siglip_feat_dim": 16}, siglip=eyes)
    parts["siglip_processor"] = tf.Siglip2ImageProcessor(patch_size=8, max_num_patches=16)
    parts["vae"].to(torch.bfloat16)
    return parts


class PicturesFromAnywhere(tf.SiglipImageProcessorPil):
    """The pipeline gives it a tensor on the device, which it takes with torchvision only."""

    def preprocess(self, images: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Pictures that come from the host."""
        return super().preprocess(images.cpu(), *args, **kwargs)


def motif_seeing() -> dict[str, Any]:
    """Motif-Video from a picture, which it shows to a part of its text encoder."""
    return {**motif(), "feature_extractor": PicturesFromAnywhere(size={"height": 16, "width": 16})}


def q_former() -> Any:
    """BLIP's Q-Former, which reads by a tokenizer of its own that it loads from a folder."""
    shape = {"hidden_size": 32, "intermediate_size": 37, "num_attention_heads": 4, "num_hidden_layers": 1}
    config = tf.Blip2Config(
        vision_config={**shape, "image_size": 16, "patch_size": 8},
        qformer_config={**shape, "vocab_size": 16, "encoder_hidden_size": 32, "max_position_embeddings": 32},
        num_query_tokens=4,
    )
    with tempfile.TemporaryDirectory() as folder:
        words = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "boat", "cat")
        Path(folder, "vocab.txt").write_text("\n".join(words))
        config.tokenizer = folder
        return Blip2QFormerModel(config)


def blip(**more: Any) -> dict[str, Any]:
    """BLIP-Diffusion."""
    return {
        "tokenizer": clip_tokenizer(),
        "text_encoder": ContextCLIPTextModel(clip().config),
        "vae": vae(),
        "unet": unet(),
        "scheduler": df.PNDMScheduler(skip_prk_steps=True),
        "qformer": q_former(),
        "image_processor": BlipImageProcessor(size={"height": 16, "width": 16}),
        **{name: one() for name, one in more.items()},
    }


def versatile_dual() -> dict[str, Any]:
    """Versatile Diffusion from a text and a picture: both kinds of attention are in one UNet, as it is saved."""
    return {
        "tokenizer": clip_tokenizer(),
        "image_feature_extractor": clip_pictures(),
        "text_encoder": clip(projected=True),
        "image_encoder": clip_vision(patch_size=2),  # 257 places, which the pipeline counts on
        "image_unet": unet(dual_cross_attention=True),
        "text_unet": None,
        "vae": vae(),
        "scheduler": ddim(),
    }


def pix2pix_zero() -> dict[str, Any]:
    """Pix2Pix Zero: the UNet's gradients steer the noise."""
    return {
        "vae": vae(),
        "text_encoder": clip(),
        "tokenizer": clip_tokenizer(),
        "unet": unet(),
        "scheduler": ddim(),
        "feature_extractor": None,
        "safety_checker": None,
        "inverse_scheduler": df.DDIMInverseScheduler(beta_schedule="scaled_linear"),
        "caption_generator": None,
        "caption_processor": None,
        "requires_safety_checker": False,
    }


def inverted(pipeline: Any) -> dict[str, Any]:
    """The noise of a picture."""
    found = pipeline.invert(
        "a house", image=picture(32), num_inference_steps=2, generator=seeded(), output_type="pt"
    )
    return {"latents": found.latents}


SUBJECT = {
    "reference_image": picture(16),
    "source_subject_category": "cat",
    "target_subject_category": "boat",
    "prompt_reps": 1,
}

CASES = [
    case(
        "GlmImagePipeline",
        glm_image,
        max_sequence_length=64,
        guidance_scale=1.5,
    ),
    case(
        "HunyuanVideoImageToVideoPipeline",
        hunyuan_seeing,
        image=picture(16),
        prompt_template=HUNYUAN_TEMPLATE,
        max_sequence_length=32,
        **FRAMES,
    ),
    case("MotifVideoImage2VideoPipeline", motif_seeing, image=picture(16), **FRAMES),
    case("ZImageOmniPipeline", z_seeing, image=[picture(64)], max_sequence_length=64),
    case("BlipDiffusionPipeline", blip, **SUBJECT),
    case(
        "BlipDiffusionControlNetPipeline",
        partial(blip, controlnet=controlnet),
        condtioning_image=picture(32),
        **SUBJECT,
    ),
    case("VersatileDiffusionDualGuidedPipeline", versatile_dual, image=picture(32)),
    case(
        "StableDiffusionPix2PixZeroPipeline",
        pix2pix_zero,
        first=inverted,
        source_embeds=noise(2, 77, 32),
        target_embeds=noise(2, 77, 32, seed=8),
    ),
]
