"""A diffusers pipeline from a folder behind the real program: nothing here is made for the demo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from omni_components import Omni
from tests.diffusers import tiny
from tests.serve.running import PATIENCE, Program, pictures, program

PROMPT = "a lighthouse"
SIZE = {"height": 32, "width": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models") / "tiny-diffusion"
    tiny.stable_diffusion().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def up(folder: Path) -> Iterator[Program]:
    with program("--max-size", "64x64", model=str(folder)) as made:
        yield made


def ask(up: Program, **fields: object) -> httpx.Response:
    body = {"prompt": PROMPT, "seed": 3, "num_inference_steps": 2, "size": "32x32", **fields}
    return httpx.post(f"{up.url}/v1/images/generations", json=body, timeout=PATIENCE)


def test_its_pictures_are_those_that_omni_makes(up: Program, folder: Path) -> None:
    drawn = pictures(ask(up, n=2, negative_prompt="rain", guidance_scale=4.0))
    with Omni(folder, device="cpu") as omni:
        for seed, picture in enumerate(drawn, start=3):
            made = omni.generate(
                PROMPT, seed=seed, num_inference_steps=2, negative_prompt="rain", guidance_scale=4.0, **SIZE
            )
            assert made.images is not None
            assert np.abs(np.asarray(picture, int) - np.asarray(made.images[0], int)).max() <= 1


def test_each_component_has_had_its_turn_and_the_path_is_not_told(up: Program, folder: Path) -> None:
    """I1, I2, I8 as the service tells them."""
    assert len(pictures(ask(up))) == 1
    state = httpx.get(f"{up.url}/v1/residency").json()
    assert (state["model"], state["offload"], state["invariant"]["holds"]) == ("tiny-diffusion", True, True)
    assert {one["name"]: one["loads"] > 0 for one in state["components"]} == dict.fromkeys(
        ("text_encoder", "unet", "vae"), True
    )
    assert 0 < state["peak_bytes"] <= state["predicted_peak"]
    assert [one["id"] for one in httpx.get(f"{up.url}/v1/models").json()["data"]] == ["tiny-diffusion"]
    for answer in (
        ask(up, model="nothing"),
        httpx.get(f"{up.url}/v1/residency"),
        httpx.get(f"{up.url}/metrics"),
    ):
        assert str(folder) not in answer.text
    assert f"serving {folder} on cpu at http://127.0.0.1:" in up.first_line  # to its own user it is


@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        ({"size": "33x32"}, 400, "divisible by 8"),
        ({"size": "128x128"}, 400, "4096 pixels in all"),
        ({"prompt": "a\0lighthouse \u202e \U0001f600"}, 200, ""),
        ({"prompt": "boat " * 500}, 200, ""),
        ({"guidance_scale": 0.0}, 200, ""),
    ],
    ids=["odd", "large", "signs", "long", "unguided"],
)
def test_what_the_pipeline_refuses_is_refused_and_the_next_is_drawn(
    up: Program, fields: dict[str, object], status: int, says: str
) -> None:
    answer = ask(up, **fields)
    assert answer.status_code == status, answer.text
    assert says in (answer.text if status != 200 else "")
    assert len(pictures(ask(up))) == 1
