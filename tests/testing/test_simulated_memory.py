"""Capacity, counters, poison, pinned memory, and what is left when a block ends."""

from __future__ import annotations

import mmap

import pytest
import torch

from omni_components.testing import SimulatedAccelerator

MIB = 2**20


def test_counts_blocks_rounded_to_512_bytes(sim: SimulatedAccelerator) -> None:
    first = torch.empty(1, device=sim.device)
    second = torch.empty(513, dtype=torch.uint8, device=sim.device)
    assert sim.stats().allocated == 512 + 1024
    assert sim.stats().allocations == 2
    del first
    assert (sim.stats().allocated, sim.stats().peak) == (1024, 1536)
    del second
    assert sim.stats().allocated == 0


def test_results_of_kernels_count(sim: SimulatedAccelerator) -> None:
    ones = torch.ones(1024, device=sim.device)
    doubled = ones * 2
    assert sim.stats().allocated == 2 * 4096
    del doubled
    assert sim.stats().allocated == 4096


def test_views_cost_nothing(sim: SimulatedAccelerator) -> None:
    whole = torch.empty(1024, device=sim.device)
    views = [whole[10:], whole.view(2, 512), whole.view(32, 32).t(), torch.from_dlpack(whole[256:512])]
    assert sim.stats().allocated == 4096
    del whole
    assert sim.stats().allocated == 4096
    del views
    assert sim.stats().allocated == 0


@pytest.mark.max_device_memory("1MiB")
def test_capacity_is_kept_to_the_byte(sim: SimulatedAccelerator) -> None:
    held = torch.empty(MIB - 512, dtype=torch.uint8, device=sim.device)
    last = torch.empty(512, dtype=torch.uint8, device=sim.device)
    with pytest.raises(torch.OutOfMemoryError, match=r"tried to allocate .* of 1\.000 MiB free"):
        torch.empty(1, device=sim.device)
    del last
    torch.empty(1, device=sim.device)
    del held


