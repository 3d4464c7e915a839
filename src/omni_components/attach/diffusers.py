"""What a diffusers pipeline, or a model from diffusers or transformers, needs to be told. Imports neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..components.recipes import held_pipelines
from ..errors import DeclarationError
from ..residency.ledger import ResidencyLedger
from .methods import WrappedMethod


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
    for one in module.modules():
        other = one.__dict__.get("_hf_hook")
        if other is not None and not isinstance(other, ExecutionDevice):
            problem = f"{path!r} has an offload hook of accelerate ({type(other).__name__})."
            raise DeclarationError(type(module).__name__, problem, "Call pipe.remove_all_hooks() first.")
        if "group_offloading" in getattr(one.__dict__.get("_diffusers_hook"), "hooks", ()):
            problem = f"{path!r} has diffusers' group offloading on."
            raise DeclarationError(type(module).__name__, problem, "Load the pipeline again without it.")


def adapt(pipeline: Any, ledger: ResidencyLedger) -> Callable[[], None]:
    """Make a diffusers pipeline's own methods agree with its offload; returns the undo.

    The end of a call becomes a ``release()``, also that of a pipeline which a combined one holds; ``to()`` is adopted
    at once, hooks are removed around the marks of ``announce``, and diffusers' own offloads say that they are one too
    many.
    """
    others = [_Refused(pipeline, name) for name in _OTHER_OFFLOADS if hasattr(type(pipeline), name)]
    ends = [_EndOfCall(one, ledger) for one in (pipeline, *held_pipelines(pipeline))]
    wrappers = [*ends, _Move(pipeline, ledger), _KeepsMarks(pipeline), *others]
    for wrapper in wrappers:
        wrapper.attach()

    def undo() -> None:
        for wrapper in wrappers:
            wrapper.detach()

    return undo


_OTHER_OFFLOADS = ("enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload")


class _EndOfCall(WrappedMethod):
    """``maybe_free_model_hooks``, which every diffusers pipeline calls last."""

    def __init__(self, pipeline: Any, ledger: ResidencyLedger) -> None:
        super().__init__(pipeline, "maybe_free_model_hooks")
        self._ledger: ResidencyLedger | None = ledger

    def detach(self) -> None:
        """Restore the method; a wrapper that others still hold calls it plainly."""
        super().detach()
        self._ledger = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The original method, which resets caches, and a ``release()``."""
        result = super().__call__(*args, **kwargs)
        if self._ledger is not None:
            self._ledger.release()
        return result


class _Move(WrappedMethod):
    """``to``: a new dtype is adopted; where the weights are stays the ledger's affair."""

    def __init__(self, pipeline: Any, ledger: ResidencyLedger) -> None:
        super().__init__(pipeline, "to")
        self._ledger = ledger

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The original method; then what it put on a device, all or a part, goes back and is adopted."""
        try:
            return super().__call__(*args, **kwargs)
        finally:
            if kwargs.get("device") is not None or any(not isinstance(one, torch.dtype) for one in args):
                super().__call__("cpu", silence_dtype_warnings=True)
            self._ledger.adopt()


class _KeepsMarks(WrappedMethod):
    """``remove_all_hooks``: without its marks a pipeline would compute where its weights are at rest."""

    def __init__(self, pipeline: Any) -> None:
        super().__init__(pipeline, "remove_all_hooks")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Remove the hooks of others."""
        modules = [one for one in self._module.components.values() if isinstance(one, nn.Module)]
        marks = [(one, one.__dict__.get("_hf_hook")) for one in modules]
        result = super().__call__(*args, **kwargs)
        for module, mark in marks:
            if isinstance(mark, ExecutionDevice):
                module.__dict__["_hf_hook"] = mark
        return result


class _Refused(WrappedMethod):
    """A method of diffusers that would make a second owner of the same weights."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ``DeclarationError``; nothing was changed."""
        problem = f"is offloaded by omni_components, so that {self._name}() cannot own its weights too."
        raise DeclarationError(type(self._module).__name__, problem, "Call the handle's disable() first.")
