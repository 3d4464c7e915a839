"""Other pipelines of the years of UNets: pixels, classes, depth, films from pictures, unCLIP, Würstchen, Cascade."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers as df
from diffusers.pipelines.deprecated.unclip.text_proj import UnCLIPTextProjModel
from diffusers.pipelines.deprecated.wuerstchen import PaellaVQModel, WuerstchenDiffNeXt, WuerstchenPrior
from diffusers.pipelines.stable_cascade import StableCascadeDecoderPipeline  # noqa: F401 (loads what it needs)

from ..case import case, made
from ..encoders import clip, clip_vision
from ..images import ddim, unet, vae
from ..inputs import film, levels, mask, noise, picture
from ..tokens import clip_pictures, clip_tokenizer


def pixels(scheduler: Any, **more: Any) -> dict[str, Any]:
    """A UNet on pixels and nothing else."""
    shape: dict[str, Any] = {
        "block_out_channels": (32, 64),
        "layers_per_block": 2,
        "sample_size": 32,
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "norm_num_groups": 8,
    }
    return {"unet": df.UNet2DModel(**{**shape, **more}), "scheduler": scheduler()}


def dance() -> dict[str, Any]:
    """A UNet on sound."""
    model = df.UNet1DModel(
        block_out_channels=(32, 32, 64),
        extra_in_channels=64,
        sample_size=512,
        sample_rate=16_000,
        in_channels=2,
        out_channels=2,
        flip_sin_to_cos=True,
        use_timestep_embedding=False,
        time_embedding_type="fourier",
        mid_block_type="UNetMidBlock1D",
        down_block_types=("DownBlock1DNoSkip", "DownBlock1D", "AttnDownBlock1D"),
        up_block_types=("AttnUpBlock1D", "UpBlock1D", "UpBlock1DNoSkip"),
    )
    return {"unet": model, "scheduler": df.IPNDMScheduler()}


def dit() -> dict[str, Any]:
    """DiT: a class instead of a text."""
    model = df.DiTTransformer2DModel(
        sample_size=16,
        num_layers=2,
        patch_size=4,
        attention_head_dim=8,
        num_attention_heads=2,
        in_channels=4,
        out_channels=8,
        attention_bias=True,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_zero",
        norm_elementwise_affine=False,
    )
    return {"transformer": model, "vae": vae(), "scheduler": df.DDIMScheduler()}


def marigold(channels: int = 8, **more: Any) -> dict[str, Any]:
    """Marigold: depth, normals, intrinsics of a picture."""
    usual = {
        "unet": partial(unet, in_channels=channels, out_channels=channels - 4, use_linear_projection=True),
        "scheduler": partial(ddim, prediction_type="v_prediction"),
        "vae": vae,
        "text_encoder": clip,
        "tokenizer": clip_tokenizer,
        "default_denoising_steps": 2,
        "default_processing_resolution": 32,
    }
    return made(usual, more)


def svd() -> dict[str, Any]:
    """Stable Video Diffusion."""
    return {
        "unet": df.UNetSpatioTemporalConditionModel(
            block_out_channels=(32, 64),
            layers_per_block=2,
            sample_size=32,
            in_channels=8,
            out_channels=4,
            down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            cross_attention_dim=32,
            num_attention_heads=8,
            projection_class_embeddings_input_dim=96,
            addition_time_embed_dim=32,
        ),
        "image_encoder": clip_vision(image_size=224, patch_size=56),
        "scheduler": df.EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            interpolation_type="linear",
            num_train_timesteps=1000,
            prediction_type="v_prediction",
            sigma_max=700.0,
            sigma_min=0.002,
            steps_offset=1,
            timestep_spacing="leading",
            timestep_type="continuous",
            use_karras_sigmas=True,
        ),
        "vae": df.AutoencoderKLTemporalDecoder(
            block_out_channels=[32, 64],
            in_channels=3,
            out_channels=3,
            down_block_types=["DownEncoderBlock2D", "DownEncoderBlock2D"],
            latent_channels=4,
        ),
        "feature_extractor": clip_pictures(),
    }


def i2vgen() -> dict[str, Any]:
    """I2VGen-XL."""
    return made(
        {
            "unet": partial(
                df.I2VGenXLUNet,
                block_out_channels=(4, 8),
                layers_per_block=1,
                sample_size=32,
                in_channels=4,
                out_channels=4,
                down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
                up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
                cross_attention_dim=4,
                attention_head_dim=4,
                num_attention_heads=None,
                norm_num_groups=2,
            ),
            "scheduler": partial(ddim, beta_schedule="linear"),
            "vae": partial(vae, widths=(8,), norm_num_groups=2),
            "text_encoder": partial(clip, 4, intermediate_size=16, num_hidden_layers=2),
            "tokenizer": clip_tokenizer,
            "image_encoder": partial(clip_vision, 4, num_hidden_layers=2),
            "feature_extractor": clip_pictures,
        }
    )


def film_parts() -> dict[str, Any]:
    """Text to video by ModelScope."""
    return {
        "unet": df.UNet3DConditionModel(
            block_out_channels=(4, 8),
            layers_per_block=1,
            sample_size=32,
            in_channels=4,
            out_channels=4,
            down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
            up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
            cross_attention_dim=4,
            attention_head_dim=4,
            norm_num_groups=2,
        ),
        "scheduler": ddim(),
        "vae": vae(widths=(8,), norm_num_groups=2),
        "text_encoder": clip(4, intermediate_size=16, num_hidden_layers=2),
        "tokenizer": clip_tokenizer(),
    }


def unclip(*, pictures: bool = False) -> dict[str, Any]:
    """unCLIP: prior, decoder and two upscalers."""
    small = partial(
        df.UNet2DModel,
        sample_size=64,
        layers_per_block=1,
        down_block_types=("ResnetDownsampleBlock2D", "ResnetDownsampleBlock2D"),
        up_block_types=("ResnetUpsampleBlock2D", "ResnetUpsampleBlock2D"),
        block_out_channels=(32, 64),
        in_channels=6,
        out_channels=3,
    )
    decoder = df.UNet2DConditionModel(
        sample_size=32,
        in_channels=3,
        out_channels=6,
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=100,
        attention_head_dim=4,
        resnet_time_scale_shift="scale_shift",
        class_embed_type="identity",
    )
    parts: dict[str, Any] = {
        "decoder": decoder,
        "text_proj": UnCLIPTextProjModel(clip_embeddings_dim=32, time_embed_dim=128, cross_attention_dim=100),
        "text_encoder": clip(projected=True),
        "tokenizer": clip_tokenizer(),
        "super_res_first": small(),
        "super_res_last": small(),
        "decoder_scheduler": df.UnCLIPScheduler(
            variance_type="learned_range", prediction_type="epsilon", num_train_timesteps=1000
        ),
        "super_res_scheduler": df.UnCLIPScheduler(
            variance_type="fixed_small_log", prediction_type="epsilon", num_train_timesteps=1000
        ),
    }
    if pictures:
        return {**parts, "feature_extractor": clip_pictures(), "image_encoder": clip_vision()}
    prior = df.PriorTransformer(num_attention_heads=2, attention_head_dim=12, embedding_dim=32, num_layers=1)
    scheduler = df.UnCLIPScheduler(
        variance_type="fixed_small_log",
        prediction_type="sample",
        num_train_timesteps=1000,
        clip_sample_range=5.0,
    )
    return {**parts, "prior": prior, "prior_scheduler": scheduler}


def paella() -> Any:
    """The autoencoder of Würstchen and Cascade."""
    return PaellaVQModel(bottleneck_blocks=1, num_vq_embeddings=2)


def wuerstchen() -> dict[str, Any]:
    """Würstchen's decoder."""
    decoder = WuerstchenDiffNeXt(
        c_cond=32,
        c_hidden=[320],
        nhead=[-1],
        blocks=[4],
        level_config=["CT"],
        clip_embd=32,
        inject_effnet=[False],
    )
    return {
        "decoder": decoder,
        "vqgan": paella(),
        "text_encoder": clip(),
        "tokenizer": clip_tokenizer(),
        "scheduler": df.DDPMWuerstchenScheduler(),
        "latent_dim_scale": 4.0,
    }


