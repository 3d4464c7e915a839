"""KeyboardInterrupt while a pipeline is enabled or disabled: all or nothing, and what was begun can be finished."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from torch import nn

import omni_components
from omni_components import Offload, offload
from omni_components.testing import SimulatedAccelerator
from omni_components.testing.plugin import require_simulated_accelerator
from tests.residency.interrupts import Interrupter
from tests.residency.test_property import Pipeline

PACKAGE = Path(omni_components.__file__).parent
PLACES = tuple(str(PACKAGE / part) for part in ("residency", "transfer", "components", "attach"))


@pytest.fixture
def sim() -> Iterator[SimulatedAccelerator]:
    require_simulated_accelerator()
    with SimulatedAccelerator() as accelerator:
        yield accelerator


def untouched(pipeline: nn.Module, sim: SimulatedAccelerator) -> None:
    """No hook, no pinned page, no device byte; every weight on the host, as it was."""
    assert all(not one._forward_hooks and not one._forward_pre_hooks for one in pipeline.modules())
    wanted = Pipeline().state_dict()
    for path, tensor in pipeline.state_dict().items():
        assert tensor.device.type == "cpu", path
        assert torch.equal(tensor, wanted[path]), path
    assert (sim.stats().pinned, sim.stats().allocated) == (0, 0)


def works(handle: Offload, pipeline: Pipeline) -> None:
    handle.ledger.audit()
    x = torch.ones(2, 8)
    assert torch.equal(pipeline.text(x).cpu(), Pipeline().text(x))


def stride(places: int) -> int:
    """Some places by default, all of them at night."""
    return max(1, places * 2 // settings().max_examples)


def test_an_interrupted_enable_leaves_nothing_or_everything(sim: SimulatedAccelerator) -> None:
    """I3, I7: and it can be asked for again."""
    at = 0
    while True:
        pipeline = Pipeline()
        interrupter = Interrupter(at, *PLACES)
        with suppress(KeyboardInterrupt), interrupter:
            offload(pipeline, sim.device)
        if "_omni_offload_handle" not in vars(pipeline):
            untouched(pipeline, sim)
        handle = offload(pipeline, sim.device)
        works(handle, pipeline)
        handle.disable()
        untouched(pipeline, sim)
        if not interrupter.place:
            break
        at += stride(4000)
    assert at > 1000


def test_an_interrupted_disable_is_finished_by_the_next_one(sim: SimulatedAccelerator) -> None:
    """I4, I7."""
    at = 0
    while True:
        pipeline = Pipeline()
        handle = offload(pipeline, sim.device)
        works(handle, pipeline)
        interrupter = Interrupter(at, *PLACES)
        with suppress(KeyboardInterrupt), interrupter:
            handle.disable()
        handle.disable()
        untouched(pipeline, sim)
        again = offload(pipeline, sim.device)
        works(again, pipeline)
        again.disable()
        if not interrupter.place:
            break
        at += stride(300)
    assert at > 300
