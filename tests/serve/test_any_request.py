"""Requests that nobody would write, made from the service's own OpenAPI: nothing but 2xx, 4xx and 503."""

from __future__ import annotations

import os

import httpx
import schemathesis
from hypothesis import HealthCheck, given, settings

from omni_components import Omni
from omni_components.serve import ServeSettings, create_app
from tests.serve.running import pictures

CASES = {"default": 50, "ci": 500, "nightly": 5000}  # of each operation that takes anything
MANY = CASES[os.environ.get("HYPOTHESIS_PROFILE", "default")]


def test_any_request_that_the_schema_gives_rise_to(omni: Omni) -> None:
    app = create_app(omni, ServeSettings(max_steps=3, max_pixels=10_000, max_pictures=2))
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    seen: dict[int, int] = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path == "/v1/events":
            continue  # it does not end; its own test reads it
        # Without a body there is nothing about a request that could be wrong: any text is a model's id.
        takes = operation.body
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            many = MANY if operation.path.startswith(("/v1/images", "/v1/models/")) else 2
            if mode is schemathesis.GenerationMode.NEGATIVE and not takes:
                continue
            _try(operation, mode, many, seen)
    assert {one for one in seen if not (200 <= one < 300 or 400 <= one < 500 or one == 503)} == set()
    assert sum(seen.values()) >= 3 * MANY
    transport = httpx.ASGITransport(app)
    _right(transport)


def _try(operation, mode, many: int, seen: dict[int, int]) -> None:
    strategy = operation.as_strategy(generation_mode=mode)

    @settings(max_examples=many, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=strategy)
    def run(case) -> None:
        response = case.call()
        seen[response.status_code] = seen.get(response.status_code, 0) + 1
        assert response.status_code < 500 or response.status_code == 503
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            assert "Traceback" not in response.text

    run()


def _right(transport: httpx.ASGITransport) -> None:
    import asyncio

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            body = {"prompt": "seven", "seed": 3, "num_inference_steps": 3}
            return await client.post("/v1/images/generations", json=body)

    answer = asyncio.run(ask())
    assert pictures(answer)[0].size == (128, 128)
