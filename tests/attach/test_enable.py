"""Enable and disable: all or nothing, once, undone whole. Design section 8."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from omni_components import (
    BudgetError,
    Offload,
    OffloadPolicy,
    PolicyError,
    ScopeError,
    TransferError,
    UnknownComponentError,
    offload,
)
from tests.helpers.pipelines import (
    KINDS,
    build,
    footprint,
    modules,
    places,
    resident_copy,
    same_values,
    tensors,
    values,
)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_policy_again_gives_the_same_handle(sim, kind):
    """Whether said as a policy, as fields, or not at all."""
    target = build(kind)
    with offload(target, sim.device) as handle:
        assert offload(target, sim.device) is handle
        assert offload(target, str(sim.device)) is handle
        assert offload(target, sim.device, policy=OffloadPolicy()) is handle
        assert offload(target, sim.device, vae="resident", timeout=None) is handle
        assert offload(target, sim.device, ledger=handle.ledger) is handle
        assert offload(target) is handle  # the accelerator that is there


@pytest.mark.parametrize("state", ["fresh", "loaded", "released"])
@pytest.mark.parametrize("kind", KINDS)
def test_another_policy_undoes_the_first_and_then_holds(sim, kind, state):
    """I7: one set of hooks, the new policy in force, the values kept."""
    target = build(kind)
    before = values(target)
    x = torch.randn(2, 16, device=sim.device)
    first = offload(target, sim.device)
    if state != "fresh":
        target.use("A", x)
    if state == "released":
        first.release()
    second = offload(target, sim.device, pin_memory=False)
    assert second is not first
    assert not first.enabled
    assert second.enabled
    assert sim.stats().pinned == 0
    start = len(second.events)
    target.use("A", x)
    target.use("A", x)
    assert [str(one.kind) for one in second.events[start:]] == ["load"]
    second.ledger.audit()
    first.disable()  # changes nothing: it is not its target's any more
    assert second.enabled
    target.use("B", x)
    second.ledger.audit()
    second.disable()
    assert same_values(target, before)


def test_another_device_undoes_the_first(sim):
    target = build("pipeline")
    first = offload(target, sim.device)
    second = offload(target, "cpu")
    assert not first.enabled
    assert second.execution_device == torch.device("cpu")
    target.use("A", torch.randn(2, 16))
    second.disable()


def test_a_bad_policy_or_device_leaves_the_offload_that_is_on_untouched(sim):
    """I6: refused before anything is undone."""
    target = build("pipeline")
    with offload(target, sim.device) as handle:
        for bad in ({"nesting": "maybe"}, {"timeout": -1}, {"no_such_field": 1}, {"vae": "sometimes"}):
            with pytest.raises(PolicyError):
                offload(target, sim.device, **bad)
        for device in ("warp:0", "sim:99", "cuda"):
            with pytest.raises(PolicyError):
                offload(target, device)
        assert offload(target, sim.device) is handle
        handle.ledger.audit()


@pytest.mark.parametrize("to", [None, "cpu", "device", "meta"])
@pytest.mark.parametrize("state", ["A", "B", "released"])
@pytest.mark.parametrize("kind", KINDS)
def test_disable_leaves_the_weights_where_to_says(sim, kind, state, to):
    """I7: on the host by default; and for a target that is no module, too."""
    # "meta" keeps no values: only places are compared.
    target = build(kind)
    before, marks = values(target), footprint(target)
    handle = offload(target, sim.device)
    target.use("A" if state == "released" else state, torch.randn(2, 16, device=sim.device))
    if state == "released":
        handle.release()
    handle.disable(to=sim.device if to == "device" else to)
    where = sim.device if to == "device" else torch.device(to or "cpu")
    assert {one.device for one in tensors(target)} == {where}
    assert footprint(target) == marks
    if to != "meta":
        assert same_values(target, before)
        assert target.use("A", torch.randn(2, 16, device=where)).device == where
    handle.disable(to="cpu" if to != "meta" else None)
    if to != "meta":
        assert {one.device.type for one in tensors(target)} == {"cpu"}


def test_disable_to_a_device_without_room_leaves_whole_weights_on_the_host_and_nothing_attached(sim):
    """I6: going there needs room for all of them; what does not fit is an error after the offload is gone."""
    target = build("pipeline", width=128)
    before, marks = values(target), footprint(target)
    handle = offload(target, sim.device)
    sim.capacity = max(one.bytes for one in handle.components) + 1024
    with pytest.raises(torch.OutOfMemoryError):
        handle.disable(to=sim.device)
    assert footprint(target) == marks
    assert same_values(target, before)


@pytest.mark.parametrize("kind", KINDS)
def test_disable_inside_a_scope_is_refused_and_changes_nothing(sim, kind):
    """I4: a pinned component stays; afterwards disabling works."""
    target = build(kind)
    x = torch.randn(2, 16, device=sim.device)
    handle = offload(target, sim.device)
    marks = footprint(target)
    with handle.scope(target.names["A"]):
        with pytest.raises(ScopeError, match="Leave the scope first"):
            handle.disable()
        assert handle.enabled
        assert footprint(target) == marks
        target.use("A", x)
        handle.ledger.audit()
    handle.disable()
    assert not handle.enabled


def test_disable_from_inside_a_components_own_call_is_refused(sim):
    """I4: a hook's scope is a scope."""
    target = build("pipeline")
    handle = offload(target, sim.device)
    target.A.layers[0].register_forward_hook(lambda *_: handle.disable())
    with pytest.raises(ScopeError):
        target.A(torch.randn(2, 16))
    target.A.layers[0]._forward_hooks.clear()
    handle.ledger.audit()
    handle.disable()


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_back_that_fails_at_disable_leaves_everything_on_and_the_next_try_succeeds(sim, kind):
    """I6, I7: nothing that changed on the device is lost."""
    target = build(kind)
    handle = offload(target, sim.device)
    with handle.scope(target.names["A"]):
        for one in target.module("A").parameters():
            one.fill_(3.0)
    marks = footprint(target)
    sim.fail(copy=0)
    with pytest.raises(TransferError):
        handle.disable()
    assert handle.enabled
    assert footprint(target) == marks
    handle.ledger.audit()
    handle.disable()
    assert all(
        bool((one == 3.0).all()) and one.device.type == "cpu" for one in target.module("A").parameters()
    )


