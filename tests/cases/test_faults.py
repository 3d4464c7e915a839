"""Faults in the middle: bodies, copies, masters that fail, each at every point. Cases C02, C20, C21 and C22."""

from __future__ import annotations

import itertools
import warnings
from typing import ClassVar

import pytest
import torch
from torch import nn

from omni_components import (
    OmniComponentsError,
    ResidencyWarning,
    SplitModel,
    TransferError,
    UnsupportedTensorError,
    offload,
)
from tests.helpers.pipelines import (
    KINDS,
    Stack,
    build,
    footprint,
    frozen,
    places,
    resident_copy,
    same_values,
    tensors,
    values,
)

# --- C02: pinning fails -----------------------------------------------------------------------------------


@pytest.mark.parametrize("slab", [0, 1, 2, 3])
def test_c02_where_a_slab_cannot_be_pinned_it_is_pageable_and_said_once(sim, slab):
    """Enabled; one warning that says host memory; results equal; only the slabs that could be are pinned."""
    pipe = frozen(Four())
    x = torch.randn(2, 16, device=sim.device)
    expected = resident_copy(pipe, sim.device)(x).cpu()
    sim.fail(pin=slab)
    with pytest.warns(ResidencyWarning, match="host memory could not be pinned") as caught:
        handle = offload(pipe, sim.device)
    with handle:
        assert len(caught) == 1
        assert torch.equal(pipe(x).cpu(), expected)
        handle.ledger.audit()
        facts = handle.report().facts
        assert sim.stats().pinned == facts.pinned_bytes
        assert facts.pageable_bytes > 0
    assert sim.stats().pinned == 0


@pytest.mark.parametrize("fitting", [0, 1, 2, 3])
def test_c02_a_host_that_pins_only_so_much_pins_that_and_no_more(sim, fitting):
    """The limit of the simulated host, met at the n-th slab."""
    pipe = frozen(Four())
    x = torch.randn(2, 16, device=sim.device)
    expected = resident_copy(pipe, sim.device)(x).cpu()
    sim.pinned_capacity = fitting * 4096
    with pytest.warns(ResidencyWarning, match="host memory could not be pinned") as caught:
        handle = offload(pipe, sim.device)
    with handle:
        assert len(caught) == 1
        assert sim.stats().pinned == fitting * 4096
        for _ in range(2):
            assert torch.equal(pipe(x).cpu(), expected)


def test_c02_pageable_as_asked_says_nothing(sim):
    """``pin_memory=False`` is a choice, not a fault."""
    pipe = frozen(Four())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = offload(pipe, sim.device, pin_memory=False)
    with handle:
        assert sim.stats().pinned == 0
        assert handle.report().facts.pinned_bytes == 0


# --- C20: forward raises ------------------------------------------------------------------------------------


class Bomb(nn.Module):
    """A layer that raises on request."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.error: type[BaseException] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            error, self.error = self.error, None
            raise error("from inside forward")
        return torch.tanh(self.linear(x))


class Mined(nn.Module):
    """A component with three such layers, the last one reached by another path through a child module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Bomb(), Bomb(), nn.Sequential(Bomb())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x) * 2


class MinedPipeline(nn.Module):
    """Encoder and DiT with mines, through calls."""

    _dit_modules: ClassVar[list[str]] = ["B"]
    _encoder_modules: ClassVar[list[str]] = ["A"]
    _vae_modules: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        self.A, self.B = Mined(), Mined()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.B(self.A(x))


class MinedEntryPoints(MinedPipeline):
    """The same through entry points."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.B.encode(self.A.encode(x))


class MinedSplit(SplitModel):
    """The same through phases."""

    _offload_components: ClassVar[dict[str, list[str]]] = {"A": ["A"], "B": ["B"]}

    def __init__(self) -> None:
        super().__init__()
        self.A, self.B = Mined(), Mined()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self._offload_context("A"):
            x = self.A(x)
        with self._offload_context("B"):
            return self.B(x)


class MinedNested(MinedSplit):
    """The same with the second phase inside the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self._offload_context("A"):
            x = self.A(x)
            with self._offload_context("B"):
                x = self.B(x)
            return self.A(x)


MINED = [MinedPipeline, MinedEntryPoints, MinedSplit, MinedNested]
ERRORS = [RuntimeError, KeyboardInterrupt, GeneratorExit, SystemExit, torch.OutOfMemoryError]


