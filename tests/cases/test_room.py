"""Faults of room: more on the device than one component needs. Cases C03, C06, C24 and C38."""

from __future__ import annotations

import itertools
from typing import ClassVar

import pytest
import torch
from torch import nn

from omni_components import offload
from tests.helpers.pipelines import (
    KINDS,
    Stack,
    build,
    frozen,
    kinds_of,
    payload,
    resident_copy,
    same_values,
    tensors,
    values,
)

WIDE = 128
ROUNDING = 512  # the simulated allocator's block
ACTIVATIONS = 16 * ROUNDING  # a handful of small tensors


def room_for_one(target, handle) -> int:
    residents = sum(one.bytes + ROUNDING * one.tensors for one in handle.components if one.resident)
    swapped = max(one.bytes for one in handle.components if not one.resident)
    return residents + -(-swapped // ROUNDING) * ROUNDING + ACTIVATIONS


@pytest.mark.parametrize("arena", ["keep", "fit"])
@pytest.mark.parametrize("kind", KINDS)
def test_c03_one_at_a_time_runs_where_both_do_not_fit(sim, kind, arena):
    """I1, I8: with room for residents, the larger component and activations it runs; both together do not."""
    target = build(kind, width=WIDE)
    x = torch.randn(2, WIDE, device=sim.device)
    expected = [resident_copy(target, sim.device).use(which, x).cpu() for which in "AB"]
    with offload(target, sim.device, arena=arena) as handle:
        room = room_for_one(target, handle)
        sim.reset()
        sim.capacity = room
        for _ in range(3):
            for which, result in zip("AB", expected, strict=True):
                assert torch.equal(target.use(which, x).cpu(), result)
        assert sim.stats().peak <= room
        assert sim.stats().peak < payload(target.module("A")) + payload(target.module("B"))
        assert handle.report().peak_bytes == handle.ledger.predicted_peak
    with pytest.raises(torch.OutOfMemoryError):
        resident_copy(target, sim.device)


@pytest.mark.parametrize("kind", KINDS)
def test_c03_every_evict_comes_before_the_load_that_needs_its_room(sim, kind):
    """I1: in the order of the events, one is home before the other sets out, at every switch."""
    target = build(kind)
    x = torch.randn(2, 16, device=sim.device)
    with offload(target, sim.device) as handle:
        start = len(handle.events)
        for which in "ABABBA":
            target.use(which, x)
        a, b = target.names["A"], target.names["B"]
        assert kinds_of(handle.events[start:], "load", "evict") == [
            ("load", a),
            *[("evict", a), ("load", b), ("evict", b), ("load", a)] * 2,
        ]
        times = [one.at for one in handle.events]
        assert times == sorted(times)


class ThreeStages(nn.Module):
    """Encoder, DiT and a VAE that a request for latents skips."""

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vae"]

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder, self.transformer, self.vae = Stack(), Stack(depth=3), Stack()


@pytest.mark.parametrize("vae", ["resident", "exclusive"])
@pytest.mark.parametrize("arena", ["keep", "fit"])
@pytest.mark.parametrize("last", ["text_encoder", "transformer", "vae"])
def test_c06_a_request_that_stops_early_leaves_nothing_swappable_behind(sim, last, arena, vae):
    """I8: after ``release()`` only residents hold device bytes, wherever the request stopped."""
    pipe = frozen(ThreeStages())
    x = torch.randn(2, 16, device=sim.device)
    with offload(pipe, sim.device, arena=arena, vae=vae) as handle:
        for name in ("text_encoder", "transformer", "vae"):
            x = getattr(pipe, name)(x)
            if name == last:
                break
        handle.release(free_arena=True)
        residents = [one for one in handle.components if one.resident]
        assert set(handle.ledger.present) == {one.name for one in residents}
        assert handle.ledger.device_bytes == sum(one.bytes for one in residents)
        swapped = [getattr(pipe, one.name) for one in handle.components if not one.resident]
        assert all(tensor.device.type == "cpu" for module in swapped for tensor in module.parameters())
        held = payload(pipe.vae) + ROUNDING * len(list(pipe.vae.parameters())) if vae == "resident" else 0
        assert sim.stats().allocated <= held + ROUNDING  # and x
        handle.ledger.audit()


def test_c06_release_inside_an_open_scope_keeps_what_the_scope_needs(sim):
    """I4: a pinned component is not sent home."""
    target = build("split")
    x = torch.randn(2, 16, device=sim.device)
    with offload(target, sim.device) as handle:
        with handle.scope("A"):
            handle.release(free_arena=True)
            assert handle.ledger.present == ("A",)
            target.A(x)
        handle.release()
        assert handle.ledger.present == ()


@pytest.mark.parametrize("arena", ["keep", "fit"])
@pytest.mark.parametrize("present", ["A", "B", None])
@pytest.mark.parametrize("kind", KINDS)
def test_c24_disable_needs_no_room_for_two(sim, kind, present, arena):
    """I6, I7: with room for one component only, disabling succeeds and the weights are on the host."""
    target = build(kind, width=WIDE)
    before = values(target)
    x = torch.randn(2, WIDE, device=sim.device)
    handle = offload(target, sim.device, arena=arena)
    sim.capacity = room_for_one(target, handle)
    for which in "AB" if present != "A" else "BA":
        target.use(which, x)
    if present is None:
        handle.release()
    held = sim.stats().allocated
    sim.capacity = held  # not a byte more may be taken
    handle.disable()
    assert all(one.device.type == "cpu" for one in tensors(target))
    assert same_values(target, before)
    del x
    assert sim.stats().allocated == 0


@pytest.mark.parametrize("kind", KINDS)
def test_c38_release_and_load_in_any_order_are_idempotent(sim, kind):
    """I5, I6: every order of three out of load A, load B, release leaves the ledger true and the values right."""
    target = build(kind)
    before = values(target)
    x = torch.randn(2, 16, device=sim.device)
    twin = resident_copy(target, sim.device)
    expected = {which: twin.use(which, x).cpu() for which in "AB"}
    with offload(target, sim.device) as handle:
        for steps in itertools.product(("A", "B", "release"), repeat=3):
            for step in steps:
                swapped = None if step == "release" else target.names[step]
                for repeat in range(2):
                    start = len(handle.events)
                    handle.release() if swapped is None else handle.load(swapped)
                    assert repeat == 0 or handle.events[start:] == ()
                    assert [one for one in target.names.values() if one in handle.ledger.present] == (
                        [] if swapped is None else [swapped]
                    )
                handle.ledger.audit()
            which = "AB"[len(steps[0]) % 2]
            assert torch.equal(target.use(which, x).cpu(), expected[which])
        assert same_values(target, before)
