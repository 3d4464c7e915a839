"""SplitModel: a module whose parts take turns, and which marks its phases itself."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from torch import nn

from ..errors import UnknownComponentError
from ..residency.ledger import ResidencyLedger
from .mixin import OmniOffloadMixin

_ATTRIBUTE = "_offload_binding"
_NOTHING = nullcontext()


class Binding:
    """Ties a split model to the ledger that knows its parts; copies of the model are not tied."""

    def __init__(self, ledger: ResidencyLedger, names: dict[str, str]) -> None:
        self.ledger = ledger
        self.names = names

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return _unbound, ()


def _unbound() -> None:
    return None


class SplitModel(OmniOffloadMixin, nn.Module):
    """A module with parts that are never needed at the same time.

    A subclass lists, per part, dotted paths of modules, parameters or buffers; ``*`` stands for one segment.
    A tensor in no part is resident. ``forward``, or whatever computes, opens the phases::

        class Transformer(SplitModel):
            _offload_components: ClassVar[dict[str, list[str]]] = {
                "reasoner": ["embed", "layers.*.attn.to_q", "layers.*.mlp"],
                "generator": ["layers.*.attn.add_q_proj", "layers.*.mlp_gen"],
            }

            def forward(self, tokens, latents):
                with self._offload_context("reasoner"):
                    memory = self.reason(tokens)
                with self._offload_context("generator"):
                    return self.generate(latents, memory)

    Attributes:
        _offload_components: Patterns per part.
    """

    _offload_components: ClassVar[dict[str, list[str]]] = {}

    def _offload_context(self, name: str) -> AbstractContextManager[Any]:
        """The scope of a part; without offload it does nothing.

        Args:
            name: A part of ``_offload_components``.

        Raises:
            UnknownComponentError: There is no such part.
        """
        if name not in self._offload_components:
            raise UnknownComponentError(name, tuple(self._offload_components), type(self).__name__)
        binding: Binding | None = self.__dict__.get(_ATTRIBUTE)
        if binding is None:
            return _NOTHING
        return binding.ledger.scope(binding.names[name])


def bind(model: nn.Module, ledger: ResidencyLedger, names: dict[str, str]) -> None:
    """Tie a split model to a ledger.

    Args:
        model: A ``SplitModel``, or a module with an ``_offload_context`` of the same kind.
        ledger: Issues the scopes.
        names: The ledger's names by the model's own.
    """
    model.__dict__[_ATTRIBUTE] = Binding(ledger, names)


def unbind(model: nn.Module) -> None:
    """Untie it. Idempotent."""
    model.__dict__.pop(_ATTRIBUTE, None)
