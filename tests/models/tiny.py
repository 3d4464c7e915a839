"""Cosmos3 with random weights: diffusers' own classes, small, and a tokenizer made on the spot."""

from __future__ import annotations

import string
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import AutoencoderKLWan, Cosmos3OmniPipeline, UniPCMultistepScheduler
from diffusers.models.autoencoders.autoencoder_cosmos3_audio import Cosmos3AVAEAudioTokenizer
from diffusers.models.transformers.transformer_cosmos3 import Cosmos3OmniTransformer
from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import CosmosActionCondition
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from omni_components.models.cosmos3 import Cosmos3SplitTransformer

SPECIAL = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"]
VOCABULARY = [*SPECIAL, *string.printable]
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }} {{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
STEPS = 10
SIZE = 64  # pixels

# The two backbones that diffusers' class knows: Qwen3 and Nemotron, the latter with keys normed for the generator.
BACKBONES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "nemotron": {"hidden_act": "relu2", "qk_norm_for_text": False, "use_und_k_norm_for_gen": True},
}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<|vision_start|>"],
    )
    made.chat_template = CHAT
    return made


def transformer(
    kind: type = Cosmos3OmniTransformer, *, width: int = 128, layers: int = 3, **more: Any
) -> Any:
    """A joint or a split transformer that makes pictures, sound and actions; no two norms alike."""
    settings: dict[str, Any] = {
        "hidden_size": width,
        "head_dim": 32,
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 64,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "latent_channel": 16,
        "latent_patch_size": 2,
        "patch_latent_dim": 64,
        "rope_axes_dim": [6, 5, 5],
        "vocab_size": len(VOCABULARY),
        "sound_gen": True,
        "sound_dim": 8,
        "sound_latent_fps": 25.0,
        "action_gen": True,
        "action_dim": 12,
    }
    made = kind(**{**settings, **more}).eval().requires_grad_(False)
    for name, one in made.named_parameters():
        if "norm" in name or "modality_embed" in name:
            one.add_(0.2 * torch.randn_like(one))
    return made


def vae() -> AutoencoderKLWan:
    """Of Wan 2.2's kind, which Cosmos3 uses: 16 pixels a latent."""
    return AutoencoderKLWan(
        base_dim=4,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    ).eval()


def sound_tokenizer() -> Cosmos3AVAEAudioTokenizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # diffusers uses torch's old weight_norm
        return Cosmos3AVAEAudioTokenizer(
            sampling_rate=800,
            vocoder_input_dim=8,
            dec_dim=8,
            dec_c_mults=(1, 2),
            dec_strides=(4, 8),
            enc_dim=8,
            enc_num_blocks=1,
            enc_latent_dim=16,
            enc_c_mults=(1, 2),
            enc_strides=(4, 8),
            enc_n_fft=8,
            enc_hop_length=4,
        ).eval()


def pipeline(kind: type = Cosmos3OmniPipeline, *, split: bool = False, **more: Any) -> Any:
    """A pipeline; the same weights each time.

    Args:
        kind: Its class; ``Cosmos3SplitPipeline`` splits the transformer itself.
        split: Its transformer is split.
        **more: For the transformer's configuration.
    """
    torch.manual_seed(1)
    joint = transformer(**more)
    made = kind(
        transformer=Cosmos3SplitTransformer.from_joint(joint) if split else joint,
        text_tokenizer=tokenizer(),
        vae=vae().requires_grad_(False),
        scheduler=UniPCMultistepScheduler(
            use_flow_sigmas=True, flow_shift=3.0, prediction_type="flow_prediction"
        ),
        sound_tokenizer=sound_tokenizer().requires_grad_(False),
        enable_safety_checker=False,
    )
    made.set_progress_bar_config(disable=True)
    return made


@dataclass(frozen=True, slots=True)
class Outputs:
    """Everything that a request gives, on the host."""

    latents: torch.Tensor
    sound: torch.Tensor | None = None
    action: list[torch.Tensor] | None = None
    steps: list[torch.Tensor] = field(default_factory=list)

    def tensors(self) -> list[torch.Tensor]:
        found = [self.latents, *self.steps, *(self.action or [])]
        return found + ([self.sound] if self.sound is not None else [])

    def same(self, other: Outputs) -> bool:
        """Bit for bit."""
        pairs = zip(self.tensors(), other.tensors(), strict=True)
        return all(torch.equal(mine, theirs) for mine, theirs in pairs)

    def distance(self, other: Outputs) -> float:
        """The largest difference of any element."""
        pairs = zip(self.tensors(), other.tensors(), strict=True)
        return max(float((mine.float() - theirs.float()).abs().max()) for mine, theirs in pairs)


