"""Films and large images: HunyuanVideo, Hunyuan-Image, Cosmos, Mochi, EasyAnimate, Kandinsky 5, Helios, Motif."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers as df
import torch
import transformers as tf
from diffusers.models.controlnets import controlnet_cosmos
from diffusers.models.transformers import transformer_cosmos

from .. import tokens
from ..case import case, made
from ..encoders import causal, clip, qwen_vl, qwen_vl_processor, siglip, siglip_pictures, t5, umt5
from ..images import flow, vae
from ..inputs import film, levels, picture
from ..tokens import clip_tokenizer, tokenizer
from .wan import wan_vae

TEMPLATE = {"prompt_template": {"template": "{}", "crop_start": 0}}


def hunyuan_vae(**more: Any) -> Any:
    """HunyuanVideo's autoencoder: eight pixels a side, four frames after the first."""
    shape: dict[str, Any] = {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 4,
        "down_block_types": ("HunyuanVideoDownBlock3D",) * 4,
        "up_block_types": ("HunyuanVideoUpBlock3D",) * 4,
        "block_out_channels": (8, 8, 8, 8),
        "layers_per_block": 1,
        "act_fn": "silu",
        "norm_num_groups": 4,
        "scaling_factor": 0.476986,
        "spatial_compression_ratio": 8,
        "temporal_compression_ratio": 4,
        "mid_block_add_attention": True,
    }
    return df.AutoencoderKLHunyuanVideo(**{**shape, **more})


HUNYUAN: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 10,
    "num_layers": 1,
    "num_single_layers": 1,
    "num_refiner_layers": 1,
    "patch_size": 1,
    "patch_size_t": 1,
    "guidance_embeds": True,
    "text_embed_dim": 16,
    "pooled_projection_dim": 8,
    "rope_axes_dim": (2, 4, 4),
}


def small_clip() -> Any:
    """A text encoder of width 8."""
    return clip(8, num_hidden_layers=2, projection_dim=32)


def hunyuan(
    transformer: Any = df.HunyuanVideoTransformer3DModel, *, shape: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """HunyuanVideo."""
    usual = {
        "transformer": partial(transformer, **{**HUNYUAN, **(shape or {})}),
        "vae": hunyuan_vae,
        "scheduler": partial(flow, shift=7.0),
        "text_encoder": partial(causal, "LlamaModel", 16),
        "tokenizer": partial(tokenizer, begins=True, ends=False, length=256),
        "text_encoder_2": small_clip,
        "tokenizer_2": clip_tokenizer,
    }
    return made(usual, more)


def framepack() -> dict[str, Any]:
    """Framepack: a film in sections."""
    shape = {
        "patch_size": 2,
        "image_condition_type": None,
        "has_image_proj": True,
        "image_proj_dim": 32,
        "has_clean_x_embedder": True,
    }
    return hunyuan(
        df.HunyuanVideoFramepackTransformer3DModel,
        shape=shape,
        image_encoder=siglip,
        feature_extractor=siglip_pictures,
    )


def qwen_text() -> Any:
    """Qwen2.5-VL's text half."""
    return qwen_vl(kind="Qwen2_5_VLForConditionalGeneration").model.language_model


def hunyuan15(**shape: Any) -> dict[str, Any]:
    """HunyuanVideo 1.5."""
    usual: dict[str, Any] = {
        "in_channels": 9,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "mlp_ratio": 2.0,
        "patch_size": 1,
        "patch_size_t": 1,
        "text_embed_dim": 16,
        "text_embed_2_dim": 32,
        "image_embed_dim": 32,
        "rope_axes_dim": (2, 2, 4),
        "target_size": 16,
        "task_type": "t2v",
    }
    return {
        "transformer": df.HunyuanVideo15Transformer3DModel(**{**usual, **shape}),
        "vae": df.AutoencoderKLHunyuanVideo15(
            latent_channels=4,
            block_out_channels=(16, 16),
            layers_per_block=1,
            spatial_compression_ratio=4,
            temporal_compression_ratio=2,
            downsample_match_channel=False,
            upsample_match_channel=False,
        ),
        "scheduler": flow(shift=7.0),
        "text_encoder": qwen_text(),
        "tokenizer": tokenizer(ends=False, length=1024),
        "text_encoder_2": t5(),
        "tokenizer_2": tokenizer(length=256),
        "guider": df.ClassifierFreeGuidance(guidance_scale=1.0),
    }


def hunyuan15_picture() -> dict[str, Any]:
    """The same from a picture."""
    return {**hunyuan15(task_type="i2v"), "image_encoder": siglip(), "feature_extractor": siglip_pictures()}


def hunyuan_image(*, refiner: bool = False) -> dict[str, Any]:
    """Hunyuan-Image and its refiner."""
    from diffusers.guiders import AdaptiveProjectedMixGuidance

    shape: dict[str, Any] = {
        "in_channels": 16 if refiner else 4,
        "out_channels": 8 if refiner else 4,
        "num_attention_heads": 4,
        "attention_head_dim": 8,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "patch_size": (1, 1, 1) if refiner else (1, 1),
        "guidance_embeds": refiner,
        "text_embed_dim": 16,
        "text_embed_2_dim": None if refiner else 32,
        "rope_axes_dim": (2, 2, 4) if refiner else (4, 4),
    }
    parts = {
        "transformer": df.HunyuanImageTransformer2DModel(**shape),
        "scheduler": flow(shift=7.0),
        "text_encoder": qwen_vl(),
        "tokenizer": tokenizer(ends=False, length=1128),
        "guider": AdaptiveProjectedMixGuidance(enabled=False),
    }
    if refiner:
        model = df.AutoencoderKLHunyuanImageRefiner(
            latent_channels=4,
            block_out_channels=(16, 16),
            layers_per_block=1,
            spatial_compression_ratio=2,
            temporal_compression_ratio=1,
            downsample_match_channel=False,
            upsample_match_channel=False,
        )
        return {**parts, "vae": model}
    model = df.AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 64, 64),
        layers_per_block=1,
        scaling_factor=0.476986,
        spatial_compression_ratio=4,
        sample_size=32,
        downsample_match_channel=True,
        upsample_match_channel=True,
    )
    return {
        **parts,
        "vae": model,
        "text_encoder_2": t5(),
        "tokenizer_2": tokenizer(length=256),
        "ocr_guider": AdaptiveProjectedMixGuidance(enabled=False),
    }


