"""Shortened runs of the transfer benchmarks: exact on counts, loose on times, which are those of a busy machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import cold_start, growth, mapped_cpu, switch
from benchmarks.harness import Time, median_ratio, size_of, verdict

from omni_components.testing.plugin import require_simulated_accelerator


def run(benchmark: Any, folder: Path, *more: str) -> dict[str, Any]:
    file = folder / f"{benchmark.__name__}.json"
    benchmark.main(["--json", str(file), "--quick", *more])
    return json.loads(file.read_text())


# --- switch.py -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def switches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    require_simulated_accelerator()
    return run(switch, tmp_path_factory.mktemp("switch"))


@pytest.mark.parametrize("count", ["device_allocations", "flushes", "host_allocations"])
def test_switches_take_no_memory_and_flush_nothing(switches: dict[str, Any], count: str) -> None:
    """I8: the arena and the masters are all there is."""
    assert switches[count] == 0


def test_a_switch_is_few_copies_one_way(switches: dict[str, Any]) -> None:
    for one in switches["by_tensors"].values():
        assert 1 <= one["copies"] <= one["most_copies"]
        assert one["bytes_to_device"] == one["bytes"]
        assert one["bytes_to_host"] == 0


def test_a_changed_weight_costs_its_own_bytes_only(switches: dict[str, Any]) -> None:
    """I7: it is copied home, and nothing else is."""
    for one in switches["by_tensors"].values():
        assert 0 < one["changed_bytes"] < one["bytes"] / 100
        assert one["changed_bytes_to_host"] == one["changed_bytes"]


def test_a_switch_is_faster_than_every_swap_that_moves_tensor_by_tensor(switches: dict[str, Any]) -> None:
    for name in ("diffusers_enable_model_cpu_offload", "accelerate_cpu_offload_with_hook", "plain_to"):
        assert switches["switch_cpu_ratio_8000"] < switches["peers"][name]["switch_cpu_ratio_8000"]


def test_every_peer_runs_and_has_the_same_figures(switches: dict[str, Any]) -> None:
    figures = {key for key in switches if key.startswith("switch_")} | {*switch.COUNTS, "host_allocations"}
    assert {*switches["peers"]} == {
        "raw_copy",
        "diffusers_enable_model_cpu_offload",
        "accelerate_cpu_offload_with_hook",
        "plain_to",
        "diffusers_group_offload",
        "diffusers_group_offload_stream",
    }
    for peer in switches["peers"].values():
        assert "did_not_run" not in peer
        assert figures <= {*peer}


def test_peers_that_swap_with_to_copy_everything_back(switches: dict[str, Any]) -> None:
    """What the counters say of a peer whose traffic is known: they count."""
    for name in (
        "diffusers_enable_model_cpu_offload",
        "accelerate_cpu_offload_with_hook",
        "plain_to",
        "diffusers_group_offload",
    ):
        for tensors, one in switches["peers"][name]["by_tensors"].items():
            assert one["bytes_to_host"] == switches["by_tensors"][tensors]["bytes"]


# --- growth.py -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    require_simulated_accelerator()
    folder = tmp_path_factory.mktemp("growth")
    result = run(growth, folder, "--plot", str(folder / "growth.png"))
    assert (folder / "growth.png").read_bytes().startswith(b"\x89PNG")
    return result


@pytest.mark.parametrize("curve", ["components", "history"])
def test_a_switch_does_not_grow_with(grown: dict[str, Any], curve: str) -> None:
    """16 times the components, 10,000 times the events: nobody walks over them."""
    assert grown[f"{curve}_growth"] < 4


def test_a_tensor_costs_microseconds(grown: dict[str, Any]) -> None:
    assert grown["cpu_us_per_tensor"] < 12


# --- mapped_cpu.py ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mapped() -> dict[str, Any]:
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("this system does not tell a process's anonymous memory (/proc/self/smaps_rollup)")
    return mapped_cpu.measure(component=100 << 20)


def test_a_mapped_pipeline_never_holds_more_than_its_largest_component(mapped: dict[str, Any]) -> None:
    """I1, by the system's own figure; the share of Python and torch is taken off, since it is no weight."""
    assert mapped["looks"] > 10
    assert 1.0 <= mapped["peak_ratio_above_before"] <= mapped_cpu.ALLOWED


def test_enabling_and_releasing_hold_no_weights(mapped: dict[str, Any]) -> None:
    for when in ("anonymous_enabled", "anonymous_released"):
        assert mapped[when] - mapped["anonymous_before"] < mapped["largest_component"] / 10


def test_a_mapped_pipeline_computes_what_it_computes_without_offload(mapped: dict[str, Any]) -> None:
    """I7; each component is loaded once per run, and travels whole."""
    assert mapped["equal"] is True
    assert mapped["loads"] == 2 * len(mapped_cpu.NAMES)
    assert mapped["bytes_loaded"] == 2 * mapped["weights"]


