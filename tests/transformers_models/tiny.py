"""Omni models of transformers, with their real classes and configurations too small to mean anything."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_SECTIONS = {**_ROPE, "mrope_section": [2, 1, 1]}
_TEXT = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_parameters": _SECTIONS,
}
_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
_AUDIO = {
    "num_mel_bins": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "d_model": 32,
    "n_window": 8,
    "output_dim": 32,
}
_MARKS = {
    "audio_token_index": 120,
    "image_token_index": 121,
    "video_token_index": 122,
    "audio_start_token_id": 123,
    "audio_end_token_id": 124,
    "vision_start_token_id": 125,
    "vision_end_token_id": 126,
}


def seeded(model: nn.Module) -> nn.Module:
    """Weights large enough that a wrong one is seen, the same every time; in ``eval`` mode."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


def qwen2_5_omni() -> Any:
    """Thinker, talker and token2wav, with a speaker."""
    from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

    config = Qwen2_5OmniConfig(
        thinker_config={
            "text_config": _TEXT,
            "vision_config": {**_VISION, "fullatt_block_indexes": [0], "window_size": 56},
            "audio_config": _AUDIO,
            **_MARKS,
        },
        talker_config={
            **_TEXT,
            **_MARKS,
            "vocab_size": 64,
            "embedding_size": 32,
            "head_dim": 8,
            "tts_text_start_token_id": 100,
            "tts_text_end_token_id": 101,
            "tts_text_pad_token_id": 102,
            "tts_codec_start_token_id": 61,
            "tts_codec_end_token_id": 62,
            "tts_codec_pad_token_id": 60,
            "tts_codec_mask_token_id": 63,
            "pad_token_id": 60,
        },
        token2wav_config={
            "dit_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "emb_dim": 16,
                "head_dim": 16,
                "look_ahead_layers": [1],
                "look_backward_layers": [0],
                "num_embeds": 65,
                "mel_dim": 16,
                "enc_emb_dim": 16,
                "enc_dim": 16,
                "enc_channels": [16, 16, 16, 16, 48],
                "enc_attention_channels": 8,
                "enc_res2net_scale": 2,
                "enc_se_channels": 8,
            },
            "bigvgan_config": {
                "mel_dim": 16,
                "upsample_initial_channel": 32,
                "upsample_rates": [2, 2],
                "upsample_kernel_sizes": [4, 4],
                "resblock_kernel_sizes": [3],
                "resblock_dilation_sizes": [[1, 3, 5]],
            },
        },
    )
    model = seeded(Qwen2_5OmniForConditionalGeneration(config))
    generator = torch.Generator().manual_seed(1)
    model.speaker_map = {
        "Chelsie": {
            "bos_token": 103,
            "cond": torch.randn(1, 16, generator=generator),
            "ref_mel": torch.randn(1, 24, 16, generator=generator),
        }
    }
    return model


def qwen3_omni() -> Any:
    """Thinker and talker with experts, a code predictor and code2wav."""
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

    marks = {"audio_token_id": 120, "image_token_id": 121, "video_token_id": 122, "audio_start_token_id": 123}
    marks |= {"vision_start_token_id": 125}
    experts = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "num_experts": 4}
    predictor = {**_TEXT, "rope_parameters": _ROPE, "vocab_size": 32, "head_dim": 8, "num_code_groups": 4}
    config = Qwen3OmniMoeConfig(
        thinker_config={
            "text_config": {**_TEXT, **experts},
            "vision_config": {**_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            "audio_config": {**_AUDIO, "downsample_hidden_size": 8, "n_window_infer": 16},
            **marks,
        },
        talker_config={
            "text_config": {
                **_TEXT,
                **experts,
                "vocab_size": 1100,  # the last 1,024 are suppressed by `generate`
                "head_dim": 8,
                "shared_expert_intermediate_size": 16,
            },
            "code_predictor_config": predictor,
            "num_code_groups": 4,
            "thinker_hidden_size": 32,
            "accept_hidden_layer": 1,
            "codec_eos_token_id": 70,
            "codec_nothink_id": 71,
            "codec_think_bos_id": 72,
            "codec_think_eos_id": 73,
            "codec_pad_id": 74,
            "codec_bos_id": 75,
            "speaker_id": {"ethan": 30},
            "spatial_merge_size": 2,
            **marks,
        },
        code2wav_config={
            "codebook_size": 1100,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_quantizers": 4,
            "upsample_rates": [2, 2],
            "upsampling_ratios": [2],
            "decoder_dim": 16,
            "rope_parameters": _ROPE,
        },
        im_start_token_id=110,
        im_end_token_id=111,
        tts_pad_token_id=112,
        tts_bos_token_id=113,
        tts_eos_token_id=114,
        system_token_id=115,
        user_token_id=116,
        assistant_token_id=117,
    )
    model = seeded(Qwen3OmniMoeForConditionalGeneration(config))
    # Grouped products want a histogram, which only CUDA has for integers.
    model.set_experts_implementation("eager")
    return model


def janus() -> Any:
    """A vision model, a language model and a VQ-VAE."""
    from transformers import JanusConfig, JanusForConditionalGeneration

    config = JanusConfig(
        text_config={
            **{key: value for key, value in _TEXT.items() if key != "rope_parameters"},
            "model_type": "llama",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        vision_config={
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
            "projection_dim": 32,
            "num_image_tokens": 16,
        },
        vq_config={
            "num_embeddings": 64,
            "latent_channels": 8,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "num_patches": 4,
            "projection_dim": 32,
            "image_token_embed_dim": 32,
        },
        image_token_id=120,
    )
    model = seeded(JanusForConditionalGeneration(config))
    model.generation_config.generation_kwargs = {"boi_token_id": 3}
    return model
