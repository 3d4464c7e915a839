"""Models without weights: built by their own libraries, with ``Deferred`` tensors where weights will be.

Only parameters are made on the meta device, through torch's own registration hook. Buffers and plain tensors
that a constructor computes (rotary frequencies, position ids) are computed on the host, as they always are.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from .classes import is_diffusers_model
from .deferred import Deferred, facts_of
from .keys import refuse_missing, refuse_shape, warn_unexpected


@contextmanager
def without_weights() -> Iterator[None]:
    """Parameters that this thread registers meanwhile have no memory."""
    thread = threading.get_ident()

    def to_meta(module: nn.Module, name: str, parameter: Any) -> Any:
        if threading.get_ident() != thread or parameter is None or parameter.is_meta:
            return None  # as it is; one that is tied stays the same object
        made = type(parameter)(parameter.to("meta"), requires_grad=parameter.requires_grad)
        made.__dict__.update(parameter.__dict__)
        return made

    hook = register_module_parameter_registration_hook(to_meta)
    try:
        with _NoInitialValues():
            yield
    finally:
        hook.remove()


class _NoInitialValues(TorchFunctionMode):
    """What constructors write into parameters that have no memory is not computed: torch takes its time over it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _WRITING_VALUES:
            target = args[0] if args else kwargs.get("tensor")
            if isinstance(target, torch.Tensor) and target.is_meta:
                return target
        return func(*args, **kwargs)


# Those functions of torch.nn.init that ask a mode first, and what the others come down to. By name: transformers
# puts functions of its own in their place while it constructs.
_WRITING_VALUES = frozenset(
    ("uniform_", "normal_", "constant_", "kaiming_uniform_", "fill_", "zero_", "mul_", "add_")
)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    if dtype.itemsize > 1:  # torch has no numbers of one byte to compute new ones in
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# --- diffusers --------------------------------------------------------------------------------------------


def diffusers_model(
    kind: Any, folder: Path, state: dict[str, Any], dtype: torch.dtype | None, component: str
) -> nn.Module:
    """A diffusers model as ``from_pretrained`` makes it, without its weights.

    Raises:
        WeightsError: The files do not fit the model.
    """
    dtype = dtype or torch.float32
    model = _constructed(kind, folder, dtype)
    model._fix_state_dict_keys_on_load(state)  # type: ignore[operator]
    _assign(model, kind, state, dtype, folder, component)
    if dtype.itemsize == 1 and not kind._keep_in_fp32_modules:
        _cast_buffers(model, dtype)
    model.register_to_config(_name_or_path=str(folder))  # type: ignore[operator]
    return model.eval()


def _cast_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    """What a constructor has computed, as diffusers casts it where the type cannot be the default one."""
    for module in model.modules():
        for name, one in module._buffers.items():
            if one is not None and one.is_floating_point() and not isinstance(one, Deferred):
                module._buffers[name] = one.to(dtype)


