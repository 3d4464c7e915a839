"""Kandinsky 2.1, 2.2 and 3: priors, decoders, and pipelines that combine the two."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers as df
import numpy as np
from diffusers.pipelines.kandinsky.text_encoder import MCLIPConfig, MultilingualCLIP

from .. import tokens
from ..case import case, made
from ..encoders import clip, clip_vision, t5
from ..inputs import levels, noise, picture
from ..tokens import clip_pictures, clip_tokenizer, tokenizer


def prior_parts(prefix: str = "") -> dict[str, Any]:
    """Components of a prior, by names with a prefix."""
    parts = {
        "prior": partial(
            df.PriorTransformer, num_attention_heads=2, attention_head_dim=12, embedding_dim=32, num_layers=1
        ),
        "image_encoder": partial(clip_vision, image_size=224, patch_size=14),
        "text_encoder": partial(clip, projected=True),
        "tokenizer": clip_tokenizer,
        "scheduler": partial(
            df.UnCLIPScheduler,
            variance_type="fixed_small_log",
            prediction_type="sample",
            num_train_timesteps=1000,
            clip_sample=True,
            clip_sample_range=10.0,
        ),
        "image_processor": partial(clip_pictures, 224),
    }
    return made({f"{prefix}{name}": one for name, one in parts.items()})


def movq() -> Any:
    """The autoencoder."""
    return df.VQModel(
        block_out_channels=[32, 64],
        down_block_types=["DownEncoderBlock2D", "AttnDownEncoderBlock2D"],
        in_channels=3,
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=8,
        norm_type="spatial",
        num_vq_embeddings=12,
        out_channels=3,
        up_block_types=["AttnUpDecoderBlock2D", "UpDecoderBlock2D"],
        vq_embed_dim=4,
    )


def unet(channels: int = 4, **more: Any) -> Any:
    """A UNet that attends to text, picture or both."""
    shape: dict[str, Any] = {
        "in_channels": channels,
        "out_channels": 8,
        "addition_embed_type": "image",
        "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "encoder_hid_dim": 32,
        "encoder_hid_dim_type": "image_proj",
        "cross_attention_dim": 32,
        "attention_head_dim": 4,
        "resnet_time_scale_shift": "scale_shift",
        "class_embed_type": None,
    }
    return df.UNet2DConditionModel(**{**shape, **more})


def scheduler(kind: type = df.DDPMScheduler) -> Any:
    """Of the decoders."""
    return kind(
        num_train_timesteps=1000,
        beta_schedule="linear",
        beta_start=0.00085,
        beta_end=0.012,
        clip_sample=False,
        prediction_type="epsilon",
        **(
            {}
            if kind is df.DDPMScheduler
            else {"set_alpha_to_one": False, "steps_offset": 0, "thresholding": False}
        ),
    )


def first(channels: int = 4, *, combined: bool = False) -> dict[str, Any]:
    """Kandinsky 2.1, which reads its text in many languages."""
    config = MCLIPConfig(
        numDims=32,
        transformerDimensions=32,
        hidden_size=32,
        intermediate_size=37,
        num_attention_heads=4,
        num_hidden_layers=5,
        vocab_size=tokens.SIZE,
        max_position_embeddings=90,
        type_vocab_size=1,
        pad_token_id=0,
    )
    model = partial(unet, channels, addition_embed_type="text_image", encoder_hid_dim_type="text_image_proj")
    parts = {
        "text_encoder": partial(MultilingualCLIP, config),
        "tokenizer": partial(tokenizer, begins=True, length=77),
        "unet": partial(model, encoder_hid_dim=32),
        "scheduler": partial(scheduler, df.DDIMScheduler),
        "movq": movq,
    }
    return {**made(parts), **(prior_parts("prior_") if combined else {})}


def second(channels: int = 4, *, combined: bool = False, **more: Any) -> dict[str, Any]:
    """Kandinsky 2.2, which reads a picture's embedding only."""
    parts = made({"unet": partial(unet, channels, **more), "scheduler": scheduler, "movq": movq})
    return {**parts, **(prior_parts("prior_") if combined else {})}


