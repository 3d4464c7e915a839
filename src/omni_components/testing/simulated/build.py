"""Builds the C++ extension once per torch, Python and source, and loads it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from omni_components.testing.simulated.errors import SimulatedAcceleratorUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

NAME = "omni_components_simulated"
SOURCES = Path(__file__).parent / "csrc"
# -O1 builds in half the time of -O2; the kernels are torch's own, ours only pass pointers around.
FLAGS = ["-O1", "-g0", "-w", "-fvisibility=hidden"]


def unavailable_reason() -> str | None:
    """Says what keeps the extension from loading here, or None if nothing is known to."""
    if _is_built(_build_directory()):
        return None
    missing = [text for text in (_missing_compiler(), _missing_ninja(), _missing_setuptools()) if text]
    return "; ".join(missing) or None


def load_extension() -> ModuleType:
    """Loads the extension, building it first if this torch, Python and source have no build yet.

    Raises:
        SimulatedAcceleratorUnavailable: the build tools are missing, or the build failed.
    """
    directory = _build_directory()
    reason = unavailable_reason()
    if reason is not None:
        raise SimulatedAcceleratorUnavailable(reason)
    if not _is_built(directory):
        _build_locked(directory)
    return _import(directory)


def cache_root() -> Path:
    """The folder that holds the builds: ``$OMNI_COMPONENTS_CACHE``, or ``~/.cache/omni_components``."""
    configured = os.environ.get("OMNI_COMPONENTS_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "omni_components"


def _build_directory() -> Path:
    return cache_root() / f"simulated-{_key()}"


def _key() -> str:
    import torch

    digest = hashlib.sha256()
    for part in (
        torch.__version__,
        sysconfig.get_config_var("SOABI") or sys.version,
        platform.machine(),
        *FLAGS,
    ):
        digest.update(f"{part}\0".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _library(directory: Path) -> Path:
    return directory / f"{NAME}.so"


def _is_built(directory: Path) -> bool:
    # The mark is written last: a build that was killed halfway leaves none.
    return (directory / "complete").exists() and _library(directory).exists()


def _missing_compiler() -> str | None:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"no C++ compiler ({compiler}): install g++ (apt install g++) or set CXX"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python's headers are missing: install python3-dev"
    return None


def _missing_ninja() -> str | None:
    return None if _ninja_directory() is not None else "no ninja: pip install ninja"


def _missing_setuptools() -> str | None:
    found = importlib.util.find_spec("setuptools") is not None
    return None if found else "no setuptools: pip install setuptools"


def _ninja_directory() -> str | None:
    # pip puts ninja beside the interpreter, which need not be on PATH.
    beside = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    found = shutil.which("ninja", path=beside)
    return str(Path(found).parent) if found else None


def _build_locked(directory: Path) -> None:
    import fcntl

    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "build.lock").open("w") as lock:
        # The system drops this lock when its holder dies, so a killed build blocks nobody.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_built(directory):
            return  # another process built it while this one waited
        # torch's own lock file outlives a killed build; under our lock nobody else can be building.
        (directory / "lock").unlink(missing_ok=True)
        _compile(directory)
        (directory / "complete").touch()


def _compile(directory: Path) -> None:
    with _build_environment():
        from torch.utils.cpp_extension import load

        try:
            load(
                NAME,
                [str(source) for source in sorted(SOURCES.glob("*.cpp"))],
                extra_cflags=FLAGS,
                build_directory=str(directory),
                is_python_module=False,
                is_standalone=False,
                keep_intermediates=True,
            )
        except Exception as error:
            log = directory / "build.log"
            log.write_text(str(error))
            raise SimulatedAcceleratorUnavailable(
                f"its build failed, see {log}: {_first_error(error)}"
            ) from error


def _first_error(error: Exception) -> str:
    lines = str(error).splitlines() or [repr(error)]
    return next((line for line in lines if " error: " in line), lines[-1])


@contextlib.contextmanager
def _build_environment() -> Iterator[None]:
    path = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.pathsep.join([path, _ninja_directory() or ""]).rstrip(os.pathsep)
    try:
        with warnings.catch_warnings():
            # Importing setuptools and torch's build helper warns about things no user of this can change.
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ["PATH"] = path


def _import(directory: Path) -> ModuleType:
    library = str(_library(directory))
    loader = importlib.machinery.ExtensionFileLoader(NAME, library)
    spec = importlib.util.spec_from_file_location(NAME, library, loader=loader)
    if spec is None:
        raise SimulatedAcceleratorUnavailable(f"{library} is not an extension module")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
