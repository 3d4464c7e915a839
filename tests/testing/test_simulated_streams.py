"""When copies run, what waits do, and how long it takes in virtual time."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_components.testing import SimulatedAccelerator


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


def pinned(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).pin_memory()


def test_a_late_copy_runs_when_its_stream_is_waited_for(
    sim: SimulatedAccelerator, side: torch.Stream
) -> None:
    target = torch.zeros(3, device=sim.device)
    side.wait_stream(current())
    with side:
        target.copy_(pinned(1, 2, 3), non_blocking=True)
    current().wait_stream(side)
    assert target.tolist() == [1, 2, 3]


def test_reading_before_the_wait_reads_poison(sim: SimulatedAccelerator, side: torch.Stream) -> None:
    target = torch.zeros(3, device=sim.device)
    side.wait_stream(current())
    with side:
        target.copy_(pinned(1, 2, 3), non_blocking=True)
    assert (target + 1).isnan().all()
    current().wait_stream(side)
    assert target.tolist() == [1, 2, 3]
    assert len(sim.expect_races()) == 1


def test_the_host_reads_poison_until_it_waits(sim: SimulatedAccelerator, side: torch.Stream) -> None:
    back = torch.zeros(3).pin_memory()
    source = torch.ones(3, device=sim.device)
    back.copy_(source, non_blocking=True)
    assert back.isnan().all()
    torch.accelerator.synchronize()
    assert back.tolist() == [1, 1, 1]


def test_only_plain_copies_of_pinned_memory_are_late(sim: SimulatedAccelerator, side: torch.Stream) -> None:
    side.wait_stream(current())
    with side:
        pageable = torch.empty(3, device=sim.device)
        pageable.copy_(torch.ones(3), non_blocking=True)
        converted = torch.empty(3, device=sim.device)
        converted.copy_(torch.ones(3, dtype=torch.float64).pin_memory(), non_blocking=True)
        blocking = torch.empty(3, device=sim.device).copy_(pinned(1, 1, 1))
    # Nobody waited, so these are races, but the values have arrived.
    assert (pageable + converted + blocking).tolist() == [3, 3, 3]
    sim.expect_races()


def test_a_stream_keeps_its_own_order(sim: SimulatedAccelerator, side: torch.Stream) -> None:
    source = pinned(1, 2, 3)
    side.wait_stream(current())
    with side:
        target = torch.empty(3, device=sim.device)
        target.copy_(source, non_blocking=True)
        target.mul_(2)
        source_again = torch.empty(3).pin_memory().copy_(target, non_blocking=True)
        target.mul_(2)
    side.synchronize()
    assert source_again.tolist() == [2, 4, 6]
    assert target.tolist() == [4, 8, 12]


def test_waits_chain_through_streams(sim: SimulatedAccelerator) -> None:
    first, second, third = (torch.Stream(device=sim.device) for _ in range(3))
    with first:
        target = torch.empty(2, device=sim.device).copy_(pinned(1, 2), non_blocking=True)
    second.wait_stream(first)
    third.wait_stream(second)
    current().wait_stream(third)
    assert target.tolist() == [1, 2]


def test_an_event_covers_what_came_before_it(sim: SimulatedAccelerator, side: torch.Stream) -> None:
    with side:
        before = torch.empty(2, device=sim.device).copy_(pinned(1, 2), non_blocking=True)
        event = side.record_event()
        after = torch.empty(2, device=sim.device).copy_(pinned(3, 4), non_blocking=True)
    assert not event.query()
    current().wait_event(event)
    assert before.tolist() == [1, 2]
    assert after.isnan().all()
    assert len(sim.expect_races()) == 1
    event.synchronize()
    assert event.query()


def test_polling_lets_time_pass(sim: SimulatedAccelerator, side: torch.Stream) -> None:
    with side:
        target = torch.empty(2, device=sim.device)
        for _ in range(3):
            target.copy_(pinned(1, 2), non_blocking=True)
    polls = 0
    while not side.query():
        polls += 1
    assert polls == 3


def test_eager_copies_run_when_issued(sim: SimulatedAccelerator, side: torch.Stream) -> None:
    sim.copies = "eager"
    with side:
        target = torch.empty(2, device=sim.device).copy_(pinned(1, 2), non_blocking=True)
    assert target.tolist() == [1, 2]
    assert len(sim.expect_races()) == 1, "an eager copy still races"


def test_a_copy_engine_works_while_the_host_goes_on(sim: SimulatedAccelerator, side: torch.Stream) -> None:
    sim.copies = "engine"
    source = torch.ones(32 << 20, dtype=torch.uint8).pin_memory()
    target = torch.empty(32 << 20, dtype=torch.uint8, device=sim.device)
    side.wait_stream(current())
    went_on = 0
    for _ in range(10):  # the host may be kept from the processor once, or twice
        with side:
            for _ in range(4):
                target.copy_(source, non_blocking=True)
        event = side.record_event()
        went_on += not event.query()
        event.synchronize()
        assert event.query()
    assert went_on > 0
    assert target.sum(dtype=torch.int64).item() == 32 << 20
    assert sim.races == []


def test_a_copy_engine_does_not_wait_to_be_waited_for(sim: SimulatedAccelerator, side: torch.Stream) -> None:
    sim.copies = "engine"
    with side:
        torch.empty(2, device=sim.device).copy_(pinned(1, 2), non_blocking=True)
    event = side.record_event()
    deadline = time.monotonic() + 60
    while not event.query():
        assert time.monotonic() < deadline


def test_a_copy_engine_keeps_the_order_of_streams_and_waits(
    sim: SimulatedAccelerator, side: torch.Stream
) -> None:
    sim.copies = "engine"
    first, last = pinned(*[1] * 100_000), pinned(*[2] * 100_000)
    target = torch.empty(100_000, device=sim.device)
    side.wait_stream(current())
    with side:
        target.copy_(first, non_blocking=True)
        target.mul_(3)
        back = torch.empty(100_000).pin_memory().copy_(target, non_blocking=True)
    current().wait_stream(side)
    target.copy_(last, non_blocking=True)
    assert target.eq(2).all()
    side.synchronize()
    assert back.eq(3).all()
    assert sim.races == []


def test_what_waits_when_a_copy_engine_comes_runs_before_it(
    sim: SimulatedAccelerator, side: torch.Stream
) -> None:
    with side:
        target = torch.empty(2, device=sim.device)
        target.copy_(pinned(1, 2), non_blocking=True)
        sim.copies = "engine"
        target.copy_(pinned(3, 4), non_blocking=True)
    current().wait_stream(side)
    assert target.tolist() == [3, 4]


FORKED = """
import os
import torch
from omni_components.testing import SimulatedAccelerator

