"""Stable Diffusion 1 and 2: text, pictures, inpainting, ControlNets, PAG, and what was built upon it."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers as df
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from transformers import CLIPConfig, DPTConfig, DPTForDepthEstimation, DPTImageProcessor

from ..case import case, made
from ..encoders import clip, clip_vision
from ..images import controlnet, ddim, unet, vae
from ..inputs import levels, mask, noise, picture, seeded
from ..tokens import clip_pictures, clip_tokenizer


def sd(**more: Any) -> dict[str, Any]:
    """Components of ``StableDiffusionPipeline``; those given take the place of the usual ones."""
    usual = {
        "unet": unet,
        "scheduler": ddim,
        "vae": vae,
        "text_encoder": clip,
        "tokenizer": clip_tokenizer,
        "safety_checker": None,
        "feature_extractor": None,
        "image_encoder": None,
    }
    return made(usual, more)


def bare(**more: Any) -> dict[str, Any]:
    """The same without places for a checker and a picture encoder."""
    optional = ("safety_checker", "feature_extractor", "image_encoder")
    return {name: one for name, one in sd(**more).items() if name not in optional or name in more}


def checked(**more: Any) -> dict[str, Any]:
    """The same without a place for a picture encoder."""
    return {name: one for name, one in sd(**more).items() if name != "image_encoder" or name in more}


def safety_checker() -> StableDiffusionSafetyChecker:
    """The checker, which no offload moves."""
    shape = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = {**shape, "image_size": 32, "patch_size": 8}
    return StableDiffusionSafetyChecker(
        CLIPConfig(text_config=shape, vision_config=vision, projection_dim=32)
    )


def with_checker() -> dict[str, Any]:
    """With a safety checker."""
    return sd(safety_checker=safety_checker, feature_extractor=clip_pictures)


def depth() -> dict[str, Any]:
    """Depth to image: a depth estimator beside the UNet."""
    estimator = DPTForDepthEstimation(
        DPTConfig(
            image_size=32,
            patch_size=16,
            num_channels=3,
            hidden_size=32,
            num_hidden_layers=4,
            backbone_out_indices=(0, 1, 2, 3),
            num_attention_heads=4,
            intermediate_size=37,
            is_decoder=False,
            initializer_range=0.02,
            is_hybrid=False,
            neck_hidden_sizes=[16, 16, 32, 32],
            fusion_hidden_size=16,
        )
    )
    extractor = DPTImageProcessor(size={"height": 32, "width": 32})
    return bare(unet=partial(unet, in_channels=5), depth_estimator=estimator, feature_extractor=extractor)


def variation() -> dict[str, Any]:
    """Image variation: a picture instead of a text."""
    parts = sd(image_encoder=clip_vision, feature_extractor=clip_pictures)
    return {name: one for name, one in parts.items() if name not in ("text_encoder", "tokenizer")}


def latent_upscale() -> dict[str, Any]:
    """The upscaler that works on latents."""
    model = df.UNet2DConditionModel(
        act_fn="gelu",
        attention_head_dim=8,
        norm_num_groups=None,
        block_out_channels=[32, 32, 64, 64],
        time_cond_proj_dim=160,
        conv_in_kernel=1,
        conv_out_kernel=1,
        cross_attention_dim=32,
        down_block_types=(
            "KDownBlock2D",
            "KCrossAttnDownBlock2D",
            "KCrossAttnDownBlock2D",
            "KCrossAttnDownBlock2D",
        ),
        in_channels=8,
        mid_block_type=None,
        only_cross_attention=False,
        out_channels=5,
        resnet_time_scale_shift="scale_shift",
        time_embedding_type="fourier",
        timestep_post_act="gelu",
        up_block_types=("KCrossAttnUpBlock2D", "KCrossAttnUpBlock2D", "KCrossAttnUpBlock2D", "KUpBlock2D"),
    )
    return bare(
        unet=lambda: model,
        vae=partial(vae, widths=(32, 32, 64, 64)),
        scheduler=partial(df.EulerDiscreteScheduler, prediction_type="sample"),
        text_encoder=partial(clip, hidden_act="quick_gelu", projection_dim=512),
    )


def upscale() -> dict[str, Any]:
    """The upscaler that works on pixels and latents."""
    model = partial(
        unet,
        block_out_channels=(32, 32, 64),
        in_channels=7,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        use_linear_projection=True,
        only_cross_attention=(True, True, False),
        num_class_embeds=100,
    )
    return checked(
        unet=model,
        vae=partial(vae, widths=(32, 32, 64)),
        low_res_scheduler=df.DDPMScheduler,
        scheduler=partial(ddim, prediction_type="v_prediction"),
        max_noise_level=350,
        watermarker=None,
    )


def unclip_unet() -> Any:
    """The UNet of Stable unCLIP: a picture's embedding and its noise level as a class."""
    return unet(
        64,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=(2, 4),
        class_embed_type="projection",
        projection_class_embeddings_input_dim=64,
        layers_per_block=1,
        upcast_attention=True,
        use_linear_projection=True,
    )