@pytest.mark.max_device_memory("1MiB")
def test_a_kernel_whose_result_does_not_fit_raises(sim: SimulatedAccelerator) -> None:
    big = torch.zeros(MIB * 3 // 4, dtype=torch.uint8, device=sim.device)
    with pytest.raises(torch.OutOfMemoryError):
        big + 1
    assert sim.stats().allocated == MIB * 3 // 4


@pytest.mark.max_device_memory("1MiB")
def test_cached_blocks_give_way_before_it_runs_out(sim: SimulatedAccelerator) -> None:
    first = torch.empty(MIB * 3 // 4, dtype=torch.uint8, device=sim.device)
    del first
    assert torch.accelerator.memory_reserved() == MIB * 3 // 4
    torch.empty(MIB, dtype=torch.uint8, device=sim.device)


def test_fresh_and_freed_memory_is_poison(sim: SimulatedAccelerator) -> None:
    fresh = torch.empty(1000, device=sim.device)
    assert fresh.isnan().all()
    fresh.fill_(1)
    del fresh
    again = torch.empty(1000, device=sim.device)
    assert again.isnan().all()
    assert torch.empty(8, dtype=torch.bfloat16, device=sim.device).isnan().all()


def test_poison_can_be_off() -> None:
    with SimulatedAccelerator(poison=False) as sim:
        tensor = torch.full((1000,), 3.0, device=sim.device)
        address = tensor.data_ptr()
        del tensor
        again = torch.empty(1000, device=sim.device)
        assert again.data_ptr() == address or sim.stats().allocations == 2


def test_copies_are_counted_in_bytes_that_cross_the_link(sim: SimulatedAccelerator) -> None:
    on_device = torch.ones(100).to(sim.device)
    halved = torch.ones(100).to(sim.device, torch.float16)
    on_device.clone()
    halved.cpu()
    on_device[0].item()
    stats = sim.stats()
    assert (stats.h2d_bytes, stats.h2d_copies) == (600, 2)
    assert (stats.d2h_bytes, stats.d2h_copies) == (200, 1)
    assert stats.syncs == 0
    assert stats.host_waits == 4


def test_empty_copies_do_not_count(sim: SimulatedAccelerator) -> None:
    torch.empty(0).to(sim.device).cpu()
    assert sim.stats().h2d_copies == sim.stats().d2h_copies == 0


def test_reset_keeps_what_is_allocated(sim: SimulatedAccelerator) -> None:
    held = torch.ones(100).pin_memory().to(sim.device)
    pinned = torch.ones(100).pin_memory()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    assert (sim.stats().syncs, sim.stats().flushes) == (1, 1)
    sim.reset()
    stats = sim.stats()
    assert (stats.allocated, stats.peak, stats.pinned) == (512, 512, 512)
    assert stats.h2d_bytes == stats.h2d_copies == stats.allocations == stats.syncs == stats.flushes == 0
    del held, pinned


def test_torch_accelerator_reports_the_same_memory(sim: SimulatedAccelerator) -> None:
    sim.capacity = "1MiB"
    held = torch.empty(1000, dtype=torch.uint8, device=sim.device)
    assert torch.accelerator.memory_allocated() == sim.stats().allocated == 1024
    assert torch.accelerator.get_memory_info() == (MIB - 1024, MIB)
    del held
    assert torch.accelerator.max_memory_allocated() == 1024
    assert torch.accelerator.get_memory_info() == (MIB - 1024, MIB), "a cached block is not free"
    torch.accelerator.empty_cache()
    assert torch.accelerator.get_memory_info() == (MIB, MIB)
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == 0
    assert torch.accelerator.memory_stats()["allocated_bytes.all.current"] == 0


# --- storages ----------------------------------------------------------------------------------------


def test_resized_storage_gives_its_memory_back(sim: SimulatedAccelerator) -> None:
    tensor = torch.ones(1024, device=sim.device)
    tensor.untyped_storage().resize_(0)
    assert sim.stats().allocated == 0
    with pytest.raises(RuntimeError, match=r"needs 4096 bytes of storage, but its storage holds 0"):
        tensor + 1
    with pytest.raises(RuntimeError, match="freed or resized"):
        tensor.cpu()
    with pytest.raises(RuntimeError, match="freed or resized"):
        tensor.copy_(torch.ones(1024))
    tensor.untyped_storage().resize_(4096)
    tensor.fill_(2)
    assert tensor.sum().item() == 2048


def test_growing_keeps_the_contents(sim: SimulatedAccelerator) -> None:
    tensor = torch.arange(4.0, device=sim.device)
    tensor.untyped_storage().resize_(4096)
    assert tensor.tolist() == [0, 1, 2, 3]
    tensor.resize_(2048)
    assert tensor[:4].tolist() == [0, 1, 2, 3]


# --- pinned memory -----------------------------------------------------------------------------------


def test_pinned_tensors_take_powers_of_two(sim: SimulatedAccelerator) -> None:
    tensor = torch.zeros(1025).pin_memory()
    assert tensor.is_pinned()
    assert sim.stats().pinned == 8192
    more = torch.empty(10, pin_memory=True)
    assert more.is_pinned()
    assert sim.stats().pinned == 8192 + 512
    del tensor, more
    assert sim.stats().pinned == 0
    assert not torch.zeros(4).is_pinned()


def test_pinned_capacity(sim: SimulatedAccelerator) -> None:
    sim.pinned_capacity = "8KiB"
    held = torch.zeros(1024).pin_memory()
    with pytest.raises(RuntimeError, match=r"cannot pin 0\.008 MiB: 0\.004 MiB of 0\.008 MiB left"):
        torch.zeros(1025).pin_memory()
    assert sim.stats().pinned == 4096
    del held
    torch.zeros(1025).pin_memory()


def _mapped(size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


def test_registered_memory_takes_whole_pages(sim: SimulatedAccelerator) -> None:
    host = _mapped(10_000)
    torch.sim.host_register(host.data_ptr(), 10_000)
    assert host.is_pinned()
    assert sim.stats().pinned == 12_288
    with pytest.raises(RuntimeError, match="already pinned"):
        torch.sim.host_register(host.data_ptr() + 4096, 100)
    torch.sim.host_unregister(host.data_ptr())
    assert not host.is_pinned()
    assert sim.stats().pinned == 0
    with pytest.raises(RuntimeError, match="not registered"):
        torch.sim.host_unregister(host.data_ptr())


def test_registered_memory_that_was_left_behind_blocks_no_later_device() -> None:
    """The system gives the same addresses to others; a device that is gone pins nothing."""
    host = torch.empty(3 * 4096, dtype=torch.uint8)
    with SimulatedAccelerator():
        torch.sim.host_register(host.data_ptr(), 4096)
        torch.sim.host_register(host.data_ptr() + 8192, 4096)
    with SimulatedAccelerator() as later:
        torch.sim.host_register(host.data_ptr() + 100, 3 * 4096 - 100)
        assert later.stats().pinned == 3 * 4096
        with pytest.raises(RuntimeError, match="already pinned"):
            torch.sim.host_register(host.data_ptr(), 4096)
        torch.sim.host_unregister(host.data_ptr() + 100)
        assert later.stats().pinned == 0


def test_registered_memory_counts_towards_the_limit(sim: SimulatedAccelerator) -> None:
    sim.pinned_capacity = 8192
    host = _mapped(8193)
    with pytest.raises(RuntimeError, match="cannot pin"):
        torch.sim.host_register(host.data_ptr(), 8193)
    assert not host.is_pinned()
    torch.sim.host_register(host.data_ptr(), 8192)
    torch.sim.host_unregister(host.data_ptr())


def test_empty_host_cache_has_nothing_to_do(sim: SimulatedAccelerator) -> None:
    torch.accelerator.empty_host_cache()


# --- blocks do not see each other ---------------------------------------------------------------------


def test_nothing_is_left_for_the_next_one() -> None:
    with SimulatedAccelerator("1MiB", pinned_capacity="1MiB") as first:
        left = torch.ones(1000, device=first.device)
        pinned = torch.ones(1000).pin_memory()
        first.fail(allocation=0, copy=0, pin=0, persistent=True)
    assert first.stats().allocated == 4096, "a closed accelerator still tells what it had seen"
    with SimulatedAccelerator() as second:
        assert second.stats().allocated == second.stats().peak == second.stats().pinned == 0
        more = torch.ones(MIB, device=second.device)
        before = second.stats()
        del left, pinned
        assert second.stats() == before
        assert more.sum().item() == MIB


def test_tensors_outlive_their_block() -> None:
    with SimulatedAccelerator() as sim:
        tensor = torch.arange(3.0, device=sim.device)
    assert tensor.cpu().tolist() == [0, 1, 2]
    assert (tensor + 1).tolist() == [1, 2, 3]


def test_outside_a_block_there_is_no_accelerator() -> None:
    with SimulatedAccelerator():
        assert torch.accelerator.is_available()
        assert torch.accelerator.current_accelerator(check_available=True) == torch.device("sim")
        assert torch.accelerator.device_count() == torch.sim.device_count() == 1
    assert not torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator(check_available=True) is None
    assert torch.accelerator.device_count() == 0
    with pytest.raises(RuntimeError, match="none is available"):
        torch.ones(3).pin_memory()


def test_an_inner_accelerator_gets_devices_of_its_own() -> None:
    with SimulatedAccelerator("1MiB") as outer:
        held = torch.ones(10, device=outer.device)
        with SimulatedAccelerator("2MiB", devices=2) as inner:
            assert {outer.device, *inner.devices} == {torch.device("sim", index) for index in range(3)}
            before = outer.stats()
            elsewhere = torch.ones(100, device=inner.devices[1])
            assert torch.ones(3, device="sim").device == inner.device
            pinned = torch.ones(10).pin_memory()
            torch.accelerator.empty_cache()
            assert outer.stats() == before
            assert inner.stats(inner.devices[1]).allocated == 512
            assert inner.stats().pinned == 512
            del elsewhere, pinned
        assert torch.ones(3, device="sim").device == outer.device
        del held


def test_devices_have_capacities_of_their_own() -> None:
    with SimulatedAccelerator("1MiB", devices=2) as sim:
        first, second = (torch.empty(MIB, dtype=torch.uint8, device=device) for device in sim.devices)
        with pytest.raises(torch.OutOfMemoryError, match="sim:1"):
            torch.empty(1, device=sim.devices[1])
        assert first.device != second.device


def test_devices_do_not_mix() -> None:
    with SimulatedAccelerator(devices=2) as sim:
        first, second = sim.devices
        tensor = torch.arange(3.0, device=first)
        there = tensor.to(second)
        assert there.device == second
        assert there.cpu().tolist() == [0, 1, 2]
        with pytest.raises(RuntimeError, match="same device"):
            tensor + there
        assert sim.stats(second).h2d_copies == 0, "a copy between devices does not pass the host"
        assert sim.races == []


def test_reopening_starts_afresh() -> None:
    sim = SimulatedAccelerator("1MiB")
    for _ in range(2):
        with sim:
            assert sim.stats().allocations == 0
            torch.ones(1, device=sim.device)
    with sim, pytest.raises(RuntimeError, match="already open"):
        sim.__enter__()


@pytest.mark.parametrize("call", ["device", "reset", "heal"])
def test_a_closed_accelerator_says_so(call: str) -> None:
    sim = SimulatedAccelerator()
    with pytest.raises(RuntimeError, match="not open"):
        getattr(sim, call)()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": "64 bananas"}, "is not a size"),
        ({"capacity": -1}, "cannot be negative"),
        ({"link": "25GB"}, "is not a speed"),
        ({"link": 0.0}, "positive speed"),
        ({"latency": -1.0}, "cannot be negative"),
        ({"devices": 5}, "from 1 to 4"),
        ({"copies": "soon"}, "lazy"),
    ],
)
def test_bad_settings_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimulatedAccelerator(**arguments)  # type: ignore[arg-type]
