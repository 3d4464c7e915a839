"""The protocols others implement. No bodies here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


@runtime_checkable
class SupportsComponentDiscovery(Protocol):
    """A pipeline that declares its components by dotted paths.

    ``_resident_modules`` is optional: :func:`omni_components.declares_components` accepts a duck-typed class
    without it, which ``isinstance`` refuses.

    Attributes:
        _dit_modules: Denoisers; they exclude each other and the encoders.
        _encoder_modules: Encoders; on the device before the denoising, on the host during it.
        _vae_modules: VAEs; on the device all the time unless the policy says otherwise.
        _resident_modules: Whatever else stays on the device.
    """

    _dit_modules: ClassVar[list[str]]
    _encoder_modules: ClassVar[list[str]]
    _vae_modules: ClassVar[list[str]]
    _resident_modules: ClassVar[list[str]] = []


@runtime_checkable
class SupportsOmniOffload(Protocol):
    """A pipeline or model that switches its own offload on and off (the keywords are vLLM-Omni's)."""

    def enable_omni_model_cpu_offload(
        self,
        *,
        device: torch.device | str,
        pin_memory: bool = True,
        use_hsdp: bool = False,
        offload_components: Collection[str] | None = None,
    ) -> Any:
        """Enable offload, all or nothing."""
        ...

    def disable_omni_model_cpu_offload(self) -> None:
        """Undo it; idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What one load or eviction did.

    Attributes:
        bytes: Bytes over the link towards the device.
        written_back: Bytes over the link towards the host, for tensors that changed on the device.
        adopted: Tensors found in the component's slots that the mover had not put there.
        size: Device bytes of the component from now on, ``None`` if they did not change.
        recopied: It had been copied ahead, and its master has changed since: that copy was for nothing.
    """

    bytes: int = 0
    written_back: int = 0
    adopted: int = 0
    size: int | None = None
    recopied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MoverFacts:
    """What the mover knows besides the events.

    Attributes:
        pinned_bytes: Host bytes really pinned.
        pageable_bytes: Bytes of masters that are not.
        mapped_bytes: Bytes of masters that are pages of a file.
        arena_bytes: Device bytes held for components, in use or not, residents included.
        binding: How tensors cross: ``data`` (same objects) or ``slots`` (two stable objects).
    """

    pinned_bytes: int = 0
    pageable_bytes: int = 0
    mapped_bytes: int = 0
    arena_bytes: int = 0
    binding: str = "data"


class Mover(Protocol):
    """Carries components between host and device. The ledger decides, the mover moves.

    Each call happens in one thread at a time. A call that raises leaves the component whole on one side, and
    ``present`` says on which.
    """

    def load(self, name: str) -> Moved:
        """Bring a component to the device; on return its tensors may be used on the current stream."""
        ...

    def evict(self, name: str) -> Moved:
        """Give a component's device memory back; on return its tensors are its masters on the host."""
        ...

    def has_room_ahead(self, name: str) -> bool:
        """Whether an absent component could be copied ahead now: from masters that do not make the host wait,
        into device bytes that are proven free. Asked with prefetch only.
        """
        ...

    def prefetch(self, name: str) -> Moved:
        """Begin to copy an absent component into free device bytes; its tensors stay its masters.

        ``load`` completes it. A call that raises has taken nothing.
        """
        ...

    def drop(self, name: str) -> None:
        """Give back what ``prefetch`` has taken; nothing happens if it has taken nothing."""
        ...

    def present(self, name: str) -> bool:
        """Whether the component is on the device."""
        ...

    def touch(self, name: str, stream: Any = None) -> Any:
        """Work on a present component may now be enqueued on a stream, by default the current one, which it returns."""
        ...

    def release_arena(self) -> int:
        """Give device memory that no loaded component needs back to the system; returns the bytes."""
        ...

    def is_current(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor, or a view, shows what its component's slots hold now."""
        ...

    def audit(self, present: Mapping[str, bool]) -> list[str]:
        """Compare, tensor by tensor, with where the ledger says each component is; returns the differences."""
        ...
