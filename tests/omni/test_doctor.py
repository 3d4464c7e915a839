"""Faults of ``omni-components doctor``: a machine that lacks something, and figures nobody measured."""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from omni_components.cli import app, media
from omni_components.cli.doctor import as_text, examine
from omni_components.transfer import hostmemory


def run(*words: str):
    result = CliRunner().invoke(app, ["doctor", *words])
    assert (result.exit_code, result.stderr) == (0, ""), result.exception
    return result.stdout


def test_text_and_json_tell_the_same_versions():
    found = json.loads(run("--json"))
    assert found["versions"]["torch"] == version("torch")
    assert found["versions"]["omni-components"] == version("omni-components")
    text = run()
    assert f"torch {version('torch')}" in text
    assert "host memory" in text


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_a_machine_without_an_accelerator_says_so_and_measures_no_link():
    found = examine()
    assert (found.devices, found.links, found.pinning.works) == ((), (), False)
    assert "no accelerator; the CPU only" in as_text(found)
    assert any("an accelerator" in one.what for one in found.missing)


def test_an_accelerators_memory_link_and_pinning_are_measured(sim):
    sim.capacity = "256MiB"
    before = sim.stats()
    found = examine()
    (device,), (link,) = found.devices, found.links
    assert device.name == link.device == "sim:0"
    assert device.total_bytes == 256 << 20
    assert link.problem is None
    assert link.pinned
    assert link.to_device > 0
    assert link.to_host > 0
    assert found.pinning.works
    assert found.pinning.speed > 0
    after = sim.stats()
    assert after.h2d_bytes - before.h2d_bytes >= 32 << 20  # a real copy
    assert (after.allocated, after.pinned) == (0, 0)
    assert "GB/s to the device" in as_text(found)


def test_a_full_device_and_a_host_that_cannot_pin_are_findings_not_failures(sim):
    sim.capacity, sim.pinned_capacity = "1MiB", 0
    found = json.loads(run("--json"))
    assert found["links"][0]["to_device"] is None
    assert found["links"][0]["problem"]
    assert not found["pinning"]["works"]
    assert found["pinning"]["problem"]
    assert "not measured" in run()


def test_packages_and_tools_that_are_missing_are_named_with_what_they_are_for(monkeypatch):
    def none(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr("importlib.metadata.version", none)
    monkeypatch.setattr(media, "find_spec", lambda name: None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("OMNI_COMPONENTS_CACHE", "/nowhere")
    found = examine()
    assert found.simulator_problem is not None
    assert "no-such-compiler" in found.simulator_problem
    named = {one.what: one for one in found.missing}
    assert named["torch"].advice == "pip install torch"
    assert "omni-components[video]" in named["an MP4 encoder"].advice
    assert "no-such-compiler" in named["the simulated accelerator"].advice
    assert "torch not installed" in as_text(found)


def test_a_torch_that_cannot_be_imported_is_a_finding(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    found = examine()
    assert found.devices == ()
    assert not found.pinning.works
    assert any("torch" in one.what for one in found.missing)
    as_text(found)


def test_a_containers_limit_is_told_and_a_huge_one_is_none(tmp_path, monkeypatch):
    group = tmp_path / "sys/fs/cgroup"
    (group / "memory").mkdir(parents=True)
    (group / "memory.max").write_text(f"{8 << 30}\n")
    (group / "memory.current").write_text(f"{1 << 30}\n")
    (group / "memory/memory.limit_in_bytes").write_text("9223372036854771712")
    real = hostmemory.container_limits
    monkeypatch.setattr(hostmemory, "container_limits", lambda root=tmp_path: real(tmp_path))
    found = examine().memory
    assert (found.container_limit, found.container_used) == (8 << 30, 1 << 30)
    assert "container: 1.0 GiB of 8.0 GiB used" in as_text(examine())
    (group / "memory.max").write_text("max")
    assert examine().memory.container_limit is None


def test_the_help_names_the_command():
    assert "doctor" in CliRunner().invoke(app, ["--help"]).stdout
    assert "--json" in CliRunner().invoke(app, ["doctor", "--help"]).stdout


def test_it_leaves_no_file(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run()
    assert list(tmp_path.iterdir()) == []
