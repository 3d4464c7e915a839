"""Split models and model-level CPU offload with a checked invariant.

Exactly one component of an exclusive set is on the device. See ``offload`` for the way in.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attach.mixin import OmniOffloadMixin
    from .attach.modular import LedgerStrategy
    from .attach.pipeline import Offload, offload
    from .attach.split import SplitModel
    from .components.component import Component, Role
    from .components.discovery import declares_components
    from .components.recipe import Recipe
    from .errors import (
        AbsentComponentError,
        BudgetError,
        ComponentNotFoundError,
        DeclarationError,
        InvariantError,
        ModelError,
        OmniComponentsError,
        OwnershipError,
        PolicyError,
        ResidencyDeadlockError,
        ResidencyTimeoutError,
        ResidencyWarning,
        ScopeError,
        TransferError,
        UnknownComponentError,
        UnsupportedTensorError,
        WeightsError,
    )
    from .loading.load import load_components
    from .omni import Omni, OmniOutput
    from .planning.model import plan
    from .policy import OffloadPolicy
    from .protocols import SupportsComponentDiscovery, SupportsOmniOffload
    from .residency.events import ResidencyEvent
    from .residency.ledger import ResidencyLedger
    from .residency.scope import OffloadScope

__all__ = [
    "AbsentComponentError",
    "BudgetError",
    "Component",
    "ComponentNotFoundError",
    "DeclarationError",
    "InvariantError",
    "LedgerStrategy",
    "ModelError",
    "Offload",
    "OffloadPolicy",
    "OffloadScope",
    "Omni",
    "OmniComponentsError",
    "OmniOffloadMixin",
    "OmniOutput",
    "OwnershipError",
    "PolicyError",
    "Recipe",
    "ResidencyDeadlockError",
    "ResidencyEvent",
    "ResidencyLedger",
    "ResidencyTimeoutError",
    "ResidencyWarning",
    "Role",
    "ScopeError",
    "SplitModel",
    "SupportsComponentDiscovery",
    "SupportsOmniOffload",
    "TransferError",
    "UnknownComponentError",
    "UnsupportedTensorError",
    "WeightsError",
    "declares_components",
    "load_components",
    "offload",
    "plan",
]

# Names are imported when they are first used: `omni-components --help` and the pytest plugin need no torch.
_ERRORS = [name for name in __all__ if name.endswith(("Error", "Warning"))]
_HOMES = {
    **dict.fromkeys(_ERRORS, ".errors"),
    "Component": ".components.component",
    "LedgerStrategy": ".attach.modular",
    "Offload": ".attach.pipeline",
    "OffloadPolicy": ".policy",
    "OffloadScope": ".residency.scope",
    "Omni": ".omni",
    "OmniOffloadMixin": ".attach.mixin",
    "OmniOutput": ".omni",
    "Recipe": ".components.recipe",
    "ResidencyEvent": ".residency.events",
    "ResidencyLedger": ".residency.ledger",
    "Role": ".components.component",
    "SplitModel": ".attach.split",
    "SupportsComponentDiscovery": ".protocols",
    "SupportsOmniOffload": ".protocols",
    "declares_components": ".components.discovery",
    "load_components": ".loading.load",
    "offload": ".attach.pipeline",
    "plan": ".planning.model",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its home."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