def _constructed(kind: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    config, unused, _ = kind.load_config(
        str(folder), return_unused_kwargs=True, return_commit_hash=True, local_files_only=True
    )
    with _default_dtype(dtype), without_weights():
        made: nn.Module = kind.from_config(config, **unused)
    return made


def _assign(
    model: nn.Module, kind: Any, state: dict[str, Any], dtype: torch.dtype, folder: Path, component: str
) -> None:
    expected = model.state_dict(keep_vars=True)
    unexpected = sorted(set(state) - set(expected))
    given = {id(expected[name]) for name in state if name in expected}
    missing = [name for name, tensor in expected.items() if name not in state and id(tensor) not in given]
    refuse_missing(component, str(folder), missing, unexpected)
    ignored = kind._keys_to_ignore_on_load_unexpected or ()
    named = [name for name in unexpected if not any(re.search(one, name) for one in ignored)]
    warn_unexpected(component, str(folder), named)
    high = kind._keep_in_fp32_modules or ()
    keep = set([high] if isinstance(high, str) else high)
    taken: dict[int, Any] = {}
    for name, old in expected.items():
        if name not in state:
            continue
        tensor = state[name]
        shape, stored = facts_of(tensor)
        refuse_shape(component, _origin(tensor, folder), name, shape, old.shape)
        wanted = stored
        if stored.is_floating_point:
            wanted = torch.float32 if keep & set(name.split(".")) else dtype
        taken[id(old)] = _put(model, name, tensor if wanted is stored else tensor.to(wanted), old)
    for name, old in expected.items():
        if name not in state:
            _slot(model, name)[1][name.rpartition(".")[2]] = taken[id(old)]  # tied: stored once


def _origin(tensor: Any, folder: Path) -> str:
    entry = tensor.plan.entry if isinstance(tensor, Deferred) else None
    return str(folder if entry is None else entry.file.path)


def _slot(model: nn.Module, name: str) -> tuple[nn.Module, Any]:
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    return module, module._parameters if last in module._parameters else module._buffers


def _put(model: nn.Module, name: str, tensor: Any, old: torch.Tensor) -> Any:
    _, table = _slot(model, name)
    if isinstance(old, nn.Parameter):
        made = tensor.parameter if isinstance(tensor, Deferred) else partial(nn.Parameter, tensor)
        tensor = made(requires_grad=old.requires_grad)
    table[name.rpartition(".")[2]] = tensor
    return tensor


# --- transformers -----------------------------------------------------------------------------------------


def transformers_model(
    kind: Any, folder: Path, state: dict[str, Any], dtype: torch.dtype | None, component: str
) -> nn.Module:
    """A transformers model: its own loader renames, casts and ties, over tensors that are not there yet.

    Raises:
        WeightsError: The files do not fit the model.
        NotDeferrable: Its loader looks at values.
    """
    config = kind.config_class.from_pretrained(str(folder), local_files_only=True)
    with quiet_transformers():
        model, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype or "auto",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **_generation(kind, folder),
        )
    for name, stored, wanted in sorted(info["mismatched_keys"]):
        origin = _origin(state[name], folder) if name in state else str(folder)
        refuse_shape(component, origin, name, stored, wanted)
    unexpected = sorted(info["unexpected_keys"])
    refuse_missing(component, str(folder), sorted(info["missing_keys"]), unexpected)
    warn_unexpected(component, str(folder), unexpected)
    model.config._name_or_path = model.name_or_path = str(folder)
    found: nn.Module = model
    return found


def _generation(kind: Any, folder: Path) -> dict[str, Any]:
    if not kind.can_generate() or not (folder / "generation_config.json").is_file():
        return {}
    from transformers import GenerationConfig  # imported here: most components never generate

    return {"generation_config": GenerationConfig.from_pretrained(str(folder), local_files_only=True)}


# --- without files ----------------------------------------------------------------------------------------


def configured_model(kind: Any, folder: Path, dtype: torch.dtype | None, component: str) -> nn.Module:
    """A model of the right shapes and element types from its configuration alone; it has no weights.

    Args:
        kind: Its class.
        folder: With ``config.json``.
        dtype: As ``load_components`` takes it.
        component: For messages.
    """
    if is_diffusers_model(kind):
        return _configured_diffusers(kind, folder, dtype or torch.float32, component)
    config = kind.config_class.from_pretrained(str(folder), local_files_only=True)
    if getattr(config, "quantization_config", None) is None:
        return _configured_transformers(kind, config, dtype or config.dtype or torch.float32)
    with _default_dtype(config.dtype or torch.float32), without_weights():
        shapes = kind(config).state_dict(keep_vars=True)
    first = {id(one): name for name, one in reversed(shapes.items())}  # what is tied is stored under one name
    state = {name: Deferred.zeros(shapes[name].shape, shapes[name].dtype) for name in first.values()}
    return transformers_model(
        kind, folder, state, dtype, component
    )  # its loader knows what a quantizer takes


def _configured_diffusers(kind: Any, folder: Path, dtype: torch.dtype, component: str) -> nn.Module:
    """Constructed once: a checkpoint would hold the names that the model has now, and floats of 32 bits."""
    model = _constructed(kind, folder, dtype)
    shapes = model.state_dict(keep_vars=True)
    first = {id(one): name for name, one in reversed(shapes.items())}  # as above
    state = {name: _as_stored(shapes[name]) for name in first.values()}
    _assign(model, kind, state, dtype, folder, component)
    return model.eval()


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=dtype, device="meta")


def _configured_transformers(kind: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """Constructed once: the loader leaves element types as they are constructed, but for those that it keeps."""
    from transformers.core_model_loading import build_glob_alternation  # imported here: it takes seconds

    with without_weights():
        model: Any = kind._from_config(config, dtype=dtype)
    kept = model._get_dtype_plan(dtype)
    if kept:
        matches, _, _ = build_glob_alternation(list(kept))
        for name, old in model.state_dict(keep_vars=True).items():
            if matches.search(name):
                _put(model, name, old.detach().to(torch.float32), old)
        model.tie_weights()
    found: nn.Module = model.eval()
    return found


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Its remarks about keys are made here, in this package's words, and the bar over bytes is the caller's."""
    from transformers.utils import logging as theirs  # imported here: it takes seconds

    logging: Any = theirs
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
