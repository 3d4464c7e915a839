"""Faults of sharing: two pipelines with one encoder, two threads. Case C34."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from omni_components import OwnershipError, offload
from tests.helpers.pipelines import KINDS, ModulePair, build, frozen, resident_copy


def two_pipelines() -> tuple[ModulePair, ModulePair]:
    """Two pipelines with one encoder object between them."""
    one, other = ModulePair(), ModulePair()
    other.A = one.A
    return frozen(one), frozen(other)


@pytest.mark.parametrize("arena", ["keep", "fit"])
def test_c34_an_encoder_that_two_pipelines_share_is_one_component_with_one_owner(sim, arena):
    """I3: under one ledger; it stays in service until both have let go."""
    one, other = two_pipelines()
    x = torch.randn(2, 16, device=sim.device)
    expected = [resident_copy(pipe, sim.device).use("A", x).cpu() for pipe in (one, other)]
    first = offload(one, sim.device, arena=arena)
    second = offload(other, sim.device, ledger=first.ledger)
    assert second.ledger is first.ledger
    assert len(first.ledger.components) == 3
    shared = {component.name for component in first.components} & {
        component.name for component in second.components
    }
    assert shared == {"A"}
    sizes = {component.name: component.bytes for component in first.ledger.components}
    one.use("A", x)
    other.use("B", x)
    one.use("B", x)  # the DiTs of two pipelines exclude each other, too
    assert first.ledger.device_bytes == max(sizes.values())
    assert torch.equal(other.use("A", x).cpu(), expected[1])
    first.ledger.audit()
    first.disable()
    assert torch.equal(other.use("A", x).cpu(), expected[0])
    assert str(other.A.layers[0].weight.device) == str(sim.device)
    second.ledger.audit()
    second.disable()
    assert not other.A._forward_pre_hooks
    assert sim.stats().pinned == 0


def test_c34_without_the_shared_ledger_the_second_pipeline_is_refused(sim):
    """I3: it says whose the encoder is, and how to share it."""
    one, other = two_pipelines()
    with offload(one, sim.device), pytest.raises(OwnershipError, match=r"ledger=handle\.ledger"):
        offload(other, sim.device)


@pytest.mark.parametrize("arena", ["keep", "fit"])
def test_c34_two_threads_with_two_pipelines_and_one_encoder_get_the_right_results(sim, arena):
    """I1, I2: they start each round together; no deadlock, and each thread's outputs are its own."""
    one, other = two_pipelines()
    x = [torch.randn(2, 16, device=sim.device) for _ in range(2)]
    expected = []
    for pipe, given in zip((one, other), x, strict=True):
        twin = resident_copy(pipe, sim.device)
        expected.append(twin.use("B", twin.use("A", given)).cpu())
    first = offload(one, sim.device, arena=arena, timeout=20)
    second = offload(other, sim.device, ledger=first.ledger)
    together = threading.Barrier(2)

    def rounds(pipe, given):
        results = []
        for _ in range(8):
            together.wait(timeout=20)
            results.append(pipe.use("B", pipe.use("A", given)).cpu())
        return results

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(rounds, pipe, given) for pipe, given in zip((one, other), x, strict=True)]
        for run, right in zip(runs, expected, strict=True):
            assert all(torch.equal(result, right) for result in run.result(timeout=60))
    first.ledger.audit()
    second.disable()
    first.disable()


@pytest.mark.parametrize("kind", KINDS)
def test_c34_two_threads_that_alternate_on_one_target_get_the_right_results(sim, kind):
    """I1, I2: one thread wants A when the other wants B, in every round."""
    target = build(kind)
    x = torch.randn(2, 16, device=sim.device)
    twin = resident_copy(target, sim.device)
    expected = {which: twin.use(which, x).cpu() for which in "AB"}
    together = threading.Barrier(2)

    def rounds(order):
        right = []
        for which in order * 6:
            together.wait(timeout=20)
            right.append(torch.equal(target.use(which, x).cpu(), expected[which]))
        return right

    with offload(target, sim.device, timeout=20) as handle:
        with ThreadPoolExecutor(2) as pool:
            runs = [pool.submit(rounds, order) for order in ("AB", "BA")]
            assert all(all(run.result(timeout=60)) for run in runs)
        handle.ledger.audit()
        assert [handle.ledger.pins(name) for name in target.names.values()] == [0, 0]
