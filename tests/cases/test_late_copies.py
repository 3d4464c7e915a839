"""Faults of order: copies that end late, on a stream of their own, while others compute. Case C33."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from omni_components import offload
from omni_components.transfer.device import AcceleratorBackend
from tests.helpers.pipelines import WIDTH, build, resident_copy

PHASES = 200


def phases(seed: int) -> list[tuple[str, int]]:
    """Which component computes, and on which of three streams."""
    drawn = random.Random(seed)
    return [(drawn.choice("AB"), drawn.randrange(3)) for _ in range(PHASES)]


def run(target: Any, course: list[tuple[str, int]], device: torch.device) -> torch.Tensor:
    """Each phase goes on with the result of the one before, whatever stream that is on; the host never waits."""
    streams = [torch.accelerator.current_stream(), *(torch.Stream(device=device) for _ in range(2))]
    x = torch.linspace(-1, 1, 2 * WIDTH, device=device).reshape(2, WIDTH)
    results, last = [x], streams[0]  # all are kept: another stream may still read what one lets go of
    for which, chosen in course:
        streams[chosen].wait_stream(last)
        last = streams[chosen]
        with last:
            x = target.use(which, x)
        results.append(x)
    streams[0].wait_stream(last)
    return torch.stack(results).cpu()


def copies(order: str) -> Any:
    """When late copies run: when somebody waits for them, or as a seed says."""
    if order == "lazy":
        return order
    drawn = random.Random(1)
    return lambda count: drawn.randint(0, count)


@pytest.mark.parametrize("prefetch", [False, True], ids=["", "prefetch"])
@pytest.mark.parametrize("order", ["lazy", "drawn"])
@pytest.mark.parametrize("arena", ["keep", "fit"])
@pytest.mark.parametrize("kind", ["pipeline", "interleaved"])
def test_c33_two_hundred_random_phases_with_late_copies(sim, kind, arena, order, prefetch):
    """I2, I5, I7: bit for bit the run where all is resident, and no race; the ``sim`` fixture fails on one."""
    target, course = build(kind), phases(seed=len(kind))
    expected = run(resident_copy(target, sim.device), course, sim.device)
    sim.copies = copies(order)
    with offload(target, sim.device, arena=arena, prefetch=prefetch) as handle:
        sim.reset()
        assert torch.equal(run(target, course, sim.device), expected)
        handle.ledger.audit()
        rows = {row.name: row for row in handle.report().rows}
    assert sim.stats().d2h_bytes == expected.nbytes
    assert sum(rows[one].loads for one in target.names.values()) > PHASES / 3
    assert (sum(row.prefetched for row in rows.values()) > 0) is prefetch


@pytest.mark.parametrize("forgotten", ["after", "wait"])
def test_c33_an_order_that_is_not_kept_shows_as_a_race(sim, monkeypatch, forgotten):
    """The test above can fail: with either of the two waits left out, the accelerator tells of it."""
    target, course = build("pipeline"), phases(seed=0)
    monkeypatch.setattr(AcceleratorBackend, forgotten, lambda self, *what: None)
    with offload(target, sim.device):
        run(target, course, sim.device)
    assert sim.expect_races() != []