def copied(sim):
    return torch.ones(3).pin_memory().to(sim.device, non_blocking=True).sum().item() == 3

with SimulatedAccelerator(copies="engine") as sim:
    assert copied(sim)
    child = os.fork()
    if child == 0:
        os._exit(0 if copied(sim) else 1)
    raise SystemExit(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_has_a_copy_engine_of_its_own() -> None:
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=120)


def test_a_chooser_is_asked_before_operations(sim: SimulatedAccelerator) -> None:
    asked: list[int] = []
    streams = [torch.Stream(device=sim.device) for _ in range(2)]
    targets = [torch.zeros(1, device=sim.device) for _ in streams]
    current().synchronize()
    sim.copies = lambda waiting: asked.append(waiting) or 0
    for stream, target in zip(streams, targets, strict=True):
        with stream:
            target.copy_(pinned(1), non_blocking=True)
    other = torch.ones(1, device=sim.device)
    other + 1
    assert asked[-1] == 2
    sim.copies = lambda waiting: waiting
    other + 1
    sim.copies = "lazy"
    assert [target.isnan().item() for target in targets] == [True, False]
    sim.expect_races()


def test_a_choosers_error_comes_out(sim: SimulatedAccelerator, side: torch.Stream) -> None:
    class Stop(BaseException):
        pass

    def chooser(waiting: int) -> int:
        raise Stop

    with side:
        target = torch.empty(1, device=sim.device).copy_(pinned(1), non_blocking=True)
    other = torch.ones(1, device=sim.device)
    sim.copies = chooser
    with pytest.raises(Stop):
        other + 1
    sim.copies = "lazy"
    side.synchronize()
    assert target.item() == 1


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_order_gives_the_same_values(data: st.DataObject) -> None:
    def chooser(waiting: int) -> int:
        return data.draw(st.integers(0, waiting))

    with SimulatedAccelerator(copies=chooser) as sim:
        streams = [torch.Stream(device=sim.device) for _ in range(3)]
        arena = torch.zeros(3, 4, device=sim.device)
        for step in range(3):
            for slot, stream in enumerate(streams):
                stream.wait_stream(current())
                with stream:
                    arena[slot].copy_(torch.full((4,), float(step + slot)).pin_memory(), non_blocking=True)
            for stream in streams:
                current().wait_stream(stream)
            arena.mul_(2)
        assert arena[:, 0].tolist() == [4, 6, 8]
        assert sim.races == []