COSMOS: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "mlp_ratio": 2,
    "text_embed_dim": 32,
    "adaln_lora_dim": 4,
    "max_size": (4, 32, 32),
    "patch_size": (1, 2, 2),
    "rope_scale": (2.0, 1.0, 1.0),
    "concat_padding_mask": True,
    "extra_pos_embed_type": "learnable",
}


class _Resize:
    """What Cosmos takes of torchvision, which it uses to resize a mask of ones."""

    class InterpolationMode:
        """Of which there is one."""

        NEAREST = "nearest"

    class functional:
        """The functions."""

        @staticmethod
        def resize(mask: torch.Tensor, size: list[int], interpolation: str) -> torch.Tensor:
            """The nearest pixel."""
            return torch.nn.functional.interpolate(mask, size, mode=interpolation)


def without_torchvision(pipeline: Any) -> None:
    """Cosmos' models ask torchvision for one function; it is not needed for anything else here."""
    for one in (transformer_cosmos, controlnet_cosmos):
        vars(one).setdefault("transforms", _Resize)


class Unchecked(torch.nn.Module):
    """Stands in for Cosmos' guardrail, whose models are far too large: it lets everything through."""

    def __init__(self) -> None:
        super().__init__()
        self._dtype = torch.float32

    def check_text_safety(self, prompt: str) -> bool:
        """Any text."""
        return True

    def check_video_safety(self, video: Any) -> Any:
        """Any film."""
        return video

    @property
    def device(self) -> torch.device:
        """Where it is: nowhere in particular."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Of weights it has not."""
        return self._dtype


def edm() -> Any:
    """The scheduler of the first Cosmos."""
    return df.EDMEulerScheduler(
        sigma_min=0.002, sigma_max=80, sigma_data=0.5, sigma_schedule="karras", final_sigmas_type="sigma_min"
    )


def cosmos_vae() -> Any:
    """Of the first Cosmos."""
    return df.AutoencoderKLCosmos(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        encoder_block_out_channels=(8, 8, 8, 8),
        decode_block_out_channels=(8, 8, 8, 8),
        attention_resolutions=(8,),
        resolution=64,
        num_layers=2,
        patch_size=4,
        patch_type="haar",
        scaling_factor=1.0,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
    )


def cosmos(channels: int = 4, **more: Any) -> dict[str, Any]:
    """Cosmos."""
    usual = {
        "transformer": partial(df.CosmosTransformer3DModel, **{**COSMOS, "in_channels": channels}),
        "vae": cosmos_vae,
        "scheduler": edm,
        "text_encoder": t5,
        "tokenizer": tokenizer,
        "safety_checker": Unchecked,
    }
    return made(usual, more)


def cosmos2(channels: int = 16, **more: Any) -> dict[str, Any]:
    """Cosmos 2: Wan's autoencoder."""
    shape = {**COSMOS, "in_channels": channels, "out_channels": 16, "max_size": (16, 32, 32)}
    usual = {
        "transformer": partial(df.CosmosTransformer3DModel, **shape),
        "vae": wan_vae,
        "scheduler": partial(flow, use_karras_sigmas=True),
        "text_encoder": t5,
        "tokenizer": tokenizer,
        "safety_checker": Unchecked,
    }
    return made(usual, more)


