"""Each hazard is found, named, and found only where it is."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from omni_components.testing import RaceReport, SimulatedAccelerator


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


@pytest.fixture
def arena(sim: SimulatedAccelerator) -> torch.Tensor:
    arena = torch.zeros(4096, dtype=torch.uint8, device=sim.device)
    torch.accelerator.synchronize()
    return arena


@pytest.fixture
def host(sim: SimulatedAccelerator) -> torch.Tensor:
    return torch.ones(1024, dtype=torch.uint8).pin_memory()


def only(races: list[RaceReport]) -> RaceReport:
    assert len(races) == 1, races
    return races[0]


def test_a_read_of_memory_whose_copy_nobody_waited_for(
    sim: SimulatedAccelerator, side: torch.Stream, arena: torch.Tensor, host: torch.Tensor
) -> None:
    sim.label(arena[:1024], "transformer.layers.0.weight")
    with side:
        arena[:1024].copy_(host, non_blocking=True)
    arena[100:200] + 1
    race = only(sim.expect_races())
    assert race.kind == "read of an unfinished write"
    assert race.first == "host-to-device copy"
    assert race.first_stream == "stream 1 of sim:0"
    assert race.second == "aten::add"
    assert race.second_stream == "default stream of sim:0"
    assert race.label == "transformer.layers.0.weight"
    assert race.bytes == 100
    assert race.address == arena.data_ptr() + 100
    assert __file__ in race.where
    assert race.missing_wait == "default stream of sim:0 must wait for stream 1 of sim:0 before aten::add"
    assert "transformer.layers.0.weight" in str(race)


def test_a_copy_into_memory_compute_may_still_use(
    sim: SimulatedAccelerator, side: torch.Stream, arena: torch.Tensor, host: torch.Tensor
) -> None:
    arena[:1024] + 1
    with side:
        arena[:1024].copy_(host, non_blocking=True)
    race = only(sim.expect_races())
    assert race.kind == "write over memory still being read"
    assert (race.first, race.second) == ("aten::add", "host-to-device copy")


def test_a_write_of_memory_whose_copy_nobody_waited_for(
    sim: SimulatedAccelerator, side: torch.Stream, arena: torch.Tensor, host: torch.Tensor
) -> None:
    with side:
        arena[:1024].copy_(host, non_blocking=True)
    arena.zero_()
    assert only(sim.expect_races()).kind == "write over an unfinished write"


def test_two_copies_into_the_same_memory(
    sim: SimulatedAccelerator, side: torch.Stream, arena: torch.Tensor, host: torch.Tensor
) -> None:
    other = torch.Stream(device=sim.device)
    for stream in (side, other):
        with stream:
            arena[:1024].copy_(host, non_blocking=True)
    race = only(sim.expect_races())
    assert (race.first_stream, race.second_stream) == ("stream 1 of sim:0", "stream 2 of sim:0")


def test_disjoint_ranges_of_one_storage_do_not_race(
    sim: SimulatedAccelerator, side: torch.Stream, arena: torch.Tensor, host: torch.Tensor
) -> None:
    with side:
        arena[:1024].copy_(host, non_blocking=True)
    arena[1024:].add_(1)
    arena[3000:] + arena[1024:2120]
    assert sim.races == []


def test_tensors_over_the_same_bytes_race_whatever_their_storage(
    sim: SimulatedAccelerator, side: torch.Stream, arena: torch.Tensor, host: torch.Tensor
) -> None:
    weight = torch.from_dlpack(arena[:1024].view(torch.float32))
    elsewhere = torch.from_dlpack(arena[1024:2048].view(torch.float32))
    assert weight.untyped_storage()._cdata != arena.untyped_storage()._cdata
    with side:
        arena[:1024].copy_(host, non_blocking=True)
    elsewhere + 1
    assert sim.races == []
    weight + 1
    only(sim.expect_races())


@pytest.mark.parametrize("order", ["lazy", "eager", "engine"])
def test_races_do_not_depend_on_when_the_copy_runs(
    sim: SimulatedAccelerator, side: torch.Stream, arena: torch.Tensor, host: torch.Tensor, order: str
) -> None:
    sim.copies = order
    with side:
        arena[:1024].copy_(host, non_blocking=True)
    arena.sum()
    only(sim.expect_races())


def test_one_missing_wait_is_reported_once(
    sim: SimulatedAccelerator, side: torch.Stream, arena: torch.Tensor, host: torch.Tensor
) -> None:
    with side:
        arena[:1024].copy_(host, non_blocking=True)
    for _ in range(5):
        arena[:1024] + 1
    only(sim.expect_races())


def test_waits_make_all_of_it_clean(
    sim: SimulatedAccelerator, side: torch.Stream, arena: torch.Tensor, host: torch.Tensor
) -> None:
    back = torch.empty_like(host).pin_memory()
    for _ in range(3):
        side.wait_stream(current())
        with side:
            arena[:1024].copy_(host, non_blocking=True)
        current().wait_event(side.record_event())
        arena.add_(1)
        side.wait_event(current().record_event())
        with side:
            back.copy_(arena[:1024], non_blocking=True)
        side.synchronize()
    assert back.tolist() == [2] * 1024
    assert sim.races == []


def test_what_a_kernel_made_on_a_side_stream_must_be_waited_for(
    sim: SimulatedAccelerator, side: torch.Stream, arena: torch.Tensor
) -> None:
    with side:
        made = arena * 2
    made + 1
    race = only(sim.expect_races())
    assert (race.first, race.second) == ("aten::mul", "aten::add")
    side.wait_stream(current())  # it goes back to the side stream, which has to know that the sum is over


def test_reads_do_not_race_with_reads(
    sim: SimulatedAccelerator, side: torch.Stream, arena: torch.Tensor
) -> None:
    with side:
        arena.sum()
    arena.sum()
    assert sim.races == []


def test_views_read_nothing(
    sim: SimulatedAccelerator, side: torch.Stream, arena: torch.Tensor, host: torch.Tensor
) -> None:
    with side:
        arena[:1024].copy_(host, non_blocking=True)
    arena[:1024].view(torch.float32).view(16, 16).t()
    arena.detach().unsqueeze(0).expand(2, -1)
    torch.from_dlpack(arena[:1024])
    arena[:1024].unsqueeze(0).squeeze_().t_().resize_(1024)
    assert sim.races == []


def test_a_source_overwritten_while_its_copy_waits(
    sim: SimulatedAccelerator, side: torch.Stream, arena: torch.Tensor, host: torch.Tensor
) -> None:
    with side:
        arena[:1024].copy_(host, non_blocking=True)
    host[512] = 7
    side.synchronize()
    race = only(sim.expect_races())
    assert race.kind == "source overwritten"
    assert race.missing_wait == "the host must wait for stream 1 of sim:0"


def test_a_source_overwritten_counts_even_if_the_copy_was_eager(
    sim: SimulatedAccelerator, side: torch.Stream, arena: torch.Tensor, host: torch.Tensor
) -> None:
    sim.copies = "eager"
    with side:
        arena[:1024].copy_(host, non_blocking=True)
    host[512] = 7
    side.synchronize()
    assert arena[512].item() == 1
    assert only(sim.expect_races()).kind == "source overwritten"


def test_memory_freed_while_a_side_stream_uses_it(sim: SimulatedAccelerator, side: torch.Stream) -> None:
    tensor = torch.ones(1000, device=sim.device)
    side.wait_stream(current())
    with side:
        tensor + 1
    del tensor
    race = only(sim.expect_races())
    assert race.kind == "freed while another stream uses it"
    assert race.missing_wait == "default stream of sim:0 must wait for stream 1 of sim:0 before free"


def test_memory_freed_while_a_copy_into_it_waits(
    sim: SimulatedAccelerator, side: torch.Stream, host: torch.Tensor
) -> None:
    target = torch.zeros(1024, dtype=torch.uint8, device=sim.device)
    side.wait_stream(current())
    with side:
        target.copy_(host, non_blocking=True)
    del target
    assert only(sim.expect_races()).kind == "freed while another stream uses it"


@pytest.mark.parametrize("how", ["wait", "synchronize", "record_stream"])
def test_memory_freed_after_a_wait_is_fine(sim: SimulatedAccelerator, side: torch.Stream, how: str) -> None:
    tensor = torch.ones(1000, device=sim.device)
    side.wait_stream(current())
    with side:
        tensor + 1
    if how == "wait":
        current().wait_stream(side)
    elif how == "synchronize":
        side.synchronize()
    else:
        tensor.record_stream(side)
    del tensor
    assert sim.races == []


def test_a_recorded_stream_keeps_memory_until_it_is_past(
    sim: SimulatedAccelerator, side: torch.Stream, host: torch.Tensor
) -> None:
    target = torch.zeros(1024, dtype=torch.uint8, device=sim.device)
    side.wait_stream(current())
    with side:
        target.copy_(host, non_blocking=True)
    target.record_stream(side)
    del target
    assert sim.stats().allocated == 1024
    side.synchronize()
    assert sim.stats().allocated == 0


def test_memory_unregistered_while_a_copy_uses_it(sim: SimulatedAccelerator, side: torch.Stream) -> None:
    host = torch.frombuffer(mmap.mmap(-1, 4096), dtype=torch.uint8)
    torch.sim.host_register(host.data_ptr(), 4096)
    with side:
        target = torch.empty(4096, dtype=torch.uint8, device=sim.device).copy_(host, non_blocking=True)
    torch.sim.host_unregister(host.data_ptr())
    race = only(sim.expect_races())
    assert race.kind == "unregistered while a copy uses it"
    side.synchronize()
    assert target.sum().item() == 0


def test_a_copy_back_and_one_from_the_same_host_memory(
    sim: SimulatedAccelerator, side: torch.Stream, arena: torch.Tensor, host: torch.Tensor
) -> None:
    with side:
        host.copy_(arena[:1024], non_blocking=True)
    arena[2048:3072].copy_(host, non_blocking=True)
    assert only(sim.expect_races()).kind == "read of an unfinished write"


def test_a_pinned_source_may_go_before_its_copy_runs(
    sim: SimulatedAccelerator, side: torch.Stream, arena: torch.Tensor
) -> None:
    source = torch.full((1024,), 5, dtype=torch.uint8).pin_memory()
    with side:
        arena[:1024].copy_(source, non_blocking=True)
    del source
    current().wait_stream(side)
    assert arena[:1024].unique().tolist() == [5]
    assert sim.races == []


def test_labels_follow_the_tenant_of_the_memory(
    sim: SimulatedAccelerator, side: torch.Stream, arena: torch.Tensor, host: torch.Tensor
) -> None:
    sim.label(arena[:512], "reasoner.a")
    sim.label(arena[512:1024], "reasoner.b")
    sim.label(arena[:600], "generator.a")
    with side:
        arena[:1024].copy_(host, non_blocking=True)
    arena[:10] + 1
    assert only(sim.expect_races()).label == "generator.a"


def test_labels_of_a_module(sim: SimulatedAccelerator, side: torch.Stream) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).to(sim.device)
    sim.label(model, "transformer")
    model[1].running_mean.add_(1)
    with side:
        model[1].running_mean.add_(1)
    assert only(sim.expect_races()).label == "transformer.1.running_mean"
    side.synchronize()


def test_what_is_left_waiting_at_the_end_is_checked_too(
    sim: SimulatedAccelerator, side: torch.Stream, arena: torch.Tensor, host: torch.Tensor
) -> None:
    from omni_components.testing import SimulatedAccelerator

    with SimulatedAccelerator() as inner:
        source = torch.ones(16).pin_memory()
        target = torch.zeros(16, device=inner.device)
        target.copy_(source, non_blocking=True)
        source.zero_()
    assert only(inner.races).kind == "source overwritten"
