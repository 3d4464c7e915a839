"""Encoders of a sequence stand beside each other where that takes no more room than the largest member. I1, I8."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from omni_components import Component, OffloadPolicy, Role, offload
from omni_components.components.area import Area
from omni_components.components.component import conflict
from omni_components.components.declaration import Found
from omni_components.components.seating import seat_encoders
from omni_components.testing import SimulatedAccelerator
from tests.diffusers import tiny

ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
KIB = 1 << 10
ASKED = {"height": 16, "width": 16, "num_inference_steps": 2, "output_type": "pt"}


def found(name: str, kib: int, role: Role = Role.ENCODER, **more: Any) -> Found:
    module = nn.ParameterList([nn.Parameter(torch.empty(kib * KIB, dtype=torch.uint8), requires_grad=False)])
    return Found(name, role, more.pop("resident", False), Area(module, [""], name), name, **more)


def seated(*components: Found) -> dict[str, list[str]]:
    seat_encoders(components)
    return {one.name: sorted(other.name for other in one.beside) for one in components}


def test_all_encoders_fit_into_the_room_of_the_denoiser() -> None:
    assert seated(found("a", 2), found("b", 3), found("c", 5), found("dit", 10, Role.DIT)) == {
        "a": ["b", "c"],
        "b": ["a", "c"],
        "c": ["a", "b"],
        "dit": [],
    }


def test_one_kibibyte_too_many_and_none_stands_beside_another() -> None:
    """Some together and one apart would need more than one at a time when the first of them come back."""
    seats = seated(found("a", 2), found("b", 4), found("c", 5), found("dit", 10, Role.DIT))
    assert not any(seats.values())


def test_the_largest_member_may_be_an_encoder_itself() -> None:
    seats = seated(found("clip", 2), found("clip_2", 3), found("t5", 12), found("dit", 10, Role.DIT))
    assert not any(seats.values())


@pytest.mark.parametrize("more", [{"resident": True}, {"exclusive": False}])
def test_the_room_is_that_of_those_that_take_turns(more: dict[str, Any]) -> None:
    """What stands outside of the turns is there as well: its room cannot be given twice."""
    large = found("controlnet", 99, Role.DIT, **more)
    assert seated(found("a", 6), found("b", 6), found("dit", 10, Role.DIT), large)["a"] == []


def test_the_largest_member_may_have_company_if_there_is_room_for_all() -> None:
    members = [found("clip", 2), found("clip_2", 3), found("t5", 12), found("dit", 10, Role.DIT)]
    seat_encoders(members, 17 * KIB - 1)
    assert not any(one.beside for one in members)
    seat_encoders(members, 17 * KIB)
    assert [len(one.beside) for one in members] == [2, 2, 2, 0]


@given(st.lists(st.integers(0, 40), max_size=6), st.lists(st.integers(0, 40), min_size=1, max_size=3))
def test_those_who_stand_together_never_need_more_than_the_largest(
    encoders: list[int], others: list[int]
) -> None:
    """I8: all of them, or nobody."""
    dits = [found(f"dit_{i}", kib, Role.DIT) for i, kib in enumerate(others)]
    texts = [found(f"text_{i}", kib) for i, kib in enumerate(encoders)]
    seat_encoders([*texts, *dits])
    together = len(texts) > 1 and sum(encoders) <= max(*encoders, *others)
    for one in texts:
        assert {id(other) for other in one.beside} == ({*map(id, texts)} - {id(one)} if together else set())


def test_beside_must_be_said_by_both() -> None:
    """In a shared ledger the encoder of another pipeline may bear the name."""
    a, b = (
        Component(name=name, role=Role.ENCODER, bytes=1, beside=frozenset(beside))
        for name, beside in (("a", "b"), ("b", ""))
    )
    assert conflict(a, b, everything=True)
    assert not conflict(a, b)


# --- a pipeline ------------------------------------------------------------------------------------------


def test_the_encoders_stand_beside_each_other_and_nobody_beside_the_transformer_but_the_vae(
    sim: SimulatedAccelerator,
) -> None:
    """I1, I8: the VAE sends home whoever is there; a picture that it has encoded may let it stay."""
    pipeline = tiny.stable_diffusion_3()
    with offload(pipeline, sim.device) as handle:
        assert {name: set(handle.ledger.rivals(name)) for name in (*ENCODERS, "transformer", "vae")} == {
            **{name: {"transformer"} for name in ENCODERS},
            "transformer": {*ENCODERS},
            "vae": set(),
        }
        size = handle.ledger.size
        assert handle.ledger.predicted_peak == size("transformer") + size("vae")
        for name in ENCODERS:
            handle.load(name)
        assert set(handle.ledger.present) == {*ENCODERS}
        handle.load("vae")
        assert handle.ledger.present == ("vae",)
        handle.load("transformer")
        assert set(handle.ledger.present) == {"transformer", "vae"}
        handle.ledger.audit()


@pytest.mark.parametrize("spare", [0, -1])
def test_a_large_text_encoder_that_sends_the_small_ones_home_although_there_is_room(
    sim: SimulatedAccelerator, spare: int
) -> None:
    """I1, I8: guidance then asks all of them twice, and each is loaded once; a byte less, and T5 stands alone."""
    pipeline = tiny.stable_diffusion_3(layers=10)
    with offload(pipeline, sim.device) as handle:
        size = handle.ledger.size
        assert size("text_encoder_3") > size("transformer")
        needed = sum(size(name) for name in (*ENCODERS, "vae"))
        assert not any(one.beside for one in handle.components)
    with offload(pipeline, sim.device, device_memory=needed + spare) as handle:
        pipeline("a", negative_prompt="b", **ASKED, generator=tiny.seeded())
        loads = {row.name: row.loads for row in handle.report().rows}
        assert handle.report().peak_bytes <= needed + spare
        handle.ledger.audit()
    together = spare == 0
    assert [loads[name] for name in ENCODERS] == ([1, 1, 1] if together else [2, 2, loads["text_encoder_3"]])


def test_room_that_others_of_a_shared_ledger_have(sim: SimulatedAccelerator) -> None:
    """I8: the budget is for both; it is not refused what fits if the encoders take turns."""
    first, second = tiny.stable_diffusion_3(layers=10), tiny.stable_diffusion_3(layers=10)
    with offload(first, sim.device) as handle:
        size = handle.ledger.size
        enough = sum(size(name) for name in (*ENCODERS, "vae"))
    with (
        offload(first, sim.device, device_memory=enough) as handle,
        offload(second, sim.device, device_memory=enough, ledger=handle.ledger) as other,
    ):
        assert all(one.beside for one in handle.components if one.role is Role.ENCODER)
        assert not any(one.beside for one in other.components)


def test_on_request_everyone_excludes_everyone(sim: SimulatedAccelerator) -> None:
    policy = OffloadPolicy(exclusive_encoders=True, vae="exclusive")
    with offload(tiny.stable_diffusion_3(), sim.device, policy=policy) as handle:
        everyone = {one.name for one in handle.components}
        assert all(set(handle.ledger.rivals(name)) == everyone - {name} for name in everyone)


def test_the_encoders_of_two_pipelines_exclude_each_other(sim: SimulatedAccelerator) -> None:
    """I8: each pipeline's encoders have the room of its own largest component, and not both."""
    with (
        offload(tiny.stable_diffusion_3(), sim.device) as first,
        offload(tiny.stable_diffusion_3(), sim.device, ledger=first.ledger) as second,
    ):
        assert [one.name for one in second.components if one.role is Role.ENCODER] == [
            f"{name}#2" for name in ENCODERS
        ]
        assert {frozenset(ENCODERS), frozenset(f"{name}#2" for name in ENCODERS)} <= {
            frozenset({one.name, *one.beside}) for one in first.ledger.components
        }
        assert set(first.ledger.rivals("text_encoder")) >= {f"{name}#2" for name in ENCODERS}
        assert first.ledger.predicted_peak == first.ledger.size("transformer") + first.ledger.size("vae")


def test_a_component_that_may_stand_beside_others_travels(sim: SimulatedAccelerator) -> None:
    with offload(tiny.stable_diffusion_3(), sim.device) as handle:
        one = handle.components[0]
    assert one.beside == {*ENCODERS} - {one.name}
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
