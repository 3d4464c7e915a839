"""Who excludes whom: the conflict graph by role, its choices in the policy, and the peak that follows. I1, I8."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from omni_components import Offload, SplitModel, offload
from tests.helpers.pipelines import Stack, frozen, kinds_of, resident_copy


class Parts(SplitModel):
    """A split DiT with two parts and a norm in neither."""

    _offload_components: ClassVar[dict[str, list[str]]] = {"reasoner": ["reader"], "generator": ["writer"]}

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.reader, self.writer, self.norm = Stack(depth=depth), Stack(depth=depth + 1), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self._offload_context("reasoner"):
            x = self.norm(self.reader(x))
        with self._offload_context("generator"):
            return self.writer(self.norm(x))


class Everything(nn.Module):
    """Every role, two of each that can be several; sizes all differ."""

    _dit_modules: ClassVar[list[str]] = ["transformer", "transformer_2"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "vision_model"]
    _vae_modules: ClassVar[list[str]] = ["vae", "audio_vae"]
    _resident_modules: ClassVar[list[str]] = ["connector"]

    def __init__(self) -> None:
        super().__init__()
        names = [
            "text_encoder",
            "vision_model",
            "transformer",
            "transformer_2",
            "vae",
            "audio_vae",
            "connector",
        ]
        for index, name in enumerate(names):
            setattr(self, name, Stack(depth=index + 1))


class WithSplit(nn.Module):
    """An encoder, a split DiT, a plain DiT, a VAE."""

    _dit_modules: ClassVar[list[str]] = ["transformer", "refiner"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vae"]

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder, self.transformer, self.refiner, self.vae = (
            Stack(),
            Parts(),
            Stack(depth=3),
            Stack(depth=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.vae(self.refiner(self.transformer(self.text_encoder(x))))


def graph(handle: Offload) -> set[frozenset[str]]:
    ledger = handle.ledger
    return {frozenset((one.name, other)) for one in ledger.components for other in ledger.rivals(one.name)}


def pairs(*groups: tuple[list[str], list[str]]) -> set[frozenset[str]]:
    return {
        frozenset((one, other)) for left, right in groups for one in left for other in right if one != other
    }


DITS, ENCODERS, VAES = (
    ["transformer", "transformer_2"],
    ["text_encoder", "vision_model"],
    ["vae", "audio_vae"],
)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({}, pairs((DITS, DITS), (DITS, ENCODERS))),
        ({"exclusive_encoders": True}, pairs((DITS, DITS), (DITS, ENCODERS), (ENCODERS, ENCODERS))),
        ({"vae": "exclusive"}, pairs((DITS, DITS), (DITS, ENCODERS), (VAES, DITS + ENCODERS + VAES))),
        (
            {"vae": "exclusive", "exclusive_encoders": True},
            pairs((DITS + ENCODERS + VAES, DITS + ENCODERS + VAES)),
        ),
        ({"offload_components": {"dit"}}, pairs((DITS, DITS))),
        ({"offload_components": ("dit", "encoder")}, pairs((DITS, DITS), (DITS, ENCODERS))),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_the_conflict_graph_follows_from_the_roles_and_the_policy(sim, policy, expected):
    """I1: DiT-DiT and DiT-encoder; encoders and VAEs only on request; residents with nobody."""
    with offload(frozen(Everything()), sim.device, **policy) as handle:
        assert graph(handle) == expected
        swapped = {name for pair in expected for name in pair}
        assert {one.name for one in handle.components if one.resident} == {
            one.name for one in handle.components
        } - swapped


@pytest.mark.parametrize("vae", ["resident", "exclusive"])
def test_a_part_conflicts_with_the_parts_of_its_model_and_inherits_its_dits_conflicts(sim, vae):
    """I1: encoder, reasoner, generator and the other DiT in one graph; what is in no part is resident."""
    everyone = ["reasoner", "generator", "refiner", "text_encoder"]
    with offload(frozen(WithSplit()), sim.device, vae=vae) as handle:
        assert graph(handle) == pairs((everyone, everyone), (["vae"], everyone if vae == "exclusive" else []))
        roles = {one.name: (str(one.role), one.resident) for one in handle.components}
        assert roles == {
            "reasoner": ("part", False),
            "generator": ("part", False),
            "transformer (rest)": ("resident", True),
            "refiner": ("dit", False),
            "text_encoder": ("encoder", False),
            "vae": ("vae", vae == "resident"),
        }


def test_two_split_models_with_parts_of_one_name_are_told_apart_by_their_paths(sim):
    """Each model opens its scopes under its own names."""

    class Two(WithSplit):
        def __init__(self) -> None:
            super().__init__()
            self.refiner = Parts(depth=3)

    pipe = frozen(Two())
    x = torch.randn(2, 16, device=sim.device)
    expected = resident_copy(pipe, sim.device)(x).cpu()
    parts = ["transformer.reasoner", "transformer.generator", "refiner.reasoner", "refiner.generator"]
    with offload(pipe, sim.device) as handle:
        assert graph(handle) == pairs(([*parts, "text_encoder"], [*parts, "text_encoder"]))
        assert torch.equal(pipe(x).cpu(), expected)
        assert [name for _, name in kinds_of(handle.events, "load") if name in parts] == parts
        handle.ledger.audit()


class Shape(nn.Module):
    """As many DiTs, encoders and VAEs as asked for, of given sizes."""

    def __init__(self, dits: list[int], encoders: list[int], vaes: list[int]) -> None:
        super().__init__()
        self._dit_modules = [f"dit_{i}" for i in range(len(dits))]
        self._encoder_modules = [f"encoder_{i}" for i in range(len(encoders))]
        self._vae_modules = [f"vae_{i}" for i in range(len(vaes))]
        names = self._dit_modules + self._encoder_modules + self._vae_modules
        for name, width in zip(names, dits + encoders + vaes, strict=True):
            setattr(self, name, nn.Linear(width, 1, bias=False))


@pytest.mark.parametrize("policy", [{}, {"vae": "exclusive"}, {"exclusive_encoders": True}])
@pytest.mark.parametrize(
    "sizes",
    [
        ([100], [300, 200], [50]),
        ([500], [200, 200], [50]),
        ([500, 700], [300, 350, 100], [600, 20]),
        ([64, 64], [64], []),
    ],
)
def test_the_predicted_peak_is_the_heaviest_set_without_a_conflict(sim, sizes, policy: dict[str, Any]):
    """I8: against trying every set of components; and a run in every order never exceeds it."""
    pipe = frozen(Shape(*sizes))
    with offload(pipe, sim.device, **policy) as handle:
        size = {one.name: one.bytes for one in handle.components}
        conflicts = graph(handle)
        subsets = itertools.chain.from_iterable(itertools.combinations(size, n) for n in range(len(size) + 1))
        allowed = [one for one in subsets if not any(pair <= set(one) for pair in conflicts)]
        heaviest = max(sum(size[name] for name in one) for one in allowed)
        assert handle.ledger.predicted_peak == heaviest
        for order in (list(size), list(size)[::-1], sorted(size)):
            for name in order:
                module = getattr(pipe, name)
                module(torch.ones(1, module.in_features, device=sim.device))
                handle.ledger.audit()
        assert handle.report().peak_bytes <= heaviest
