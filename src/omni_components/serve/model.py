"""The model that is served: what it accepts, and how several pictures are drawn at once."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..demo import DemoPipeline, PromptError, parse_prompt
from ..errors import ModelError
from .errors import refused
from .jobs import Sampling
from .needs import ALWAYS_GIVEN, in_python, unmet
from .pictures import fitted, pictures_of

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..omni import Omni

_STEPS = ("num_inference_steps", "steps")  # as diffusers' pipelines call them, and the demo
_VIDEO = ("num_frames", "video_length")  # with one frame, a pipeline for video makes a picture


class PictureModel:
    """An ``Omni`` that makes pictures.

    Args:
        omni: The model.
        name: Its id for clients; ``None`` takes the model's own.

    Raises:
        ModelError: It makes no pictures, or not from what a request holds.
    """

    def __init__(self, omni: Omni, name: str | None = None) -> None:
        self.omni = omni
        self.name = name or _plain_name(omni.model)
        if any("audio" in one for one in omni.sampling_arguments) and not self._given(_VIDEO):
            raise ModelError(omni.model, "makes sound, not pictures.", "Use `omni-components run`.")
        self._refuse_other_needs()
        if not omni.accepts("generator"):
            problem = "takes no generator, so that no seed could give a picture again."
            raise ModelError(omni.model, problem, "Serve another pipeline.")
        if hasattr(omni.pipeline, "set_progress_bar_config"):
            omni.pipeline.set_progress_bar_config(disable=True)

    def _refuse_other_needs(self) -> None:
        kind = type(self.omni.pipeline)
        missing = unmet(kind, (*ALWAYS_GIVEN, *_VIDEO))
        if missing:
            problem = f"needs {' and '.join(missing)}, which the endpoint has no field for."
            advice = f"Serve a pipeline that draws from a prompt alone, or use Python: {in_python(missing)}."
            raise ModelError(self.omni.model, problem, advice)
        if "prompt" not in inspect.signature(kind.__call__).parameters:
            raise ModelError(
                self.omni.model, "takes no prompt.", "Serve a pipeline that draws what one says."
            )

    def check(self, prompt: str, sampling: Sampling) -> None:
        """Refuse what this model cannot do, before it waits in a queue.

        Raises:
            ApiError: 400; it says which field.
        """
        if sampling.steps is not None and self._given(_STEPS) is None:
            raise refused(f"{self.name} chooses its steps itself.", "num_inference_steps")
        for field in ("guidance_scale", "negative_prompt"):
            if getattr(sampling, field) is not None and not self.omni.accepts(field):
                raise refused(f"{self.name} takes no {field}.", field)
        if isinstance(self.omni.pipeline, DemoPipeline):
            try:
                parse_prompt(prompt)
            except PromptError as error:
                raise refused(str(error), "prompt") from error

    def draw(
        self,
        wanted: Sequence[tuple[str, int]],
        sampling: Sampling,
        on_step: Callable[[int, int], None],
    ) -> list[Image]:
        """One picture per prompt and seed, all of them together.

        Each is the picture that its prompt and seed give alone, to rounding.
        """
        arguments = self._arguments(sampling, len(wanted))
        if len(wanted) == 1:
            [(prompt, seed)] = wanted
            output = self.omni.generate(prompt, seed=seed, on_step=on_step, **arguments)
        else:
            prompts, seeds = [prompt for prompt, _ in wanted], [seed for _, seed in wanted]
            output = self.omni.generate(prompts, seed=seeds, on_step=on_step, **arguments)
        pictures = pictures_of(output)
        if sampling.size is not None and not self._draws_to_size():
            pictures = [fitted(one, sampling.size) for one in pictures]
        return pictures

    def _arguments(self, sampling: Sampling, count: int) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        steps, frames = self._given(_STEPS), self._given(_VIDEO)
        if sampling.steps is not None and steps is not None:
            arguments[steps] = sampling.steps
        if sampling.size is not None and self._draws_to_size():
            arguments["width"], arguments["height"] = sampling.size
        if sampling.guidance_scale is not None:
            arguments["guidance_scale"] = sampling.guidance_scale
        if sampling.negative_prompt is not None:
            negative = sampling.negative_prompt
            arguments["negative_prompt"] = negative if count == 1 else [negative] * count
        if frames is not None:
            arguments[frames] = 1
        if self.omni.accepts("output_type"):
            arguments["output_type"] = "pil"
        return arguments

    def _draws_to_size(self) -> bool:
        return self.omni.accepts("width") and self.omni.accepts("height")

    def _given(self, names: Sequence[str]) -> str | None:
        return next((one for one in names if self.omni.accepts(one)), None)


def _plain_name(model: str) -> str:
    """A folder's path is nothing to tell to clients."""
    return os.path.basename(os.path.abspath(model)) if os.path.isdir(model) else model
