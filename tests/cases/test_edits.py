"""Faults of edits: what others put into, or write to, a component. Cases C25 and C26."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from omni_components import UnknownComponentError, offload
from tests.helpers.pipelines import KINDS, build, resident_copy, tensors


def linears(target, which: str) -> list[nn.Linear]:
    return [one for one in target.module(which).modules() if isinstance(one, nn.Linear)]


def add_lora(linear: nn.Linear) -> list[nn.Parameter]:
    """Two children of a Linear, and a forward that uses them, on the side where the Linear is."""
    where = linear.weight.device
    linear.lora_A = nn.Linear(linear.in_features, 2, bias=False).requires_grad_(False).to(where)
    linear.lora_B = nn.Linear(2, linear.out_features, bias=False).requires_grad_(False).to(where)
    original = linear.forward
    linear.forward = lambda x: original(x) + linear.lora_B(linear.lora_A(x))
    return [linear.lora_A.weight, linear.lora_B.weight]


# --- C25: adapters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arena", ["keep", "fit"])
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("kind", KINDS)
def test_c25_adapters_added_while_it_is_on_either_side_move_with_their_component(sim, kind, where, arena):
    """I3, I5, I7: from the next switch on; their values are kept, and so is the result."""
    target = build(kind)
    x = torch.randn(2, 16, device=sim.device)
    with offload(target, sim.device, arena=arena) as handle:
        target.use("A", x)
        if where == "host":
            handle.release()
        size = handle.ledger.size(target.names["A"])
        for linear in linears(target, "A"):
            add_lora(linear)
        host = {name: one.cpu().clone() for name, one in target.module("A").named_parameters()}
        expected = resident_copy_of_a(target, x)
        for _ in range(2):
            target.use("B", x)
            assert all(one.device.type == "cpu" for one in target.module("A").parameters())
            assert torch.equal(target.use("A", x).cpu(), expected)
            assert all(one.device == sim.device for one in target.module("A").parameters())
            handle.ledger.audit()
        assert {str(one.kind) for one in handle.events if one.component == target.names["A"]} >= {"adopt"}
        assert handle.ledger.size(target.names["A"]) > size
    now = dict(target.module("A").named_parameters())
    assert now.keys() == host.keys()
    assert all(torch.equal(now[name], host[name]) for name in host)
    assert all(one.device.type == "cpu" for one in tensors(target))


def resident_copy_of_a(target, x: torch.Tensor) -> torch.Tensor:
    """The result with the adapters, computed without the library's hooks: layer by layer on the device."""
    state = {name: one.detach().to(x.device) for name, one in target.module("A").named_parameters()}
    fresh = build(next(kind for kind, cls in KINDS.items() if type(target) is cls))
    for linear in linears(fresh, "A"):
        add_lora(linear)
    for name, one in fresh.module("A").named_parameters():
        one.copy_(state[name].cpu())
    if hasattr(fresh, "blocks"):
        for mine, theirs in zip(fresh.blocks, target.blocks, strict=True):
            mine.bias.copy_(theirs.bias.cpu())
    return fresh.use("A", x.cpu())


@pytest.mark.parametrize("where", ["host", "device"])
def test_c25_an_adapter_that_is_taken_out_again_leaves_with_its_owner(sim, where):
    """I7: who takes a module out keeps whole weights; the component shrinks at the next switch."""
    target = build("pipeline")
    x = torch.randn(2, 16, device=sim.device)
    with offload(target, sim.device) as handle:
        adapters = [one for linear in linears(target, "A") for one in add_lora(linear)]
        values = [one.clone() for one in adapters]
        target.use("A", x)
        target.use("B", x)
        if where == "device":
            target.use("A", x)
        for linear in target.A.layers:
            del linear.forward, linear.lora_A, linear.lora_B
        expected = resident_copy(build("pipeline"), sim.device).use("A", x).cpu()
        target.use("B", x)
        assert torch.equal(target.use("A", x).cpu(), expected)
        handle.ledger.audit()
    assert all(torch.equal(one.cpu(), value) for one, value in zip(adapters, values, strict=True))


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("how", ["half", "double", "to dtype", "replaced", "assign"])
def test_c25_tensors_that_are_replaced_are_adopted_at_the_next_switch(sim, how, where):
    """I5, I7: ``.half()``, ``.to()``, a new Parameter, ``load_state_dict(assign=True)``, on either side."""
    target = build("pipeline")
    x = torch.randn(2, 16, device=sim.device)
    source = build("pipeline", seed=1).A.state_dict()
    with offload(target, sim.device) as handle:
        if where == "device":
            target.use("A", x)
        else:
            handle.release()
        if how == "half":
            target.A.half()
        elif how == "double":
            target.A.double()
        elif how == "to dtype":
            target.A.to(torch.bfloat16)
        elif how == "replaced":
            for linear in linears(target, "A"):
                linear.weight = nn.Parameter(torch.full_like(linear.weight, 0.25), requires_grad=False)
        else:
            target.A.load_state_dict(source, assign=True)
            for one in target.A.parameters():
                one.requires_grad_(False)
        now = {name: one.cpu().clone() for name, one in target.A.named_parameters()}
        dtype = next(iter(now.values())).dtype
        for _ in range(2):
            target.use("B", x)
            assert all(torch.equal(one, now[name]) for name, one in target.A.named_parameters())
            assert target.use("A", x.to(dtype)).dtype is dtype
            assert all(one.device == sim.device for one in target.A.parameters())
            handle.ledger.audit()
    assert all(
        torch.equal(one, now[name]) and one.dtype is dtype for name, one in target.A.named_parameters()
    )


