"""The service as users of OpenAI's client meet it: over a real socket, from the program and from Python."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from PIL import Image

from omni_components import Omni
from tests.serve.running import PATIENCE, STEPS, Running, is_right, pictures, program, running


def client_of(url: str, **more: Any) -> openai.OpenAI:
    more = {"api_key": "unused", "max_retries": 0, "timeout": PATIENCE, **more}
    return openai.OpenAI(base_url=f"{url}/v1", **more)


def opened(text: str | None) -> Image.Image:
    assert text is not None
    return Image.open(io.BytesIO(base64.b64decode(text)))


@pytest.fixture
def client(service: Running) -> Iterator[openai.OpenAI]:
    with client_of(service.url) as made:
        yield made


def test_the_program_makes_a_picture_for_openais_client() -> None:
    with program("--omni") as up, client_of(up.url) as client:  # as in commands for vLLM-Omni
        model = client.models.list().data[0].id
        answer = client.images.generate(
            model=model,
            prompt="seven",
            response_format="b64_json",
            extra_body={"seed": 3, "num_inference_steps": STEPS},
        )
    assert model == "demo"
    assert answer.data is not None
    assert is_right(opened(answer.data[0].b64_json))
    assert answer.created > 1_700_000_000


def test_several_pictures_are_those_of_seeds_in_a_row(client: openai.OpenAI) -> None:
    answer = client.images.generate(prompt="seven", n=3, extra_body={"seed": 1, "num_inference_steps": STEPS})
    assert answer.data is not None
    for at, datum in enumerate(answer.data):
        assert is_right(opened(datum.b64_json), seed=1 + at)
        assert datum.model_extra == {"seed": 1 + at}


def test_a_picture_without_a_seed_tells_the_one_that_gives_it_again(client: openai.OpenAI) -> None:
    first = client.images.generate(prompt="two", extra_body={"num_inference_steps": STEPS}).data
    assert first is not None
    seed = first[0].model_extra["seed"]  # type: ignore[index]
    again = client.images.generate(prompt="two", extra_body={"num_inference_steps": STEPS, "seed": seed})
    assert again.data is not None
    assert again.data[0].b64_json == first[0].b64_json


def test_fields_of_openais_that_change_nothing_here_are_accepted(client: openai.OpenAI) -> None:
    answer = client.images.generate(
        model="demo",
        prompt="seven",
        n=1,
        quality="high",
        style="vivid",
        moderation="low",
        background="opaque",
        user="somebody",
        size="auto",
        stream=False,
        extra_body={"seed": 3, "num_inference_steps": STEPS},
    )
    assert answer.data is not None
    assert is_right(opened(answer.data[0].b64_json))


@pytest.mark.parametrize("form", ["png", "jpeg", "webp"])
def test_a_picture_of_the_size_and_format_asked_for(client: openai.OpenAI, form: Any) -> None:
    answer = client.images.generate(
        prompt="three one four",
        size="1024x1024",
        output_format=form,
        extra_body={"num_inference_steps": STEPS},
    )
    assert answer.data is not None
    picture = opened(answer.data[0].b64_json)
    assert (picture.size, picture.format) == ((1024, 1024), form.upper())
    assert answer.size == "1024x1024"
    assert answer.output_format == form
    assert picture.getpixel((5, 5)) == pytest.approx(picture.getpixel((1018, 1018)), abs=6)  # its own paper


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": "url"}, "response_format", "invalid_value"),
        ({"quality": "splendid"}, "quality", "invalid_value"),
        ({"style": "dull"}, "style", "invalid_value"),
        ({"background": "transparent"}, "background", "invalid_value"),
        ({"size": "big"}, "size", "invalid_value"),
        ({"size": "100000x1"}, "size", "invalid_value"),
        ({"size": "9999x9999"}, "size", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 11}, "n", "invalid_value"),
        ({"n": "2"}, "n", "invalid_type"),
        ({"prompt": "one" * 2000}, "prompt", "string_above_max_length"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": "a lighthouse"}, "prompt", "invalid_value"),
        ({"extra_body": {"num_inference_steps": 101}}, "num_inference_steps", "invalid_value"),
        ({"extra_body": {"seed": -1}}, "seed", "invalid_value"),
        ({"extra_body": {"seed": 2**63}}, "seed", "invalid_value"),
        ({"extra_body": {"guidance_scale": -1}}, "guidance_scale", "invalid_value"),
        ({"extra_body": {"negative_prompt": "eight"}}, "negative_prompt", "invalid_value"),
        ({"extra_body": {"image": "/etc/passwd"}}, "image", "unknown_parameter"),
        ({"extra_body": {"lora": "http://example.org/a.pt"}}, "lora", "unknown_parameter"),
    ],
    ids=lambda one: str(one)[:40],
)
def test_a_field_that_is_refused_is_named(
    client: openai.OpenAI, fields: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(**{"prompt": "seven", **fields})
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.type == "invalid_request_error"


def test_a_model_that_is_not_served(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.images.generate(model="dall-e-3", prompt="seven")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("dall-e-3")
    assert client.models.retrieve("demo").owned_by == "omni-components"


@pytest.mark.parametrize("key", ["wrong", "secret one", "secret-ones"])
def test_a_wrong_key(omni: Omni, key: str) -> None:
    with running(omni, api_keys=(b"secret-one", b"secret-two")) as up:
        with client_of(up.url, api_key=key) as client, pytest.raises(openai.AuthenticationError) as caught:
            client.images.generate(prompt="seven")
        assert caught.value.code == "invalid_api_key"


def test_any_of_the_right_keys(omni: Omni) -> None:
    with running(omni, api_keys=(b"secret-one", b"secret-two")) as up:
        for key in ("secret-one", "secret-two"):
            with client_of(up.url, api_key=key) as client:
                assert client.models.list().data[0].id == "demo"


def test_a_full_queue_tells_openais_client_when_to_come_again(omni: Omni) -> None:
    with running(omni, max_queue=1) as up, client_of(up.url) as client, up.holding() as hold:
        running_one = up.aside()
        hold.wait()
        waiting_one = up.aside()
        with pytest.raises(openai.RateLimitError) as caught:
            client.images.generate(prompt="seven")
        assert caught.value.code == "queue_full"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        hold.let_go()
        assert all(is_right(pictures(one.result())[0]) for one in (running_one, waiting_one))
