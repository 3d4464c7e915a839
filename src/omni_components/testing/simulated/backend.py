"""Registers the device type ``sim`` with torch, once per process and on first use."""

from __future__ import annotations

import inspect
import threading
import types
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import backend_registration
from torch.utils.dlpack import DLDeviceType

from omni_components.testing.simulated.build import load_extension
from omni_components.testing.simulated.errors import SimulatedAcceleratorUnavailable

if TYPE_CHECKING:
    from types import ModuleType

BACKEND = "sim"
_NOT_THE_CALLER = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_lock = threading.Lock()
_extension: ModuleType | None = None


def extension() -> ModuleType:
    """The loaded C++ extension; the first call builds it, loads it and registers the device type.

    Raises:
        SimulatedAcceleratorUnavailable: it cannot be built, or another backend has taken torch's one slot.
    """
    global _extension
    with _lock:
        if _extension is None:
            _extension = _register()
        return _extension


def _register() -> ModuleType:
    registered: ModuleType | None = getattr(getattr(torch, BACKEND, None), "_omni_components_extension", None)
    if registered is not None:
        return registered  # this module was imported anew, as pytester does; torch still has the device
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", BACKEND):
        raise SimulatedAcceleratorUnavailable(f"torch's PrivateUse1 slot is taken by the backend {taken!r}")
    loaded = load_extension()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backend_registration.rename_privateuse1_backend(BACKEND)
        torch._register_device_module(BACKEND, _device_module(loaded))  # type: ignore[no-untyped-call]
        backend_registration.generate_methods_for_privateuse1_backend()
    _teach_dlpack()
    loaded.set_locator(_caller)
    return loaded


def _caller() -> str:
    """The innermost line of Python that is neither torch's nor ours: who issued the running operation."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_CALLER):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def _device_module(loaded: ModuleType) -> types.ModuleType:
    """What torch and users find as ``torch.sim``."""
    module: Any = types.ModuleType("torch.sim", "The simulated accelerator of omni_components.testing.")
    module._omni_components_extension = loaded
    module.is_available = lambda: loaded.active_devices() > 0
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = loaded.active_devices
    module.current_device = loaded.current_device
    module.device = lambda device: torch.accelerator.device_index(_index_of(device))
    module.set_device = torch.accelerator.set_device_index
    module.Stream = torch.Stream
    module.Event = torch.Event
    module.stream = lambda stream: stream  # a torch.Stream is a context manager already
    module.current_stream = torch.accelerator.current_stream
    module.set_stream = torch.accelerator.set_stream
    module.synchronize = torch.accelerator.synchronize
    module.empty_cache = torch.accelerator.empty_cache
    module.memory_allocated = torch.accelerator.memory_allocated
    module.max_memory_allocated = torch.accelerator.max_memory_allocated
    module.reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats
    module.mem_get_info = torch.accelerator.get_memory_info
    module.host_register = loaded.host_register
    module.host_unregister = loaded.host_unregister
    # Who lends the same memory in turns tells which tensors' memory is somebody else's, until it is theirs again:
    # reads through their storages then see poison and are reported.
    module.revoke = loaded.revoke
    module.restore = loaded.restore
    module.watches_references = lambda: loaded.poisons(loaded.current_device())
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    _add_random(module, loaded)
    return module  # type: ignore[no-any-return]


def _index_of(device: torch.device | str | int) -> int:
    index = device if isinstance(device, int) else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def _add_random(module: Any, loaded: ModuleType) -> None:
    def manual_seed_all(seed: int) -> None:
        for index in range(max(1, loaded.active_devices())):
            loaded.default_generator(index).manual_seed(seed)

    def manual_seed(seed: int) -> None:
        loaded.default_generator(loaded.current_device()).manual_seed(seed)

    def get_rng_state(device: torch.device | str | int = BACKEND) -> torch.Tensor:
        state: torch.Tensor = loaded.default_generator(_index_of(device)).get_state()
        return state

    def set_rng_state(state: torch.Tensor, device: torch.device | str | int = BACKEND) -> None:
        loaded.default_generator(_index_of(device)).set_state(state)

    module.manual_seed = manual_seed
    module.manual_seed_all = manual_seed_all
    module.get_rng_state = get_rng_state
    module.set_rng_state = set_rng_state


def _teach_dlpack() -> None:
    # torch's own `__dlpack_device__` knows this backend only by its name before the renaming.
    original = torch.Tensor.__dlpack_device__

    def __dlpack_device__(self: torch.Tensor) -> tuple[Any, int]:
        if self.device.type == BACKEND:
            return (DLDeviceType.kDLExtDev, self.device.index)
        return original(self)

    torch.Tensor.__dlpack_device__ = __dlpack_device__  # type: ignore[method-assign]
