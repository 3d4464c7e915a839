"""Tokenizers and processors made on the spot: one token for each letter, one for each special mark."""

from __future__ import annotations

import string

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import CLIPImageProcessor, PreTrainedTokenizerFast

PAD, EOS, BOS, UNKNOWN, MASK = "<pad>", "</s>", "<s>", "<unk>", "<mask>"
SPECIAL = [
    PAD,
    EOS,
    BOS,
    UNKNOWN,
    MASK,
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|image_pad|>", "<|video_pad|>"),
    *(
        "<|vision_start|>",
        "<|vision_end|>",
        "<image>",
        "<start_of_image>",
        "<end_of_image>",
        "<image_soft_token>",
    ),
    *("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<think>", "</think>"),
    *("<start_of_turn>", "<end_of_turn>"),
]
VOCABULARY = [*SPECIAL, *(one for one in string.printable)]
SIZE = 160
"""Rows of an encoder's table of embeddings: the vocabulary, and room for words that a pipeline adds."""

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def number(token: str) -> int:
    """A token's number."""
    return VOCABULARY.index(token)


def tokenizer(
    *,
    begins: bool = False,
    ends: bool = True,
    length: int = 64,
    kind: type = PreTrainedTokenizerFast,
    **more: object,
) -> PreTrainedTokenizerFast:
    """One token per letter.

    Args:
        begins: Starts with a token of its own, as CLIP's does and T5's does not.
        ends: Ends with one.
        length: The longest text, in tokens.
        kind: The class of transformers that wraps it.
        **more: Attributes such as ``padding_side``.
    """
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in SPECIAL])
    pieces = [BOS] * begins + ["$A"] + [EOS] * ends
    pair = [*pieces, "$B", *[EOS] * ends]
    core.post_processor = processors.TemplateProcessing(
        single=" ".join(pieces),
        pair=" ".join(pair),
        special_tokens=[(one, number(one)) for one in (BOS, EOS)],
    )
    return kind(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        unk_token=UNKNOWN,
        mask_token=MASK,
        model_max_length=length,
        chat_template=CHAT,
        **more,
    )


def clip_tokenizer(length: int = 77) -> PreTrainedTokenizerFast:
    """As CLIP's: a token at the start and one at the end."""
    return tokenizer(begins=True, length=length)


def clip_pictures(side: int = 32) -> CLIPImageProcessor:
    """Pictures for a CLIP encoder."""
    return CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