# --- C26: writes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arena", ["keep", "fit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_c26_a_weight_written_on_the_device_is_written_everywhere(sim, kind, dtype, arena):
    """I7: ``fill_(2)``, evict, read, load, run: 2 everywhere, and no call was needed."""
    target = build(kind, dtype=dtype)
    x = torch.randn(2, 16, dtype=dtype, device=sim.device)
    with offload(target, sim.device, arena=arena) as handle:
        with handle.scope(target.names["A"]):
            for one in target.module("A").parameters():
                one.fill_(2)
        inside = target.use("A", x).cpu()
        target.use("B", x)
        assert all(
            one.device.type == "cpu" and bool((one == 2).all()) for one in target.module("A").parameters()
        )
        assert torch.equal(target.use("A", x).cpu(), inside)
        assert all(bool((one == 2).all()) for one in target.module("A").parameters())
        written = [one for one in handle.events if str(one.kind) == "write_back"]
        assert [one.component for one in written] == [target.names["A"]]
        assert written[0].bytes == sum(one.nbytes for one in target.module("A").parameters())
        handle.ledger.audit()
    assert all(bool((one == 2).all()) for one in target.module("A").parameters())


def test_c26_only_what_was_written_goes_home(sim):
    """I7, I8: one bias of many tensors changed; its bytes go home, once."""
    target = build("pipeline")
    x = torch.randn(2, 16, device=sim.device)
    with offload(target, sim.device) as handle:
        with handle.scope("A"):
            target.A.layers[0].bias.add_(1)
        sim.reset()
        for _ in range(3):
            target.use("B", x)
            target.use("A", x)
        assert sim.stats().d2h_bytes == target.A.layers[0].bias.nbytes
        handle.ledger.audit()


@pytest.mark.parametrize("how", ["data", "no version", "view", "set_"])
@pytest.mark.parametrize("kind", KINDS)
def test_c26_edits_that_leave_no_trace_are_kept_inside_editing(sim, kind, how):
    """I7: ``weight.data.fill_(3)`` inside ``handle.editing("A")`` is 3 on both sides."""
    target = build(kind)
    name = target.names["A"]
    x = torch.randn(2, 16, device=sim.device)
    with offload(target, sim.device) as handle:
        with handle.editing(name):
            for one in target.module("A").parameters():
                if how == "data":
                    one.data.fill_(3)
                elif how == "no version":
                    with torch.autograd._unsafe_preserve_version_counter(one):
                        one.fill_(3)
                elif how == "view":
                    one.data.view(-1)[:].fill_(3)
                else:
                    one.data = torch.full_like(one, 3)
        target.use("B", x)
        assert all(bool((one == 3).all()) for one in target.module("A").parameters())
        target.use("A", x)
        assert all(bool((one == 3).all()) for one in target.module("A").parameters())
        handle.ledger.audit()
    assert all(bool((one == 3).all()) for one in target.module("A").parameters())


def test_c26_editing_an_unknown_component_lists_the_known_ones(sim):
    with (
        offload(build("pipeline"), sim.device) as handle,
        pytest.raises(UnknownComponentError, match=r"declared: B, A\. Did you mean 'A'\?"),
        handle.editing("AA"),
    ):
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_c26_a_weight_written_on_the_host_is_loaded_as_written(sim, kind):
    """I7: the master is the tensor's memory, so a write on the host needs nothing at all."""
    target = build(kind)
    with offload(target, sim.device) as handle:
        for _ in range(2):
            for one in target.module("A").parameters():
                one.data.fill_(4)
            with handle.scope(target.names["A"]):
                assert all(
                    one.device == sim.device and bool((one == 4).all())
                    for one in target.module("A").parameters()
                )
            handle.release()


@pytest.mark.parametrize("kind", KINDS)
def test_c26_what_was_written_before_editing_failed_is_kept(sim, kind):
    """I6, I7: the error goes on, and the master has what the device had, as it would without offload."""
    target = build(kind)
    with offload(target, sim.device) as handle:

        def edit() -> None:
            with handle.editing(target.names["A"]):
                next(target.module("A").parameters()).data.fill_(3)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            edit()
        handle.release()
        assert bool((next(target.module("A").parameters()) == 3).all())
        handle.ledger.audit()
