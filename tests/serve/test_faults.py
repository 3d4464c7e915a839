"""What goes wrong midway; the next request is answered rightly every time."""

from __future__ import annotations

import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

from omni_components import Omni
from omni_components.testing import SimulatedAccelerator
from tests.serve.running import (
    PATIENCE,
    Program,
    Running,
    demo,
    is_right,
    pictures,
    program,
    running,
    until,
    write_keys,
)


def test_sigterm_midway_answers_what_is_there_and_ends_with_0() -> None:
    with program("--max-steps", "1000") as up:
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(up.post(num_inference_steps=1000)))
        asking.start()
        until(up.working)
        up.signal(signal.SIGTERM)
        asking.join(PATIENCE)
        status, said = up.end()
    assert len(pictures(answers[0])) == 1
    assert (status, said) == (0, "")


def test_a_second_signal_forces_the_end() -> None:
    with program("--max-steps", "100000") as up:
        asking = threading.Thread(target=_given_up, args=(up,))
        asking.start()
        until(up.working)
        up.signal(signal.SIGTERM)
        time.sleep(0.5)
        up.signal(signal.SIGINT)
        status, _ = up.end()
        asking.join(PATIENCE)
    assert status == 128 + signal.SIGINT


def _given_up(up: Program) -> None:
    """Whether the answer still leaves the process depends on who is quicker."""
    try:
        assert up.post(num_inference_steps=100_000).status_code == 503
    except httpx.TransportError:
        return


def test_open_streams_do_not_keep_a_server_that_drains(omni: Omni) -> None:
    with running(omni) as up:
        stream = up.client.stream("GET", "/v1/events")
        lines = stream.__enter__().iter_lines()
        assert next(lines) == "event: state"
        up.service.drain()
        assert list(lines)  # the state itself, then the end
        stream.__exit__(None, None, None)
        ready = up.client.get("/ready")
        assert (ready.status_code, ready.json()["error"]["code"]) == (503, "draining")
        assert up.draw().json()["error"]["code"] == "draining"
        assert up.client.get("/health").json() == {"status": "draining"}


def test_the_device_runs_out_of_memory_midway(sim: SimulatedAccelerator) -> None:
    with demo(sim.device) as omni, running(omni) as up:
        assert is_right(pictures(up.draw())[0])
        for after in (0, 3, 40):
            sim.fail(allocation=after, persistent=True)
            answer = up.draw(num_inference_steps=24)
            sim.heal()
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "out_of_memory"
            assert "Traceback" not in answer.text
            up.check()


def test_an_unexpected_fault_is_told_without_its_traceback(
    service: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(service.service.model.omni, "generate", lambda *_, **__: 1 / 0)
        answer = service.draw()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "internal_error"
    assert "Zero" not in answer.text


@pytest.mark.parametrize("told", [True, False], ids=["told", "chunked"])
def test_a_body_that_is_too_large(service: Running, told: bool) -> None:
    body = b'{"prompt": "' + b"x" * 200_000 + b'"}'
    content = body if told else iter([body[:1000], body[1000:]])
    try:
        answer = service.client.post(
            "/v1/images/generations", content=content, headers={"Content-Type": "application/json"}
        )
    except httpx.TransportError:
        return  # the connection was closed on a client that still sends
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"


def test_a_large_body_is_refused_before_it_is_sent(service: Running) -> None:
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as line:
        line.sendall(b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n")
        assert line.recv(1000).startswith(b"HTTP/1.1 413")


def test_a_body_that_does_not_come(omni: Omni) -> None:
    with running(omni, body_timeout=0.2) as up:
        host, port = up.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as line:
            line.sendall(b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
            assert line.recv(1000).startswith(b"HTTP/1.1 408")
        up.check()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"prompt": "\\ud800"}',
        b'{"\\ud800": 1, "prompt": "one"}',
        b'{"prompt": "one", "n": ' + b"9" * 5000 + b"}",
        b'{"prompt": "one", "guidance_scale": NaN}',
        b"\xff\xfe",
        b"[" * 30_000,
        b"\x80\x04\x95",
    ],
    ids=range(11),
)
def test_a_body_that_means_nothing(service: Running, body: bytes) -> None:
    answer = service.client.post(
        "/v1/images/generations", content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_keys_guard_all_but_the_page_and_the_probes(omni: Omni, tmp_path: Path) -> None:
    from omni_components.serve import read_keys

    key = "schl\u00fcssel".encode()
    with running(omni, api_keys=read_keys(write_keys(tmp_path, b"other", key))) as up:
        for path in ("/v1/models", "/v1/residency", "/v1/events", "/metrics", "/openapi.json", "/nothing"):
            answer = up.client.get(path)
            assert (path, answer.status_code) == (path, 401)
            assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/", "/page.js", "/page.css", "/health", "/ready"):
            assert up.client.get(path).status_code == 200
        assert up.client.get("/v1/models", headers={b"Authorization": b"Bearer " + key}).status_code == 200
        assert up.client.get("/v1/models", headers={b"Authorization": b"Basic " + key}).status_code == 401
