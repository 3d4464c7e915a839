"""diffusers' ``ComponentsManager``: its strategy for making room, served by a ledger.

The manager asks, before a model comes to the device, which others to send home. A ledger answers, and moves them
itself through the manager's own hooks: conflicts, budget, history and checks are those of any other ledger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..components.component import Component, conflict
from ..components.recipes import role_of
from ..policy import OffloadPolicy
from ..protocols import Moved
from ..residency.ledger import ResidencyLedger


class LedgerStrategy:
    """An ``offload_strategy`` for ``ComponentsManager.enable_auto_cpu_offload``.

    ::

        manager.enable_auto_cpu_offload(device="cuda", offload_strategy=LedgerStrategy())

    Exactly one model is on the device, encoders beside each other excepted; where the policy has a budget, a model
    that cannot fit is refused before anything moves. The bytes travel as diffusers moves them, both ways: for one
    copy per switch, and none back, use ``offload(manager)`` instead.

    Args:
        policy: ``device_memory``, ``exclusive_encoders`` and ``history`` are heeded.
        **fields: Single fields of it.

    Attributes:
        ledger: Who is on the device, and the history of every move.
    """

    def __init__(self, policy: OffloadPolicy | None = None, **fields: Any) -> None:
        self._policy = OffloadPolicy.of(policy, fields)
        self._mover = _HookMover()
        self.ledger = ResidencyLedger(self._mover, self._policy, owner="ComponentsManager")

    def __call__(
        self, hooks: Sequence[Any], model_id: str, model: nn.Module, execution_device: torch.device
    ) -> list[Any]:
        """Make room for a model, bring it in, and leave nothing to do for the manager.

        Args:
            hooks: The manager's hooks of the other models on the device.
            model_id: Who is coming.
            model: The model.
            execution_device: Where to.

        Raises:
            BudgetError: It cannot fit into ``device_memory``; nothing was moved.
        """
        self._mover.devices[model_id] = execution_device
        self._mover.modules[model_id] = model
        for hook in hooks:
            self._mover.modules[hook.model_id] = hook.model
            self._mover.devices.setdefault(hook.model_id, execution_device)
        self._take_on([model_id, *(hook.model_id for hook in hooks)])
        self._believe_what_is_there(hooks)
        self.ledger.load(model_id)
        return []

    def _take_on(self, names: Sequence[str]) -> None:
        known = {one.name for one in self.ledger.components}
        fresh = [_component(name, self._mover.modules[name]) for name in names if name not in known]

        def rivals(one: Component, other: Component) -> bool:
            return conflict(one, other, exclusive_encoders=self._policy.exclusive_encoders)

        self.ledger.admit(fresh, rivals)

    def _believe_what_is_there(self, hooks: Sequence[Any]) -> None:
        """Models that came or went without us (an enabling, ``.to``): the ledger starts from what is there."""
        there = {hook.model_id for hook in hooks}
        if there == set(self.ledger.present):
            return  # as it left them
        for name in there:
            self._mover.evict(name)
        self.ledger.release()


class _HookMover:
    """Moves a whole module as the manager's hooks do."""

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.devices: dict[str, torch.device] = {}

    def load(self, name: str) -> Moved:
        """Bring it to the device."""
        self.modules[name].to(self.devices[name])
        return Moved(bytes=_bytes(self.modules[name]))

    def evict(self, name: str) -> Moved:
        """Send it home, with its bytes: it has no master."""
        self.modules[name].to("cpu")
        return Moved(written_back=_bytes(self.modules[name]))

    def has_room_ahead(self, name: str) -> bool:
        """Nothing is copied ahead."""
        return False

    def prefetch(self, name: str) -> Moved:
        """Never asked: there is no room ahead."""
        raise NotImplementedError

    def drop(self, name: str) -> None:
        """Nothing was copied ahead."""

    def present(self, name: str) -> bool:
        """Whether its first tensor is on the device."""
        first = next(self.modules[name].parameters(), None)
        return first is not None and first.device == self.devices[name]

    def touch(self, name: str, stream: Any = None) -> Any:
        """Its memory is the allocator's affair."""

    def release_arena(self) -> int:
        """There is none."""
        return 0

    def is_current(self, tensor: torch.Tensor) -> bool:
        """Whether it is on the device, or on the host, with its module."""
        return any(tensor is one for module in self.modules.values() for one in module.parameters())

    def audit(self, present: Mapping[str, bool]) -> list[str]:
        """Compare every tensor's device with what the ledger says."""
        return [
            f"{name}.{path} is on {tensor.device}"
            for name, here in present.items()
            for path, tensor in self.modules[name].named_parameters()
            if (tensor.device == self.devices[name]) is not here
        ]


def _component(name: str, module: nn.Module) -> Component:
    tensors = len([*module.parameters(), *module.buffers()])
    return Component(name=name, role=role_of(name), bytes=_bytes(module), tensors=tensors, model=name)


def _bytes(module: nn.Module) -> int:
    tensors = {id(one): one for one in (*module.parameters(), *module.buffers())}
    return sum(one.numel() * one.element_size() for one in tensors.values())
