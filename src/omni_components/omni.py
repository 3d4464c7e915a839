"""Omni: a model by name, asked for pictures, video or sound; its components take turns if wanted."""

from __future__ import annotations

import inspect
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from .attach.pipeline import Offload, offload
from .errors import ModelError, PolicyError, nearest
from .loading.load import load_components
from .policy import OffloadPolicy
from .report.report import Request, ResidencyReport
from .transfer.device import resolve_device

DEMO = "demo"
REQUESTS = 1000  # whose times are kept, for the report
DTYPES = ("float32", "bfloat16", "float16")
_OWN = ("enable_cpu_offload", "device", "dtype", "local_files_only", "on_bytes")
# generate() has a way of its own for these, or none: it always returns an OmniOutput.
_NOT_SAMPLING = ("self", "prompt", "seed", "return_dict")
# What the outputs of diffusers' pipelines call their pictures, video and sound.
_IMAGES, _FRAMES, _AUDIO = ("images", "image"), ("frames", "video", "videos"), ("audio", "audios", "sound")
_SAMPLE_RATES = (  # where diffusers' pipelines with sound keep their rate
    ("vae", "sampling_rate"),
    ("vocoder", "output_sampling_rate"),
    ("vocoder", "sampling_rate"),
    ("sound_tokenizer", "sampling_rate"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OmniOutput:
    """What one ``Omni.generate`` gave; what the model does not make is ``None``.

    Attributes:
        images: Pictures, one per prompt: PIL images unless ``output_type`` asked for another form.
        frames: Video, one per prompt, in the pipeline's own form.
        audio: Sound in -1..1, in the pipeline's own form.
        sample_rate: Of the sound, per second, where the model tells.
        seed: The seed that gives the same again, or one per picture; ``None`` if ``generator=`` was given, or the
            pipeline takes none.
        seconds: How long it took, loads included.
    """

    images: Any = None
    frames: Any = None
    audio: Any = None
    sample_rate: int | None = None
    seed: int | tuple[int, ...] | None = None
    seconds: float = 0.0


class Omni:
    """A model by name, ready for ``generate``; as a context manager it gives the device back at the end.

    Its weights are loaded to the host only. With ``enable_cpu_offload`` each component goes to the device for
    its turn; without, all of them go there at once.

    Args:
        model: A folder that ``save_pretrained`` of a diffusers pipeline has written, the id of one on the
            Hugging Face hub, or ``"demo"``.
        enable_cpu_offload: Exactly one of each exclusive set of components is on the device.
        device: Where it computes; ``None`` takes the accelerator if there is one, else the CPU.
        dtype: Of the weights, such as ``"bfloat16"``; ``None`` is the pipeline's own default.
        local_files_only: Never ask the hub: what is not in its cache is an error.
        on_bytes: Called while weights are read, with the bytes that are there and the bytes in all.
        **policy_fields: Single fields of ``OffloadPolicy``, such as ``vae="exclusive"``; they need
            ``enable_cpu_offload``.

    Attributes:
        model: As given.
        device: Where it computes.
        pipeline: The pipeline itself.
        handle: The handle on its offload; ``None`` without.

    Raises:
        ModelError: There is no such model here, or it cannot be read.
        PolicyError: An argument is unknown or not possible; no weight was read.
        TransferError: The residents do not fit on the device.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        enable_cpu_offload: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        local_files_only: bool = False,
        on_bytes: Callable[[int, int], None] | None = None,
        **policy_fields: Any,
    ) -> None:
        policy = _policy(policy_fields, enable_cpu_offload)
        self.model = os.fspath(model)
        self.device = resolve_device(device)
        self.pipeline: Any = _load(
            self.model, as_dtype(dtype), self.device, enable_cpu_offload, local_files_only, on_bytes
        )
        self.handle: Offload | None = None
        if enable_cpu_offload:
            self.handle = offload(self.pipeline, self.device, policy=policy)
        elif self.device.type != "cpu":
            self.pipeline.to(self.device)
        self._parameters = tuple(inspect.signature(type(self.pipeline).__call__).parameters)
        self._requests: deque[Request] = deque(maxlen=REQUESTS)
        self._closed = False

    # --- what it does -------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        on_step: Callable[[int, int], None] | None = None,
        **sampling: Any,
    ) -> OmniOutput:
        """Make what a prompt, or each of several, asks for.

        Args:
            prompt: One or several; ``None`` where the pipeline takes something else, such as
                ``prompt_embeds=``.
            seed: Fixes the noise, which is drawn on the host and so the same on every device; several seeds
                are one per picture. ``None`` draws one: it is in the output.
            on_step: Called after each denoising step with the steps done and the steps in all, where the
                pipeline tells.
            **sampling: The pipeline's own arguments, such as ``num_inference_steps=``.

        Raises:
            ModelError: It is closed, or the pipeline gave nothing that is known.
            PolicyError: An argument is unknown to the pipeline; nothing was computed.
        """
        if self._closed:
            raise ModelError(
                self.model, "is closed.", "Make a new Omni, or generate inside its `with` block."
            )
        arguments = {**sampling}
        self._refuse_unknown(arguments)
        self._put_prompt(arguments, prompt)
        seed = self._put_seed(arguments, seed)
        self._put_step(arguments, on_step)
        start = time.perf_counter()
        result = self.pipeline(**arguments)
        found = [_brought_home(_first(result, names)) for names in (_IMAGES, _FRAMES, _AUDIO)]
        if all(one is None for one in found):
            problem = f"gave a {type(result).__name__} without pictures, video or sound."
            raise ModelError(self.model, problem, "Call omni.pipeline itself.")
        return OmniOutput(
            images=found[0],
            frames=found[1],
            audio=found[2],
            sample_rate=None if found[2] is None else _sample_rate(self.pipeline),
            seed=seed,
            seconds=self._answered(start),
        )

    def _answered(self, start: float) -> float:
        end = time.perf_counter()
        self._requests.append(Request(start=start, end=end))
        return end - start

    def accepts(self, argument: str) -> bool:
        """Whether ``generate`` takes a sampling argument of this name."""
        return argument in self.sampling_arguments

    @property
    def sampling_arguments(self) -> tuple[str, ...]:
        """The pipeline's own arguments that ``generate`` takes."""
        return tuple(one for one in self._parameters if one not in (*_NOT_SAMPLING, "args", "kwargs"))

    def report(self) -> ResidencyReport:
        """What moved, what it cost, and who was there when; empty without offload."""
        if self.handle is None:
            return ResidencyReport.empty(str(self.device))
        return replace(self.handle.report(), requests=tuple(self._requests))

    def close(self) -> None:
        """Take everything off the device; idempotent. The report stays."""
        if self._closed:
            return
        if self.handle is not None:
            self.handle.disable()
        elif self.device.type != "cpu":
            self.pipeline.to("cpu")
        self._closed = True

    def __enter__(self) -> Omni:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.handle is not None:
            self.handle.__exit__(kind, error, trace)  # it lets the body's own error through
            self._closed = not self.handle.enabled
        else:
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "offloaded" if self.handle else "resident"
        return f"<Omni {self.model!r} ({type(self.pipeline).__name__}) on {self.device}, {state}>"

    # --- its arguments ------------------------------------------------------------------------------------

    def _refuse_unknown(self, arguments: Mapping[str, Any]) -> None:
        # Also where a pipeline takes **kwargs: diffusers' swallow what they do not know.
        for name, value in arguments.items():
            if not self.accepts(name):
                raise _unknown(name, value, (*self.sampling_arguments, "prompt", "seed"))

    def _put_prompt(self, arguments: dict[str, Any], prompt: Any) -> None:
        if prompt is None:
            return
        if "prompt" not in self._parameters:
            raise _unknown("prompt", prompt, self.sampling_arguments)
        several = not isinstance(prompt, str)
        if several and not (prompt and all(isinstance(one, str) for one in prompt)):
            raise PolicyError("prompt", prompt, "a text, or a list of one text or more")
        arguments["prompt"] = list(prompt) if several else prompt

    def _put_seed(self, arguments: dict[str, Any], seed: Any) -> int | tuple[int, ...] | None:
        if arguments.get("generator") is not None:
            if seed is not None:
                raise PolicyError("seed", seed, "seed= or generator=, not both")
            return None
        takes_generator = "generator" in self._parameters
        if not takes_generator and "seed" not in self._parameters:
            if seed is not None:
                raise _unknown("seed", seed, self.sampling_arguments)
            return None
        if seed is None:
            seed = secrets.randbelow(2**32)
        several = isinstance(seed, Sequence) and not isinstance(seed, str)
        seeds = tuple(seed) if several else (seed,)
        if not all(_is_seed(one) for one in seeds) or (several and not (takes_generator and seeds)):
            choices = "a whole number from 0 to 2**63 - 1" + (
                ", or one per picture" if takes_generator else ""
            )
            raise PolicyError("seed", seed, choices)
        if several and "prompt" in arguments and len(seeds) != _pictures(arguments):
            raise PolicyError("seed", seed, f"one, or {_pictures(arguments)}: one per picture")
        if takes_generator:
            # On the host: a seed means the same noise on every device, and in every residency state.
            made = [torch.Generator("cpu").manual_seed(one) for one in seeds]
            arguments["generator"] = made if several else made[0]
        else:
            arguments["seed"] = seed
        return seeds if several else seeds[0]

    def _put_step(self, arguments: dict[str, Any], on_step: Callable[[int, int], None] | None) -> None:
        if on_step is None:
            return
        theirs = "callback_on_step_end" if self.accepts("callback_on_step_end") else "callback"
        if arguments.get(theirs) is not None:
            raise PolicyError(theirs, arguments[theirs], f"on_step= or {theirs}=, not both")
        if theirs == "callback_on_step_end":
            arguments[theirs] = _StepCallback(on_step)
        elif "callback_steps" not in self._parameters and self.accepts("callback"):
            arguments[theirs] = (
                on_step  # as the demo calls it; older pipelines' callback takes other arguments
            )


class _StepCallback:
    """Calls ``on_step`` the way diffusers calls ``callback_on_step_end``."""

    def __init__(self, on_step: Callable[[int, int], None]) -> None:
        self._on_step = on_step

    def __call__(self, pipeline: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        total = getattr(pipeline, "num_timesteps", None) or len(pipeline.scheduler.timesteps)
        self._on_step(step + 1, max(int(total), step + 1))
        return values


# --- checking -------------------------------------------------------------------------------------------


def _policy(given: Mapping[str, Any], offloading: bool) -> OffloadPolicy:
    known = [one.name for one in fields(OffloadPolicy)]
    for name, value in given.items():
        if name not in known:
            raise _unknown(name, value, (*known, *_OWN))
    policy = OffloadPolicy.of(None, given)
    if given and not offloading:
        name, value = next(iter(given.items()))
        raise PolicyError(name, value, "enable_cpu_offload=True with it: without offload nothing takes turns")
    return policy


def _unknown(name: str, value: object, known: Sequence[str]) -> PolicyError:
    choices = ", ".join(nearest(name, known) or known)
    return PolicyError(name, value, f"one of {choices} instead of {name!r}")


def as_dtype(asked: torch.dtype | str | None) -> torch.dtype | None:
    """An element type by its name.

    Raises:
        PolicyError: It is none that weights are kept in.
    """
    names = {name: getattr(torch, name) for name in DTYPES}
    found = names.get(asked, asked) if isinstance(asked, str) else asked
    if found is not None and found not in names.values():
        raise PolicyError("dtype", asked, f"one of {', '.join(DTYPES)}, or None")
    return found


def _pictures(arguments: Mapping[str, Any]) -> int:
    """How many pictures the prompts ask for."""
    prompts = 1 if isinstance(arguments["prompt"], str) else len(arguments["prompt"])
    several: Any = arguments.get("num_images_per_prompt") or arguments.get("num_videos_per_prompt") or 1
    return prompts * int(several)


def _is_seed(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


# --- loading --------------------------------------------------------------------------------------------


def _load(
    model: str,
    dtype: torch.dtype | None,
    device: torch.device,
    offloaded: bool,
    local_files_only: bool,
    on_bytes: Callable[[int, int], None] | None,
) -> Any:
    if model == DEMO:
        from .demo import DemoPipeline  # imported here: other models do not need it

        if dtype not in (None, torch.float32):
            raise PolicyError("dtype", dtype, "None: the demo computes in float32")
        # On the CPU, mapped weights are what gives load and evict a meaning: loaded means in private memory.
        return DemoPipeline.from_pretrained(mapped=offloaded and device.type == "cpu")
    place = Path(model).expanduser()
    if model and place.is_dir():
        if not (place / "model_index.json").is_file():
            problem = "is a folder without model_index.json, so that no diffusers pipeline was saved there."
            raise ModelError(model, problem, "Write one with pipeline.save_pretrained(folder).")
        return _from_files(model, place, dtype, offloaded, True, on_bytes)
    if not _could_be_hub_id(model):
        problem = "is neither a folder here, nor a model id of the hub (owner/name), nor 'demo'."
        raise ModelError(model, problem, "Check the path.")
    return _from_files(model, model, dtype, offloaded, local_files_only, on_bytes)


def _could_be_hub_id(model: str) -> bool:
    owner, slash, name = model.partition("/")
    plain = all(one.isalnum() or one in "-_." for one in owner + name)
    return bool(slash and owner and name and plain and owner[0].isalnum() and not os.path.exists(model))


def _from_files(
    model: str,
    source: str | Path,
    dtype: torch.dtype | None,
    lazy: bool,
    local_files_only: bool,
    on_bytes: Callable[[int, int], None] | None,
) -> Any:
    try:
        return load_components(
            source,
            dtype=dtype,
            lazy=lazy,
            on_bytes=on_bytes,
            local_files_only=local_files_only,
        )
    except Exception as error:  # of many kinds: the hub's, the file system's, each component's loader's
        cause = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(model, f"could not be loaded: {cause}", _advice(source, local_files_only)) from error


def _advice(source: str | Path, local_files_only: bool) -> str:
    if isinstance(source, Path):
        return "Check that the folder is whole: save or copy it again."
    if local_files_only:
        return "Fetch it once without local_files_only, or pass a folder."
    return (
        f"Check the name and the network, or fetch it elsewhere (hf download {source}) and pass the folder."
    )


# --- results --------------------------------------------------------------------------------------------


def _first(result: Any, names: Sequence[str]) -> Any:
    return next((found for name in names if (found := getattr(result, name, None)) is not None), None)


def _brought_home(value: Any) -> Any:
    """Tensors are given on the host, wherever they were made."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, (list, tuple)):
        return [_brought_home(one) for one in value]
    return value


def _sample_rate(pipeline: Any) -> int | None:
    for name, attribute in _SAMPLE_RATES:
        component = getattr(pipeline, name, None)
        for owner in (component, getattr(component, "config", None)):
            rate = getattr(owner, attribute, None)
            if isinstance(rate, int):
                return rate
    return None
