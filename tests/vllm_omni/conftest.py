"""vLLM-Omni's own offload code, from its wheel, with stand-ins for what surrounds it.

The wheel needs vLLM, and that needs CUDA. Its model-level offload needs of both only a logger, a platform and a
type: these are stood in for here. Everything else that runs is theirs, unchanged.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.helpers.fixtures import seeded, sim

__all__ = ["offloader", "seeded", "sim"]

HOW = (
    "vllm-omni is not installed; it comes without what it depends on: pip install --no-deps vllm-omni==0.30.0"
)
FOLDERS = ("", "diffusion", "diffusion.hooks", "diffusion.models", "diffusion.offloader")


class Platform:
    """The simulated accelerator, as ``current_omni_platform`` would describe it; counts what is asked of it."""

    def __init__(self) -> None:
        self.synchronized = self.flushed = 0

    def is_xpu(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.synchronized += 1

    def empty_cache(self) -> None:
        self.flushed += 1

    def get_free_memory(self) -> int:
        return 0


@pytest.fixture(scope="session")
def wheel() -> Path:
    """Where the package's files are."""
    try:
        return Path(str(distribution("vllm-omni").locate_file("vllm_omni")))
    except PackageNotFoundError:
        if os.environ.get("CI"):
            pytest.fail(HOW)
        pytest.skip(HOW)


@pytest.fixture
def offloader(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``vllm_omni.diffusion.offloader.sequential_backend`` and its neighbours, as attributes of one module."""
    before = set(sys.modules)
    for name, contents in _stand_ins().items():
        monkeypatch.setitem(sys.modules, name, _module(name, **contents))
    for folder in FOLDERS:  # packages whose __init__ would import the whole of vLLM
        name = f"vllm_omni.{folder}".rstrip(".")
        package = _module(name)
        package.__path__ = [str(wheel.joinpath(*folder.split(".")) if folder else wheel)]
        monkeypatch.setitem(sys.modules, name, package)
    hooks = importlib.import_module("vllm_omni.diffusion.hooks.base")
    vars(sys.modules["vllm_omni.diffusion.hooks"]).update(
        HookRegistry=hooks.HookRegistry, ModelHook=hooks.ModelHook
    )
    yield _module(
        "offloader",
        **vars(importlib.import_module("vllm_omni.diffusion.offloader.base")),
        ModelLevelOffloadBackend=importlib.import_module(
            "vllm_omni.diffusion.offloader.sequential_backend"
        ).ModelLevelOffloadBackend,
        ComponentDiscovery=importlib.import_module(
            "vllm_omni.diffusion.models.interface"
        ).SupportsComponentDiscovery,
    )
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("vllm", "vllm_omni"):
            sys.modules.pop(name)


def _stand_ins() -> dict[str, dict[str, Any]]:
    logger = logging.getLogger("vllm_omni")
    return {
        "vllm": {},
        "vllm.logger": {"init_logger": lambda name: logger},
        "vllm_omni.platforms": {"current_omni_platform": Platform()},
        "vllm_omni.diffusion.data": {
            "OmniDiffusionConfig": object,
            "validate_dlo_host_registration_options": lambda **_: 0.0,
        },
    }


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    for key, value in contents.items():
        if key != "__name__":
            vars(module)[key] = value
    return module
