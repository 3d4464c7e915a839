"""More of the earlier years: Shap-E, Paint by Example, Attend and Excite, safe and depth variants, Kolors."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers as df
import torch
import transformers as tf
from diffusers.pipelines.deprecated.stable_diffusion_safe.safety_checker import (
    SafeStableDiffusionSafetyChecker,
)
from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig, ChatGLMModel
from diffusers.pipelines.shap_e import ShapERenderer

from .. import tokens
from ..case import case
from ..encoders import clip, clip_vision
from ..images import XL, unet, vae
from ..inputs import mask, picture
from ..tokens import clip_pictures, clip_tokenizer, tokenizer
from .stable_diffusion import checked, sd


def shap_e(*, pictures: bool = False) -> dict[str, Any]:
    """Shap-E: a solid from a text or a picture."""
    prior = df.PriorTransformer(
        num_attention_heads=2,
        attention_head_dim=16,
        embedding_dim=32,
        num_embeddings=32,
        embedding_proj_dim=32,
        time_embed_dim=128,
        num_layers=1,
        clip_embed_dim=64,
        additional_embeddings=0,
        time_embed_act_fn="gelu",
        norm_in_type="layer",
        embedding_proj_norm_type="layer" if pictures else None,
        encoder_hid_proj_type=None,
        added_emb_type=None,
    )
    renderer = ShapERenderer(
        param_shapes=((8, 93), (8, 8), (8, 8), (8, 8)),
        d_latent=32,
        d_hidden=8,
        n_output=12,
        background=(0.1, 0.1, 0.1),
    )
    scheduler = df.HeunDiscreteScheduler(
        beta_schedule="exp",
        num_train_timesteps=1024,
        prediction_type="sample",
        use_karras_sigmas=True,
        clip_sample=True,
        clip_sample_range=1.0,
    )
    parts: dict[str, Any] = {"prior": prior, "shap_e_renderer": renderer, "scheduler": scheduler}
    if pictures:
        return {**parts, "image_encoder": clip_vision(projected=False), "image_processor": clip_pictures()}
    return {**parts, "text_encoder": clip(projected=True), "tokenizer": clip_tokenizer()}


def coarse(pipeline: Any) -> None:
    """Few rays, and few points on them."""
    renderer = pipeline.shap_e_renderer
    few = {"n_coarse_samples": 4, "n_fine_samples": 4, "ray_batch_size": 256}
    vars(renderer)["decode_to_image"] = partial(type(renderer).decode_to_image, renderer, **few)


def paint() -> dict[str, Any]:
    """Paint by Example: a picture tells what to put behind the mask."""
    from diffusers.pipelines.deprecated.paint_by_example import PaintByExampleImageEncoder

    config = tf.CLIPVisionConfig(
        hidden_size=32,
        projection_dim=32,
        intermediate_size=37,
        num_attention_heads=4,
        num_hidden_layers=5,
        image_size=32,
        patch_size=4,
    )
    parts = checked(
        unet=partial(unet, in_channels=9),
        image_encoder=lambda: PaintByExampleImageEncoder(config, proj_size=32),
    )
    return {name: one for name, one in parts.items() if name not in ("text_encoder", "tokenizer")} | {
        "feature_extractor": clip_pictures()
    }


def attend() -> dict[str, Any]:
    """Attend and Excite, whose UNet must attend at 16 by 16."""
    return checked(
        unet=partial(
            unet,
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        )
    )


def safe() -> dict[str, Any]:
    """Safe Stable Diffusion, with its checker."""
    shape = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = {**shape, "image_size": 32, "patch_size": 8}
    checker = SafeStableDiffusionSafetyChecker(
        tf.CLIPConfig(text_config=shape, vision_config=vision, projection_dim=32)
    )
    return sd(safety_checker=lambda: checker, feature_extractor=clip_pictures)


def kolors() -> dict[str, Any]:
    """Kolors, which ChatGLM reads for."""
    config = ChatGLMConfig(
        num_layers=2,
        padded_vocab_size=tokens.SIZE,
        hidden_size=8,
        ffn_hidden_size=8,
        kv_channels=4,
        num_attention_heads=2,
        seq_length=64,
        add_qkv_bias=True,
        multi_query_attention=True,
        multi_query_group_num=1,
        original_rope=True,
    )
    reader = ChatGLMModel(config)
    for parameter in reader.parameters():  # it leaves them as the memory was
        torch.nn.init.normal_(parameter, std=0.1)
    return {
        "unet": unet(8, **{**XL, "projection_class_embeddings_input_dim": 6 * 8 + 8}),
        "scheduler": df.EulerDiscreteScheduler(
            beta_schedule="scaled_linear", steps_offset=1, timestep_spacing="leading"
        ),
        "vae": vae(),
        "text_encoder": reader,
        "tokenizer": tokenizer(ends=False, padding_side="left", kind=Positioned),
        "image_encoder": None,
        "feature_extractor": None,
    }


class Positioned(tf.PreTrainedTokenizerFast):
    """A tokenizer that counts positions, as ChatGLM's does."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Numbers of tokens, mask and positions."""
        given = super().__call__(*args, **kwargs)
        if isinstance(given["input_ids"], torch.Tensor):
            given["position_ids"] = (given["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        return given


def gligen_pictures() -> dict[str, Any]:
    """GLIGEN with pictures in its boxes."""
    from diffusers.pipelines.deprecated.stable_diffusion_gligen.pipeline_stable_diffusion_gligen_text_image import (
        CLIPImageProjection,
    )

    parts = checked(
        unet=partial(unet, attention_type="gated-text-image", attention_head_dim=4, cross_attention_dim=32),
        image_encoder=clip_vision,
        image_project=partial(CLIPImageProjection, hidden_size=32),
    )
    return {**parts, "processor": Both(clip_pictures(), clip_tokenizer())}


class Both(tf.CLIPProcessor):
    """Pictures and text, for CLIP."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor, self.tokenizer, self.chat_template = image_processor, tokenizer, None


def alt() -> dict[str, Any]:
    """AltDiffusion: a reader of many languages."""
    from diffusers.pipelines.deprecated.alt_diffusion.modeling_roberta_series import (
        RobertaSeriesConfig,
        RobertaSeriesModelWithTransformation,
    )

    config = RobertaSeriesConfig(
        hidden_size=32,
        project_dim=32,
        intermediate_size=37,
        layer_norm_eps=1e-05,
        num_attention_heads=4,
        num_hidden_layers=5,
        vocab_size=tokens.SIZE,
        max_position_embeddings=90,
        pad_token_id=0,
        type_vocab_size=1,
    )
    return sd(
        text_encoder=partial(RobertaSeriesModelWithTransformation, config),
        tokenizer=partial(tokenizer, begins=True, length=77),
    )


PICTURE = picture(32)

CASES = [
    case("ShapEPipeline", shap_e, prepare=coarse, num_inference_steps=1, frame_size=8, output_type="np"),
    case(
        "ShapEImg2ImgPipeline",
        partial(shap_e, pictures=True),
        prepare=coarse,
        num_inference_steps=1,
        frame_size=8,
        output_type="np",
        image=PICTURE,
    ),
    case("PaintByExamplePipeline", paint, example_image=PICTURE, image=PICTURE, mask_image=mask()),
    case(
        "StableDiffusionAttendAndExcitePipeline",
        attend,
        token_indices=[2, 5],
        max_iter_to_alter=1,
        thresholds={},
        attn_res=(16, 16),
    ),
    case("StableDiffusionPipelineSafe", safe),
    case("KolorsPipeline", kolors),
    case("KolorsImg2ImgPipeline", kolors, image=PICTURE, strength=0.9),
    case("KolorsPAGPipeline", kolors, pag_scale=3.0),
    case(
        "StableDiffusionGLIGENTextImagePipeline",
        gligen_pictures,
        gligen_phrases=["a cake"],
        gligen_images=[PICTURE],
        gligen_boxes=[[0.2676, 0.6088, 0.4773, 0.7183]],
    ),
    case("AltDiffusionPipeline", alt),
    case("AltDiffusionImg2ImgPipeline", alt, image=PICTURE, strength=0.9),
]