def test_the_handle_as_context_manager_disables_whatever_happens(sim):
    target = build("pipeline")
    marks = footprint(target)
    for error in (RuntimeError, KeyboardInterrupt):
        handle = offload(target, sim.device)
        with pytest.raises(error), handle:
            raise error
        assert not handle.enabled
        assert footprint(target) == marks


def test_a_disabled_handle_still_reports_and_says_that_it_is_off(sim):
    """What was measured stays; scopes are refused."""
    target = build("pipeline")
    with offload(target, sim.device) as handle:
        target.use("A", torch.randn(2, 16))
        during = handle.report().to_dict()
    assert "disabled" in repr(handle)
    assert len(handle.events) >= len(during["events"])
    assert {one["name"] for one in handle.report().to_dict()["rows"]} == {"A", "B"}
    with pytest.raises(UnknownComponentError):
        handle.scope("A")
    handle.release()  # nothing to do


@pytest.mark.parametrize("kind", KINDS)
def test_objects_stay_the_same_through_every_state(sim, kind):
    """Identity: two stable objects on this device, the host's one back after disable; attributes are shared."""
    target = build(kind)
    x = torch.randn(2, 16, device=sim.device)
    host = list(tensors(target))
    for index, one in enumerate(host):
        one.mark = index
    with offload(target, sim.device) as handle:
        seen: dict[str, list] = {}
        for which in "ABAB":
            target.use(which, x)
            now = list(target.module(which).parameters())
            assert seen.setdefault(which, now) == now or all(
                a is b for a, b in zip(seen[which], now, strict=True)
            )
            assert all(hasattr(one, "mark") for one in now)
            now[0].extra = which
        handle.release()
        assert all(
            one is other for one, other in zip(tensors(target), host, strict=True) if one.device.type == "cpu"
        )
    assert all(one is other for one, other in zip(tensors(target), host, strict=True))
    assert [one.mark for one in tensors(target)] == list(range(len(host)))
    assert next(target.module("A").parameters()).extra == "A"


