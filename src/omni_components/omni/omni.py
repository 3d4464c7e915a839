"""Omni: a model by name, asked for pictures, video or sound; its components take turns if wanted."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from types import TracebackType
from typing import Any

import torch

from ..attach.pipeline import Offload, offload
from ..errors import ModelError, PolicyError
from ..policy import OffloadPolicy
from ..report.report import Request, ResidencyReport
from ..transfer.device import resolve_device
from .arguments import Arguments, unknown
from .output import OmniOutput, output_of
from .source import Source, as_dtype

REQUESTS = 1000  # whose times are kept, for the report
_OWN = ("enable_cpu_offload", "device", "dtype", "local_files_only", "on_bytes")


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
        source = Source(
            model=self.model,
            dtype=as_dtype(dtype),
            device=self.device,
            offloaded=enable_cpu_offload,
            local_files_only=local_files_only,
            on_bytes=on_bytes,
        )
        self.pipeline: Any = source.load()
        self.handle: Offload | None = None
        if enable_cpu_offload:
            self.handle = offload(self.pipeline, self.device, policy=policy)
        elif self.device.type != "cpu":
            self.pipeline.to(self.device)
        self._arguments = Arguments(self.pipeline)
        self._requests: deque[Request] = deque(maxlen=REQUESTS)
        self._closed = False

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
        arguments, seeds = self._arguments.filled(sampling, prompt=prompt, seed=seed, on_step=on_step)
        start = time.perf_counter()
        output = output_of(self.pipeline(**arguments), self.pipeline, self.model, seeds)
        return replace(output, seconds=self._answered(start))

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
        return self._arguments.sampling

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


def _policy(given: Mapping[str, Any], offloading: bool) -> OffloadPolicy:
    known = [one.name for one in fields(OffloadPolicy)]
    for name, value in given.items():
        if name not in known:
            raise unknown(name, value, (*known, *_OWN))
    policy = OffloadPolicy.of(None, given)
    if given and not offloading:
        name, value = next(iter(given.items()))
        raise PolicyError(name, value, "enable_cpu_offload=True with it: without offload nothing takes turns")
    return policy