def unclip() -> dict[str, Any]:
    """Stable unCLIP: a prior makes the picture's embedding of the text."""
    from diffusers.pipelines.stable_diffusion.stable_unclip_image_normalizer import (
        StableUnCLIPImageNormalizer,
    )

    return bare(
        prior_tokenizer=clip_tokenizer,
        prior_text_encoder=partial(clip, projected=True),
        prior=partial(
            df.PriorTransformer,
            num_attention_heads=2,
            attention_head_dim=12,
            embedding_dim=32,
            num_layers=1,
        ),
        prior_scheduler=partial(
            df.DDPMScheduler,
            variance_type="fixed_small_log",
            prediction_type="sample",
            num_train_timesteps=1000,
            clip_sample=True,
            clip_sample_range=5.0,
            beta_schedule="squaredcos_cap_v2",
        ),
        image_normalizer=partial(StableUnCLIPImageNormalizer, embedding_dim=32),
        image_noising_scheduler=partial(df.DDPMScheduler, beta_schedule="squaredcos_cap_v2"),
        text_encoder=partial(clip, 64),
        unet=unclip_unet,
        scheduler=partial(ddim, prediction_type="v_prediction"),
    )


def unclip_img2img() -> dict[str, Any]:
    """Stable unCLIP from a picture."""
    from diffusers.pipelines.stable_diffusion.stable_unclip_image_normalizer import (
        StableUnCLIPImageNormalizer,
    )

    return bare(
        feature_extractor=clip_pictures,
        image_encoder=clip_vision,
        image_normalizer=partial(StableUnCLIPImageNormalizer, embedding_dim=32),
        image_noising_scheduler=partial(df.DDPMScheduler, beta_schedule="squaredcos_cap_v2"),
        text_encoder=partial(clip, 64),
        unet=unclip_unet,
        scheduler=partial(ddim, prediction_type="v_prediction"),
    )


def controlled(**more: Any) -> dict[str, Any]:
    """With two ControlNets, which run before every step of the UNet."""
    return sd(**{"controlnet": controlnet, **more})


def two_controlnets() -> list[Any]:
    """Two."""
    return [controlnet(), controlnet()]


def xs() -> dict[str, Any]:
    """ControlNet-XS: its adapter becomes a part of the UNet."""
    shape = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (4, 8),
        "layers_per_block": 2,
        "norm_num_groups": 4,
        "sample_size": 16,
        "time_cond_proj_dim": None,
        "use_linear_projection": True,
        "cross_attention_dim": 8,
    }
    model = df.UNet2DConditionModel(**{key: one for key, one in shape.items() if key != "time_cond_proj_dim"})
    adapter = df.ControlNetXSAdapter.from_unet(
        unet=model, size_ratio=1, learn_time_embedding=True, conditioning_embedding_out_channels=(2, 2)
    )
    return checked(
        unet=lambda: model,
        controlnet=lambda: adapter,
        vae=partial(vae, widths=(4, 8), norm_num_groups=2),
        text_encoder=partial(clip, 8, num_attention_heads=2),
    )


def adapter() -> dict[str, Any]:
    """A T2I adapter."""
    return checked(
        unet=partial(
            unet,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        ),
        adapter=partial(
            df.T2IAdapter,
            in_channels=3,
            channels=[32, 64],
            num_res_blocks=2,
            downscale_factor=2,
            adapter_type="full_adapter",
        ),
    )


def gligen(**more: Any) -> dict[str, Any]:
    """GLIGEN: phrases in boxes."""
    return sd(
        unet=partial(unet, attention_type="gated", attention_head_dim=4),
        **more,
    )


def sde() -> Any:
    """The scheduler of LEdits++."""
    return df.DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++", solver_order=2)