def test_an_offload_that_is_dropped_without_disable_leaves_no_memory_behind(sim):
    """Pipe and handle go out of scope: device, pinned pages and masters are free."""
    for late in (False, True):
        target = build("pipeline", width=64)
        handle = offload(target, sim.device)
        x = torch.randn(2, 64, device=sim.device)
        target.use("A", x)
        if not late:
            torch.accelerator.synchronize()
        gone = weakref.ref(target.A)
        del target, handle, x
        gc.collect()
        assert gone() is None
        assert (sim.stats().allocated, sim.stats().pinned) == (0, 0)


def test_requires_grad_and_training_mode_are_as_they_were(sim):
    """Parameters that want gradients are carried as they are."""
    target = build("pipeline")
    target.A.layers[0].weight.requires_grad_(True)
    target.B.train()
    flags = [one.requires_grad for one in tensors(target)]
    modes = [one.training for root in modules(target) for one in root.modules()]
    with offload(target, sim.device), torch.no_grad():
        for which in "AB":
            target.use(which, torch.randn(2, 16))
            assert [one.requires_grad for one in tensors(target)] == flags
    assert [one.requires_grad for one in tensors(target)] == flags
    assert [one.training for root in modules(target) for one in root.modules()] == modes
    assert isinstance(target.A.layers[0].weight, nn.Parameter)


def test_a_subclass_of_parameter_keeps_its_class_and_attributes(sim):
    """As loaders of quantised or sharded checkpoints use them."""

    class Loaded(nn.Parameter):
        pass

    target = build("pipeline")
    linear = target.A.layers[0]
    linear.weight = Loaded(linear.weight.detach(), requires_grad=False)
    linear.weight.weight_loader = "here"
    expected = resident_copy(target, sim.device).use("A", torch.ones(2, 16, device=sim.device)).cpu()
    with offload(target, sim.device) as handle:
        assert torch.equal(target.use("A", torch.ones(2, 16)).cpu(), expected)
        assert type(linear.weight) is Loaded
        assert linear.weight.weight_loader == "here"
        handle.ledger.audit()
    assert type(linear.weight) is Loaded


def test_weights_that_start_on_the_device_or_on_both_sides_end_on_the_host(sim):
    """Placements before enabling do not matter; ``to=`` says where they go afterwards."""
    for start in ("device", "mixed"):
        target = build("pipeline")
        before = values(target)
        target.A.to(sim.device)
        if start == "device":
            target.B.to(sim.device)
        handle: Offload = offload(target, sim.device)
        assert handle.ledger.present == ()
        assert sim.stats().allocated == 0
        target.use("B", torch.randn(2, 16))
        handle.ledger.audit()
        handle.disable()
        assert set(places(target).values()) == {"cpu"}
        assert same_values(target, before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_component_that_the_device_memory_cannot_hold_is_refused_before_anything_moves(sim, kind):
    """I8: the policy's budget; the error has the numbers, and nothing was touched."""
    target = build(kind, width=64)
    with offload(target, sim.device) as handle:
        largest = max((one for one in handle.components if not one.resident), key=lambda one: one.bytes)
        residents = sum(one.bytes for one in handle.components if one.resident)
    before = footprint(target), places(target)
    with pytest.raises(BudgetError) as caught:
        offload(target, sim.device, device_memory=largest.bytes + residents - 1)
    assert (caught.value.wanted, caught.value.residents) == (largest.bytes, residents)
    assert (footprint(target), places(target)) == before
    with offload(target, sim.device, device_memory=largest.bytes + residents) as handle:
        for which in "AB":
            target.use(which, torch.randn(2, 64, device=sim.device))
        handle.ledger.audit()


def test_disable_while_another_thread_is_inside_a_scope_is_refused_and_changes_nothing(sim):
    """I4: the other thread's component stays under it."""
    target = build("pipeline")
    handle = offload(target, sim.device)
    entered, leave = threading.Event(), threading.Event()

    def hold() -> torch.device:
        with handle.scope("A"):
            entered.set()
            leave.wait(20)
            return next(target.A.parameters()).device

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(hold)
        assert entered.wait(20)
        with pytest.raises(ScopeError, match="'A'"):
            handle.disable()
        assert handle.enabled
        leave.set()
        assert held.result(20) == sim.device
    handle.disable()
