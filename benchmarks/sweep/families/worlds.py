"""Worlds and molecules: Sana-WM and its refiner, RFD4-Proteina.

Sizes: diffusers' tests/pipelines/{sana_wm,rfd4_proteina}, and otherwise what satisfies the class.
"""

from __future__ import annotations

from typing import Any

import diffusers as df
import torch
from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMLTX2RefinerTransformer3DModel

from ..case import case
from ..encoders import causal
from ..images import flow
from ..inputs import noise, picture
from ..tokens import tokenizer
from .ltx2 import film_vae, ltx2


def sana_wm() -> dict[str, Any]:
    """Sana-WM: a film from a picture and a camera's way."""
    return {
        "tokenizer": tokenizer(begins=True, ends=False, length=512),
        "text_encoder": causal(
            "Gemma2ForCausalLM", 8, layers=1, heads=2, head_dim=16, attn_implementation="eager"
        ),
        "vae": film_vae(),
        "transformer": df.SanaWMTransformer3DModel(
            in_channels=4,
            num_layers=2,
            hidden_size=32,
            num_attention_heads=2,
            softmax_every_n=2,
            linear_head_dim=16,
            chunk_plucker_channels=12,  # six numbers a ray, two frames in one
            chunk_plucker_post_attn_blocks=2,
            caption_channels=8,
        ),
        "scheduler": flow(),
    }


def sana_refiner() -> dict[str, Any]:
    """Its second stage, which is LTX-2's transformer block by block."""
    parts = ltx2()
    shape = dict(parts["transformer"].config)
    shape = {name: one for name, one in shape.items() if not name.startswith("_")}
    kept = ("vae", "scheduler", "text_encoder", "tokenizer", "connectors")
    return {
        **{name: parts[name] for name in kept},
        "transformer": SanaWMLTX2RefinerTransformer3DModel(**shape),
        "text_max_sequence_length": 16,
    }


RESIDUES, KINDS, TOKENS = 8, 7, 6


def proteina() -> dict[str, Any]:
    """RFD4-Proteina: a backbone and latents of its atoms."""
    shape: dict[str, Any] = {"nlayers": 2, "token_dim": 32, "nheads": 2, "dim_cond": 16, "latent_dim": 4}
    scheduler = {"noise_mode": "1/t", "tsr_k": 1.2, "tsr_sigma": 0.5, "tail_steps": 0}
    return {
        "transformer": df.RFD4ProteinaTransformer(
            **shape,
            pair_repr_dim=16,
            token_type_emb_dim=8,
            cath_emb_dim=4,
            t_emb_dim=16,
            seq_sep_dim=8,
            feats_seq=("xt_bb_ca", "xt_local_latents", "token_type"),
            feats_pair_repr=("xt_bb_ca_pair_dists", "molecule_idx_pair"),
            tri_mult_c=16,
            num_sequence_classes=RESIDUES,
        ),
        "vae": df.RFD4ProteinaAutoencoder(
            **shape,
            atom37_mask=[[True] * 37] * RESIDUES,
            allowed_residue_types=[[True] * RESIDUES] * KINDS,
            n_residue_types=RESIDUES,
            pair_repr_dim=16,
            token_type_emb_dim=8,
            encoder_feats_seq=("token_type", "x1_a37coors_nm", "x1_a37coors_nm_rel"),
        ),
        "bb_ca_scheduler": df.RFD4ProteinaScheduler(schedule_mode="log", **scheduler),
        "local_latents_scheduler": df.RFD4ProteinaScheduler(schedule_mode="power", **scheduler),
        "recycle_depths": [2, 1],
    }


def every(value: Any) -> torch.Tensor:
    """One value for each token of the one molecule."""
    return torch.full((1, TOKENS), value)


CASES = [
    case(
        "SanaWMPipeline",
        sana_wm,
        image=picture(32),
        action="w-4",
        intrinsics=[30.0, 30.0, 16.0, 16.0],
        num_frames=5,
        chi_prompt=["a"],
    ),
    case("SanaWMLTX2Refiner", sana_refiner, sana_latent=noise(1, 4, 3, 16, 16), fps=25.0),
    case(
        "RFD4ProteinaPipeline",
        proteina,
        padding_mask=every(True),
        is_in_context_conditioning=every(False),
        supports_local_latent=every(True),
        token_type=every(0),
        atom37_mask=torch.ones(1, TOKENS, 37, dtype=torch.bool),
        coords_nm=noise(1, TOKENS, 37, 3),
        conditioning_features={"condition_sequence_1_residue": every(0), "molecule_iid": every(0)},
        partial_t_bb_ca=0.2,
        partial_t_local_latents=0.2,
    ),
]
