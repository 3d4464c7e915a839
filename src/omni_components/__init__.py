"""Split models and model-level CPU offload with a checked invariant.

Exactly one component of an exclusive set is on the device. See ``offload`` for the way in.
"""

from .attach.mixin import OmniOffloadMixin
from .attach.pipeline import Offload, offload
from .attach.split import SplitModel
from .components.component import Component, Role
from .components.discovery import declares_components
from .errors import (
    AbsentComponentError,
    BudgetError,
    ComponentNotFoundError,
    DeclarationError,
    InvariantError,
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
)
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
    "Offload",
    "OffloadPolicy",
    "OffloadScope",
    "OmniComponentsError",
    "OmniOffloadMixin",
    "OwnershipError",
    "PolicyError",
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
    "declares_components",
    "offload",
]
