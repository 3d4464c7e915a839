"""Enabled, run and disabled two thousand times: nothing grows."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from contextlib import suppress
from typing import Any

import torch
from hypothesis import settings
from torch import nn

from omni_components import TransferError, offload
from omni_components.testing import SimulatedAccelerator
from tests.residency.generation import PROMPTS, Pipeline, resident_results

CYCLES = {"default": 200}  # other profiles do all 2,000
POLICIES: tuple[dict[str, Any], ...] = (
    {"vae": "resident", "arena": "keep"},
    {"vae": "exclusive", "arena": "fit"},
)
WARM = 20  # by then every cache has what it keeps


def census(pipe: nn.Module, sim: SimulatedAccelerator) -> dict[str, Any]:
    """Whatever could be left behind by a cycle, counted."""
    gc.collect()
    alive = gc.get_objects()
    tensors = [one for one in alive if issubclass(type(one), torch.Tensor)]
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}
    ours = Counter(
        type(one).__qualname__ for one in alive if str(type(one).__module__).startswith("omni_components")
    )
    ours.pop("ResidencyEvent", None)  # the pytest plugin keeps them all, to tell what led to a failure
    modules = list(pipe.modules())
    found = {
        "tensors": len(tensors),
        "storages": len(storages),
        "bytes in storages": sum(storages.values()),
        "device bytes": sim.stats().allocated,
        "pinned bytes": sim.stats().pinned,
        "hooks": sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in modules),
        "instance attributes": sum(len(vars(one)) for one in modules),
        "threads": threading.active_count(),
        **{f"objects: {name}": count for name, count in ours.items()},
    }
    if os.path.isdir("/proc/self/fd"):
        found["file descriptors"] = len(os.listdir("/proc/self/fd"))
    return found


def test_enabling_running_and_disabling_again_and_again_leaves_nothing(
    sim: SimulatedAccelerator, one_thread: None
) -> None:
    """I6, I8: host storages, device bytes, pinned pages, hooks, threads, descriptors, our own objects: as before.

    The policies take turns, and every eleventh request fails on the way, by a copy that the device refuses.
    """
    cycles = CYCLES.get(settings.get_current_profile_name(), 2000)
    pipe, expected = Pipeline(), resident_results()
    before: dict[str, Any] = {}
    for cycle in range(WARM + cycles):
        if cycle == WARM:
            before = census(pipe, sim)
        handle = offload(pipe, sim.device, **POLICIES[cycle % 2])
        if cycle % 11 == 10:
            sim.fail(copy=cycle // 11 % 8)
            with suppress(TransferError, RuntimeError):
                pipe(PROMPTS[0])
            sim.heal()
        prompt = cycle % len(PROMPTS)
        assert torch.equal(pipe(PROMPTS[prompt]).cpu(), expected[prompt])
        handle.disable()
        del handle
    after = census(pipe, sim)
    # What earlier tests of this process left may go meanwhile, so that less than before is no fault.
    assert {
        name: (before.get(name, 0), now) for name, now in after.items() if now > before.get(name, 0)
    } == {}