@pytest.mark.parametrize("arena", ["keep", "fit"])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("kind", MINED)
@pytest.mark.filterwarnings("ignore:.*costs two more switches")
def test_c20_whatever_forward_raises_at_whichever_layer_the_next_call_is_right(sim, kind, error, arena):
    """I1-I7: the error goes on untouched; pins are 0; the ledger is true; the same call then succeeds."""
    pipe = frozen(kind())
    x = torch.randn(2, 16, device=sim.device)
    expected = resident_copy(pipe, sim.device)(x).cpu()
    bombs = [one for one in pipe.modules() if isinstance(one, Bomb)]
    assert len(bombs) == 6
    with offload(pipe, sim.device, arena=arena) as handle:
        for bomb in bombs:
            bomb.error = error
            with pytest.raises(error, match="from inside forward") as caught:
                pipe(x)
            assert not isinstance(caught.value, OmniComponentsError)
            assert [handle.ledger.pins(one.name) for one in handle.components] == [0, 0]
            handle.ledger.audit()
            assert torch.equal(pipe(x).cpu(), expected)
            handle.ledger.audit()
        assert not [one for one in handle.events if str(one.kind) in ("rollback", "write_back", "adopt")]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_c20_a_generator_that_is_closed_inside_a_scope_leaves_it(sim, error):
    """GeneratorExit as Python raises it: a half-used generator is closed, or dropped, or its consumer raises."""
    model = frozen(MinedSplit())
    x = torch.randn(2, 16, device=sim.device)

    def steps():
        with model._offload_context("A"):
            while True:
                yield model.A(x)

    with offload(model, sim.device) as handle:
        running = steps()
        next(running)
        assert handle.ledger.pins("A") == 1
        running.close()
        assert handle.ledger.pins("A") == 0
        running = steps()
        next(running)
        del running
        assert handle.ledger.pins("A") == 0
        running = steps()
        next(running)
        with pytest.raises(error):
            running.throw(error())
        assert handle.ledger.pins("A") == 0
        handle.ledger.audit()


# --- C21: the k-th copy fails ---------------------------------------------------------------------------------


def disarm(sim) -> None:
    """No fault is pending; races that were found stay found."""
    sim.fail(copy=1 << 30, allocation=1 << 30, pin=1 << 30)


def consistent(target, device: torch.device, handle) -> None:
    """Every tensor of a component is on one side, whole, and where the ledger says."""
    handle.ledger.audit()
    for which, name in target.names.items():
        there = device if name in handle.ledger.present else torch.device("cpu")
        assert {one.device for one in target.module(which).parameters()} == {there}


@pytest.mark.parametrize("error", [TransferError, KeyboardInterrupt])
@pytest.mark.parametrize("arena", ["keep", "fit"])
@pytest.mark.parametrize("kind", KINDS)
def test_c21_whichever_copy_of_a_switch_fails_every_tensor_is_whole(sim, kind, arena, error):
    """I1, I6, I7: device, value and stride of each tensor are consistent, and the next call is right."""
    target = build(kind, width=17)  # ragged sizes: many copies
    x = torch.randn(2, 17, device=sim.device)
    twin = resident_copy(target, sim.device)
    expected = {which: twin.use(which, x).cpu() for which in "AB"}
    before, strides = values(target), [one.stride() for one in tensors(target)]
    failed = 0
    with offload(target, sim.device, arena=arena) as handle:
        target.use("A", x)
        for k in itertools.count():
            sim.fail(copy=k, error=None if error is TransferError else error)
            try:
                target.use("B", x)
            except error:
                failed += 1
                consistent(target, sim.device, handle)
                assert same_values(target, before)
                assert [one.stride() for one in tensors(target)] == strides
                disarm(sim)
                assert torch.equal(target.use("B", x).cpu(), expected["B"])
                assert torch.equal(target.use("A", x).cpu(), expected["A"])
            else:
                break
        disarm(sim)
        consistent(target, sim.device, handle)
    assert failed == k >= 1
    assert same_values(target, before)


@pytest.mark.parametrize("arena", ["keep", "fit"])
@pytest.mark.parametrize("kind", KINDS)
def test_c21_after_a_failed_copy_masters_and_device_memory_are_free_at_once(sim, kind, arena):
    """I6, I7: copies enqueued before it read no master that is written next, and write no memory given away."""
    target = build(kind, width=17)
    x = torch.randn(2, 17, device=sim.device)
    with offload(target, sim.device, arena=arena) as handle:
        for k in itertools.count():
            sim.fail(copy=k)
            try:
                target.use("B", x)
            except TransferError:
                for one in target.module("B").parameters():
                    one.fill_(k + 0.5)
                taken = [torch.zeros(500, device=sim.device) for _ in range(20)]
                target.use("B", x)
                assert all(bool((one == k + 0.5).all()) for one in target.module("B").parameters())
                assert all(not one.any() for one in taken)
                handle.release()
            else:
                break
        assert k >= 1


