"""Hooks: one pre-hook and one post-hook, beside everybody else's wrappers and hooks. Design section 8."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import CpuOffload, add_hook_to_module, remove_hook_from_module
from torch import nn

from omni_components import DeclarationError, offload
from tests.helpers.pipelines import ModulePair, build, footprint, resident_copy


class Wrapper:
    """A wrapper of forward as DeepCache, cache-dit, FreeU and others put on: an instance attribute."""

    def __init__(self, module: nn.Module, name: str = "forward") -> None:
        self.module, self.name, self.calls = module, name, 0
        self.devices: list[str] = []

    def put_on(self) -> None:
        self.original = getattr(self.module, self.name)
        setattr(self.module, self.name, self)

    def take_off(self) -> None:
        if getattr(self.module, self.name) is self:
            if getattr(self.original, "__self__", None) is self.module:
                delattr(self.module, self.name)
            else:
                setattr(self.module, self.name, self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        self.devices.append(next(self.module.parameters()).device.type)
        return self.original(*args, **kwargs)


def orders() -> list[tuple[str, ...]]:
    """Every order of putting two wrappers and the offload on and off in which each goes on before it goes off."""
    steps = ["on 1", "off 1", "on 2", "off 2", "enable", "disable"]
    found = []
    for order in itertools.permutations(steps):
        at = {step: order.index(step) for step in steps}
        nested = at["on 1"] < at["off 1"] and at["on 2"] < at["off 2"] and at["enable"] < at["disable"]
        # Two instance wrappers themselves work only if the later one is taken off first.
        stacked = not (
            at["on 1"] < at["on 2"] < at["off 1"] < at["off 2"]
            or at["on 2"] < at["on 1"] < at["off 2"] < at["off 1"]
        )
        if nested and stacked and at["on 1"] < at["on 2"]:
            found.append(order)
    return found


@pytest.mark.parametrize("order", orders(), ids=", ".join)
def test_wrappers_of_forward_put_on_and_taken_off_in_any_order_keep_working(sim, order):
    """The hook is no wrapper: both see every call, on the device while it is offloaded, and nothing is left."""
    pipe = build("pipeline")
    clean = footprint(pipe)
    x = torch.randn(2, 16)
    expected = pipe.B(x)
    wrappers = {"1": Wrapper(pipe.B), "2": Wrapper(pipe.B)}
    worn: set[str] = set()
    handle = None
    for step in order:
        what, _, which = step.partition(" ")
        if what == "on":
            wrappers[which].put_on()
            worn.add(which)
        elif what == "off":
            wrappers[which].take_off()
            worn.discard(which)
        elif what == "enable":
            handle = offload(pipe, sim.device)
        else:
            handle.disable()
        pipe.A(x)
        before = {name: one.calls for name, one in wrappers.items()}
        assert torch.equal(pipe.B(x).cpu(), expected)
        for name, one in wrappers.items():
            assert one.calls - before[name] == (1 if name in worn else 0)
            if name in worn:
                assert one.devices[-1] == ("sim" if handle is not None and handle.enabled else "cpu")
        if handle is not None and handle.enabled:
            handle.ledger.audit()
    assert footprint(pipe) == clean


class WithMethods(ModulePair):
    """Its B has an entry point and a plain method."""

    def __init__(self) -> None:
        super().__init__()

        class Vae(type(self.B)):
            def decode(self, x: torch.Tensor) -> torch.Tensor:
                return self(x) + 1

            def tile(self, x: torch.Tensor) -> torch.Tensor:
                return x * self.layers[0].bias

        self.B = Vae()
        self.requires_grad_(False)


@pytest.mark.parametrize("method", ["decode", "tile"])
@pytest.mark.parametrize(
    "order", [one for one in orders() if one.index("on 2") + 1 == one.index("off 2")], ids=", ".join
)
def test_wrappers_of_methods_put_on_and_taken_off_in_any_order_keep_working(sim, order, method):
    """Of an entry point, and of a method that is only explained when it fails."""
    pipe = WithMethods()
    x = torch.randn(2, 16, device=sim.device)
    expected = getattr(resident_copy(pipe, sim.device).B, method)(x).cpu()
    wrapper = Wrapper(pipe.B, method)
    steps: dict[str, Callable[[], Any]] = {"on 1": wrapper.put_on, "off 1": wrapper.take_off}
    handle = None
    for step in order:
        if step == "enable":
            handle = offload(pipe, sim.device)
        elif step == "disable":
            handle.disable()
        else:
            steps.get(step, lambda: None)()
        on = handle is not None and handle.enabled
        if on:
            pipe.A(x)
            with handle.scope("B"):
                assert torch.equal(getattr(pipe.B, method)(x).cpu(), expected)
            if method == "decode":
                pipe.A(x)
                assert torch.equal(pipe.B.decode(x).cpu(), expected)
            handle.ledger.audit()
        else:
            assert torch.allclose(getattr(pipe.B, method)(x.cpu()), expected)
    assert getattr(pipe.B, method)(x.cpu()).shape == x.shape


@pytest.mark.parametrize("when", ["before", "after"])
def test_other_hooks_keep_running_in_their_order_and_see_the_component_present(sim, when):
    """User's pre-hooks and post-hooks, put on before or after, with and without always_call."""
    pipe = build("pipeline")
    seen: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda module, *_: seen.append(f"{name} on {next(module.parameters()).device.type}")

    def put_on() -> list[Any]:
        return [
            pipe.B.register_forward_pre_hook(note("pre")),
            pipe.B.register_forward_hook(note("post")),
            pipe.B.register_forward_hook(note("always"), always_call=True),
        ]

    handles = put_on() if when == "before" else []
    with offload(pipe, sim.device) as handle:
        handles = handles or put_on()
        pipe.B(torch.randn(2, 16))
        assert seen == ["pre on sim", "post on sim", "always on sim"]
        handle.ledger.audit()
    for one in handles:
        one.remove()
    assert not pipe.B._forward_hooks
    assert not pipe.B._forward_hooks_always_called