# --- cold_start.py ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cold() -> dict[str, Any]:
    require_simulated_accelerator()
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("this system does not tell a process's anonymous memory (/proc/self/smaps_rollup)")
    return cold_start.measure(nbytes=96 << 20, rounds=1, stored=["float32"], ways=["ours", "diffusers"])


def test_a_first_phase_that_waits_for_the_weights_of_the_second(cold: dict[str, Any]) -> None:
    """The transformer's are in their file still, and took no memory; diffusers has converted them."""
    ours, theirs = cold["cases"]["float32"]["ours"], cold["cases"]["float32"]["diffusers"]
    assert cold["equal"] is True
    for one in (ours, theirs):
        assert set(cold["time_ratio"]) == set(one["seconds"]) == set(one["time_ratio"])
        assert all(0 < one["seconds_to_enabled"][place] < one["seconds"][place] for place in one["seconds"])
    assert ours["unread"] > 0.6 * ours["weights"]
    assert theirs["unread"] == 0
    assert ours["peak_enabling"] < 0.3 * ours["weights"]
    assert theirs["peak_enabling"] > 0.9 * theirs["weights"]


def test_a_first_phase_that_is_slow_and_passes() -> None:
    ratios = {"float32": 0.5, "bfloat16": 0.5}
    good = {"time_ratio": {"disk": ratios, "page cache": {**ratios, "bfloat16": 1.2}}}
    good |= {"memory_ratio": 1.0, "equal": True}
    assert all(cold_start.bounds(good).values())
    slow = {**good, "time_ratio": {"disk": {**ratios, "bfloat16": 0.61}, "page cache": ratios}}
    assert [name for name, held in cold_start.bounds(slow).items() if not held] == [
        "time_ratio from disk bfloat16"
    ]
    unknown = {**good, "time_ratio": {"page cache": ratios}}
    assert [name for name, held in cold_start.bounds(unknown).items() if not held] == ["files dropped"]


# --- as commands -----------------------------------------------------------------------------------------

# One process for all, since importing torch takes longest; each file is run as `python FILE --help` runs it.
HELP = """
import runpy, sys
from pathlib import Path
folder = Path(sys.argv.pop())
path = [one for one in sys.path if Path(one).resolve() != folder.parent]
for file in sorted(folder.glob("*.py")):
    if "__main__" not in file.read_text(encoding="utf-8"):
        continue
    for name in [one for one in sys.modules if one.split(".")[0] in ("benchmarks", "tests")]:
        del sys.modules[name]
    sys.path[:], sys.argv[:] = [str(folder), *path], [str(file), "--help"]
    try:
        runpy.run_path(str(file), run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, file
        print("ran", file.name)
"""


def test_a_benchmark_that_runs_only_where_the_checkout_is_on_the_path(tmp_path: Path) -> None:
    """`python benchmarks/X.py`, from any folder."""
    folder = Path(switch.__file__).parent
    command = [sys.executable, "-c", HELP, str(folder)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    ran = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("ran ")}
    files = {"switch", "generation", "cold_start", "mapped_cpu", "growth", "prefetch"}
    assert {f"{name}.py" for name in files} <= ran


@pytest.mark.parametrize("key", [*switch.TARGETS, "device_allocations", "flushes", "copies", "bytes_to_host"])
def test_a_bound_that_is_missed_and_not_told(
    switches: dict[str, Any], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    held = {**switches, **switch.TARGETS}
    assert verdict(switch.bounds(held), quick=False) == 0
    assert verdict(switch.bounds({**held, key: 10**12}), quick=False) == 1
    assert capsys.readouterr().out == f"missed: {key}\n"


# --- harness.py ------------------------------------------------------------------------------------------


def test_a_ratio_is_taken_round_by_round() -> None:
    """A slow round is slow for both: the ratio of the medians would be 3 here."""
    base = [Time(1.0, 1.0), Time(10.0, 2.0), Time(1.0, 1.0)]
    taken = [Time(2.0, 3.0), Time(20.0, 6.0), Time(3.0, 3.0)]
    assert median_ratio(taken, base) == 2.0
    assert median_ratio(taken, base, "cpu") == 3.0


def test_components_have_the_tensors_and_bytes_they_are_asked_for() -> None:
    module = switch.Layers(400, 32 << 20)
    assert sum(1 for _ in module.parameters()) == 400
    assert size_of(module) == pytest.approx(32 << 20, rel=0.01)


@pytest.mark.parametrize("benchmark", [switch, growth, mapped_cpu, cold_start])
def test_a_missing_file_name_is_a_usage_error(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        benchmark.main([])
    assert "--json" in capsys.readouterr().err
