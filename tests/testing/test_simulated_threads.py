"""Many threads on one device: counters add up, nothing hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from omni_components.testing import SimulatedAccelerator

THREADS = 6


def _at_once(work: Callable[[int], object]) -> None:
    together = threading.Barrier(THREADS)

    def start(number: int) -> None:
        together.wait()
        work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(start, number) for number in range(THREADS)]:
            done.result(timeout=60)


def test_threads_share_the_device(sim: SimulatedAccelerator, one_thread: None) -> None:
    def work(number: int) -> None:
        side = torch.Stream(device=sim.device)
        for step in range(100):
            source = torch.full((64,), float(number + step)).pin_memory()
            with side:
                target = torch.empty(64, device=sim.device).copy_(source, non_blocking=True)
            torch.accelerator.current_stream().wait_stream(side)
            assert (target * 2)[0].item() == 2 * (number + step)
            side.wait_stream(torch.accelerator.current_stream())

    _at_once(work)
    stats = sim.stats()
    assert (stats.h2d_copies, stats.h2d_bytes) == (THREADS * 100, THREADS * 100 * 256)
    assert (stats.allocated, stats.pinned) == (0, 0)
    assert sim.races == []


def test_streams_are_current_per_thread(sim: SimulatedAccelerator) -> None:
    def work(number: int) -> None:
        side = torch.Stream(device=sim.device)
        for _ in range(50):
            with side:
                assert torch.accelerator.current_stream() == side
            assert torch.accelerator.current_stream() != side

    _at_once(work)


def test_asking_python_from_a_kernel_does_not_deadlock(sim: SimulatedAccelerator, one_thread: None) -> None:
    # The chooser takes the GIL inside kernels, while other threads free tensors and ask for counters with it.
    sim.copies = lambda waiting: 1

    def work(number: int) -> None:
        side = torch.Stream(device=sim.device)
        for _ in range(100):
            source = torch.ones(16).pin_memory()
            with side:
                target = torch.empty(16, device=sim.device).copy_(source, non_blocking=True)
            del source
            sim.stats()
            side.synchronize()
            assert target.sum().item() == 16

    _at_once(work)
    assert sim.stats().allocated == 0


def test_races_between_threads_are_found(sim: SimulatedAccelerator) -> None:
    shared = torch.zeros(64, device=sim.device)
    torch.accelerator.synchronize()

    def work(number: int) -> None:
        with torch.Stream(device=sim.device):
            shared.add_(1)

    _at_once(work)
    assert len(sim.expect_races()) >= THREADS - 1
    torch.accelerator.synchronize()