@pytest.mark.parametrize("prepend", [True, False])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_users_pre_hook_or_post_hook_that_raises_leaves_no_pin(sim, error, prepend):
    """I4: whether ours has run before it or not; the post-hook closes its own scope or none."""
    pipe = build("pipeline")
    x = torch.randn(2, 16)

    def fail(*_: Any) -> None:
        raise error("from a hook")

    with offload(pipe, sim.device) as handle:
        for put_on in (
            lambda: pipe.B.register_forward_pre_hook(fail, prepend=prepend),
            lambda: pipe.B.register_forward_hook(fail, prepend=prepend),
        ):
            hook = put_on()
            with handle.scope("B"):  # an outer scope of the same component must not be closed instead
                with pytest.raises(error, match="from a hook"):
                    pipe.B(x)
                assert handle.ledger.pins("B") == 1
            hook.remove()
            assert handle.ledger.pins("B") == 0
            pipe.A(x)
            pipe.B(x)
            handle.ledger.audit()


def test_a_module_that_calls_itself_opens_a_scope_per_call(sim):
    """I4: recursion is pins, not transfers."""

    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16).requires_grad_(False)

        def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
            assert handle.ledger.pins("B") == 4 - depth
            return self(self.linear(x), depth - 1) if depth else self.linear(x)

    pipe = build("pipeline")
    pipe.B = Recursive()
    with offload(pipe, sim.device) as handle:
        start = len(handle.events)
        pipe.B(torch.randn(2, 16), depth=3)
        assert handle.ledger.pins("B") == 0
        assert [str(one.kind) for one in handle.events[start:]] == ["load"]


def test_a_component_called_inside_another_ones_call_switches_there_and_back(sim):
    """I4: the outer component is back before its body resumes, and its results are right."""

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16).requires_grad_(False)
            self.inner = [inner]  # no child of this module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.inner[0](self.linear(x)))

    pipe = build("pipeline")
    pipe.B = Outer(pipe.A)
    x = torch.randn(2, 16)
    expected = pipe.B(x)
    with offload(pipe, sim.device) as handle:
        start = len(handle.events)
        with pytest.warns(UserWarning, match="two more switches"):
            assert torch.equal(pipe.B(x).cpu(), expected)
        kinds = [(str(one.kind), one.component) for one in handle.events[start:]]
        assert kinds == [("load", "B"), ("evict", "B"), ("load", "A"), ("evict", "A"), ("load", "B")]
        assert torch.equal(pipe.B(x).cpu(), expected)  # warned once per pair
        handle.ledger.audit()


# --- where a module computes, for diffusers and transformers ------------------------------------------------------


@pytest.mark.parametrize("kind", ["pipeline", "duck", "nested"])
def test_every_called_module_tells_its_execution_device_in_every_state(sim, kind):
    """``_hf_hook.execution_device``, which diffusers and transformers ask; it is gone after disable."""
    target = build(kind)
    called = {"nested": lambda: [target.core.text.model, *target.core.blocks]}.get(
        kind, lambda: [target.A, target.B]
    )()
    with offload(target, sim.device) as handle:
        for step in (
            lambda: None,
            *(lambda name=name: handle.load(name) for name in target.names.values()),
            handle.release,
        ):
            step()
            assert all(one._hf_hook.execution_device == sim.device for one in called)
    assert not any(hasattr(one, "_hf_hook") for one in called)


def test_residents_tell_it_too(sim):
    """A VAE that stays on the device is asked like any other."""

    class WithVae(ModulePair):
        _vae_modules = ["vae"]  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.vae = nn.Linear(2, 2)

    pipe = WithVae().requires_grad_(False)
    with offload(pipe, sim.device):
        assert pipe.vae._hf_hook.execution_device == sim.device
    assert not hasattr(pipe.vae, "_hf_hook")


@pytest.mark.parametrize("where", ["component", "submodule"])
def test_accelerates_own_hook_on_a_component_is_refused_by_name(sim, where):
    """I3: two owners would move the same weights."""
    pipe = build("pipeline")
    module = pipe.B if where == "component" else pipe.B.layers[1]
    add_hook_to_module(module, CpuOffload(execution_device=sim.device))
    before = footprint(pipe)
    with pytest.raises(DeclarationError, match="'B'"):
        offload(pipe, sim.device)
    assert footprint(pipe) == before
    remove_hook_from_module(module)
    with offload(pipe, sim.device) as handle:
        pipe.B(torch.randn(2, 16))
        handle.ledger.audit()


def test_accelerate_may_remove_its_hooks_from_an_offloaded_component(sim):
    """``pipe.remove_all_hooks()`` takes the answer away, not the offload; disable then finds nothing to do."""
    pipe = build("pipeline")
    before = footprint(pipe)
    with offload(pipe, sim.device) as handle:
        remove_hook_from_module(pipe.B, recurse=True)
        pipe.B(torch.randn(2, 16))
        handle.ledger.audit()
    assert footprint(pipe) == before
