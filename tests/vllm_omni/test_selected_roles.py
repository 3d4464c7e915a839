"""``offload_components`` here means what it means there: their backend and ours on one pipeline, side by side.

Their backend moves weights by ``.data =``, which the simulated accelerator's tensors refuse. So its hooks run, and
where they would move a module is written down instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from omni_components import offload
from omni_components.testing import SimulatedAccelerator
from tests.vllm_omni.test_both_ways import Lists, backend, wanted

Seen = list[tuple[str, frozenset[str]]]


def watched(pipeline: Lists, there: Callable[[nn.Module], bool]) -> Seen:
    """Who computed, and who was on the device then; filled while the pipeline runs."""
    found: Seen = []
    parts = dict(pipeline.named_children())

    def look(name: str) -> None:
        found.append((name, frozenset(key for key, one in parts.items() if there(one))))

    for name, part in parts.items():
        part.layers[0].register_forward_hook(lambda *_, name=name: look(name))
    return found


def by_their_backend(
    offloader: Any, sim: SimulatedAccelerator, monkeypatch: pytest.MonkeyPatch, roles: set[str]
) -> Seen:
    """The second and third request: at first their generic backend leaves a DiT where it was loaded."""
    pipeline = type("TheirPipeline", (Lists, offloader.ComponentDiscovery), {})()
    driver = backend(offloader, sim, components=frozenset(roles), pin_cpu_memory=False)
    driver.enable(pipeline)
    pipeline.to("cpu")  # the weights stay here; where they would be is in this table
    at = {id(one): torch.device("cpu") for one in pipeline.children()}
    at |= {id(pipeline.text_encoder): sim.device, id(pipeline.vae): sim.device}

    def move(module: nn.Module, target: torch.device, **_: Any) -> bool:
        moved, at[id(module)] = at[id(module)] != target, target
        return moved

    hooks = sys.modules["vllm_omni.diffusion.offloader.sequential_backend"].SequentialOffloadHook
    monkeypatch.setattr(hooks, "_move_params", staticmethod(move))
    x = wanted(sim)[0]
    pipeline(x)
    seen = watched(pipeline, lambda one: at[id(one)] == sim.device)
    for _ in range(2):
        pipeline(x)
    driver.disable()
    return seen


def by_ours(sim: SimulatedAccelerator, roles: set[str]) -> Seen:
    x, expected = wanted(sim)
    pipeline = Lists()
    with offload(pipeline, sim.device, pin_memory=False, offload_components=roles) as handle:
        pipeline(x.to(sim.device))
        seen = watched(pipeline, lambda one: next(one.parameters()).device == sim.device)
        for _ in range(2):
            assert torch.equal(pipeline(x.to(sim.device)).cpu(), expected)
        handle.ledger.audit()
    return seen


@pytest.mark.parametrize("roles", [{"text_encoder"}, {"dit"}, {"text_encoder", "dit"}], ids=sorted)
def test_whoever_computes_has_the_same_beside_it_as_with_their_backend(
    offloader: Any, sim: SimulatedAccelerator, monkeypatch: pytest.MonkeyPatch, roles: set[str]
) -> None:
    """I2, I5: every value that they know, in two requests one after the other."""
    ours = by_ours(sim, roles)
    assert ours == by_their_backend(offloader, sim, monkeypatch, roles)
    everyone = {"text_encoder", "transformer", "vae"}
    assert dict(ours) == {
        "text_encoder": everyone - ({"transformer"} if "dit" in roles else set()),
        "transformer": everyone - ({"text_encoder"} if "text_encoder" in roles else set()),
        "vae": everyone - ({"text_encoder"} if "text_encoder" in roles else set()),
    }


def test_they_refuse_what_is_refused_here(offloader: Any) -> None:
    """No role, an unknown one, a string."""
    for roles in (frozenset(), frozenset({"vae"}), "dit"):
        with pytest.raises((TypeError, ValueError)):
            offloader.parse_offload_components(roles)
