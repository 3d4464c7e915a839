"""The pipelines of ``generation.py``: real classes as deep as the published models, narrow, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import diffusers as df
import torch

from benchmarks.sweep.encoders import clip, t5, umt5
from benchmarks.sweep.images import flow, vae16
from benchmarks.sweep.inputs import seeded
from benchmarks.sweep.tokens import clip_tokenizer, tokenizer
from omni_components import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a pipeline is made.

    Attributes:
        unit: The width that all others are multiples of.
        deep: Layers are those of the published model divided by this.
    """

    unit: int = 64
    deep: int = 1

    def layers(self, published: int) -> int:
        """Layers of a component."""
        return max(2, published // self.deep)


QUICK = Size(unit=16, deep=6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A pipeline, one request, and what the link must carry.

    Attributes:
        build: Makes the pipeline, with the same weights each time.
        arguments: Of a request; two prompts are read, and each step is guided.
        options: For ``offload()``.
        at_enable: Components that are loaded by enabling, and stay.
        per_prompt: Components that travel for each of the two prompts anew.
        why: Why they do.
    """

    build: Callable[[], Any]
    arguments: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    at_enable: frozenset[str] = frozenset()
    per_prompt: frozenset[str] = frozenset()
    why: str = ""

    def request(self, pipeline: Any) -> torch.Tensor:
        """One generation; noise is drawn on the host, so that it is the same wherever the pipeline computes."""
        return pipeline(**self.arguments, generator=seeded(), output_type="pt")[0].cpu()


# --- the pipelines ---------------------------------------------------------------------------------------


def _ready(pipeline: Any) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def wan(size: Size) -> Any:
    """Wan 2.2 A14B: 24 layers of UMT5, twice 40 of the transformer, one for high noise and one for low."""
    torch.manual_seed(1)
    width = 3 * size.unit
    transformers = [
        df.WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=3,
            attention_head_dim=size.unit,
            in_channels=16,
            out_channels=16,
            text_dim=width,
            freq_dim=256,
            ffn_dim=8 * size.unit,
            num_layers=size.layers(40),
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=32,
        ).eval()
        for _ in range(2)
    ]
    text = umt5(width, num_layers=size.layers(24), num_heads=4, d_kv=size.unit, d_ff=8 * size.unit)
    vae = df.AutoencoderKLWan(base_dim=size.unit // 4, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=1)
    return _ready(
        df.WanPipeline(
            tokenizer=tokenizer(length=16),
            text_encoder=text.eval(),
            vae=vae.eval(),
            scheduler=flow(shift=3.0),
            transformer=transformers[0],
            transformer_2=transformers[1],
            boundary_ratio=0.875,
        )
    )


def stable_diffusion_3(size: Size, *, transformer: int, t5_width: int) -> Any:
    """Stable Diffusion 3: 12 and 32 layers of CLIP, 24 of T5, and a transformer of so many."""
    torch.manual_seed(2)
    unit = size.unit
    heads = {"intermediate_size": 6 * unit, "num_attention_heads": 2, "max_position_embeddings": 16}
    projected = {"projected": True, "projection": unit, **heads}
    encoder, encoder_2 = (
        clip(3 * unit // 2, num_hidden_layers=size.layers(layers), **projected) for layers in (12, 32)
    )
    text = t5(t5_width, num_layers=size.layers(24), num_heads=4, d_kv=unit, d_ff=8 * unit)
    return _ready(
        df.StableDiffusion3Pipeline(
            transformer=df.SD3Transformer2DModel(
                sample_size=8,
                patch_size=2,
                in_channels=16,
                out_channels=16,
                num_layers=size.layers(transformer),
                attention_head_dim=unit,
                num_attention_heads=2,
                joint_attention_dim=t5_width,
                caption_projection_dim=2 * unit,
                pooled_projection_dim=2 * unit,
                pos_embed_max_size=16,
            ).eval(),
            scheduler=flow(shift=3.0),
            vae=vae16(widths=(unit, 2 * unit)).eval(),
            text_encoder=encoder.eval(),
            tokenizer=clip_tokenizer(16),
            text_encoder_2=encoder_2.eval(),
            tokenizer_2=clip_tokenizer(16),
            text_encoder_3=text.eval(),
            tokenizer_3=tokenizer(length=16),
        )
    )


ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
TOGETHER = Recipe(encoder_modules=ENCODERS, dit_modules=("transformer",), vae_modules=("vae",))


def cases(size: Size) -> dict[str, Case]:
    """By name."""
    text = {"prompt": "a lighthouse", "negative_prompt": "fog", "max_sequence_length": 16}
    film = {**text, "num_frames": 5, "num_inference_steps": 4, "height": 16, "width": 16}
    picture = {**text, "num_inference_steps": 4, "height": 16, "width": 16}
    large = partial(stable_diffusion_3, size, transformer=38, t5_width=3 * size.unit)
    medium = partial(stable_diffusion_3, size, transformer=24, t5_width=8 * size.unit)
    return {
        "wan_two_transformers": Case(build=partial(wan, size), arguments=film),
        "sd3_three_encoders": Case(build=large, arguments=picture),
        "sd3_t5_largest_declared": Case(
            build=medium, arguments=picture, options={"recipe": TOGETHER}, at_enable=frozenset({"vae"})
        ),
        "sd3_t5_largest": Case(
            build=medium,
            arguments=picture,
            per_prompt=frozenset(ENCODERS[:2]),
            why="T5 is the largest component, so that the encoders do not fit together into the room of one.",
        ),
    }