def third() -> dict[str, Any]:
    """Kandinsky 3."""
    return {
        "tokenizer": tokenizer(),
        "text_encoder": t5(),
        "unet": df.Kandinsky3UNet(
            in_channels=4,
            time_embedding_dim=4,
            groups=2,
            attention_head_dim=4,
            layers_per_block=3,
            block_out_channels=(32, 64),
            cross_attention_dim=4,
            encoder_hid_dim=32,
        ),
        "scheduler": scheduler(df.DDPMScheduler),
        "movq": movq(),
    }


HINT = {"encoder_hid_dim_type": "image_proj", "addition_embed_type": "image_hint"}
EMBEDS = {"image_embeds": noise(1, 32), "negative_image_embeds": noise(1, 32, seed=8)}
HINT_PICTURE = levels(1, 3, 256, 256)
PICTURE = picture(64)
MASK = np.pad(np.zeros((64, 32), dtype=np.float32), ((0, 0), (0, 32)), constant_values=1)
PRIOR = {"prior_num_inference_steps": 2}
SIZE = {"height": 64, "width": 64}

CASES = [
    case("KandinskyPipeline", first, **EMBEDS, **SIZE),
    case("KandinskyImg2ImgPipeline", first, image=PICTURE, strength=0.9, **EMBEDS, **SIZE),
    case("KandinskyInpaintPipeline", partial(first, 9), image=PICTURE, mask_image=MASK, **EMBEDS, **SIZE),
    case("KandinskyPriorPipeline", prior_parts),
    case("KandinskyCombinedPipeline", partial(first, combined=True), **PRIOR, **SIZE),
    case(
        "KandinskyImg2ImgCombinedPipeline",
        partial(first, combined=True),
        image=PICTURE,
        strength=0.9,
        **PRIOR,
        **SIZE,
    ),
    case(
        "KandinskyInpaintCombinedPipeline",
        partial(first, 9, combined=True),
        image=PICTURE,
        mask_image=MASK,
        **PRIOR,
        **SIZE,
    ),
    case("KandinskyV22Pipeline", second, **EMBEDS, **SIZE),
    case("KandinskyV22Img2ImgPipeline", second, image=PICTURE, strength=0.9, **EMBEDS, **SIZE),
    case("KandinskyV22InpaintPipeline", partial(second, 9), image=PICTURE, mask_image=MASK, **EMBEDS, **SIZE),
    case("KandinskyV22ControlnetPipeline", partial(second, 8, **HINT), hint=HINT_PICTURE, **EMBEDS, **SIZE),
    case(
        "KandinskyV22ControlnetImg2ImgPipeline",
        partial(second, 8, **HINT),
        image=PICTURE,
        hint=HINT_PICTURE,
        strength=0.9,
        **EMBEDS,
        **SIZE,
    ),
    case("KandinskyV22PriorPipeline", prior_parts),
    case("KandinskyV22PriorEmb2EmbPipeline", prior_parts, image=picture(64), strength=0.9),
    case("KandinskyV22CombinedPipeline", partial(second, combined=True), **PRIOR, **SIZE),
    case(
        "KandinskyV22Img2ImgCombinedPipeline",
        partial(second, combined=True),
        image=PICTURE,
        strength=0.9,
        **PRIOR,
        **SIZE,
    ),
    case(
        "KandinskyV22InpaintCombinedPipeline",
        partial(second, 9, combined=True),
        image=PICTURE,
        mask_image=MASK,
        **PRIOR,
        **SIZE,
    ),
    case("Kandinsky3Pipeline", third),
    case("Kandinsky3Img2ImgPipeline", third, image=PICTURE, strength=0.9),
]
