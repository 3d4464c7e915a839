"""Faults strike where they are told to, and every place can be walked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from omni_components.testing import every_fault

if TYPE_CHECKING:
    from omni_components.testing import SimulatedAccelerator


def test_the_count_starts_at_the_next_one(sim: SimulatedAccelerator) -> None:
    sim.fail(copy=1)
    ones = torch.ones(2)
    on_device = ones.to(sim.device)
    with pytest.raises(RuntimeError, match="injected copy failure"):
        on_device.cpu()
    assert on_device.cpu().tolist() == [1, 1], "each fault strikes once"


def test_kinds_count_separately(sim: SimulatedAccelerator) -> None:
    sim.fail(copy=0, allocation=1, pin=2)
    torch.empty(1, device=sim.device)
    with pytest.raises(torch.OutOfMemoryError, match="injected allocation failure"):
        torch.empty(1, device=sim.device)
    for _ in range(2):
        torch.ones(1).pin_memory()
    with pytest.raises(RuntimeError, match="injected pin failure"):
        torch.ones(1).pin_memory()
    target = torch.empty(1, device=sim.device)
    with pytest.raises(RuntimeError, match="injected copy failure"):
        target.copy_(torch.ones(1))


def test_registering_is_a_pin(sim: SimulatedAccelerator) -> None:
    host = torch.zeros(4096, dtype=torch.uint8)
    sim.fail(pin=0)
    with pytest.raises(RuntimeError, match="injected pin failure"):
        torch.sim.host_register(host.data_ptr(), 4096)
    assert sim.stats().pinned == 0


def test_results_of_kernels_are_allocations(sim: SimulatedAccelerator) -> None:
    ones = torch.ones(4, device=sim.device)
    sim.fail(allocation=0)
    with pytest.raises(torch.OutOfMemoryError):
        ones + 1


def test_copies_on_the_device_are_no_copies_over_the_link(sim: SimulatedAccelerator) -> None:
    ones = torch.ones(4, device=sim.device)
    sim.fail(copy=0)
    ones.clone()
    assert not sim.fired("copy")


def test_persistent_faults_last_until_healed(sim: SimulatedAccelerator) -> None:
    sim.fail(allocation=1, persistent=True)
    torch.empty(1, device=sim.device)
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1, device=sim.device)
    sim.heal()
    torch.empty(1, device=sim.device)


def test_any_exception_type(sim: SimulatedAccelerator) -> None:
    class Unusual(BaseException):
        pass

    for error in (KeyboardInterrupt, Unusual):
        for point in ("copy", "allocation", "pin", "step"):
            sim.fail_at(point, 0, error=error)  # type: ignore[arg-type]
            with pytest.raises(error, match="injected"):
                torch.ones(1).pin_memory().to(sim.device)
            sim.heal()


def test_a_failed_copy_leaves_nothing_queued(sim: SimulatedAccelerator, side: torch.Stream) -> None:
    target = torch.zeros(4, device=sim.device)
    source = torch.ones(4).pin_memory()
    sim.fail(copy=0)
    with side, pytest.raises(RuntimeError, match="injected"):
        target.copy_(source, non_blocking=True)
    assert target.tolist() == [0, 0, 0, 0]


def test_negative_counts_are_refused(sim: SimulatedAccelerator) -> None:
    with pytest.raises(ValueError, match="starts at 0"):
        sim.fail(copy=-1)


# --- walking all of them ------------------------------------------------------------------------------


def _load(sim: SimulatedAccelerator) -> float:
    side = torch.Stream(device=sim.device)
    with side:
        arena = torch.empty(4, device=sim.device)
        arena.copy_(torch.ones(4).pin_memory(), non_blocking=True)
    torch.accelerator.current_stream().wait_stream(side)
    total = arena.sum().item()
    side.wait_stream(torch.accelerator.current_stream())
    return float(total)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
@pytest.mark.parametrize(("point", "places"), [("copy", 1), ("allocation", 2), ("pin", 1), ("step", 10)])
def test_every_place_is_visited(
    sim: SimulatedAccelerator, point: str, places: int, error: type[BaseException] | None
) -> None:
    trials = []
    for trial in every_fault(sim, point, error=error):  # type: ignore[arg-type]
        total = None
        with trial:
            total = _load(sim)
        assert (total == 4) == (trial.error is None)
        trials.append(trial)
        torch.accelerator.synchronize()
        sim.expect_races()  # an interrupted run never gets to its waits
    assert [trial.fired for trial in trials] == [True] * (len(trials) - 1) + [False]
    assert all(isinstance(trial.error, error or RuntimeError) for trial in trials[:-1])
    assert len(trials) - 1 >= places


def test_errors_caused_by_the_fault_end_a_trial_too(sim: SimulatedAccelerator) -> None:
    def run() -> None:
        try:
            torch.ones(1).to(sim.device)
        except RuntimeError as error:
            raise LookupError("could not load") from error

    errors = []
    for trial in every_fault(sim, "copy"):
        with trial:
            run()
        errors.append(type(trial.error))
    assert errors == [LookupError, type(None)]


def test_a_run_that_gets_over_its_fault(sim: SimulatedAccelerator) -> None:
    trials = []
    for trial in every_fault(sim, "allocation"):
        with trial:
            try:
                torch.ones(1, device=sim.device)
            except torch.OutOfMemoryError:
                torch.ones(1, device=sim.device)
        trials.append((trial.fired, trial.error))
    assert trials == [(True, None), (False, None)]


def test_other_errors_go_on(sim: SimulatedAccelerator) -> None:
    for trial in every_fault(sim, "copy"):
        with pytest.raises(ZeroDivisionError), trial:
            1 / 0  # noqa: B018
        break


def test_a_trial_must_be_entered(sim: SimulatedAccelerator) -> None:
    with pytest.raises(RuntimeError, match="fault at copy 0: enter it"):
        list(every_fault(sim, "copy"))


def test_walking_has_an_end(sim: SimulatedAccelerator) -> None:
    def walk() -> None:
        for trial in every_fault(sim, "copy", limit=3):
            with trial:
                for _ in range(10):
                    torch.ones(1).to(sim.device)

    with pytest.raises(RuntimeError, match="after 3 trials"):
        walk()
