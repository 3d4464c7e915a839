"""The demo on the simulated accelerator: offloaded as resident, in less room, each part in once (I1, I5, I8)."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from omni_components import offload
from omni_components.demo import DemoPipeline
from omni_components.testing import SimulatedAccelerator

PROMPT = "three one four"
STEPS = 3


def drawn(pipe: DemoPipeline) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(pipe(PROMPT, steps=STEPS).images[0])


def resident(sim: SimulatedAccelerator) -> tuple[np.ndarray, int]:
    """The picture, and the device bytes at the peak, with every weight on the device."""
    pipe = DemoPipeline.from_pretrained().to(sim.device)
    sim.reset()
    return drawn(pipe), sim.stats().peak


def test_the_offloaded_demo_draws_the_resident_picture_where_the_resident_run_has_no_room(
    simulated_accelerator: SimulatedAccelerator,
) -> None:
    sim = simulated_accelerator
    expected, resident_peak = resident(sim)
    gc.collect()
    pipe = DemoPipeline.from_pretrained()
    sim.reset()
    with offload(pipe, sim.device) as handle:
        assert np.array_equal(drawn(pipe), expected)
        peak = sim.stats().peak
        handle.release(free_arena=True)
        sim.capacity = peak
        assert np.array_equal(drawn(pipe), expected)
        handle.ledger.audit()
        assert handle.report().peak_bytes == handle.ledger.predicted_peak
    assert peak < resident_peak
    del pipe
    gc.collect()
    with pytest.raises(torch.OutOfMemoryError):
        resident(sim)


def test_each_part_of_the_demo_travels_once_a_request_and_nothing_comes_back(
    simulated_accelerator: SimulatedAccelerator,
) -> None:
    pipe = DemoPipeline.from_pretrained()
    payload = {name: sum(one.nbytes for one in module.parameters()) for name, module in pipe.named_children()}
    with offload(pipe, simulated_accelerator.device) as handle:
        for _ in range(2):
            drawn(pipe)
            handle.release()
        rows = {row.name: row for row in handle.report().rows}
    assert {name: rows[name].loads for name in rows} == {
        "text_encoder": 2,
        "reasoner": 2,
        "generator": 2,
        "vae": 1,
    }
    assert all(row.bytes_out == 0 for row in rows.values())
    assert rows["text_encoder"].bytes_in == 2 * payload["text_encoder"]
    buffers = sum(one.nbytes for one in pipe.transformer.buffers())
    assert rows["reasoner"].bytes_in + rows["generator"].bytes_in == 2 * (payload["transformer"] + buffers)
