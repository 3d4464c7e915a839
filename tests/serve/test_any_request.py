"""Requests that nobody would write, most made from the service's own OpenAPI: nothing but 2xx, 4xx and 503."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from omni_components import Omni
from omni_components.serve import ServeSettings, create_app
from tests.serve.running import STEPS, asked, is_right, pictures, until

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")
SHARE = {"default": 1, "ci": 15, "nightly": 100}[PROFILE]
CASES = {"good": 45, "bad": 75, "other": 15, "bytes": 20}  # times the share
PROMISED = {"default": 100, "ci": 2000, "nightly": 10_000}[PROFILE]

MOST_BODY = 2000
GOOD, BAD = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE


class Tried:
    """An app, and what it has answered so far."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.statuses: Counter[int] = Counter()

    def look(self, status: int, text: str) -> None:
        """Nothing but 2xx, 4xx and 503, and errors in OpenAI's shape."""
        self.statuses[status] += 1
        assert 200 <= status < 300 or 400 <= status < 500 or status == 503, text
        assert "Traceback" not in text
        if status >= 400:
            assert set(json.loads(text)["error"]) == {"message", "type", "param", "code"}


@pytest.fixture(scope="module")
def statuses() -> Counter[int]:
    return Counter()


@pytest.fixture
def tried(omni: Omni, statuses: Counter[int]) -> Iterator[Tried]:
    """One app for each test: schemathesis ends the app's life with the test."""
    limits = ServeSettings(max_steps=STEPS, max_pixels=20_000, max_pictures=2, max_body=MOST_BODY)
    made = Tried(create_app(omni, limits))
    yield made
    statuses.update(made.statuses)
    asyncio.run(made.app.state.service.close())


def answers_the_next_rightly(tried: Tried) -> None:
    """I1 to I6, I8 after it: the picture is the pipeline's own, and the ledger agrees with every tensor."""
    assert is_right(pictures(post(tried.app, json=asked()))[0])
    until(lambda: tried.app.state.service.worker.tally.running == 0)
    tried.app.state.service.ledger.audit()


@pytest.mark.parametrize("mode", [GOOD, BAD], ids=["good", "bad"])
def test_bodies_that_the_schema_gives_rise_to(tried: Tried, mode: schemathesis.GenerationMode) -> None:
    [drawing] = [one for one in operations(tried.app) if one.body]
    assert drawing.path == "/v1/images/generations"
    cases = CASES["good" if mode is GOOD else "bad"]
    check(drawing.as_strategy(generation_mode=mode), cases, lambda case: asked_by(case, tried))
    answers_the_next_rightly(tried)


def test_requests_without_a_body(tried: Tried) -> None:
    for operation in operations(tried.app):
        if not operation.body:
            # Only a model's id can be chosen; one case of anything else is as good as many.
            cases = CASES["other"] if "{" in operation.path else 1
            check(operation.as_strategy(generation_mode=GOOD), cases, lambda case: asked_by(case, tried))
    answers_the_next_rightly(tried)


def test_bytes_that_are_no_body(tried: Tried) -> None:
    """Good bodies that were cut, spoilt, doubled or blown up beyond the limit, and any bytes at all."""
    check(spoilt_bodies(), CASES["bytes"], lambda body: posted(body, tried))
    assert tried.statuses[413] > 0
    answers_the_next_rightly(tried)


def test_there_were_as_many_as_promised(statuses: Counter[int]) -> None:
    assert statuses.total() >= PROMISED
    assert statuses[200] > 0
    assert statuses[400] > statuses.total() / 4
    assert statuses[503] == 0  # nothing here was the service's fault


def operations(app: Any) -> list[Any]:
    found = [one.ok() for one in schemathesis.openapi.from_asgi("/openapi.json", app).get_all_operations()]
    return [one for one in found if one.path != "/v1/events"]  # it does not end; its own tests read it


def check(strategy: SearchStrategy[Any], cases: int, ask: Callable[[Any], None]) -> None:
    many = cases * SHARE if cases > 1 else 1

    @settings(max_examples=many, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=strategy)
    def run(case: Any) -> None:
        ask(case)

    run()


def asked_by(case: Any, tried: Tried) -> None:
    response = case.call()
    tried.look(response.status_code, response.text)


def posted(body: bytes, tried: Tried) -> None:
    response = post(tried.app, content=body, headers={"Content-Type": "application/json"})
    tried.look(response.status_code, response.text)


def spoilt_bodies() -> SearchStrategy[bytes]:
    good = json.dumps(asked(size="100x100")).encode()
    at = st.integers(0, len(good))
    cut = at.map(lambda end: good[:end])
    spoilt = st.tuples(at, st.binary(min_size=1, max_size=4)).map(
        lambda one: good[: one[0]] + one[1] + good[one[0] :]
    )
    padded = st.integers(0, 2 * MOST_BODY).map(lambda more: good + b" " * more)
    nested = st.integers(1, MOST_BODY).map(lambda depth: b'{"prompt":' + b"[" * depth)
    numbers = st.sampled_from(["NaN", "-Infinity", "1e400", "9" * 1500, "-0.0", "1e-400", str(2**63)])
    fields = st.sampled_from(["seed", "n", "num_inference_steps", "guidance_scale", "prompt", "size"])
    odd = st.tuples(fields, numbers).map(lambda one: f'{{"prompt":"one","{one[0]}":{one[1]}}}'.encode())
    return st.one_of(cut, spoilt, padded, nested, odd, st.binary(max_size=MOST_BODY + 100))


def post(app: Any, **more: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://here", timeout=60
        ) as client:
            return await client.post("/v1/images/generations", **more)

    return asyncio.run(ask())
