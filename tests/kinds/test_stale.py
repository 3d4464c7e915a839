"""References to device memory that its component has left. Case C37."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from omni_components import offload
from omni_components.testing import SimulatedAccelerator
from tests.helpers.pipelines import KINDS, WIDTH, build, tensors, values
from tests.kinds.quantised import Pair, int8, wrap

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda weight: weight,
    "detached": lambda weight: weight.detach(),
    "row": lambda weight: weight.detach()[1],
    "turned": lambda weight: weight.detach().T[2:, ::2],
    "data": lambda weight: weight.data,
}
each_arena = pytest.mark.parametrize("arena", ["keep", "fit"])
each_view = pytest.mark.parametrize("view", VIEWS)


def weight_of(target: Any, which: str) -> torch.Tensor:
    return next(one for one in target.module(which).parameters() if one.dim() == 2)


@each_arena
@each_view
@pytest.mark.parametrize("kind", KINDS)
def test_c37_a_reference_that_shows_the_rivals_weights(sim, kind, view, arena):
    """I5: the handle says that it is stale; with poison on it reads NaN, never the rival's bytes, and is reported."""
    target = build(kind)
    a, b = target.names["A"], target.names["B"]
    with offload(target, sim.device, arena=arena) as handle:
        with handle.scope(a):
            reference = VIEWS[view](weight_of(target, "A"))
            assert handle.is_current(reference)
            assert handle.ledger.is_current(reference)
            shown = reference.cpu().clone()
        with handle.scope(b):
            assert not handle.is_current(reference)
            assert not handle.ledger.is_current(reference)
            assert (
                reference.cpu().isnan().all()
            )  # of a parameter whose memory was freed there is nothing left
            assert (reference + 1).cpu().isnan().all()
            assert handle.is_current(VIEWS[view](weight_of(target, "B")))
        stale = sim.expect_races()
        assert {one.kind for one in stale} <= {"read through a stale reference"}
        assert bool(stale) is (reference.numel() > 0)
        with handle.scope(a):
            assert handle.is_current(reference) is (arena == "keep" or view == "itself")
            if handle.is_current(reference):
                assert torch.equal(reference.cpu(), shown)
            assert handle.is_current(VIEWS[view](weight_of(target, "A")))


@each_arena
def test_c37_a_write_through_a_stale_reference_that_hits_the_rival(sim, arena):
    """I7: it goes nowhere: neither the rival, nor the component it came from, has it."""
    target = build("pipeline")
    before = values(target)
    with offload(target, sim.device, arena=arena) as handle:
        with handle.scope("A"):
            reference = target.A.layers[0].weight.detach()
        with handle.scope("B"):
            reference.fill_(7)
        assert {one.kind for one in sim.expect_races()} == {"write through a stale reference"}
        for which in ("A", "B"):
            handle.load(which)
            now = values(target)
            assert all(torch.equal(now[name], before[name]) for name in before)
            handle.ledger.audit()


@each_arena
def test_c37_a_late_copy_from_a_stale_reference(sim, arena):
    """A copy that would run later, to pinned memory, sees poison too."""
    target = build("pipeline")
    with offload(target, sim.device, arena=arena) as handle:
        with handle.scope("A"):
            reference = target.A.layers[0].weight.detach()
        with handle.scope("B"):
            landed = torch.zeros(WIDTH, WIDTH, pin_memory=True)
            landed.copy_(reference, non_blocking=True)
            torch.accelerator.synchronize()
            assert landed.isnan().all()
            assert torch.isnan(reference[0, 0]).item()
            assert str(reference[0, 0].item()) == "nan"
    assert sim.expect_races()


def test_c37_a_report_that_does_not_say_what_to_do(sim):
    """It names the operation, the line that issued it, and the way out."""
    target = build("pipeline")
    with offload(target, sim.device) as handle:
        with handle.scope("A"):
            reference = target.A.layers[0].weight.detach()
        handle.load("B")
        reference.sum()
    (report,) = sim.expect_races()
    assert "read through a stale reference" in str(report)
    assert "test_stale.py" in str(report)
    assert "take the tensor from its module again" in str(report)
    assert report.missing_wait == ""


