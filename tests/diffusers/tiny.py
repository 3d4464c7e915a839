"""Real diffusers pipelines with random weights and a tokenizer made on the spot: nothing is downloaded.

The widths are chosen so that each component weighs 1 to 8 MiB and outweighs what it computes on.
"""

from __future__ import annotations

import string
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    ControlNetModel,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

PAD, EOS, BOS, UNKNOWN = "<pad>", "</s>", "<s>", "<unk>"
VOCABULARY = [PAD, EOS, BOS, UNKNOWN, *string.ascii_lowercase, *string.digits]


def tokenizer(*, begins: bool, length: int = 16) -> PreTrainedTokenizerFast:
    """One token per letter or digit.

    Args:
        begins: Starts with a token of its own, as CLIP's does and T5's does not.
        length: The longest text, in tokens.
    """
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    marks = [(mark, VOCABULARY.index(mark)) for mark in (BOS, EOS)]
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}" if begins else f"$A {EOS}", special_tokens=marks
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        unk_token=UNKNOWN,
        model_max_length=length,
    )


def t5(kind: type = T5EncoderModel, width: int = 256, layers: int = 2) -> Any:
    config = {T5EncoderModel: T5Config, UMT5EncoderModel: UMT5Config}[kind]
    return kind(
        config(
            vocab_size=len(VOCABULARY),
            d_model=width,
            d_kv=32,
            d_ff=2 * width,
            num_layers=layers,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            pad_token_id=0,
            eos_token_id=1,
            tie_word_embeddings=True,
        )
    ).eval()


def clip(kind: type = CLIPTextModel, width: int = 256, projection: int = 64) -> Any:
    return kind(
        CLIPTextConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=16,
            projection_dim=projection,
            bos_token_id=VOCABULARY.index(BOS),
            eos_token_id=VOCABULARY.index(EOS),
            pad_token_id=0,
        )
    ).eval()


def vae(channels: int, **more: Any) -> AutoencoderKL:
    widths = (64, 128)
    return AutoencoderKL(
        block_out_channels=widths,
        down_block_types=["DownEncoderBlock2D"] * len(widths),
        up_block_types=["UpDecoderBlock2D"] * len(widths),
        latent_channels=channels,
        sample_size=32,
        norm_num_groups=16,
        **more,
    ).eval()


def unet(context: int, **more: Any) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        block_out_channels=(64, 128),
        layers_per_block=1,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=context,
        norm_num_groups=16,
        **more,
    ).eval()


def ddim() -> DDIMScheduler:
    return DDIMScheduler(
        beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False, steps_offset=1
    )


def wan() -> WanPipeline:
    """Wan 2.2: a UMT5 encoder, one transformer for high noise and one for low, a causal video VAE."""
    torch.manual_seed(1)
    transformers = [
        WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=4,
            attention_head_dim=64,
            in_channels=16,
            out_channels=16,
            text_dim=256,
            freq_dim=64,
            ffn_dim=512,
            num_layers=2,
            rope_max_seq_len=32,
        ).eval()
        for _ in range(2)
    ]
    return quiet(
        WanPipeline(
            tokenizer=tokenizer(begins=False),
            text_encoder=t5(UMT5EncoderModel),
            vae=AutoencoderKLWan(base_dim=16, z_dim=16, dim_mult=[1, 1, 2, 2], num_res_blocks=1).eval(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            transformer=transformers[0],
            transformer_2=transformers[1],
            boundary_ratio=0.9,
        )
    )


def stable_diffusion_3(layers: int = 2) -> StableDiffusion3Pipeline:
    """Two CLIP encoders, a T5 encoder of so many layers, a joint-attention transformer, a VAE."""
    torch.manual_seed(2)
    return quiet(
        StableDiffusion3Pipeline(
            transformer=SD3Transformer2DModel(
                sample_size=8,
                patch_size=2,
                in_channels=16,
                out_channels=16,
                num_layers=2,
                attention_head_dim=32,
                num_attention_heads=8,
                joint_attention_dim=256,
                caption_projection_dim=256,
                pooled_projection_dim=128,
                pos_embed_max_size=16,
            ).eval(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=vae(
                16, shift_factor=0.06, scaling_factor=1.5, use_quant_conv=False, use_post_quant_conv=False
            ),
            text_encoder=clip(CLIPTextModelWithProjection, width=128),
            tokenizer=tokenizer(begins=True),
            text_encoder_2=clip(CLIPTextModelWithProjection, width=128),
            tokenizer_2=tokenizer(begins=True),
            text_encoder_3=t5(width=256, layers=layers),
            tokenizer_3=tokenizer(begins=False),
        )
    )


def stable_diffusion_xl() -> StableDiffusionXLPipeline:
    """Two CLIP encoders, a UNet, a VAE."""
    torch.manual_seed(3)
    return quiet(
        StableDiffusionXLPipeline(
            vae=vae(4),
            text_encoder=clip(width=128),
            text_encoder_2=clip(CLIPTextModelWithProjection, width=128),
            tokenizer=tokenizer(begins=True),
            tokenizer_2=tokenizer(begins=True),
            unet=unet(
                256,
                attention_head_dim=(2, 4),
                use_linear_projection=True,
                transformer_layers_per_block=(1, 2),
                addition_embed_type="text_time",
                addition_time_embed_dim=8,
                projection_class_embeddings_input_dim=6 * 8 + 64,
            ),
            scheduler=ddim(),
            add_watermarker=False,
        )
    )


def stable_diffusion() -> StableDiffusionPipeline:
    """One CLIP encoder, a UNet, a VAE; no safety checker."""
    torch.manual_seed(4)
    return quiet(StableDiffusionPipeline(**_stable_diffusion_parts(), requires_safety_checker=False))


def stable_diffusion_checked() -> StableDiffusionPipeline:
    """The same with a safety checker, which diffusers excludes from offload."""
    torch.manual_seed(6)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config=shape, vision_config={**shape, "image_size": 16, "patch_size": 8}, projection_dim=32
    )
    size = {"height": 16, "width": 16}
    parts = _stable_diffusion_parts()
    parts["safety_checker"] = StableDiffusionSafetyChecker(config).eval()
    parts["feature_extractor"] = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=size)
    return quiet(StableDiffusionPipeline(**parts))


def stable_diffusion_control_net() -> StableDiffusionControlNetPipeline:
    """The same with a ControlNet, which runs before the UNet at every step."""
    torch.manual_seed(5)
    parts = _stable_diffusion_parts()
    control = ControlNetModel.from_unet(parts["unet"], conditioning_embedding_out_channels=(16, 32)).eval()
    return quiet(
        StableDiffusionControlNetPipeline(**parts, controlnet=control, requires_safety_checker=False)
    )


def _stable_diffusion_parts() -> dict[str, Any]:
    return {
        "vae": vae(4),
        "text_encoder": clip(width=256),
        "tokenizer": tokenizer(begins=True),
        "unet": unet(256, attention_head_dim=(2, 4)),
        "scheduler": ddim(),
        "safety_checker": None,
        "feature_extractor": None,
    }


def quiet(pipeline: Any) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def seeded() -> torch.Generator:
    """Noise is drawn on the host, so that it is the same wherever the pipeline computes."""
    return torch.Generator("cpu").manual_seed(7)
