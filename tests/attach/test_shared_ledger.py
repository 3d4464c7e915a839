"""One ledger for several pipelines: names, shared modules, order of disabling. Design section 8. I1, I3."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

from omni_components import OwnershipError, PolicyError, SplitModel, TransferError, offload
from tests.helpers.pipelines import (
    KINDS,
    ModulePair,
    SplitPair,
    Stack,
    build,
    footprint,
    frozen,
    places,
    resident_copy,
    same_values,
    values,
)


@pytest.mark.parametrize("arena", ["keep", "fit"])
@pytest.mark.parametrize("kind", KINDS)
def test_pipelines_with_the_same_names_are_told_apart_and_exclude_each_other(sim, kind, arena):
    """I1: each handle knows its components by the names declared; the ledger numbers them."""
    one, other = build(kind), build(kind, seed=1, depth=3)
    x = torch.randn(2, 16, device=sim.device)
    expected = [resident_copy(target, sim.device).use("B", x).cpu() for target in (one, other)]
    with (
        offload(one, sim.device, arena=arena) as first,
        offload(other, sim.device, ledger=first.ledger) as second,
    ):
        names = [component.name for component in first.ledger.components]
        assert len(set(names)) == len(names) == len(first.components) + len(second.components)
        name = one.names["B"]
        assert f"{name}#2" in names
        assert {str(component.name) for component in second.components}.isdisjoint(
            {component.name for component in first.components}
        )
        for _ in range(2):
            assert torch.equal(one.use("B", x).cpu(), expected[0])
            assert torch.equal(other.use("B", x).cpu(), expected[1])
            assert name not in first.ledger.present
            first.ledger.audit()
        with second.scope(other.names["A"]):
            assert next(other.module("A").parameters()).device == sim.device
            assert next(one.module("A").parameters()).device.type == "cpu" or kind in (
                "pipeline",
                "duck",
                "nested",
            )
        assert sim.stats().peak <= sum(component.bytes for component in first.ledger.components) + 20_000


def test_a_module_declared_under_two_names_is_one_component(sim):
    """I3: the second handle finds it under its own name."""

    class Renamed(nn.Module):
        _dit_modules: ClassVar[list[str]] = ["denoiser"]
        _encoder_modules: ClassVar[list[str]] = ["conditioner"]
        _vae_modules: ClassVar[list[str]] = []

        def __init__(self, encoder: nn.Module) -> None:
            super().__init__()
            self.conditioner, self.denoiser = encoder, Stack()

    one = build("pipeline")
    other = frozen(Renamed(one.A))
    with offload(one, sim.device) as first, offload(other, sim.device, ledger=first.ledger) as second:
        assert [component.name for component in first.ledger.components] == ["B", "A", "denoiser"]
        with second.scope("conditioner"):
            assert "A" in first.ledger.present
        first.ledger.audit()


class Around(nn.Module):
    """A pipeline around a split DiT."""

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = []

    def __init__(self, transformer: SplitModel) -> None:
        super().__init__()
        self.text_encoder, self.transformer = Stack(), transformer

    def use(self, x: torch.Tensor) -> torch.Tensor:
        return self.transformer.use("B", self.transformer.use("A", self.text_encoder(x)))


@pytest.mark.parametrize("first_out", [0, 1])
def test_a_split_model_in_two_pipelines_is_one_set_of_parts(sim, first_out):
    """I3: it stays in service until the last one lets go, whichever that is."""
    model = SplitPair()
    pipes = [frozen(Around(model)) for _ in range(2)]
    clean = [footprint(pipe) for pipe in pipes]
    x = torch.randn(2, 16, device=sim.device)
    expected = [resident_copy(pipe, sim.device).use(x).cpu() for pipe in pipes]
    first = offload(pipes[0], sim.device)
    handles = [first, offload(pipes[1], sim.device, ledger=first.ledger)]
    assert len(first.ledger.components) == 4
    for pipe, right in zip(pipes, expected, strict=True):
        assert torch.equal(pipe.use(x).cpu(), right)
    handles[first_out].disable()
    rest = 1 - first_out
    assert torch.equal(pipes[rest].use(x).cpu(), expected[rest])
    handles[rest].ledger.audit()
    assert len(handles[rest].ledger.components) == 3
    handles[rest].disable()
    assert [footprint(pipe) for pipe in pipes] == clean
    assert sim.stats().pinned == 0


def test_a_second_pipeline_that_is_larger_lets_the_arena_grow(sim):
    """I8: also while a component of the first is on the device, inside a scope."""
    one, other = build("pipeline"), build("pipeline", width=128)
    x, wide = torch.randn(2, 16, device=sim.device), torch.randn(2, 128, device=sim.device)
    expected = [
        resident_copy(one, sim.device).use("B", x).cpu(),
        resident_copy(other, sim.device).use("B", wide).cpu(),
    ]
    with offload(one, sim.device) as first:
        with first.scope("A"), offload(other, sim.device, ledger=first.ledger) as second:
            one.use("A", x)
            first.ledger.audit()
        second = offload(other, sim.device, ledger=first.ledger)
        for _ in range(2):
            assert torch.equal(one.use("B", x).cpu(), expected[0])
            assert torch.equal(other.use("B", wide).cpu(), expected[1])
            first.ledger.audit()
        second.disable()
        assert torch.equal(one.use("B", x).cpu(), expected[0])


@pytest.mark.parametrize("point", ["pin", "allocation", "copy"])
def test_a_second_pipeline_that_fails_to_enable_leaves_the_first_as_it_was(sim, point):
    """I6: components, conflicts, places and results of the first, and the second untouched."""

    class WithVae(ModulePair):
        _vae_modules: ClassVar[list[str]] = ["vae"]

        def __init__(self) -> None:
            super().__init__()
            self.vae = Stack()

    one, other = build("pipeline"), frozen(WithVae())
    other.A = one.A
    x = torch.randn(2, 16, device=sim.device)
    expected = resident_copy(one, sim.device).use("A", x).cpu()
    with offload(one, sim.device) as first:
        one.use("A", x)
        before = (footprint(one), places(one), first.ledger.components, first.ledger.rivals("A"))
        clean, where, weights = footprint(other), places(other), values(other)
        sim.fail(**{point: 0}, error=KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            offload(other, sim.device, ledger=first.ledger)
        assert (footprint(one), places(one), first.ledger.components, first.ledger.rivals("A")) == before
        assert (footprint(other), places(other)) == (clean, where)
        assert same_values(other, weights)
        assert torch.equal(one.use("A", x).cpu(), expected)
        first.ledger.audit()
        with offload(other, sim.device, ledger=first.ledger):
            other.vae(x)
            first.ledger.audit()


def test_a_tensor_shared_with_another_pipeline_of_the_ledger_is_refused_by_name(sim):
    """I3: whole modules may be shared; a part of one would have two owners."""
    one, other = build("pipeline"), build("pipeline")
    other.B.layers[1] = one.A.layers[1]
    with offload(one, sim.device) as first, pytest.raises(OwnershipError, match=r"layers\.1\.weight.*'A'"):
        offload(other, sim.device, ledger=first.ledger)


def test_another_device_than_the_shared_ledgers_is_refused(sim):
    one, other = build("pipeline"), build("pipeline")
    with offload(one, sim.device) as first, pytest.raises(PolicyError, match="shared ledger"):
        offload(other, "cpu", ledger=first.ledger)


@pytest.mark.parametrize(
    "fields",
    [
        {"nesting": "error"},
        {"timeout": 3.0},
        {"pin_memory": False},
        {"exclusive_encoders": True},
        {"device_memory": 10**9},
    ],
    ids=str,
)
def test_a_field_that_the_shared_ledger_keeps_cannot_be_chosen_anew(sim, fields):
    """It would be dropped in silence; what the ledger has may be repeated."""
    one, other = build("pipeline"), build("pipeline")
    with offload(one, sim.device) as first, pytest.raises(PolicyError, match=next(iter(fields))):
        offload(other, sim.device, ledger=first.ledger, **fields)
    with (
        offload(one, sim.device, **fields) as first,
        offload(other, sim.device, ledger=first.ledger, **fields),
    ):
        other.use("A", torch.randn(2, 16))


def test_each_pipeline_has_its_own_entry_points_and_its_own_vae(sim):
    """Fields about a target's own components are its own."""

    class WithVae(ModulePair):
        _vae_modules: ClassVar[list[str]] = ["vae"]

        def __init__(self) -> None:
            super().__init__()

            class Vae(Stack):
                def tile(self, x: torch.Tensor) -> torch.Tensor:
                    return self.layers[0](x)

            self.vae = Vae()

    one, other = frozen(WithVae()), frozen(WithVae())
    policy = {"vae": "exclusive", "entry_points": {"vae": ("tile",)}}
    with (
        offload(one, sim.device) as first,
        offload(other, sim.device, ledger=first.ledger, **policy) as second,
    ):
        resident = {component.name: component.resident for component in second.ledger.components}
        assert (resident["vae"], resident["vae#2"]) == (True, False)
        assert other.vae.tile(torch.randn(2, 16)).device == sim.device
        assert "vae#2" in second.ledger.present


def test_a_write_back_that_fails_while_one_of_two_lets_go_changes_nothing(sim):
    """I6, I7."""
    one, other = build("pipeline"), build("pipeline")
    first = offload(one, sim.device)
    second = offload(other, sim.device, ledger=first.ledger)
    with second.scope("A"):
        other.A.layers[0].weight.fill_(1.0)
    sim.fail(copy=0)
    with pytest.raises(TransferError):
        second.disable()
    assert second.enabled
    first.ledger.audit()
    second.disable()
    assert bool((other.A.layers[0].weight == 1.0).all())
    first.disable()
