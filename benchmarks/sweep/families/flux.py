"""Flux: text, pictures, control, fill, Kontext, Redux; VisualCloze, which holds a second pipeline."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers as df
from diffusers.pipelines.flux.modeling_flux import ReduxImageEncoder
from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

from ..case import case, made
from ..encoders import clip, t5
from ..images import flow, vae
from ..inputs import levels, mask, picture
from ..tokens import clip_tokenizer, tokenizer

TRANSFORMER: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": [4, 4, 8],
}


def flux_vae() -> Any:
    """One latent channel: four in a patch."""
    return vae(
        1,
        (4,),
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5035,
    )


def flux(*, guided: bool = False, channels: int = 4, **more: Any) -> dict[str, Any]:
    """Components of ``FluxPipeline``.

    Args:
        guided: The transformer takes a guidance scale.
        channels: What it takes; it gives four.
        **more: Others, or in place of the usual ones.
    """
    shape = {**TRANSFORMER, "in_channels": channels, "out_channels": 4, "guidance_embeds": guided}
    usual = {
        "transformer": partial(df.FluxTransformer2DModel, **shape),
        "scheduler": flow,
        "vae": flux_vae,
        "text_encoder": clip,
        "tokenizer": clip_tokenizer,
        "text_encoder_2": t5,
        "tokenizer_2": tokenizer,
    }
    return made(usual, more)


def control() -> Any:
    """A ControlNet of the same kind."""
    return df.FluxControlNetModel(**TRANSFORMER)


def redux() -> dict[str, Any]:
    """The prior that turns a picture into a prompt."""
    return {
        "image_encoder": SiglipVisionModel(
            SiglipVisionConfig(
                hidden_size=32,
                intermediate_size=37,
                num_hidden_layers=2,
                num_attention_heads=4,
                image_size=32,
                patch_size=8,
            )
        ),
        "feature_extractor": SiglipImageProcessor(size={"height": 32, "width": 32}),
        "image_embedder": ReduxImageEncoder(redux_dim=32, txt_in_features=32),
        "text_encoder": clip(),
        "tokenizer": clip_tokenizer(),
        "text_encoder_2": t5(),
        "tokenizer_2": tokenizer(),
    }


PICTURE = picture(32)
MASKED = {"image": PICTURE, "mask_image": mask()}
CONTROL = {"controlnet": control}
CLOZE = {
    "task_prompt": "Each row is a task.",
    "content_prompt": "A boat.",
    "image": [[picture(32), picture(32, seed=1)], [picture(32, seed=2), None]],
}

CASES = [
    case("FluxPipeline", flux),
    case("FluxImg2ImgPipeline", flux, image=PICTURE, strength=0.9),
    case("FluxInpaintPipeline", flux, **MASKED, strength=0.9),
    case("FluxControlPipeline", partial(flux, channels=8), control_image=PICTURE),
    case(
        "FluxControlImg2ImgPipeline",
        partial(flux, channels=8),
        image=PICTURE,
        control_image=PICTURE,
        strength=0.9,
    ),
    case(
        "FluxControlInpaintPipeline", partial(flux, channels=8), **MASKED, control_image=PICTURE, strength=0.9
    ),
    case("FluxControlNetPipeline", partial(flux, **CONTROL), control_image=levels(1, 3, 32, 32)),
    case(
        "FluxControlNetImg2ImgPipeline",
        partial(flux, **CONTROL),
        image=PICTURE,
        control_image=PICTURE,
        strength=0.9,
    ),
    case(
        "FluxControlNetInpaintPipeline",
        partial(flux, **CONTROL),
        **MASKED,
        control_image=PICTURE,
        strength=0.9,
    ),
    case("FluxFillPipeline", partial(flux, channels=4 + 4 + 4 * 1 * 1, guided=True), **MASKED),
    case("FluxKontextPipeline", flux, image=PICTURE, max_area=32 * 32, _auto_resize=False),
    case("FluxKontextInpaintPipeline", flux, **MASKED, max_area=32 * 32, _auto_resize=False, strength=0.9),
    case("FluxPriorReduxPipeline", redux, image=PICTURE),
    case(
        "VisualClozeGenerationPipeline",
        partial(flux, channels=12, guided=True, resolution=32),
        **CLOZE,
    ),
    case(
        "VisualClozePipeline",
        partial(flux, channels=12, guided=True, resolution=32),
        **CLOZE,
        upsampling_height=32,
        upsampling_width=32,
    ),
]
