"""The pair of methods that vLLM-Omni's backend, and this package, drive."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from ..errors import PolicyError

if TYPE_CHECKING:
    from .pipeline import Offload

HANDLE = "_omni_offload_handle"


class OmniOffloadMixin:
    """Gives a pipeline or model the pair that vLLM-Omni's backend, and this package, drive."""

    def enable_omni_model_cpu_offload(
        self,
        *,
        device: torch.device | str,
        pin_memory: bool = True,
        use_hsdp: bool = False,
        offload_components: Collection[str] | None = None,
    ) -> Offload:
        """Enable offload, all or nothing.

        Args:
            device: Where it computes.
            pin_memory: Pin the masters.
            use_hsdp: Weights are sharded over devices; not possible here.
            offload_components: Roles that take turns; ``None``: all.

        Raises:
            PolicyError: ``use_hsdp`` is set, or a role is unknown or missing.
        """
        if use_hsdp:
            raise PolicyError("use_hsdp", use_hsdp, "False: sharded weights stay on their devices")
        from .pipeline import (
            offload,
        )  # the handle stands below: it attaches split models, which have this pair

        return offload(self, device, pin_memory=pin_memory, offload_components=offload_components)

    def disable_omni_model_cpu_offload(self) -> None:
        """Undo it. Idempotent."""
        handle: Offload | None = vars(self).get(HANDLE)
        if handle is not None:
            handle.disable()
