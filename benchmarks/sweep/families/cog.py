"""CogVideoX, CogView, ConsisID; Allegro, AuraFlow, Chroma, which are built much alike.

Sizes: diffusers' tests/pipelines/{cogvideo,cogview3,cogview4,consisid,allegro,aura_flow,chroma}.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers as df

from ..case import case, made
from ..encoders import causal, t5, umt5
from ..images import flow, vae
from ..inputs import film, levels, mask, picture
from ..tokens import tokenizer
from .flux import flux_vae

SCREEN: dict[str, Any] = {"height": 16, "width": 16, "num_frames": 8}


def video_vae(kind: str, block: str) -> Any:
    """A film's autoencoder: 8 to 1 in space, 4 to 1 in time."""
    return getattr(df, kind)(
        in_channels=3,
        out_channels=3,
        down_block_types=(f"{block}DownBlock3D",) * 4,
        up_block_types=(f"{block}UpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
    )


COG: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 2,
    "text_embed_dim": 32,
    "num_layers": 1,
    "sample_width": 2,
    "sample_height": 2,
    "sample_frames": 9,
    "patch_size": 2,
    "temporal_compression_ratio": 4,
    "max_text_seq_length": 16,
}
FACE: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 8,
    "use_rotary_positional_embeddings": True,
    "use_learned_positional_embeddings": True,
    "cross_attn_interval": 1,
    "is_train_face": True,
    "cross_attn_dim_head": 1,
    "cross_attn_num_heads": 1,
    "LFE_id_dim": 2,
    "LFE_vit_dim": 2,
    "LFE_depth": 5,
    "LFE_dim_head": 8,
    "LFE_num_heads": 2,
    "LFE_num_id_token": 1,
    "LFE_num_querie": 1,
    "LFE_output_dim": 21,
    "LFE_ff_mult": 1,
    "LFE_num_scale": 1,
}


def film_parts(scheduler: Any = df.CogVideoXDDIMScheduler, **more: Any) -> dict[str, Any]:
    """Components of ``CogVideoXPipeline``; ``more`` are sizes of the transformer."""
    return {
        "transformer": df.CogVideoXTransformer3DModel(**{**COG, **more}),
        "vae": video_vae("AutoencoderKLCogVideoX", "CogVideoX"),
        "scheduler": scheduler(),
        "text_encoder": t5(),
        "tokenizer": tokenizer(),
    }


def face_parts() -> dict[str, Any]:
    """Components of ``ConsisIDPipeline``."""
    usual = film_parts(df.CogVideoXDPMScheduler)
    return {**usual, "transformer": df.ConsisIDTransformer3DModel(**{**COG, **FACE})}


def view_parts(transformer: Any, scheduler: Any, encoder: Any) -> dict[str, Any]:
    """Components of CogView's pipelines."""
    usual = {"transformer": transformer, "scheduler": scheduler, "text_encoder": encoder}
    return made({**usual, "vae": vae, "tokenizer": tokenizer})


VIEW_4: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 4,
    "num_attention_heads": 4,
    "out_channels": 4,
    "text_embed_dim": 32,
    "time_embed_dim": 8,
    "condition_dim": 4,
}
view_3 = partial(
    view_parts,
    partial(
        df.CogView3PlusTransformer2DModel,
        **{**VIEW_4, "num_layers": 1, "condition_dim": 2, "pos_embed_max_size": 8, "sample_size": 8},
    ),
    df.CogVideoXDDIMScheduler,
    t5,
)


def view_4(channels: int = 4) -> dict[str, Any]:
    """Components of ``CogView4Pipeline``."""
    return view_parts(
        partial(df.CogView4Transformer2DModel, **{**VIEW_4, "in_channels": channels}),
        partial(flow, base_shift=0.25, max_shift=0.75, use_dynamic_shifting=True, time_shift_type="linear"),
        partial(causal, "GlmModel"),
    )


def allegro() -> dict[str, Any]:
    """Components of ``AllegroPipeline``; its autoencoder knows tiles only."""
    film_vae = video_vae("AutoencoderKLAllegro", "Allegro")
    film_vae.enable_tiling()
    film_vae.kernel, film_vae.stride = (8, 16, 16), (8, 8, 8)  # a tile no larger than the film
    return {
        "transformer": df.AllegroTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            cross_attention_dim=24,
            sample_width=8,
            sample_height=8,
            sample_frames=8,
            caption_channels=24,
        ),
        "vae": film_vae,
        "scheduler": df.DDIMScheduler(),
        "text_encoder": t5(24),
        "tokenizer": tokenizer(),
    }


def aura_flow() -> dict[str, Any]:
    """Components of ``AuraFlowPipeline``."""
    return {
        "transformer": df.AuraFlowTransformer2DModel(
            sample_size=32,
            patch_size=2,
            in_channels=4,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_projection_dim=32,
            joint_attention_dim=32,
            out_channels=4,
            pos_embed_max_size=256,
        ),
        "vae": vae(),
        "scheduler": flow(),
        "text_encoder": umt5(),
        "tokenizer": tokenizer(),
    }


def chroma() -> dict[str, Any]:
    """Components of ``ChromaPipeline``."""
    return {
        "transformer": df.ChromaTransformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=[4, 4, 8],
            approximator_hidden_dim=32,
            approximator_layers=1,
            approximator_num_channels=16,
        ),
        "vae": flux_vae(),
        "scheduler": flow(),
        "text_encoder": t5(),
        "tokenizer": tokenizer(),
    }


PICTURE = picture(16)
ROTARY = {"use_rotary_positional_embeddings": True, "in_channels": 8}
CASES = [
    case("CogVideoXPipeline", film_parts, **SCREEN),
    case(
        "CogVideoXFunControlPipeline",
        partial(film_parts, in_channels=8),
        control_video=film(8, 16),
        height=16,
        width=16,
    ),
    case("CogVideoXImageToVideoPipeline", partial(film_parts, in_channels=8), image=PICTURE, **SCREEN),
    case("CogVideoXVideoToVideoPipeline", film_parts, video=film(8, 16), height=16, width=16, strength=0.9),
    case(
        "ConsisIDPipeline",
        face_parts,
        image=PICTURE,
        id_vit_hidden=[levels(1, 2, 2)],
        id_cond=levels(1, 2),
        **SCREEN,
    ),
    case("CogView3PlusPipeline", view_3, height=16, width=16),
    case("CogView4Pipeline", view_4, height=16, width=16),
    case("CogView4ControlPipeline", partial(view_4, 8), control_image=PICTURE, height=16, width=16),
    case("AllegroPipeline", allegro, **SCREEN),
    case("AuraFlowPipeline", aura_flow),
    case("ChromaPipeline", chroma),
    case("ChromaImg2ImgPipeline", chroma, image=picture(32), strength=0.9),
    case("ChromaInpaintPipeline", chroma, image=picture(32), mask_image=mask(), strength=0.9),
]