def cosmos25(**more: Any) -> dict[str, Any]:
    """Cosmos 2.5: Qwen2.5-VL reads the prompt, all its layers at once."""
    shape = {
        **COSMOS,
        "in_channels": 16 + 1,
        "out_channels": 16,
        "max_size": (16, 32, 32),
        "extra_pos_embed_type": None,
        "use_crossattn_projection": True,
        "crossattn_proj_in_channels": 32,
        "encoder_hidden_states_channels": 32,
    }
    usual = {
        "transformer": partial(df.CosmosTransformer3DModel, **{**shape, **more.pop("shape", {})}),
        "vae": partial(wan_vae, latents_mean=[0.0] * 16, latents_std=[1.0] * 16),
        "scheduler": df.UniPCMultistepScheduler,
        "text_encoder": qwen_vl,
        "tokenizer": partial(tokenizer, ends=False, length=512),
        "safety_checker": Unchecked,
    }
    return made(usual, more)


def cosmos_transfer() -> dict[str, Any]:
    """Cosmos 2.5 with a ControlNet."""
    control = partial(
        df.CosmosControlNetModel,
        n_controlnet_blocks=2,
        in_channels=16 + 1 + 1,
        latent_channels=16 + 1 + 1,
        model_channels=32,
        num_attention_heads=2,
        attention_head_dim=16,
        mlp_ratio=2,
        text_embed_dim=32,
        adaln_lora_dim=4,
        patch_size=(1, 2, 2),
        max_size=(16, 32, 32),
        rope_scale=(2.0, 1.0, 1.0),
        use_crossattn_projection=False,
        encoder_hidden_states_channels=32,
    )
    return cosmos25(controlnet=control, shape={"controlnet_block_every_n": 1})


def mochi() -> dict[str, Any]:
    """Mochi."""
    return {
        "transformer": df.MochiTransformer3DModel(
            patch_size=2,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=2,
            pooled_projection_dim=16,
            in_channels=12,
            out_channels=None,
            qk_norm="rms_norm",
            text_embed_dim=32,
            time_embed_dim=4,
            activation_fn="swiglu",
            max_sequence_length=16,
        ),
        "vae": df.AutoencoderKLMochi(
            latent_channels=12,
            out_channels=3,
            encoder_block_out_channels=(32, 32, 32, 32),
            decoder_block_out_channels=(32, 32, 32, 32),
            layers_per_block=(1, 1, 1, 1, 1),
        ),
        "scheduler": flow(),
        "text_encoder": t5(),
        "tokenizer": tokenizer(),
    }


def easy(channels: int = 4) -> dict[str, Any]:
    """EasyAnimate."""
    return {
        "transformer": df.EasyAnimateTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=channels,
            out_channels=4,
            time_embed_dim=2,
            text_embed_dim=16,
            num_layers=1,
            mmdit_layers=1,
            sample_width=16,
            sample_height=16,
            patch_size=2,
        ),
        "vae": df.AutoencoderKLMagvit(
            in_channels=3,
            out_channels=3,
            down_block_types=(
                "SpatialDownBlock3D",
                "SpatialTemporalDownBlock3D",
                "SpatialTemporalDownBlock3D",
                "SpatialTemporalDownBlock3D",
            ),
            up_block_types=(
                "SpatialUpBlock3D",
                "SpatialTemporalUpBlock3D",
                "SpatialTemporalUpBlock3D",
                "SpatialTemporalUpBlock3D",
            ),
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=2,
            spatial_group_norm=False,
        ),
        "scheduler": flow(),
        "text_encoder": qwen2_vl(),
        "tokenizer": tokenizer(ends=False, length=512),
    }


def qwen2_vl() -> Any:
    """Qwen2-VL."""
    from ..encoders import _causal_shape

    return tf.Qwen2VLForConditionalGeneration(
        tf.Qwen2VLConfig(
            text_config={
                **_causal_shape(16),
                "rope_parameters": {"mrope_section": [1, 1, 0], "rope_type": "default", "rope_theta": 1e6},
            },
            vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2},
            image_token_id=tokens.number("<|image_pad|>"),
            video_token_id=tokens.number("<|video_pad|>"),
            vision_start_token_id=tokens.number("<|vision_start|>"),
            vision_end_token_id=tokens.number("<|vision_end|>"),
        )
    )