@pytest.mark.parametrize("arena", ["keep", "fit"])
@pytest.mark.parametrize("kind", KINDS)
def test_c21_whichever_copy_home_of_a_changed_weight_fails_the_change_is_kept(sim, kind, arena):
    """I6, I7: a write-back that fails leaves the component whole on the device, with the new values."""
    target = build(kind, width=17)
    x = torch.randn(2, 17, device=sim.device)
    failed = 0
    with offload(target, sim.device, arena=arena) as handle:
        for k in itertools.count():
            with handle.scope(target.names["A"]):
                for one in target.module("A").parameters():
                    one.fill_(0.5 + k)
            sim.fail(copy=k)
            try:
                target.use("B", x)
            except TransferError:
                failed += 1
                consistent(target, sim.device, handle)
                assert all(bool((one == 0.5 + k).all()) for one in target.module("A").parameters())
                target.use("B", x)  # the next try takes all of it home
                assert all(bool((one == 0.5 + k).all()) for one in target.module("A").parameters())
                consistent(target, sim.device, handle)
            else:
                break
        disarm(sim)
        consistent(target, sim.device, handle)
        assert all(bool((one == 0.5 + k).all()) for one in target.module("A").parameters())
    assert failed >= len(list(target.module("A").parameters()))


@pytest.mark.parametrize("arena", ["keep", "fit"])
@pytest.mark.parametrize("where", ["host", "device"])
def test_c21_whichever_copy_of_an_adopted_tensor_fails_it_is_kept_and_counted(sim, where, arena):
    """I6, I7, I8: weights replaced on either side survive a failed switch, and the ledger learns the new size."""
    failed = 0
    for k in itertools.count():
        target = build("pipeline", width=17)
        x = torch.randn(2, 17, dtype=torch.float64, device=sim.device)
        with offload(target, sim.device, arena=arena) as handle:
            if where == "device":
                handle.load("A")
            target.A.double()
            now = {name: one.cpu().clone() for name, one in target.A.named_parameters()}
            sim.fail(copy=k)
            try:
                target.use("A", x)
                target.use("B", x.float())
            except TransferError:
                failed += 1
            else:
                break
            finally:
                disarm(sim)
            assert all(torch.equal(one.cpu(), now[name]) for name, one in target.A.named_parameters())
            target.use("A", x)
            target.use("B", x.float())
            handle.ledger.audit()
            assert all(torch.equal(one, now[name]) for name, one in target.A.named_parameters())
            assert handle.ledger.size("A") >= sum(one.nbytes for one in now.values())
        assert all(torch.equal(one, now[name]) for name, one in target.A.named_parameters())
    assert failed == k >= 4


@pytest.mark.parametrize("kind", KINDS)
def test_c21_a_failed_switch_inside_an_outer_scope_puts_the_outer_component_back(sim, kind):
    """I2, I4: the body of the outer scope resumes with its component present, whichever copy failed."""
    target = build(kind)
    x = torch.randn(2, 16, device=sim.device)
    a, b = target.names["A"], target.names["B"]
    expected = resident_copy(target, sim.device).use("A", x).cpu()
    with offload(target, sim.device) as handle, handle.scope(a):
        for k in itertools.count():
            sim.fail(copy=k)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResidencyWarning)
                try:
                    with handle.scope(b):
                        disarm(sim)  # the way back is not what fails here
                except TransferError:
                    assert handle.ledger.present[0] == a or a in handle.ledger.present
                    assert torch.equal(target.use("A", x).cpu(), expected)
                    consistent(target, sim.device, handle)
                    continue
            break
        assert k >= 1


# --- C22: enabling fails ----------------------------------------------------------------------------------------


