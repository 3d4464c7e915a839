"""A shortened run of ``benchmarks/generation.py``: counts of whole generations are exact on any machine."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from benchmarks import generation
from benchmarks.generation import KEEP, OURS, RESIDENT, THEIRS, WHEN

from omni_components.testing.plugin import require_simulated_accelerator

NAMES = ("wan_two_transformers", "sd3_three_encoders", "sd3_t5_largest_declared", "sd3_t5_largest")
CLIPS = {"text_encoder", "text_encoder_2"}
CASES = generation.cases(generation.QUICK)


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    require_simulated_accelerator()
    file = tmp_path_factory.mktemp("generation") / "generation.json"
    assert generation.main(["--json", str(file), "--quick"]) == 0
    return json.loads(file.read_text())


@pytest.fixture(params=NAMES)
def found(request: pytest.FixtureRequest, figures: dict[str, Any]) -> dict[str, Any]:
    return {"name": request.param, **figures["cases"][request.param]}


def ours_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [found["ways"][way][when] for way in found["ways"] if way != THEIRS for when in WHEN]


def test_every_case_and_way_is_there(figures: dict[str, Any]) -> None:
    assert tuple(figures["cases"]) == NAMES
    for name, one in figures["cases"].items():
        assert [*one["ways"]] == [*generation.ways_of(CASES[name])[1:]]
    assert figures["missed"] == []


def test_both_transformers_and_all_encoders_take_part(figures: dict[str, Any]) -> None:
    """Else "once each" would be said of a generation that leaves some out."""
    wan, sd3 = (figures["cases"][name]["ways"][OURS]["later"]["loads"] for name in NAMES[:2])
    assert wan == dict.fromkeys(["text_encoder", "transformer", "transformer_2", "vae"], 1)
    assert sd3 == dict.fromkeys(["text_encoder", "text_encoder_2", "text_encoder_3", "transformer", "vae"], 1)


def test_each_generation_gives_what_the_resident_run_gives(found: dict[str, Any]) -> None:
    """I7; those of diffusers' own offload, too."""
    assert found["informative"] is True
    for one in found["ways"].values():
        assert one["equal"] == [True, True]


def test_the_link_carries_each_swapped_component_once(found: dict[str, Any]) -> None:
    """I1, I2: to the byte; guidance reads two prompts, and takes each step twice."""
    twice = CLIPS if found["name"] == "sd3_t5_largest" else set()
    once = {"vae"} if found["name"] == "sd3_t5_largest_declared" else set()
    sizes = found["component_bytes"]
    for one in ours_of(found):
        assert one["loads"] == {name: 1 + (name in twice) for name in sizes if name not in once}
        assert one["bytes_to_device"] == sum(sizes[name] * n for name, n in one["loads"].items())
    for way, one in found["ways"].items():
        assert one["enable_bytes"] == (sum(sizes[name] for name in once) if way != THEIRS else 0)


def test_nothing_goes_back_and_nobody_waits(found: dict[str, Any]) -> None:
    """I7: masters are taken once."""
    for one in ours_of(found):
        assert {
            key: one[key] for key in ("bytes_to_host", "copies_to_host", "flushes", "host_waits", "races")
        } == {"bytes_to_host": 0, "copies_to_host": 0, "flushes": 0, "host_waits": 0, "races": 0}


def test_weights_take_one_allocation_a_load_or_one_for_good(found: dict[str, Any]) -> None:
    """I8."""
    declared = found["name"] == "sd3_t5_largest_declared"
    for way in {OURS, KEEP} & {*found["ways"]}:
        first, later = (found["ways"][way][when] for when in WHEN)
        each = sum(later["loads"].values())
        expected = (1, 0) if declared or way == KEEP else (each, each)
        assert (first["device_allocations"], later["device_allocations"]) == expected


def test_a_later_generation_costs_what_the_first_did(found: dict[str, Any]) -> None:
    """The release in between leaves nothing behind, and loses nothing."""
    for one in found["ways"].values():
        first, later = one["first"], one["later"]
        assert later["link_seconds"] == pytest.approx(first["link_seconds"])
        for key in {*generation.COUNTS, "loads"} - {"device_allocations"}:
            assert later[key] == first[key]


