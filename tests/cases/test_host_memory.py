"""Faults of host memory: pinned twice over, beyond the container's limit, or held twice. Cases C09, C10 and C11."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

import omni_components.attach.fleet as fleet
import omni_components.transfer.masters as masters
from omni_components import ResidencyWarning, offload
from omni_components.transfer.hostmemory import pinnable_bytes
from tests.helpers.pipelines import Stack, frozen, resident_copy

MB = 1_000_000


class Floats(nn.Module):
    """Parameters of given lengths."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__()
        self.tables = nn.ParameterList(
            [nn.Parameter(torch.zeros(one), requires_grad=False) for one in lengths]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.tables[0][0]


class Heavy(nn.Module):
    """Two components of given sizes."""

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = []

    def __init__(self, encoder: list[int], transformer: list[int]) -> None:
        super().__init__()
        self.text_encoder, self.transformer = Floats(encoder), Floats(transformer)


# --- C09 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoder", "transformer"),
    [
        ([129_500_000], [129_500_000, 64]),
        ([33 * MB, *[1000] * 5000], [33 * MB]),
        ([4100], [1]),
        ([1000] * 300, [70 * MB, 70 * MB]),
    ],
    ids=["129.5 MB", "33 MB and 5,000 of 1 KB", "a page and a byte", "odd blocks"],
)
def test_c09_pinning_wastes_nothing_on_powers_of_two(sim, encoder, transformer):
    """The pinned allocator would round each block up; here what is taken is within 5 % and two pages."""
    pipe = Heavy([size // 4 for size in encoder], [size // 4 for size in transformer])
    payload = sum(one.nbytes for one in pipe.parameters())
    with offload(pipe, sim.device) as handle:
        taken = sim.stats().pinned
        assert taken == handle.report().facts.pinned_bytes
        padding = 256 * len(list(pipe.parameters())) if len(encoder) < 1000 else 0
        assert taken <= 1.05 * payload + padding + 2 * 4096
    assert sim.stats().pinned == 0


# --- C10 ----------------------------------------------------------------------------------------------------


def machine(
    root: Path, *, available: int, v1: tuple[str, str] | None = None, v2: tuple[str, str] | None = None
) -> Path:
    """A root folder as a container sees it: its machine's memory, and its own limit and usage."""
    (root / "proc").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 999 kB\nMemAvailable: {available // 1024} kB\n")
    for numbers, folder, names in (
        (v2, "sys/fs/cgroup", ("memory.max", "memory.current")),
        (v1, "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ):
        if numbers is not None:
            (root / folder).mkdir(parents=True)
            for name, number in zip(names, numbers, strict=True):
                (root / folder / name).write_text(f"{number}\n")
    return root


GIB = 1 << 30


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"v2": (f"{2 * GIB}", f"{GIB}")}, GIB),
        ({"v1": (f"{2 * GIB}", f"{GIB // 2}")}, 3 * GIB // 2),
        ({"v2": ("max", f"{GIB}")}, 8 * GIB),
        ({"v1": ("9223372036854771712", f"{GIB}")}, 8 * GIB),
        ({"v2": (f"{16 * GIB}", "0")}, 8 * GIB),
        ({"v2": (f"{GIB}", f"{2 * GIB}")}, 0),
        ({}, 8 * GIB),
    ],
    ids=[
        "v2",
        "v1",
        "v2 without limit",
        "v1 without limit",
        "limit above the machine",
        "over the limit",
        "no container",
    ],
)
def test_c10_what_may_be_pinned_is_what_machine_and_container_leave_free(tmp_path, files, free):
    """The container's limit counts, not only the machine's memory; and some of it is left to the system."""
    found = pinnable_bytes(machine(tmp_path, available=8 * GIB, **files))
    assert 0.75 * free <= found <= free


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_c10_files_that_a_container_has_read_do_not_keep_it_from_pinning(tmp_path, version):
    """Its usage counts the pages that the system keeps of them; weights, once read, would take all of the budget."""
    root = machine(tmp_path, available=8 * GIB, **{version: (f"{4 * GIB}", f"{3 * GIB}")})
    prefix, folder = {"v1": ("total_", "memory"), "v2": ("", "")}[version]
    stat = f"cache 1\n{prefix}inactive_file {GIB}\n{prefix}active_file {GIB}\n{prefix}shmem {GIB}\nother\n"
    (root / "sys/fs/cgroup" / folder / "memory.stat").write_text(stat)
    assert 0.75 * 3 * GIB <= pinnable_bytes(root) <= 3 * GIB


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_c10_pinning_stops_at_the_containers_limit_and_the_rest_is_pageable(
    sim, tmp_path, monkeypatch, version
):
    """Said once; the results are the same."""
    pipe = frozen(Many(5))
    x = torch.randn(2, 64, device=sim.device)
    expected = resident_copy(pipe, sim.device)(x).cpu()
    each = sum(one.nbytes for one in pipe.encoders[0].parameters())
    root = machine(tmp_path, available=8 * GIB, **{version: (f"{3 * each + GIB}", f"{GIB}")})
    monkeypatch.setattr(fleet, "pinnable_bytes", lambda: pinnable_bytes(root))
    with pytest.warns(ResidencyWarning, match="host memory could not be pinned") as caught:
        handle = offload(pipe, sim.device, exclusive_encoders=True)
    with handle:
        assert len(caught) == 1
        assert 0 < sim.stats().pinned <= 3 * each
        facts = handle.report().facts
        assert facts.pinned_bytes == sim.stats().pinned
        assert facts.pageable_bytes >= each
        assert torch.equal(pipe(x).cpu(), expected)


def test_c10_a_policy_may_set_a_lower_limit(sim):
    pipe = frozen(Many(4))
    with (
        pytest.warns(ResidencyWarning, match=r"the limit is 39\.1 KiB"),
        offload(pipe, sim.device, pinned_limit=40_000),
    ):
        assert 0 < sim.stats().pinned <= 40_000


# --- C11 ----------------------------------------------------------------------------------------------------


class Many(nn.Module):
    """Many encoders and a DiT."""

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _vae_modules: ClassVar[list[str]] = []

    def __init__(self, count: int) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(Stack(width=64) for _ in range(count))
        self.transformer = Stack(width=64)

    @property
    def _encoder_modules(self) -> list[str]:
        return [f"encoders.{index}" for index in range(len(self.encoders))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for encoder in self.encoders:
            x = encoder(x)
        return self.transformer(x)


@pytest.fixture
def census():
    """Counts only what comes to life from here on, which is quick."""
    gc.collect()
    gc.freeze()
    yield live_host_bytes
    gc.unfreeze()


def live_host_bytes() -> int:
    """Bytes of all host storages that any live tensor refers to, each byte once."""
    ranges = []
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor) and one.device.type == "cpu" and one.layout is torch.strided:
            storage = one.untyped_storage()
            ranges.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    total, end = 0, 0
    for low, high in sorted(ranges):
        total += max(0, high - max(low, end))
        end = max(end, high)
    return total


@pytest.mark.parametrize("pin", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("slab", ["one per component", "several per component"])
def test_c11_enabling_holds_the_weights_and_one_slab_at_most(sim, monkeypatch, census, slab, pin):
    """A census of live host storages at every step of enabling 20 components."""
    if slab == "several per component":
        monkeypatch.setattr(masters, "SLAB_BYTES", 20_000)
    others = census()
    pipe = frozen(Many(19))
    payload = census() - others
    largest = 20_000 if slab == "several per component" else max(
        sum(one.nbytes for one in module.parameters()) for module in (*pipe.encoders, pipe.transformer)
    )  # fmt: skip
    seen = []
    make, copy = masters.PinBudget.slab, masters.own_storage

    def counted_slab(self, nbytes, base):
        made = make(self, nbytes, base)
        seen.append(census() - others)
        return made

    def counted_copy(raw):
        seen.append(census() - others)
        return copy(raw)

    monkeypatch.setattr(masters.PinBudget, "slab", counted_slab)
    monkeypatch.setattr(masters, "own_storage", counted_copy)
    with offload(pipe, sim.device, pin_memory=pin):
        assert len(seen) >= 20 * 5
        assert max(seen) <= payload + largest + 20 * 1024  # alignment
        assert census() - others <= payload * 1.02 + 20 * 1024


# Weights below the C library's limit for mappings of their own lie in its heap, which it keeps when they are freed.
FROM_THE_HEAP = """
import torch
from benchmarks.harness import Layers, size_of
from benchmarks.mapped_cpu import anonymous
from omni_components import offload
from omni_components.testing import SimulatedAccelerator
from omni_components.transfer import masters

masters.SLAB_BYTES = 32 << 20
peak, make = 0, masters.PinBudget.slab

def slab(*arguments):
    global peak
    made = make(*arguments)
    made.tensor.zero_()  # its pages are taken, while those of what it is for are not given back yet
    peak = max(peak, anonymous())
    return made

masters.PinBudget.slab = slab

class Pipeline(torch.nn.Module):
    _dit_modules, _encoder_modules, _vae_modules = ["transformer"], ["encoder"], []

    def __init__(self):
        super().__init__()
        self.encoder, self.transformer = Layers(1600, 80 << 20), Layers(1600, 80 << 20)

with SimulatedAccelerator(poison=False) as sim:
    before = anonymous()
    pipe = Pipeline()
    weights = size_of(pipe)
    offload(pipe, sim.device)
    print((peak - before - masters.SLAB_BYTES) / weights, (anonymous() - before) / weights)
"""


def test_c11_freed_weights_that_the_c_library_keeps_are_given_back(sim):
    """By the system's own figure, in a process of its own: enabling takes a slab, not a second model."""
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("this system does not tell a process's anonymous memory (/proc/self/smaps_rollup)")
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", FROM_THE_HEAP]
    answer = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    most, afterwards = map(float, answer.stdout.split())
    assert most < 1.25
    assert afterwards < 1.25
