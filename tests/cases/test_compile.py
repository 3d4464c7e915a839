"""Faults of compiled modules: never silent, no recompilation per switch. Case C29, with ``backend="eager"``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from omni_components import offload
from tests.helpers.pipelines import ModulePair, build, resident_copy

EAGER = {"backend": "eager"}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def in_place(pipe: ModulePair) -> None:
    pipe.A.compile(**EAGER)
    pipe.B.compile(**EAGER)


def wrapped(pipe: ModulePair) -> None:
    pipe.A, pipe.B = torch.compile(pipe.A, **EAGER), torch.compile(pipe.B, **EAGER)


def called(pipe: ModulePair) -> None:
    pipe.A(torch.randn(2, 16))
    pipe.B(torch.randn(2, 16))


ORDERS: dict[str, list[Callable[[ModulePair], Any] | str]] = {
    "wrapped, enabled": [wrapped, "enable"],
    "wrapped, called, enabled": [wrapped, called, "enable"],
    "enabled, wrapped": ["enable", wrapped],
    "enabled, called, wrapped": ["enable", called, wrapped],
    "in place, enabled": [in_place, "enable"],
    "in place, called, enabled": [in_place, called, "enable"],
    "enabled, in place": ["enable", in_place],
}


@pytest.mark.parametrize("order", ORDERS)
def test_c29_whenever_it_is_compiled_results_are_right_and_the_ledger_true(sim, order):
    """I2, I5: before or after enabling, or after the first compiled call; and a switch compiles nothing anew."""
    pipe = build("pipeline")
    x = torch.randn(2, 16, device=sim.device)
    twin = resident_copy(pipe, sim.device)
    expected = [twin.A(x).cpu(), twin.B(x).cpu()]
    handle = None
    for step in ORDERS[order]:
        if step == "enable":
            handle = offload(pipe, sim.device)
        else:
            step(pipe)
    start = len(handle.events)
    for repeat in range(5):
        if repeat == 2:
            compiled = graphs()
        assert torch.equal(pipe.A(x).cpu(), expected[0])
        assert "A" in handle.ledger.present
        assert torch.equal(pipe.B(x).cpu(), expected[1])
        assert "B" in handle.ledger.present
        handle.ledger.audit()
    assert graphs() == compiled
    assert len([one for one in handle.events[start:] if str(one.kind) == "load"]) >= 9
    handle.disable()
    assert torch.equal(pipe.B(x.cpu()), expected[1])


def test_c29_a_compiled_caller_of_a_split_model_switches_between_the_parts(sim):
    """I1, I2: the contexts are no part of a graph."""
    model = build("split")

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model.use("B", self.model.use("A", x))

    x = torch.randn(2, 16, device=sim.device)
    twin = resident_copy(model, sim.device)
    expected = twin.use("B", twin.use("A", x)).cpu()
    run = torch.compile(Caller(), **EAGER)
    with offload(model, sim.device) as handle:
        for repeat in range(4):
            if repeat == 2:
                compiled = graphs()
            assert torch.equal(run(x).cpu(), expected)
            handle.ledger.audit()
        assert graphs() == compiled
    assert torch.equal(run(x.cpu()), expected)