def kandinsky5(*, image: bool = False, seen: bool = False) -> dict[str, Any]:
    """Kandinsky 5."""
    channels = 16
    return {
        "transformer": df.Kandinsky5Transformer3DModel(
            in_visual_dim=channels,
            in_text_dim=16,
            in_text_dim2=8,
            time_dim=16,
            out_visual_dim=channels,
            patch_size=(1, 2, 2),
            model_dim=16,
            ff_dim=32,
            num_text_blocks=1,
            num_visual_blocks=2,
            axes_dims=(1, 1, 2),
            visual_cond=seen,
            attention_type="regular",
        ),
        "vae": vae(channels, (8, 8, 8, 8), norm_num_groups=4)
        if image
        else hunyuan_vae(latent_channels=channels),
        "scheduler": flow(shift=7.0),
        "text_encoder": qwen_vl(),
        "tokenizer": qwen_vl_processor(2048),
        "text_encoder_2": small_clip(),
        "tokenizer_2": clip_tokenizer(),
    }


def helios(scheduler: Any = df.HeliosScheduler, stages: int = 1) -> dict[str, Any]:
    """Helios."""
    return {
        "transformer": df.HeliosTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=16,
            out_channels=16,
            text_dim=32,
            freq_dim=256,
            ffn_dim=32,
            num_layers=2,
            cross_attn_norm=True,
            rope_dim=(4, 4, 4),
        ),
        "vae": wan_vae(),
        "scheduler": scheduler(stages=stages, gamma=0.3),
        "text_encoder": umt5(),
        "tokenizer": tokenizer(),
    }


FRAMES = {"num_frames": 9, "height": 16, "width": 16}
PICTURE = picture(16)

CASES = [
    case("HunyuanVideoPipeline", hunyuan, **FRAMES, **TEMPLATE),
    case(
        "HunyuanSkyreelsImageToVideoPipeline",
        partial(hunyuan, shape={"in_channels": 8, "guidance_embeds": False}),
        image=PICTURE,
        **FRAMES,
        **TEMPLATE,
    ),
    case(
        "HunyuanVideoFramepackPipeline",
        framepack,
        image=picture(32),
        **{**FRAMES, "height": 32, "width": 32},
        latent_window_size=3,
        **TEMPLATE,
    ),
    case("HunyuanVideo15Pipeline", hunyuan15, **FRAMES, without=("max_sequence_length",)),
    case("HunyuanVideo15ImageToVideoPipeline", hunyuan15_picture, image=PICTURE, num_frames=9),
    case("HunyuanImagePipeline", hunyuan_image),
    case("HunyuanImageRefinerPipeline", partial(hunyuan_image, refiner=True), image=picture(32)),
    case("CosmosTextToWorldPipeline", cosmos, prepare=without_torchvision, num_frames=9),
    case(
        "CosmosVideoToWorldPipeline",
        partial(cosmos, 5),
        prepare=without_torchvision,
        video=film(9),
        num_frames=9,
    ),
    case("Cosmos2TextToImagePipeline", cosmos2),
    case(
        "Cosmos2VideoToWorldPipeline",
        partial(cosmos2, 17),
        prepare=without_torchvision,
        image=picture(32),
        num_frames=9,
    ),
    case("Cosmos2_5_PredictBasePipeline", cosmos25, prepare=without_torchvision, num_frames=5),
    case(
        "Cosmos2_5_TransferPipeline",
        cosmos_transfer,
        prepare=without_torchvision,
        controls=film(5),
        num_frames=5,
        num_frames_per_chunk=5,
    ),
    case("MochiPipeline", mochi, **{**FRAMES, "num_frames": 7}),
    case(
        "EasyAnimatePipeline",
        easy,
        negative_prompt="bad",
        num_frames=5,
        height=16,
        width=16,
        without=("max_sequence_length",),
    ),
    case(
        "EasyAnimateControlPipeline",
        partial(easy, 8),
        num_frames=5,
        height=16,
        width=16,
        negative_prompt="bad",
        control_video=levels(1, 3, 5, 16, 16),
    ),
    case(
        "EasyAnimateInpaintPipeline",
        partial(easy, 9),
        num_frames=5,
        height=16,
        width=16,
        video=levels(1, 3, 5, 16, 16),
        negative_prompt="bad",
        mask_video=levels(1, 1, 5, 16, 16).round(),
    ),
    case("Kandinsky5T2VPipeline", kandinsky5, num_frames=5),
    case("Kandinsky5T2IPipeline", partial(kandinsky5, image=True)),
    case(
        "HeliosPipeline",
        helios,
        **{**FRAMES, "num_frames": 9},
        num_latent_frames_per_chunk=3,
        history_sizes=[4, 2, 1],
    ),
    case(
        "HeliosPyramidPipeline",
        partial(helios, stages=3),
        **{**FRAMES, "height": 64, "width": 64},
        num_latent_frames_per_chunk=3,
        history_sizes=[4, 2, 1],
        pyramid_num_inference_steps_list=[1, 1, 1],
    ),
]
