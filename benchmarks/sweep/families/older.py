"""More of the earlier years: Shap-E, Paint by Example, Attend and Excite, safe and depth variants, Kolors; sounds."""

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
from diffusers.pipelines.stable_audio import StableAudioProjectionModel

from .. import tokens
from ..case import case
from ..encoders import clip, clip_vision, t5
from ..images import XL, ddim, unet, vae
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
        "vae": df.AutoencoderOobleck(
            encoder_hidden_size=6,
            downsampling_ratios=[1, 2],
            decoder_channels=3,
            decoder_input_channels=3,
            audio_channels=2,
            channel_multiples=[2, 4],
            sampling_rate=4,
        ),
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
    case("StableAudioPipeline", stable_audio),
    case("AudioLDMPipeline", audio_ldm, audio_length_in_s=0.01),
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
