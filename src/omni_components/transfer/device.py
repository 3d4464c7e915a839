"""The only file that names an accelerator: streams, pinning, memory; all through ``torch.accelerator``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch

from ..errors import PolicyError, format_bytes


def resolve_device(device: torch.device | str | None) -> torch.device:
    """The execution device, with an index; ``None`` takes the accelerator if there is one, else the CPU.

    Raises:
        PolicyError: No such device here.
    """
    if device is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = found or torch.device("cpu")
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise PolicyError("device", str(device), f"one of: {', '.join(_available())}") from error
    if parsed.type == "cpu":
        return torch.device("cpu")
    if parsed.type not in _available():
        raise PolicyError("device", str(device), f"one of: {', '.join(_available())}")
    index = parsed.index if parsed.index is not None else torch.accelerator.current_device_index()
    if index >= torch.accelerator.device_count():
        raise PolicyError("device", str(device), f"an index below {torch.accelerator.device_count()}")
    return torch.device(parsed.type, index)


def _available() -> list[str]:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu", *([found.type] if found is not None else [])]


@contextmanager
def moving() -> Iterator[None]:
    """Moves happen outside inference mode and without gradients, whatever the caller has set.

    A subclass's ``__torch_function__`` is not asked: to it, a move is none of its operations.
    """
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        yield


def data_crosses(device: torch.device) -> bool:
    """Whether ``.data =`` can put a host tensor object on the device."""
    probe = torch.empty(0)
    try:
        probe.data = torch.empty(0, device=device)
    except RuntimeError:
        return False
    return probe.device.type == device.type


class Backend(Protocol):
    """What the mover needs of a device."""

    device: torch.device

    def touch(self) -> Any:
        """The stream on which the caller's work is enqueued now; ``None`` where there are none."""
        ...

    def after(self, streams: list[Any]) -> None:
        """Let copies wait for the work that is enqueued on these streams."""
        ...

    def copies(self) -> Any:
        """A context in which copies go to the copy stream."""
        ...

    def done(self) -> Any:
        """An event behind the copies enqueued so far; ``None`` where copies end before they return."""
        ...

    def wait(self, stream: Any, event: Any) -> None:
        """Let the work on a stream wait for an event."""
        ...

    def flush(self) -> None:
        """Give cached device memory back to the system."""
        ...

    def free_bytes(self) -> int | None:
        """Free device memory, where the device tells."""
        ...

    def watches(self) -> bool:
        """Whether the device finds references to memory that has changed hands (simulated ones do)."""
        ...

    def lend(self, memory: list[torch.Tensor]) -> None:
        """From now on these storages may be used."""
        ...

    def take_back(self, memory: list[torch.Tensor]) -> None:
        """From now on a use of these storages is a mistake: the bytes may be somebody else's."""
        ...


class HostBackend:
    """``device="cpu"``: copies end before they return, and there are no streams."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def touch(self) -> None:
        """There are no streams."""

    def after(self, streams: list[Any]) -> None:
        """Nothing is pending."""

    @contextmanager
    def copies(self) -> Iterator[None]:
        """Copies run at once."""
        yield

    def done(self) -> None:
        """Nothing is pending."""

    def wait(self, stream: Any, event: Any) -> None:
        """Nothing is pending."""

    def flush(self) -> None:
        """The system has it already."""

    def free_bytes(self) -> int | None:
        """Unknown."""
        return None

    def watches(self) -> bool:
        """Nobody looks."""
        return False

    def lend(self, memory: list[torch.Tensor]) -> None:
        """Nobody looks."""

    def take_back(self, memory: list[torch.Tensor]) -> None:
        """Nobody looks."""


# Asked for at every scope. The public function spends most of its time on finding the index in its argument.
_current_stream: Callable[[int], torch.Stream] = getattr(
    torch._C, "_accelerator_getStream", torch.accelerator.current_stream
)


class AcceleratorBackend:
    """An accelerator with streams. One side stream carries all copies."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._index = device.index
        self._stream = torch.Stream(device=device)
        self._watched = self._module() if hasattr(self._module(), "watches_references") else None

    def touch(self) -> Any:
        """The current stream of this thread."""
        return _current_stream(self._index)

    def after(self, streams: list[Any]) -> None:
        """The copy stream waits for the streams that used the memory it will write."""
        for stream in streams:
            self._stream.wait_stream(stream)

    @contextmanager
    def copies(self) -> Iterator[None]:
        """Make the copy stream current."""
        with self._stream:
            yield

    def done(self) -> Any:
        """An event behind the copies."""
        return self._stream.record_event()

    def wait(self, stream: Any, event: Any) -> None:
        """Compute waits for the copy by event; the host does not wait."""
        stream.wait_event(event)

    def flush(self) -> None:
        """Empty the allocator's cache."""
        torch.accelerator.empty_cache() if hasattr(
            torch.accelerator, "empty_cache"
        ) else self._module().empty_cache()

    def free_bytes(self) -> int | None:
        """As the device tells; ``None`` where it does not."""
        try:
            free, _total = torch.accelerator.get_memory_info(self.device)
        except (AttributeError, RuntimeError, NotImplementedError):
            return None
        return int(free)

    def watches(self) -> bool:
        """As the device's module says, if it has the functions for it."""
        return self._watched is not None and bool(self._watched.watches_references())

    def lend(self, memory: list[torch.Tensor]) -> None:
        """Tell the device."""
        if self._watched is not None:
            self._watched.restore(memory)

    def take_back(self, memory: list[torch.Tensor]) -> None:
        """Tell the device."""
        if self._watched is not None:
            self._watched.revoke(memory)

    def _module(self) -> Any:
        return torch.get_device_module(self.device)


