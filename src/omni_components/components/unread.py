"""Tensors whose memory has its place, and whose values are read when somebody first wants them.

A loader that has to convert weights leaves them so: a component that is not used yet costs neither time nor pages.
To its users an unread tensor is an ordinary one. What asks for its shape, type or device gets an answer at once; any
other operation makes it, and what belongs to it, an ordinary tensor first, in place: the object stays the same.
(torch's lazily initialised parameters change their class in the same way.)
"""

from __future__ import annotations

import copy
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

Fill = Callable[[torch.Tensor], None]


class Unread(torch.Tensor):
    """A tensor that is still to be read, with its ``source``."""

    source: Source

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer what its values are not needed for; before anything else, read it."""
        kwargs = kwargs or {}
        if _name(func) in _WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        read(tree_leaves((args, kwargs)))
        if func is torch.Tensor.detach and sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            return torch.Tensor._make_subclass(type(args[0]), args[0])  # it insists on the type that it got
        return func(*args, **kwargs)

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> Any:
        """``type(old)(new)``, as libraries replace a parameter, is an ordinary one."""
        return nn.Parameter(data, requires_grad)

    # A parameter has these of its own: asked of the tensor that it becomes.

    def __deepcopy__(self, memo: Any) -> Any:
        read([self])
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        read([self])
        return self.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is untyped
        read([self])
        return repr(self)


class Source:
    """Unread tensors that are read together."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[torch.Tensor, torch.Tensor, type[torch.Tensor], Fill]] = deque()
        self._lock = threading.RLock()

    def promise(self, values: torch.Tensor, like: torch.Tensor, fill: Fill) -> torch.Tensor:
        """A tensor over memory that ``fill`` will write to.

        Args:
            values: Contiguous host memory, of its element type and shape.
            like: Whether it is a parameter, and requires a gradient.
            fill: Writes the values to the memory it is given; asked again if it raised.
        """
        is_parameter = isinstance(like, nn.Parameter)
        made = torch.Tensor._make_subclass(Unread, values, is_parameter and like.requires_grad)
        made.source = self
        if is_parameter:
            made._is_param = True  # what isinstance(_, nn.Parameter) looks for
        self._waiting.append((made, values, nn.Parameter if is_parameter else torch.Tensor, fill))
        return made

    def read(self) -> None:
        """Read what is still to be read.

        Raises:
            WeightsError: The file cannot be read any more; what is not read yet can be tried again.
        """
        with (
            self._lock,
            torch.inference_mode(False),
            torch.no_grad(),
            torch._C.DisableTorchFunctionSubclass(),
        ):
            while self._waiting:
                tensor, values, kind, fill = self._waiting[0]
                if type(tensor) is Unread:  # else an interrupt came after this, and it may be written to
                    fill(values)
                    tensor.__class__ = kind  # type: ignore[assignment]
                for note in ("source", "_is_param"):
                    vars(tensor).pop(note, None)  # last: at no time is it neither an unread parameter nor one
                self._waiting.popleft()


def read(tensors: Iterable[Any]) -> None:
    """Read those among them that are unread."""
    # Between the two questions another thread may read it, and take the source away.
    found = [vars(one).get("source") for one in tensors if type(one) is Unread]
    sources = {id(source): source for source in found if source is not None}
    for source in sources.values():
        source.read()


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    return func.__self__.__name__ if name in ("__get__", "__set__") else name


_QUESTIONS = """
shape dtype device layout ndim itemsize nbytes requires_grad requires_grad_ is_leaf grad grad_fn is_cpu is_cuda
is_meta is_mps is_xpu is_sparse is_quantized is_nested size dim ndimension numel nelement stride
storage_offset element_size is_floating_point is_complex is_contiguous is_inference __len__ __hash__
"""
_WITHOUT_VALUES = frozenset(_QUESTIONS.split())
