"""What a diffusers pipeline, or a model from diffusers or transformers, needs to be told. Imports neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import DeclarationError
from ..residency.ledger import ResidencyLedger


class ExecutionDevice:
    """Answers diffusers' question where a module computes, in every residency state.

    diffusers and transformers ask ``module._hf_hook.execution_device``; without an answer they look where the
    weights are now, which is the host while a component is evicted.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.execution_device = device
        self.io_same_device = False  # transformers' generate sets it; outputs stay on the device here

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """accelerate calls this when it removes hooks; there is nothing of its own to undo."""
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> ExecutionDevice:
        return ExecutionDevice(None)

    def __reduce__(self) -> Any:
        return ExecutionDevice, (None,)


def announce(module: nn.Module, device: torch.device) -> Callable[[], None]:
    """Tell a module's users where it computes; returns the undo."""
    mark = ExecutionDevice(device)
    module.__dict__["_hf_hook"] = mark

    def undo() -> None:
        if module.__dict__.get("_hf_hook") is mark:
            del module.__dict__["_hf_hook"]

    return undo


def refuse_other_offload(path: str, module: nn.Module) -> None:
    """Two owners would move the same weights.

    Raises:
        DeclarationError: accelerate's or diffusers' own offload is on.
    """
    for _, one in module.named_modules():
        other = one.__dict__.get("_hf_hook")
        if other is not None and not isinstance(other, ExecutionDevice):
            problem = f"{path!r} has an offload hook of accelerate ({type(other).__name__})."
            raise DeclarationError(type(module).__name__, problem, "Call pipe.remove_all_hooks() first.")


def release_at_end(pipeline: Any, ledger: ResidencyLedger) -> Callable[[], None]:
    """Make the end of a diffusers call (``maybe_free_model_hooks``) a ``release()``; returns the undo."""
    original = pipeline.maybe_free_model_hooks

    def maybe_free_model_hooks() -> None:
        original()  # resets the stateful caches; without diffusers' own offload it moves nothing
        ledger.release()

    pipeline.__dict__["maybe_free_model_hooks"] = maybe_free_model_hooks

    def undo() -> None:
        if pipeline.__dict__.get("maybe_free_model_hooks") is maybe_free_model_hooks:
            del pipeline.__dict__["maybe_free_model_hooks"]

    return undo