class StreamlessBackend(HostBackend):
    """An accelerator that offers no streams: its copies end before they return."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def flush(self) -> None:
        """Empty the allocator's cache."""
        torch.get_device_module(self.device).empty_cache()


def backend_for(device: torch.device) -> Backend:
    """The adapter for a resolved device."""
    if device.type == "cpu":
        return HostBackend()
    try:
        return AcceleratorBackend(device)
    except (RuntimeError, NotImplementedError):
        return StreamlessBackend(device)


# --- pinning ----------------------------------------------------------------------------------------------


class Registrar(Protocol):
    """Pins host memory that exists already, page by page, and lets go of it again."""

    def host_register(self, pointer: int, nbytes: int) -> None:
        """Pin ``nbytes`` from ``pointer``; raises ``RuntimeError`` where the system refuses."""
        ...

    def host_unregister(self, pointer: int) -> None:
        """Undo it."""
        ...


_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device, not only for the current one
_GONE = (4, 709)  # cudaErrorCudartUnloading, cudaErrorContextIsDestroyed (HIP's too): the pins went with it


class _CudaRegistrar:
    """cudaHostRegister, or its HIP twin, through torch's runtime binding, whose names are CUDA's on ROCm too.

    The binding gives a status: an enum whose only name is ``success``, unequal to every ``int``, and whose number
    ``int()`` tells (``torch/csrc/cuda/shared/cudart.cpp``).
    """

    def __init__(self, device: torch.device) -> None:
        self._runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._device = device
        self._process = os.getpid()

    def host_register(self, pointer: int, nbytes: int) -> None:
        # The current device's context takes the pin, and is made where there is none: in a thread that never chose
        # a device, hundreds of MiB on the first one.
        with torch.cuda.device(self._device):
            status = self._runtime.cudaHostRegister(pointer, nbytes, _PORTABLE)
            self._check(status, f"pinning {format_bytes(nbytes)}")

    def host_unregister(self, pointer: int) -> None:
        if os.getpid() != self._process:
            return  # a forked child: the pin is its parent's, and the runtime does not work here
        with torch.cuda.device(self._device):
            status = self._runtime.cudaHostUnregister(pointer)
            if int(status) not in _GONE:
                self._check(status, "unpinning")

    def _check(self, status: Any, what: str) -> None:
        if int(status) == 0:
            return
        _forget_error(self._device)
        reason = self._runtime.cudaGetErrorString(status)
        raise RuntimeError(f"{what} failed: {reason} (status {int(status)})")


def _forget_error(device: torch.device) -> None:
    """Let a kernel that nobody needs fail in place of the next one.

    The runtime keeps a refused call's status until this thread asks for it, and torch asks after each kernel: it
    would blame that one. The binding cannot ask by itself (torch 2.9).
    """
    with suppress(RuntimeError):
        torch.empty(1, device=device).fill_(0)


def registrar_for(device: torch.device) -> Registrar | None:
    """Pinning of existing memory, where the device offers it: CUDA, ROCm, or a backend's ``host_register``."""
    if device.type == "cuda":
        return _CudaRegistrar(device)
    module = torch.get_device_module(device) if device.type != "cpu" else None
    return module if hasattr(module, "host_register") else None
