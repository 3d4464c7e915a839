"""The extension is built once, says what it lacks, and nothing happens before it is used."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from omni_components.testing import SimulatedAcceleratorUnavailable, simulated_accelerator_available
from omni_components.testing.simulated import build


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMNI_COMPONENTS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _pretend_to_compile(directory: Path) -> None:
    (directory / f"{build.NAME}.so").touch()


def test_here_it_is_available() -> None:
    assert simulated_accelerator_available() is None


def test_without_a_compiler_it_says_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    reason = simulated_accelerator_available()
    assert reason is not None
    assert "no C++ compiler (no-such-compiler): install g++" in reason
    with pytest.raises(SimulatedAcceleratorUnavailable, match=r"install g\+\+") as caught:
        build.load_extension()
    assert caught.value.reason == reason
    assert not cache.exists(), "asking writes nothing"


def test_without_ninja_it_says_what_to_install(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert simulated_accelerator_available() == "no ninja: pip install ninja"


def test_ninja_beside_the_interpreter_is_found(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ninja = tmp_path / "ninja"
    ninja.write_text("#!/bin/sh\n")
    ninja.chmod(0o755)
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert simulated_accelerator_available() is None


def test_a_build_needs_no_compiler_any_more(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_compile", _pretend_to_compile)
    build._build_locked(build._build_directory())
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert simulated_accelerator_available() is None


def test_a_build_that_was_killed_is_done_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = build._build_directory()
    directory.mkdir(parents=True)
    (directory / "lock").touch()  # torch's own lock, for which it would wait for ever
    (directory / f"{build.NAME}.so").touch()
    monkeypatch.setattr(build, "_compile", _pretend_to_compile)
    build._build_locked(directory)
    assert build._is_built(directory)
    assert not (directory / "lock").exists()


def test_who_comes_second_waits_and_builds_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = []
    at_work = threading.Event()

    def compile_slowly(directory: Path) -> None:
        builds.append(directory)
        at_work.wait(0.2)
        _pretend_to_compile(directory)

    monkeypatch.setattr(build, "_compile", compile_slowly)
    directory = build._build_directory()
    threads = [threading.Thread(target=build._build_locked, args=(directory,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert builds == [directory]


def test_another_source_is_another_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build._key()
    (tmp_path / "other.cpp").write_text("int x;")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build._key() != before


def test_a_failing_build_names_the_error_and_the_log(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "broken-c++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-version*|*-dump*) exec c++ "$@";; esac\n'
        'echo "some.cpp:1: fatal error: it is broken" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(SimulatedAcceleratorUnavailable, match="fatal error: it is broken") as caught:
        build.load_extension()
    log = build._build_directory() / "build.log"
    assert str(log) in caught.value.reason
    assert "broken-c++" in log.read_text()


def test_importing_builds_and_registers_nothing(run_python: Callable[..., str], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    code = """
import omni_components.testing, omni_components.testing.plugin
import torch
from omni_components.testing import SimulatedAccelerator, every_fault
assert torch._C._get_privateuse1_backend_name() == "privateuseone"
assert not hasattr(torch, "sim")
assert not torch.accelerator.is_available()
SimulatedAccelerator("64MiB")
assert not hasattr(torch, "sim")
"""
    run_python(code, OMNI_COMPONENTS_CACHE=str(cache))
    assert not cache.exists()


def test_the_plugin_imports_no_torch(run_python: Callable[..., str]) -> None:
    # Apart from the package's own `__init__`, which is not the plugin's to decide.
    package = str(Path(build.__file__).parents[2])
    code = f"""
import sys, types
root = types.ModuleType("omni_components")
root.__path__ = [{package!r}]
sys.modules["omni_components"] = root
import omni_components.testing.plugin
print("torch" in sys.modules)
"""
    assert run_python(code).strip() == "False"


def test_a_fresh_process_uses_the_build_without_a_warning_or_a_compiler(
    run_python: Callable[..., str],
) -> None:
    code = """
import torch
from omni_components.testing import SimulatedAccelerator
with SimulatedAccelerator() as sim:
    leaked = torch.ones(3, device=sim.device)
    print(leaked.sum().item(), torch.accelerator.is_available())
print(torch.accelerator.is_available())
"""
    assert run_python(code, CXX="no-such-compiler").split() == ["3.0", "True", "False"]


def test_torchs_one_slot_may_be_taken(run_python: Callable[..., str]) -> None:
    code = """
import torch
torch.utils.rename_privateuse1_backend("other")
from omni_components.testing import SimulatedAccelerator, SimulatedAcceleratorUnavailable
try:
    SimulatedAccelerator().__enter__()
except SimulatedAcceleratorUnavailable as error:
    print(error)
"""
    assert "slot is taken by the backend 'other'" in run_python(code)