class Four(nn.Module):
    """An encoder, two transformers and a VAE that takes no turns."""

    _dit_modules: ClassVar[list[str]] = ["first", "second"]
    _encoder_modules: ClassVar[list[str]] = ["reader", "looker"]
    _vae_modules: ClassVar[list[str]] = ["vae"]

    def __init__(self) -> None:
        super().__init__()
        self.reader, self.looker, self.first, self.second, self.vae = (Stack() for _ in range(5))
        self.register_buffer("sigmas", torch.rand(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.vae(self.second(self.first(self.looker(self.reader(x))))) * self.sigmas

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.reader(x)


def unmovable(pipe: Four) -> None:
    pipe.second.layers[1].weight = nn.Parameter(torch.empty(16, 16, device="meta"), requires_grad=False)


@pytest.mark.parametrize("start", ["cpu", "device"])
def test_c22_a_component_that_cannot_be_moved_undoes_the_ones_before_it(sim, start):
    """I6: the third component is refused by name; no hook, no patched method, placements as before."""
    pipe = frozen(Four())
    if start == "device":
        pipe.to(sim.device)
    unmovable(pipe)
    marks, where = footprint(pipe), places(pipe)
    with pytest.raises(UnsupportedTensorError) as caught:
        offload(pipe, sim.device)
    assert (caught.value.component, caught.value.tensor) == ("second", "second.layers.1.weight")
    assert footprint(pipe) == marks
    assert places(pipe) == where
    assert sim.stats().pinned == 0


@pytest.mark.parametrize("start", ["cpu", "device", "mixed"])
@pytest.mark.parametrize("point", ["pin", "allocation", "copy"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_c22_wherever_enabling_fails_nothing_is_left_of_it(sim, point, start, error):
    """I6, I7: the error is the first one; at every n: no hook, no method, no attribute, no pin, all where it was."""
    pipe = frozen(Four())
    before = values(pipe)
    x = torch.randn(2, 16, device=sim.device)
    expected = resident_copy(pipe, sim.device)(x).cpu()
    if start == "device":
        pipe.to(sim.device)
    elif start == "mixed":
        pipe.first.to(sim.device)
        pipe.vae.layers[0].to(sim.device)
    kept = list(tensors(pipe))
    marks, where, objects = footprint(pipe), places(pipe), [id(one) for one in kept]
    for n in itertools.count():
        # A failed allocation is tried again: only one that fails for good is a fault.
        sim.fail(**{point: n}, error=error, persistent=point == "allocation" and start == "cpu")
        try:
            handle = offload(pipe, sim.device)
        except (MemoryError, KeyboardInterrupt, TransferError) as caught:
            disarm(sim)
            # The loop ends where nothing fails any more, so this cannot be a `pytest.raises`.
            assert isinstance(caught, error) or isinstance(caught.__cause__, error)  # noqa: PT017
            assert footprint(pipe) == marks
            assert places(pipe) == where
            assert same_values(pipe, before)
            assert sim.stats().pinned == 0
            assert [id(one) for one in tensors(pipe)] == objects
        else:
            break
    disarm(sim)
    retried = (point, error) == ("allocation", MemoryError) and start != "cpu"
    assert n >= {"pin": 4, "allocation": 1, "copy": 1}[point] or retried
    with handle:
        assert torch.equal(pipe(x).cpu(), expected)
        handle.ledger.audit()
    assert footprint(pipe) == marks


@pytest.mark.parametrize("start", ["cpu", "device"])
def test_c22_aliases_are_aliases_again_when_enabling_has_failed(sim, start):
    """I3, I6: a view of a weight follows it after the rollback, on the side where both were."""
    pipe = frozen(Four())
    linear = pipe.reader.layers[0]
    linear.register_buffer("row", linear.weight.detach()[3])
    if start == "device":
        linear.to(sim.device)
        linear.row = linear.weight.detach()[3]
    sim.fail(pin=3, error=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        offload(pipe, sim.device)
    linear.weight.fill_(7.0)
    assert linear.row.device == linear.weight.device
    assert bool((linear.row == 7.0).all())


def test_c22_the_first_slabs_of_a_component_whose_later_one_fails_are_unpinned(sim, monkeypatch):
    """I6: within one component, too, at every slab."""
    monkeypatch.setattr("omni_components.transfer.masters.SLAB_BYTES", 1024)
    pipe = frozen(Four())
    before = values(pipe)
    for n in itertools.count():
        disarm(sim)
        sim.fail(pin=n, error=KeyboardInterrupt)
        try:
            handle = offload(pipe, sim.device)
        except KeyboardInterrupt:
            assert sim.stats().pinned == 0
            assert same_values(pipe, before)
        else:
            break
    assert n > 8  # more than one slab in each of the four components
    handle.disable()
    assert same_values(pipe, before)


def test_c22_residents_that_do_not_fit_are_refused_and_everything_is_as_before(sim):
    """I6, I8: the device is too small for the VAE."""
    pipe = frozen(Four())
    marks, before = footprint(pipe), values(pipe)
    sim.capacity = 1024
    with pytest.raises(TransferError, match="vae"):
        offload(pipe, sim.device)
    assert footprint(pipe) == marks
    assert same_values(pipe, before)
    assert sim.stats().allocated == 0