def three_levels() -> Any:
    """A UNet that attends at a quarter of the latents' side, where LEdits++ looks."""
    return unet(
        block_out_channels=(32, 64, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    )


def invert(pipeline: Any) -> dict[str, Any]:
    """Find the noise of a picture; LEdits++ edits it afterwards."""
    pipeline.invert(image=picture(64), num_inversion_steps=4, skip=0.15, generator=seeded())
    return {}


def masked_and_inverted(pipeline: Any) -> dict[str, Any]:
    """DiffEdit's mask and the noise of its picture."""
    common = {"num_inference_steps": 2, "generator": seeded()}
    found = pipeline.generate_mask(
        image=PICTURE, source_prompt="a house", target_prompt="a boat", num_maps_per_mask=2, **common
    )
    latents = pipeline.invert(
        image=PICTURE, prompt="a house", inpaint_strength=1.0, output_type="latent", **common
    )
    return {"mask_image": found, "image_latents": latents.latents}


PICTURE = picture(32)
SMALL = levels(1, 3, 32, 32)

CASES = [
    case("StableDiffusionPipeline", with_checker),
    case("StableDiffusionImg2ImgPipeline", sd, image=PICTURE, strength=0.9),
    case(
        "StableDiffusionInpaintPipeline",
        partial(sd, unet=partial(unet, in_channels=9)),
        image=PICTURE,
        mask_image=mask(),
    ),
    case("StableDiffusionDepth2ImgPipeline", depth, image=PICTURE, strength=0.9),
    case("StableDiffusionImageVariationPipeline", variation, image=PICTURE),
    case(
        "StableDiffusionInstructPix2PixPipeline",
        partial(sd, unet=partial(unet, in_channels=8)),
        image=PICTURE,
    ),
    case("StableDiffusionLatentUpscalePipeline", latent_upscale, image=noise(1, 4, 16, 16)),
    case("StableDiffusionUpscalePipeline", upscale, image=picture(16)),
    case("StableUnCLIPPipeline", unclip, prior_num_inference_steps=2),
    case("StableUnCLIPImg2ImgPipeline", unclip_img2img, image=PICTURE),
    case(
        "StableDiffusionControlNetPipeline",
        partial(controlled, controlnet=two_controlnets),
        image=[SMALL, SMALL],
    ),
    case("StableDiffusionControlNetImg2ImgPipeline", controlled, image=PICTURE, control_image=SMALL),
    case(
        "StableDiffusionControlNetInpaintPipeline",
        partial(controlled, unet=partial(unet, in_channels=9)),
        image=PICTURE,
        mask_image=mask(),
        control_image=SMALL,
    ),
    case("StableDiffusionPAGPipeline", sd, pag_scale=3.0),
    case("StableDiffusionPAGImg2ImgPipeline", sd, image=PICTURE, pag_scale=3.0),
    case(
        "StableDiffusionPAGInpaintPipeline",
        partial(sd, unet=partial(unet, in_channels=9)),
        image=PICTURE,
        mask_image=mask(),
        pag_scale=3.0,
    ),
    case("StableDiffusionControlNetPAGPipeline", controlled, image=SMALL, pag_scale=3.0),
    case(
        "StableDiffusionControlNetPAGInpaintPipeline",
        partial(controlled, unet=partial(unet, in_channels=9)),
        image=PICTURE,
        mask_image=mask(),
        control_image=SMALL,
        pag_scale=3.0,
    ),
    case("StableDiffusionControlNetXSPipeline", xs, image=SMALL),
    case("StableDiffusionAdapterPipeline", adapter, image=PICTURE),
    case(
        "LatentConsistencyModelPipeline",
        partial(sd, unet=partial(unet, time_cond_proj_dim=32), scheduler=df.LCMScheduler),
        original_inference_steps=20,
    ),
    case(
        "LatentConsistencyModelImg2ImgPipeline",
        partial(sd, unet=partial(unet, time_cond_proj_dim=32), scheduler=df.LCMScheduler),
        image=PICTURE,
        original_inference_steps=20,
    ),
    case("SemanticStableDiffusionPipeline", checked, editing_prompt=["a boat"], edit_warmup_steps=0),
    case(
        "StableDiffusionLDM3DPipeline",
        partial(sd, vae=partial(vae, in_channels=6, out_channels=6)),
        output_type="np",
    ),
    case("StableDiffusionPanoramaPipeline", sd, height=None, width=None),
    case("StableDiffusionSAGPipeline", sd, height=None, width=None),
    case(
        "StableDiffusionParadigmsPipeline", partial(checked, scheduler=df.DDIMParallelScheduler), parallel=2
    ),
    case("StableDiffusionModelEditingPipeline", checked),
    case(
        "CycleDiffusionPipeline",
        checked,
        source_prompt="a house",
        image=PICTURE,
        strength=0.9,
        guidance_scale=3.0,
    ),
    case("StableDiffusionInpaintPipelineLegacy", checked, image=PICTURE, mask_image=mask(), strength=0.9),
    case(
        "StableDiffusionGLIGENPipeline",
        lambda: checked(unet=partial(unet, attention_type="gated", attention_head_dim=4)),
        gligen_phrases=["a birthday cake"],
        gligen_boxes=[[0.2676, 0.6088, 0.4773, 0.7183]],
    ),
    case(
        "LEditsPPPipelineStableDiffusion",
        partial(checked, scheduler=sde, unet=three_levels),
        first=invert,
        editing_prompt=["a boat"],
        edit_threshold=[0.7],
    ),
    case(
        "StableDiffusionDiffEditPipeline",
        partial(checked, inverse_scheduler=partial(df.DDIMInverseScheduler, beta_schedule="scaled_linear")),
        first=masked_and_inverted,
        inpaint_strength=1.0,
    ),
]