def test_c37_references_that_are_still_good_taken_for_stale(sim):
    """I5: residents, masters of absent components, adopted tensors, and weights at rest after release."""
    target = build("pipeline")
    target.head = torch.nn.Linear(WIDTH, WIDTH)
    with offload(target, sim.device) as handle:
        assert handle.is_current(target.head.weight)
        master = target.A.layers[0].weight.detach()
        assert handle.is_current(master)
        with handle.scope("A"):
            assert not handle.is_current(master)  # the latest values are on the device, and may change there
            target.A.layers[0].weight = torch.nn.Parameter(torch.ones(WIDTH, WIDTH, device=sim.device))
            assert handle.is_current(target.A.layers[0].weight)
            assert handle.is_current(target.head.weight.detach())
        handle.release()
        assert handle.is_current(target.A.layers[0].weight)
        assert all(handle.is_current(one) for one in tensors(target))
        assert not handle.is_current(torch.ones(3, device=sim.device))
    assert not handle.is_current(target.A.layers[0].bias)  # nobody knows any more


def test_c37_the_inner_tensors_of_a_wrapper(sim):
    """I5: a wrapper is current if all it consists of is."""
    model = wrap(Pair(), int8)
    with offload(model, sim.device) as handle:
        with handle.scope("A"):
            weight = model.A.layers[0].weight
            scale = weight.scale[2:]
            assert handle.is_current(weight)
            assert handle.is_current(scale)
        with handle.scope("B"):
            assert not handle.is_current(weight)
            assert not handle.is_current(scale)
            assert scale.cpu().isnan().all()
    assert sim.expect_races()


@pytest.mark.parametrize("kind", KINDS)
def test_c37_without_an_accelerator_nothing_goes_stale(kind):
    """I5: with the weights in memory there is one place for each tensor."""
    target = build(kind)
    references = [VIEWS[view](weight_of(target, which)) for which in "AB" for view in VIEWS]
    with offload(target, "cpu") as handle:
        for which in "ABA":
            target.use(which, torch.ones(1, WIDTH))
            fresh = [VIEWS[view](weight_of(target, one)) for one in "AB" for view in VIEWS]
            assert all(handle.is_current(one) for one in fresh)
            assert all(torch.equal(new, old) for new, old in zip(fresh, references, strict=True))


def test_c37_without_poison_nobody_looks():
    """Watching costs a call per tensor and switch: it is for tests, and timings are taken without it."""
    with SimulatedAccelerator(poison=False) as sim:
        target = build("pipeline")
        with offload(target, sim.device) as handle:
            with handle.scope("A"):
                reference = target.A.layers[0].weight.detach()
            with handle.scope("B"):
                assert not handle.is_current(reference)
                assert any(torch.equal(reference.cpu(), layer.weight.cpu()) for layer in target.B.layers)
        assert sim.races == []


@each_arena
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("on_device", [True, False], ids=["device", "host"])
def test_a_module_taken_out_that_computes_with_the_rivals_weights(sim, on_device, wrapped, arena):
    """I7: whoever takes a layer out of an offloaded component keeps it whole, where it was."""
    model = wrap(Pair(), int8) if wrapped else build("pipeline")
    x = torch.randn(2, WIDTH, device=sim.device)
    with offload(model, sim.device, arena=arena) as handle:
        with handle.scope("A"):
            expected = model.A.layers[0](x)
        where = sim.device if on_device else torch.device("cpu")
        handle.load("A" if on_device else "B")
        taken = model.A.layers[0]
        model.A.layers[0] = torch.nn.Identity()
        for which in "BAB":
            handle.load(which)
            handle.ledger.audit()
        assert {one.device for one in taken.parameters()} == {where}
        assert torch.equal(taken(x.to(where)).cpu(), expected.cpu())


@each_arena
def test_a_layer_dropped_on_the_device_whose_memory_stays(sim, arena):
    """I8: nobody keeps it, so nothing of it is copied and nothing stays."""
    model = build("pipeline")
    with offload(model, sim.device, arena=arena) as handle:
        handle.load("A")
        model.A.layers[0] = torch.nn.Identity()
        sim.reset()
        handle.release(free_arena=True)
        assert (sim.stats().allocations, sim.stats().allocated, sim.stats().d2h_bytes) == (0, 0, 0)