def noise(*shape: int) -> torch.Tensor:
    """The same values each time."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(3))


def _clip(frames: int) -> torch.Tensor:
    return noise(frames, 3, SIZE, SIZE)


def _action(mode: str, **more: Any) -> dict[str, Any]:
    return {
        "action": CosmosActionCondition(
            mode=mode, chunk_size=4, domain_name="umi", resolution_tier=256, **more
        )
    }


_PIXELS = {"height": SIZE, "width": SIZE}
# What diffusers' class can be asked for, by its arguments.
MODALITIES: dict[str, dict[str, Any]] = {
    "text-to-image": {**_PIXELS, "num_frames": 1},
    "text-to-video": {**_PIXELS, "num_frames": 5},
    "image-to-video": {**_PIXELS, "num_frames": 5, "image": noise(3, SIZE, SIZE)},
    "video-to-video": {
        **_PIXELS,
        "num_frames": 9,
        "video": _clip(9),
        "condition_frame_indexes_vision": [0, 1],
    },
    "text-to-video with sound": {**_PIXELS, "num_frames": 5, "enable_sound": True},
    "image-to-video with sound": {
        **_PIXELS,
        "num_frames": 5,
        "image": noise(3, SIZE, SIZE),
        "enable_sound": True,
    },
    "policy": _action("policy", image=noise(3, SIZE, SIZE)),
    "forward dynamics": _action("forward_dynamics", image=noise(3, SIZE, SIZE), raw_actions=noise(4, 10)),
    "inverse dynamics": _action("inverse_dynamics", video=_clip(5)),
}


def request(pipe: Any, modality: str = "text-to-image", **more: Any) -> Outputs:
    """One request; ``guided_steps`` switches guidance off after so many steps."""
    steps: list[torch.Tensor] = []
    guided = more.pop("guided_steps", None)

    def after(pipe: Any, step: int, time: Any, state: dict[str, Any]) -> dict[str, Any]:
        steps.append(state["latents"].cpu().clone())
        if guided is not None and step + 1 >= guided:
            pipe._guidance_scale = 1.0
        return {}

    settings = {
        "prompt": "A lighthouse in the rain.",
        "negative_prompt": "blurry",
        "num_inference_steps": STEPS,
        "guidance_scale": 4.0,
        "generator": torch.Generator().manual_seed(7),
        "output_type": "latent",
        "use_system_prompt": False,
        "callback_on_step_end": after,
        **MODALITIES[modality],
        **more,
    }
    made = pipe(**settings)
    sound = made.sound.cpu() if made.sound is not None else None
    return Outputs(torch.as_tensor(made.video).cpu(), sound, made.action, steps)


def call(
    text: int = 12, grid: tuple[int, int, int] = (1, 4, 4), *, ids: torch.Tensor | None = None
) -> dict[str, Any]:
    """Arguments of one call of the transformer, in its order: so much text, and one picture of patches."""
    generator = torch.Generator().manual_seed(5)
    if ids is None:
        ids = torch.randint(len(VOCABULARY), (text,), generator=generator)
    text, tokens = len(ids), grid[0] * grid[1] * grid[2]
    axes = torch.cartesian_prod(*(torch.arange(one) for one in grid)).T + torch.tensor([[text], [0], [0]])
    pictures = torch.arange(text, text + tokens)
    return {
        "input_ids": ids,
        "text_indexes": torch.arange(text),
        "position_ids": torch.cat([torch.arange(text).expand(3, -1), axes], dim=1),
        "und_len": text,
        "sequence_length": text + tokens,
        "vision_tokens": [torch.randn(1, 16, grid[0], 2 * grid[1], 2 * grid[2], generator=generator)],
        "vision_token_shapes": [grid],
        "vision_sequence_indexes": pictures,
        "vision_mse_loss_indexes": pictures,
        "vision_timesteps": torch.full((tokens,), 500.0),
        "vision_noisy_frame_indexes": [torch.arange(grid[0])],
    }