def test_it_needs_no_more_room_than_diffusers_and_no_more_link(found: dict[str, Any]) -> None:
    """I8: a pipeline without lists."""
    for when in WHEN:
        ours, theirs = found["ways"][OURS][when], found["ways"][THEIRS][when]
        assert ours["bytes_to_device"] <= theirs["bytes_to_device"]
        assert ours["link_seconds"] < theirs["link_seconds"]
        if found["name"] != "sd3_t5_largest_declared":
            assert ours["peak_bytes"] <= theirs["peak_bytes"] < found[RESIDENT][when]["peak_bytes"]


def test_diffusers_moves_tensor_by_tensor_both_ways(found: dict[str, Any]) -> None:
    """What the counters say of a peer whose traffic is known: they count."""
    encoders = sum(found["component_tensors"][name] for name in CLIPS & {*found["component_tensors"]})
    if found["name"] == "wan_two_transformers":
        encoders = 0  # one encoder stays for the second prompt
    for when in WHEN:
        one = found["ways"][THEIRS][when]
        assert one["bytes_to_host"] == one["bytes_to_device"] > found["expected_bytes"]
        assert one["copies"] == one["copies_to_host"] == one["device_allocations"]
        assert one["copies"] >= sum(found["component_tensors"].values()) + encoders
        assert one["host_waits"] == one["copies"] + one["copies_to_host"]


def test_the_ratios_are_of_a_later_generation(found: dict[str, Any]) -> None:
    theirs = found["ways"][THEIRS]["later"]
    for way, ratios in found["ratios"].items():
        one = found["ways"][way]["later"]
        assert ratios["bytes_to_device"] * theirs["bytes_to_device"] == pytest.approx(one["bytes_to_device"])
        assert ratios["bytes_to_host"] == (0 if way != THEIRS else 1)
        assert found["times"][way]["ratio"] > 0


# --- the bounds can be missed ----------------------------------------------------------------------------


def spoilt(found: dict[str, Any], spoil: Callable[[dict[str, Any]], None]) -> list[str]:
    other = copy.deepcopy(found)
    spoil(other)
    name = found["name"]
    return generation.missed(name, CASES[name], other)


@pytest.mark.parametrize(
    ("what", "key", "add"),
    [
        ("each load's bytes once over the link", "bytes_to_device", -1),
        ("each load's bytes once over the link", "bytes_to_device", 1 << 30),
        ("nothing back to the host", "bytes_to_host", 1),
        ("no race", "races", 1),
        ("no flush", "flushes", 1),
        ("no wait of the host", "host_waits", 1),
        ("no more room than diffusers", "peak_bytes", 1 << 30),
    ],
)
def test_a_count_beyond_its_bound_is_named(figures: dict[str, Any], what: str, key: str, add: int) -> None:
    found = {"name": NAMES[0], **figures["cases"][NAMES[0]]}

    def spoil(one: dict[str, Any]) -> None:
        one["ways"][OURS]["later"][key] += add

    assert f"{NAMES[0]}, {OURS}, later: {what}" in spoilt(found, spoil)


def test_a_component_that_travels_twice_is_named(figures: dict[str, Any]) -> None:
    found = {"name": NAMES[1], **figures["cases"][NAMES[1]]}

    def spoil(one: dict[str, Any]) -> None:
        one["ways"][KEEP]["first"]["loads"]["text_encoder"] += 1

    missed = spoilt(found, spoil)
    assert missed == [f"{NAMES[1]}, {KEEP}, first: each swapped component loaded as often as said"]


def test_another_picture_is_named(figures: dict[str, Any]) -> None:
    found = {"name": NAMES[1], **figures["cases"][NAMES[1]]}
    missed = spoilt(found, lambda one: one["ways"][OURS].update(equal=[True, False]))
    assert missed == [f"{NAMES[1]}, {OURS}, later: equal to the resident run"]


def test_a_missed_bound_is_the_exit_status(
    figures: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(generation, "measure", lambda quick: {**figures, "missed": ["a bound"]})
    file = tmp_path_factory.mktemp("missed") / "generation.json"
    assert generation.main(["--json", str(file)]) == 1
    assert "missed: a bound" in capsys.readouterr().out


def test_a_missing_file_name_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        generation.main([])
    assert "--json" in capsys.readouterr().err
