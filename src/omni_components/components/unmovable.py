"""Tensors that cannot be moved: refused by name, or found so that they can be warned about."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedTensorError
from .declaration import Found
from .tensors import Slot
from .wrappers import cannot_be_rebuilt, is_elsewhere, is_wrapper, leaves

_BY_HAND = "Put it on the device yourself, as a plain attribute instead of a parameter or buffer."


def refuse_unmovable(component: str, slot: Slot) -> None:
    """Raise for a tensor that has no bytes of its own to move, nor of inner tensors.

    Raises:
        UnsupportedTensorError: It names the tensor, the reason and what to do.
    """
    tensor: Any = slot.tensor
    if not is_wrapper(tensor):
        _refuse_unmovable(component, slot.path, tensor)
        return
    reason = is_elsewhere(tensor)
    if reason is None:
        for path, leaf in leaves(tensor, slot.path):
            _refuse_unmovable(component, path, leaf)
        reason = cannot_be_rebuilt(tensor)
    if reason is not None:
        raise UnsupportedTensorError(component, slot.path, reason, _BY_HAND)


def refuse_unmovable_if_real(component: str, slot: Slot) -> None:
    """Likewise, save for a tensor on meta, as a plan has them: it is looked at when it has memory.

    Raises:
        UnsupportedTensorError: As :func:`refuse_unmovable`.
    """
    if slot.tensor is not None and not slot.tensor.is_meta:
        refuse_unmovable(component, slot)


def _refuse_unmovable(component: str, path: str, tensor: Any) -> None:
    kind = type(tensor).__name__
    if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
        raise UnsupportedTensorError(
            component, path, "is not initialised", "Run the module once before enabling."
        )
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedTensorError(component, path, f"is a {kind}, not a tensor", _BY_HAND)
    if type(tensor).__torch_dispatch__ not in (
        torch.Tensor.__torch_dispatch__,
        nn.Parameter.__torch_dispatch__,
    ):
        reason = f"is a {kind}, which does not say where its bytes are (no __tensor_flatten__)"
        raise UnsupportedTensorError(component, path, reason, _BY_HAND)
    if type(tensor).__module__.partition(".")[0] == "bitsandbytes":
        reason = f"is a {kind}, whose quantisation state lies outside of it"
        raise UnsupportedTensorError(component, path, reason, _BY_HAND)
    if tensor.is_meta:
        raise UnsupportedTensorError(
            component, path, "is on the meta device", "Load the weights before enabling."
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        reason = f"is not a plain strided tensor ({tensor.layout})"
        raise UnsupportedTensorError(component, path, reason, _BY_HAND)


def loose_tensors(found: Iterable[Found]) -> list[str]:
    """Paths of tensors that are plain attributes of a component's modules: nothing can move them."""
    loose = []
    for one in found:
        registered = {id(slot.tensor) for slot in one.area.slots()}
        for path, module in one.area.modules():
            # torch's old weight_norm and spectral_norm compute it anew before each call, where the module is.
            renewed = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor) and id(value) not in registered and name not in renewed:
                    loose.append(f"{path}.{name}" if path else name)
    return loose
