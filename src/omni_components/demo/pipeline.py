"""The demo's pipeline: prompt -> text encoder -> reasoner -> generator -> VAE -> picture.

It is written as a user of `omni_components` would write it: a plain module, four lists that name its
components, and nothing about devices but the one question where to put its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from omni_components.demo.config import DemoConfig
from omni_components.demo.render import render_digits
from omni_components.demo.text import Phrase, encode_words, parse_prompt
from omni_components.demo.text_encoder import DemoTextEncoder
from omni_components.demo.transformer import DemoTransformer, PromptMemory
from omni_components.demo.vae import DemoVae
from omni_components.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from PIL import Image

WEIGHTS = Path(__file__).parent / "weights"


@dataclass(frozen=True, slots=True)
class DemoOutput:
    """What a call of the pipeline gives.

    Attributes:
        images: one picture per prompt, each digit a tile of it.
        phrases: what each prompt was read as.
        ink: the decoded digits of all prompts in order, (N, 16, 16) in 0..1, on the CPU.
    """

    images: list[Image.Image]
    phrases: list[tuple[Phrase, ...]]
    ink: Tensor


class DemoPipeline(nn.Module):
    """Draws the digits that a prompt names."""

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vae"]
    _resident_modules: ClassVar[list[str]] = []

    def __init__(self, text_encoder: DemoTextEncoder, transformer: DemoTransformer, vae: DemoVae) -> None:
        super().__init__()
        self.text_encoder = text_encoder
        self.transformer = transformer
        self.vae = vae

    @classmethod
    def from_config(cls, config: DemoConfig) -> DemoPipeline:
        """An untrained pipeline, for training or for shapes alone."""
        return cls(
            DemoTextEncoder(config.text_encoder),
            DemoTransformer(config.transformer),
            DemoVae(config.vae),
        )

    @classmethod
    def from_pretrained(cls, path: str | Path | None = None, *, mapped: bool = False) -> DemoPipeline:
        """Load trained weights, ready for inference on the CPU.

        Args:
            path: a folder with `config.json` and one `.safetensors` file per network; default, the one in the
                package.
            mapped: leave the weights in their files, mapped and read as they are used, with no private copy.
        """
        folder = WEIGHTS if path is None else Path(path)
        with torch.device("meta"):  # nothing is drawn or allocated that the files are about to replace
            pipeline = cls.from_config(DemoConfig.load(folder))
        for name, module in pipeline.named_children():
            _assign_weights(module, folder / f"{name}.safetensors", mapped=mapped)
        return pipeline.requires_grad_(False).eval()

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str],
        *,
        steps: int = 24,
        seed: int = 0,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        guidance_scale: float = 2.5,
        callback: Callable[[int, int], None] | None = None,
    ) -> DemoOutput:
        """Draw one picture per prompt.

        Args:
            prompt: one prompt or several; see `omni_components.demo.text` for the words.
            steps: denoising steps, at least 1; 16 to 32 are good.
            seed: fixes the noise, and so the picture; on another device it is the same to rounding.
            generator: draws the noise in place of `seed`, on the CPU; several are one per prompt, so that each
                picture is the one that its prompt and its generator give alone, to rounding.
            guidance_scale: 1 follows the prompt as trained, more follows it harder.
            callback: called after each step with the steps done and the steps in all.

        Raises:
            PromptError: a prompt is empty or holds a word that is not known.
            ValueError: `steps` is below 1, there is no prompt, or not one generator per prompt.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        if steps < 1 or not prompts:
            raise ValueError(f"{steps} steps for {len(prompts)} prompts; at least one of each is needed")
        phrases = [parse_prompt(text) for text in prompts]
        digits = [phrase for line in phrases for phrase in line]
        if generator is None:
            generator = torch.Generator("cpu").manual_seed(seed)
        noise = self._draw_noise([len(line) for line in phrases], generator)
        latents = self._denoise(self._read(digits), noise, steps, guidance_scale, callback)
        ink = self.vae.decode(latents)[:, 0].cpu()
        pictures = [render_digits(part) for part in torch.split(ink, [len(line) for line in phrases])]
        return DemoOutput(images=pictures, phrases=phrases, ink=ink)

    def _device(self) -> torch.device:
        # Under offload any component may be away: the marker on the transformer answers, as in diffusers' pipelines.
        marker = getattr(self.transformer, "_hf_hook", None)
        return self.vae.latent_mean.device if marker is None else torch.device(marker.execution_device)

    def _draw_noise(
        self, counts: Sequence[int], generator: torch.Generator | Sequence[torch.Generator]
    ) -> Tensor:
        # On the CPU, so that a seed means the same noise on every device.
        if isinstance(generator, torch.Generator):
            counts, generator = [sum(counts)], [generator]
        if len(generator) != len(counts):
            raise PolicyError(
                "generator", f"a list of {len(generator)}", f"one, or one for each of {len(counts)} prompts"
            )
        shape = self.transformer.latent_shape
        noise = [
            torch.randn((count, *shape), generator=one, device="cpu")
            for count, one in zip(counts, generator, strict=True)
        ]
        return torch.cat(noise).to(self._device())

    def _read(self, digits: Sequence[Phrase]) -> PromptMemory:
        """One text encoder phase and one reasoner phase, for all digits and, last, the empty prompt."""
        ids = torch.tensor([encode_words(phrase.words) for phrase in digits] + [encode_words(())])
        ids, mask = ids.to(self._device()), (ids != 0).to(self._device())
        return self.transformer.prefill(self.text_encoder(ids, mask), mask)

    def _denoise(
        self,
        memory: PromptMemory,
        latents: Tensor,
        steps: int,
        guidance_scale: float,
        callback: Callable[[int, int], None] | None,
    ) -> Tensor:
        """Follow the flow from noise to latents, in `steps` Euler steps of the guided velocity."""
        count, device = len(latents), latents.device
        conditional = torch.arange(count, device=device)
        both = memory.rows(torch.cat([conditional, torch.full_like(conditional, count)]))
        times = torch.linspace(1, 0, steps + 1).tolist()
        with self.transformer.generating():
            for step, (now, after) in enumerate(pairwise(times), start=1):
                time = torch.full((2 * count,), now, device=device)
                velocity = self.transformer(torch.cat([latents, latents]), time, both)
                guided, free = velocity.chunk(2)
                latents = latents + (after - now) * (free + guidance_scale * (guided - free))
                if callback is not None:
                    callback(step, steps)
        return latents


def _assign_weights(module: nn.Module, file: Path, *, mapped: bool) -> None:
    tensors = load_file(file)  # maps the file: no byte is read before its first use
    if not mapped:
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    module.load_state_dict(tensors, assign=True)
