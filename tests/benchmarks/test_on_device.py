"""``benchmarks/on_device.py`` on the simulated accelerator: all that it does, exact on counts, silent on times."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import on_device
from benchmarks.on_device_times import FULL, QUICK, SIMULATED, WAYS, Clock, missing_memory

from omni_components.testing import SimulatedAccelerator
from omni_components.testing.plugin import require_simulated_accelerator


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    require_simulated_accelerator()
    file = tmp_path_factory.mktemp("on_device") / "on_device.json"
    assert on_device.main(["--device", "sim", "--quick", "--json", str(file)]) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


# --- what is checked -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo", "diffusers"])
def test_results_are_those_of_the_resident_run(figures: dict[str, Any], name: str) -> None:
    """I2, I5, I7, by the ledger's own look too."""
    found = figures["pipelines"][name]
    assert (found["equal"], found["wrong"]) == ([True, True], None)
    assert found["loads"] > 4


@pytest.mark.parametrize("name", ["demo", "diffusers"])
def test_torch_counts_no_more_for_weights_than_was_predicted(figures: dict[str, Any], name: str) -> None:
    """I8. What computing takes besides is counted apart."""
    found = figures["pipelines"][name]
    assert 0 < found["weights_peak"] <= found["predicted_peak"] + found["rounding"]
    assert found["rounding"] < 0.05 * found["predicted_peak"]
    assert found["weights_peak"] < found["running_peak"]


def test_masters_are_pinned(figures: dict[str, Any]) -> None:
    found = figures["masters"]
    assert found["pageable_bytes"] == found["mapped_bytes"] == 0
    assert found["pinned_bytes"] >= 2 * 0.9 * SIMULATED.phase
    assert found["tensors"] == 2 * SIMULATED.tensors[0]


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        (lambda found: found["pipelines"]["demo"].update(equal=[True, False]), "demo equal"),
        (lambda found: found["pipelines"]["diffusers"].update(wrong="I5 truth"), "diffusers ledger"),
        (lambda found: found["pipelines"]["demo"].update(weights_peak=1 << 40), "demo peak"),
        (lambda found: found["masters"].update(pageable_bytes=1), "masters pinned"),
        (
            lambda found: found["masters"].update(is_pinned=1),
            "masters is_pinned",
        ),
    ],
)
def test_what_does_not_hold_is_named_and_nothing_else(
    figures: dict[str, Any], change: Any, missed: str
) -> None:
    found = copy.deepcopy(figures)
    change(found)
    assert [name for name, holds in on_device.bounds(found).items() if not holds] == [missed]


def test_a_pipeline_that_computes_something_else_ends_the_command_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The comparison is one: here each request gives other numbers."""
    require_simulated_accelerator()
    pipe, _ = on_device.demo()
    answers = iter(range(9))

    def drifting() -> tuple[Any, Any]:
        return pipe, lambda pipe: torch.tensor([next(answers)])

    monkeypatch.setattr(on_device, "demo", drifting)
    monkeypatch.setattr(on_device, "from_diffusers", drifting)
    for name in ("switches", "pinning", "first_load", "prefetch"):
        monkeypatch.setattr(on_device, name, lambda *given: {"bytes": 0, "tensors": 0, "left_out": "no time"})
    assert on_device.main(["--device", "sim", "--json", str(tmp_path / "other.json")]) == 1
    assert "missed: demo equal, diffusers equal" in capsys.readouterr().out


# --- what is measured ------------------------------------------------------------------------------------


def test_every_way_is_timed_beside_a_raw_copy(figures: dict[str, Any]) -> None:
    assert [one["tensors"] for one in figures["switches"]] == list(SIMULATED.tensors)
    for one in figures["switches"]:
        assert 0.9 * SIMULATED.switches[0] < one["bytes"] <= SIMULATED.switches[0]
        assert all(one[name]["ratio"] > 0 for name in WAYS)
        assert one["raw_copy"]["gb_per_s"] > 0


def test_memory_is_pinned_in_every_way(figures: dict[str, Any]) -> None:
    found = figures["pinning_seconds_per_gib"]
    for name in ("registered", "registered_filled", "unregistered", "torch"):
        assert found[name] > 0


def test_a_mapped_component_is_loaded_whole_both_times(figures: dict[str, Any]) -> None:
    """Its bytes stay in the file in between: what is measured is the way through the staging slabs."""
    found = figures["first_load"]
    assert found["loaded_bytes"] == [found["bytes"]] * 2
    assert found["mapped_bytes"] == found["bytes"]
    assert all(found[f"{name}_gb_per_s"] > 0 for name in ("staged", "staged_again", "plain_to"))


def test_every_component_is_copied_ahead_where_prefetch_is_asked_for(figures: dict[str, Any]) -> None:
    found = figures["prefetch"]
    assert (found["prefetched_off"], found["prefetched_on"]) == (0, 3 * SIMULATED.requests)
    assert found["notes"] == []


def test_the_file_says_where_it_was_measured(figures: dict[str, Any]) -> None:
    told = {"hardware", "driver", "torch", "date", "device_memory", "timed_by", "cuda", "hip", "simulated"}
    assert told <= {*figures}
    assert (figures["device"], figures["simulated"], figures["quick"]) == ("sim:0", True, True)
    assert figures["timed_by"] == "the host's clock"  # the simulated device's events tell no time


def test_a_device_whose_events_tell_time_is_timed_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As real ones are: the time between two events around the step, the second of which is waited for."""
    require_simulated_accelerator()
    log: list[str] = []

    class Event:
        def __init__(self, *, device: torch.device, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("synchronize")

        def elapsed_time(self, end: Event) -> float:
            return 5.0

    with SimulatedAccelerator() as sim:
        monkeypatch.setattr(torch, "Event", Event)
        clock = Clock(sim.device)
        log.clear()
        assert clock(lambda: log.append("step")).wall == 0.005
    assert clock.events
    assert log == ["record", "step", "record", "synchronize"]


def test_the_driver_is_what_the_system_says(tmp_path: Path) -> None:
    assert on_device.driver(tmp_path) is None
    file = tmp_path / on_device.KERNEL_DRIVERS[0]
    file.parent.mkdir(parents=True)
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.1\nGCC version: 12\n")
    assert on_device.driver(tmp_path) == "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.1"


def test_a_real_device_is_measured_at_the_sizes_that_are_promised() -> None:
    assert QUICK.switches == (512 << 20,)
    assert FULL.switches == (512 << 20, 4 << 30)
    assert QUICK.tensors == FULL.tensors == (400, 8000)


def test_what_does_not_fit_says_where() -> None:
    require_simulated_accelerator()
    with SimulatedAccelerator(capacity="64MiB") as sim:
        assert missing_memory(sim.device, 1 << 20, 1 << 20) is None
        assert "of the device can be had, 1.0 are needed" in str(missing_memory(sim.device, 1 << 30, 0))
        assert "of the host can be had, 1048576.0 are" in str(missing_memory(sim.device, 0, 1 << 50))


# --- mistakes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "cpu", "nonsense"])
def test_a_device_that_is_not_there_is_a_mistake_in_the_command(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit status 2, and nothing is written."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    file = tmp_path / "none.json"
    with pytest.raises(SystemExit) as ended:
        on_device.main(["--device", device, "--json", str(file)])
    assert ended.value.code == 2
    assert f"device={device!r}" in capsys.readouterr().err
    assert not file.exists()