def test_streams_and_devices_through_torch(sim: SimulatedAccelerator, side: torch.Stream) -> None:
    assert current().device == sim.device
    torch.accelerator.set_stream(side)
    try:
        assert current() == side
    finally:
        torch.accelerator.set_stream(torch.Stream(stream_id=0, device_index=0, device_type=side.device_type))
    assert current() != side


# --- virtual time --------------------------------------------------------------------------------------


def test_a_copy_takes_its_bytes_over_the_links_speed() -> None:
    with SimulatedAccelerator(link="1GB/s", latency=1e-6) as sim:
        torch.empty(500_000, dtype=torch.uint8).to(sim.device)
        assert sim.seconds == pytest.approx(500e-6 + 1e-6)
        sim.reset()
        assert sim.seconds == 0


def test_copies_hide_behind_compute() -> None:
    with SimulatedAccelerator(link=1e9) as sim:
        side = torch.Stream(device=sim.device)
        host = torch.empty(1_000_000, dtype=torch.uint8).pin_memory()
        target = torch.empty(1_000_000, dtype=torch.uint8, device=sim.device)
        side.wait_stream(current())
        with side:
            target.copy_(host, non_blocking=True)
        sim.spend(0.003)
        current().wait_stream(side)
        assert sim.seconds == pytest.approx(0.003)
        target.add_(1)
        back = torch.empty_like(host).pin_memory()
        back.copy_(target, non_blocking=True)
        torch.accelerator.synchronize()
        assert sim.seconds == pytest.approx(0.004)
    assert sim.seconds == pytest.approx(0.004)


def test_one_direction_carries_one_copy_at_a_time() -> None:
    with SimulatedAccelerator(link=1e9) as sim:
        streams = [torch.Stream(device=sim.device) for _ in range(2)]
        hosts = [torch.zeros(1_000_000, dtype=torch.uint8).pin_memory() for _ in streams]
        for stream, host in zip(streams, hosts, strict=True):
            with stream:
                host.to(sim.device, non_blocking=True)
        assert sim.seconds == pytest.approx(0.002)
        sim.expect_races()


def test_events_tell_the_time_between_them() -> None:
    with SimulatedAccelerator(link=1e9) as sim:
        start, end = torch.Event(enable_timing=True), torch.Event(enable_timing=True)
        start.record()
        torch.zeros(1_000_000, dtype=torch.uint8).to(sim.device)
        end.record()
        end.synchronize()
        assert start.elapsed_time(end) == pytest.approx(1.0)