def wuerstchen_prior() -> dict[str, Any]:
    """Würstchen's prior."""
    return {
        "prior": WuerstchenPrior(c_in=2, c=8, depth=2, c_cond=32, c_r=8, nhead=2),
        "text_encoder": clip(),
        "tokenizer": clip_tokenizer(),
        "scheduler": df.DDPMWuerstchenScheduler(),
    }


def cascade_unet(**more: Any) -> Any:
    """The UNet of both stages."""
    from diffusers.models.unets.unet_stable_cascade import StableCascadeUNet

    return StableCascadeUNet(**more)


def cascade() -> dict[str, Any]:
    """Stable Cascade's decoder."""
    decoder = cascade_unet(
        in_channels=4,
        out_channels=4,
        conditioning_dim=128,
        block_out_channels=[16, 32, 64, 128],
        num_attention_heads=[-1, -1, 1, 2],
        down_num_layers_per_block=[1, 1, 1, 1],
        up_num_layers_per_block=[1, 1, 1, 1],
        down_blocks_repeat_mappers=[1, 1, 1, 1],
        up_blocks_repeat_mappers=[3, 3, 2, 2],
        block_types_per_layer=[
            ["SDCascadeResBlock", "SDCascadeTimestepBlock"],
            ["SDCascadeResBlock", "SDCascadeTimestepBlock"],
            ["SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"],
            ["SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"],
        ],
        switch_level=None,
        clip_text_pooled_in_channels=32,
        dropout=[0.1, 0.1, 0.1, 0.1],
    )
    return {
        "decoder": decoder,
        "vqgan": paella(),
        "text_encoder": clip(projected=True),
        "tokenizer": clip_tokenizer(),
        "scheduler": df.DDPMWuerstchenScheduler(),
        "latent_dim_scale": 4.0,
    }


