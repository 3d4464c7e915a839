"""The arguments of a request: what a pipeline's call takes, and what ``generate`` makes of its own for it."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import PolicyError, nearest

# generate() has a way of its own for these, or none: it always returns an OmniOutput.
_NOT_SAMPLING = ("self", "prompt", "seed", "return_dict", "args", "kwargs")


class Arguments:
    """What the call of a pipeline takes, and how a request is put into it.

    Args:
        pipeline: The pipeline.

    Attributes:
        parameters: The names of its call's parameters.
        sampling: Those of them that ``generate`` passes on as they are.
    """

    def __init__(self, pipeline: Any) -> None:
        self.parameters = tuple(inspect.signature(type(pipeline).__call__).parameters)
        self.sampling = tuple(one for one in self.parameters if one not in _NOT_SAMPLING)
        self._takes_generator = "generator" in self.parameters

    def filled(
        self,
        sampling: Mapping[str, Any],
        *,
        prompt: Any,
        seed: Any,
        on_step: Callable[[int, int], None] | None,
    ) -> tuple[dict[str, Any], int | tuple[int, ...] | None]:
        """The arguments of a request as the pipeline takes them, and the seeds in use.

        Raises:
            PolicyError: An argument is unknown to the pipeline, or not possible.
        """
        arguments = dict(sampling)
        self._refuse_unknown(arguments)
        self._put_prompt(arguments, prompt)
        seeds = self._put_seed(arguments, seed)
        self._put_step(arguments, on_step)
        return arguments, seeds

    def _refuse_unknown(self, arguments: Mapping[str, Any]) -> None:
        # Also where a pipeline takes **kwargs: diffusers' swallow what they do not know.
        for name, value in arguments.items():
            if name not in self.sampling:
                raise unknown(name, value, (*self.sampling, "prompt", "seed"))

    def _put_prompt(self, arguments: dict[str, Any], prompt: Any) -> None:
        if prompt is None:
            return
        if "prompt" not in self.parameters:
            raise unknown("prompt", prompt, self.sampling)
        several = not isinstance(prompt, str)
        if several and not (prompt and all(isinstance(one, str) for one in prompt)):
            raise PolicyError("prompt", prompt, "a text, or a list of one text or more")
        arguments["prompt"] = list(prompt) if several else prompt

    def _put_seed(self, arguments: dict[str, Any], seed: Any) -> int | tuple[int, ...] | None:
        if arguments.get("generator") is not None:
            if seed is not None:
                raise PolicyError("seed", seed, "seed= or generator=, not both")
            return None
        if not self._takes_generator and "seed" not in self.parameters:
            if seed is not None:
                raise unknown("seed", seed, self.sampling)
            return None
        if seed is None:
            seed = secrets.randbelow(2**32)
        several = isinstance(seed, Sequence) and not isinstance(seed, str)
        seeds = tuple(seed) if several else (seed,)
        if not all(_is_seed(one) for one in seeds) or (several and not (self._takes_generator and seeds)):
            more = ", or one per picture" if self._takes_generator else ""
            raise PolicyError("seed", seed, f"a whole number from 0 to 2**63 - 1{more}")
        if several and "prompt" in arguments and len(seeds) != _pictures(arguments):
            raise PolicyError("seed", seed, f"one, or {_pictures(arguments)}: one per picture")
        if self._takes_generator:
            # On the host: a seed means the same noise on every device, and in every residency state.
            made = [torch.Generator("cpu").manual_seed(one) for one in seeds]
            arguments["generator"] = made if several else made[0]
        else:
            arguments["seed"] = seed
        return seeds if several else seeds[0]

    def _put_step(self, arguments: dict[str, Any], on_step: Callable[[int, int], None] | None) -> None:
        if on_step is None:
            return
        theirs = "callback_on_step_end" if "callback_on_step_end" in self.sampling else "callback"
        if arguments.get(theirs) is not None:
            raise PolicyError(theirs, arguments[theirs], f"on_step= or {theirs}=, not both")
        if theirs == "callback_on_step_end":
            arguments[theirs] = _StepCallback(on_step)
        elif "callback_steps" not in self.parameters and "callback" in self.sampling:
            arguments[theirs] = on_step  # as the demo calls it; older pipelines' takes other arguments


class _StepCallback:
    """Calls ``on_step`` the way diffusers calls ``callback_on_step_end``."""

    def __init__(self, on_step: Callable[[int, int], None]) -> None:
        self._on_step = on_step

    def __call__(self, pipeline: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        total = getattr(pipeline, "num_timesteps", None) or len(pipeline.scheduler.timesteps)
        self._on_step(step + 1, max(int(total), step + 1))
        return values


def unknown(name: str, value: object, known: Sequence[str]) -> PolicyError:
    """The error for a name that is none of those known; it says the nearest."""
    choices = ", ".join(nearest(name, known) or known)
    return PolicyError(name, value, f"one of {choices} instead of {name!r}")


def _pictures(arguments: Mapping[str, Any]) -> int:
    """How many pictures the prompts ask for."""
    prompts = 1 if isinstance(arguments["prompt"], str) else len(arguments["prompt"])
    several: Any = arguments.get("num_images_per_prompt") or arguments.get("num_videos_per_prompt") or 1
    return prompts * int(several)


def _is_seed(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
