"""Tiny encoders of text and pictures, by the classes of transformers."""

from __future__ import annotations

from typing import Any

import transformers as tf

from . import tokens

WIDTH = 32


def clip(width: int = WIDTH, *, projected: bool = False, projection: int | None = None, **more: Any) -> Any:
    """CLIP's text encoder."""
    shape: dict[str, Any] = {
        "vocab_size": tokens.SIZE,
        "hidden_size": width,
        "intermediate_size": 37,
        "projection_dim": projection or width,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "max_position_embeddings": 77,
        "bos_token_id": tokens.number(tokens.BOS),
        "eos_token_id": tokens.number(tokens.EOS),
        "pad_token_id": tokens.number(tokens.PAD),
    }
    kind = tf.CLIPTextModelWithProjection if projected else tf.CLIPTextModel
    return kind(tf.CLIPTextConfig(**{**shape, **more}))


def clip_vision(
    width: int = WIDTH, *, projected: bool = True, projection: int | None = None, **more: Any
) -> Any:
    """CLIP's picture encoder."""
    shape: dict[str, Any] = {
        "hidden_size": width,
        "image_size": 32,
        "projection_dim": projection or width,
        "intermediate_size": 37,
        "num_attention_heads": 4,
        "num_channels": 3,
        "num_hidden_layers": 5,
        "patch_size": 8,
    }
    kind = tf.CLIPVisionModelWithProjection if projected else tf.CLIPVisionModel
    return kind(tf.CLIPVisionConfig(**{**shape, **more}))


def _t5_shape(width: int) -> dict[str, Any]:
    return {
        "vocab_size": tokens.SIZE,
        "d_model": width,
        "d_kv": 8,
        "d_ff": 37,
        "num_layers": 5,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
        "pad_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
    }


def t5(width: int = WIDTH, **more: Any) -> Any:
    """T5's encoder."""
    return tf.T5EncoderModel(tf.T5Config(**{**_t5_shape(width), **more}))


def umt5(width: int = WIDTH, **more: Any) -> Any:
    """UMT5's encoder."""
    return tf.UMT5EncoderModel(tf.UMT5Config(**{**_t5_shape(width), **more}))


def _causal_shape(width: int, layers: int = 2, heads: int = 4) -> dict[str, Any]:
    return {
        "vocab_size": tokens.SIZE,
        "hidden_size": width,
        "intermediate_size": 37,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": width // heads,
        "max_position_embeddings": 2048,
        "bos_token_id": tokens.number(tokens.BOS),
        "eos_token_id": tokens.number(tokens.EOS),
        "pad_token_id": tokens.number(tokens.PAD),
    }


def causal(kind: str, width: int = WIDTH, *, layers: int = 2, heads: int = 4, **more: Any) -> Any:
    """A decoder of transformers by its class's name, such as ``Qwen2Model``, ``LlamaForCausalLM``."""
    model = getattr(tf, kind)
    return model(model.config_class(**{**_causal_shape(width, layers, heads), **more}))


def qwen_vl(
    width: int = 16, *, kind: str = "Qwen2_5_VLForConditionalGeneration", layers: int = 2, **more: Any
) -> Any:
    """Qwen2.5-VL, which pipelines use to read prompts and pictures."""
    config = tf.Qwen2_5_VLConfig(
        text_config={
            **_causal_shape(width, layers),
            "rope_parameters": {
                "mrope_section": [1, 1, 2] if width >= 32 else [1, 1, 0],
                "rope_type": "default",
                "type": "default",
                "rope_theta": 1000000.0,
            },
            **more,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": width,
            "fullatt_block_indexes": [0],
        },
        image_token_id=tokens.number("<|image_pad|>"),
        video_token_id=tokens.number("<|video_pad|>"),
        vision_start_token_id=tokens.number("<|vision_start|>"),
        vision_end_token_id=tokens.number("<|vision_end|>"),
    )
    return getattr(tf, kind)(config)


class PicturesAndText(tf.Qwen2VLProcessor):
    """The processor of Qwen2-VL without films, for which its constructor would ask for torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor, self.tokenizer, self.video_processor = image_processor, tokenizer, None
        self.chat_template = tokens.CHAT
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokens.number(self.image_token)
        self.video_token_id = tokens.number(self.video_token)
        self.image_ids, self.video_ids = [self.image_token_id], [self.video_token_id]


def qwen_vl_processor(length: int = 1024, patch: int = 14, **more: Any) -> Any:
    """A processor for ``qwen_vl``."""
    side = 2 * patch
    size = {"shortest_edge": side * side, "longest_edge": 4 * side * side}
    pictures = tf.Qwen2VLImageProcessor(size=size, patch_size=patch, merge_size=2, temporal_patch_size=2)
    return PicturesAndText(pictures, tokens.tokenizer(length=length, ends=False, **more))


def qwen3_vl(
    width: int = 16, *, kind: str = "Qwen3VLForConditionalGeneration", layers: int = 2, **more: Any
) -> Any:
    """Qwen3-VL."""
    config = tf.Qwen3VLConfig(
        text_config={
            **_causal_shape(width, layers),
            "head_dim": 8,
            "rope_parameters": {
                "mrope_section": [2, 1, 1],
                "rope_type": "default",
                "rope_theta": 1000000.0,
                "mrope_interleaved": True,
            },
            **more,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "patch_size": 16,
            "out_hidden_size": width,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=tokens.number("<|image_pad|>"),
        video_token_id=tokens.number("<|video_pad|>"),
        vision_start_token_id=tokens.number("<|vision_start|>"),
        vision_end_token_id=tokens.number("<|vision_end|>"),
    )
    return getattr(tf, kind)(config)


def siglip(width: int = WIDTH, *, side: int = 32, **more: Any) -> Any:
    """SigLIP's picture encoder."""
    shape: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 37,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": side,
        "patch_size": 8,
    }
    return tf.SiglipVisionModel(tf.SiglipVisionConfig(**{**shape, **more}))


def siglip_pictures(side: int = 32) -> Any:
    """Pictures for it."""
    return tf.SiglipImageProcessor(size={"height": side, "width": side})


def bert(width: int = WIDTH) -> Any:
    """BERT."""
    return tf.BertModel(
        tf.BertConfig(
            vocab_size=tokens.SIZE,
            hidden_size=width,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=37,
            max_position_embeddings=128,
        )
    )