def cascade_prior() -> dict[str, Any]:
    """Stable Cascade's prior."""
    prior = cascade_unet(
        conditioning_dim=128,
        block_out_channels=(128, 128),
        num_attention_heads=(2, 2),
        down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1),
        switch_level=(False,),
        clip_image_in_channels=32,
        clip_text_in_channels=32,
        clip_text_pooled_in_channels=32,
        dropout=(0.1, 0.1),
    )
    return {
        "prior": prior,
        "text_encoder": clip(projected=True),
        "tokenizer": clip_tokenizer(),
        "scheduler": df.DDPMWuerstchenScheduler(),
        "feature_extractor": None,
        "image_encoder": None,
    }


def by_a_prior(pipeline: Any) -> dict[str, Any]:
    """What a prior would have left on the device."""
    return {"image_embeddings": noise(1, 4, 4, 4).to(pipeline._execution_device)}


def amused() -> dict[str, Any]:
    """aMUSEd: tokens of a picture, uncovered step by step."""
    transformer = df.UVit2DModel(
        hidden_size=8,
        use_bias=False,
        hidden_dropout=0.0,
        cond_embed_dim=32,
        micro_cond_encode_dim=2,
        micro_cond_embed_dim=10,
        encoder_hidden_size=32,
        vocab_size=32,
        codebook_size=32,
        in_channels=8,
        block_out_channels=8,
        num_res_blocks=1,
        downsample=True,
        upsample=True,
        block_num_heads=1,
        num_hidden_layers=1,
        num_attention_heads=1,
        attention_dropout=0.0,
        intermediate_size=16,
        layer_norm_eps=1e-06,
        ln_elementwise_affine=True,
    )
    vqvae = df.VQModel(
        act_fn="silu",
        block_out_channels=[8],
        down_block_types=["DownEncoderBlock2D"],
        in_channels=3,
        latent_channels=8,
        layers_per_block=1,
        norm_num_groups=8,
        num_vq_embeddings=32,
        out_channels=3,
        sample_size=8,
        up_block_types=["UpDecoderBlock2D"],
        mid_block_add_attention=False,
        lookup_from_codebook=True,
    )
    return {
        "transformer": transformer,
        "scheduler": df.AmusedScheduler(mask_token_id=31),
        "vqvae": vqvae,
        "text_encoder": clip(
            projected=True, intermediate_size=64, num_attention_heads=8, num_hidden_layers=3
        ),
        "tokenizer": clip_tokenizer(),
    }


PICTURE = picture(32)

CASES = [
    case("DDPMPipeline", partial(pixels, df.DDPMScheduler), output_type="np"),
    case("DDIMPipeline", partial(pixels, df.DDIMScheduler), output_type="np"),
    case(
        "ConsistencyModelPipeline",
        partial(
            pixels,
            partial(
                df.CMStochasticIterativeScheduler, num_train_timesteps=40, sigma_min=0.002, sigma_max=80.0
            ),
        ),
    ),
    case(
        "RePaintPipeline",
        partial(pixels, df.RePaintScheduler),
        image=levels(1, 3, 32, 32),
        mask_image=levels(1, 1, 32, 32).round(),
        num_inference_steps=5,
        jump_length=2,
        jump_n_sample=2,
        output_type="np",
    ),
    case("DanceDiffusionPipeline", dance, without=("output_type",), num_inference_steps=4),
    case("DiTPipeline", dit, class_labels=[1], output_type="np"),
    case("MarigoldDepthPipeline", marigold, image=PICTURE),
    case("MarigoldNormalsPipeline", marigold, image=PICTURE),
    case(
        "MarigoldIntrinsicsPipeline",
        partial(marigold, 12, target_properties={"target_names": ["albedo", "roughness"]}),
        image=PICTURE,
    ),
    case(
        "StableVideoDiffusionPipeline",
        svd,
        image=PICTURE,
        num_frames=2,
        min_guidance_scale=1.0,
        max_guidance_scale=2.5,
    ),
    case("I2VGenXLPipeline", i2vgen, image=PICTURE, num_frames=2),
    case("TextToVideoSDPipeline", film_parts, num_frames=2),
    case("VideoToVideoSDPipeline", film_parts, video=film(3), strength=0.9),
    case(
        "UnCLIPPipeline",
        unclip,
        prior_num_inference_steps=2,
        decoder_num_inference_steps=2,
        super_res_num_inference_steps=2,
    ),
    case(
        "UnCLIPImageVariationPipeline",
        partial(unclip, pictures=True),
        image=PICTURE,
        decoder_num_inference_steps=2,
        super_res_num_inference_steps=2,
    ),
    case("WuerstchenDecoderPipeline", wuerstchen, first=by_a_prior, guidance_scale=1.0),
    case("WuerstchenPriorPipeline", wuerstchen_prior, without=("height", "width"), height=128, width=128),
    case("StableCascadeDecoderPipeline", cascade, first=by_a_prior, guidance_scale=2.0),
    case("StableCascadePriorPipeline", cascade_prior, height=128, width=128),
    case("AmusedPipeline", amused),
    case("AmusedImg2ImgPipeline", amused, image=PICTURE, strength=0.9),
    case("AmusedInpaintPipeline", amused, image=PICTURE, mask_image=mask(), strength=0.9),
]
