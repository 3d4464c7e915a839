"""What clients do that mean no good, byte by byte over real sockets; the next request is answered rightly."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from omni_components import Omni, PolicyError
from omni_components.serve import ServeSettings, protocol, read_keys
from omni_components.serve.server import Server, config_for
from tests.serve.running import PATIENCE, Running, asked, is_right, pictures, running, until

POST = b"POST /v1/images/generations HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
GOOD = json.dumps(asked()).encode()


@contextmanager
def line_to(url: str) -> Iterator[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as line:
        yield line


def everything(line: socket.socket) -> bytes:
    """What comes until the server hangs up."""
    got = b""
    try:
        while more := line.recv(65536):
            got += more
    except ConnectionResetError:
        pass  # it hung up on what was still being sent
    return got


def answer_to(up: Running, sent: bytes) -> tuple[int, dict[str, Any]]:
    """Status and body of the one answer to these bytes; the server hangs up by itself."""
    with line_to(up.url) as line:
        with suppress(OSError):  # it may have answered, and hung up, before it has all of it
            line.sendall(sent)
            line.shutdown(socket.SHUT_WR)
        head, _, body = everything(line).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


# --- requests that are no HTTP, or two kinds at once ------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS
        b"GET /health HTTP/1.1\r\n\r\n",  # no Host
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /health\r\n\r\n",  # HTTP/0.9
        b"GET /\xff\xfe HTTP/1.1\r\nHost: here\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: here\r\nX: a\x00b\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: here\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
        POST + b"Content-Length: -1\r\n\r\n{}",
        POST + b"Content-Length: " + b"9" * 4000 + b"\r\n\r\n{}",
        POST + b"Transfer-Encoding: gzip\r\n\r\n{}",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    ],
    ids=[
        "tls",
        "nohost",
        "hosts",
        "version",
        "bytes",
        "nul",
        "huge",
        "lengths",
        "negative",
        "long",
        "gzip",
        "chunk",
    ],
)
def test_a_request_that_is_no_http_is_refused_in_openais_shape(service: Running, head: bytes) -> None:
    status, body = answer_to(service, head)
    assert status in (400, 413)
    assert body["error"]["type"] == "invalid_request_error"


def test_chunks_without_a_length_that_go_on_beyond_the_limit(service: Running) -> None:
    chunk = b"1000\r\n" + b" " * 0x1000 + b"\r\n"
    with line_to(service.url) as line:
        line.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 20)  # 80 KiB, and no end
        assert line.recv(1000).startswith(b"HTTP/1.1 413")


def test_a_length_and_chunks_at_once_are_read_as_chunks(service: Running) -> None:
    """As the standard has it: what follows the last chunk is no request that was smuggled in."""
    chunk = f"{len(GOOD):x}\r\n".encode() + GOOD + b"\r\n0\r\n\r\n"
    head = POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n"
    with line_to(service.url) as line:
        line.sendall(head + chunk)
        got = everything(line)
    assert got.startswith(b"HTTP/1.1 200")
    assert got.count(b"HTTP/1.1") == 1


def test_requests_that_come_at_once_are_answered_in_their_order(service: Running) -> None:
    """Pipelining: each answer is whole before the next begins."""
    drawing = POST + f"Content-Length: {len(GOOD)}\r\n\r\n".encode() + GOOD
    last = b"GET /v1/models HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"
    with line_to(service.url) as line:
        line.sendall(drawing + b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n" + drawing + last)
        got = everything(line)
    kinds = [
        re.search(rb'"(b64_json|status|owned_by)"', one).group(1) for one in got.split(b"HTTP/1.1 200")[1:]
    ]  # type: ignore[union-attr]
    assert kinds == [b"b64_json", b"status", b"b64_json", b"owned_by"]


def test_a_path_with_a_slash_too_many_is_not_sent_on_to_where_the_client_says(service: Running) -> None:
    for path in ("/metrics/", "/v1/residency/", "/health/", "/%2e%2e/etc/passwd"):
        answer = service.client.get(path, headers={"Host": "example.org"}, follow_redirects=False)
        assert (path, answer.status_code) == (path, 404)


def test_a_websocket_is_refused(service: Running) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    assert service.client.get("/v1/events/", headers=headers).status_code == 404


# --- clients that are slow --------------------------------------------------------------------------------


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(protocol, "STALL_SECONDS", 0.5)


def dripped(line: socket.socket, text: bytes) -> int:
    """Send byte by byte; returns how many were taken."""
    for at in range(len(text)):
        try:
            line.sendall(text[at : at + 1])
        except OSError:
            return at
        time.sleep(0.01)
    return len(text)


def test_a_head_that_comes_in_drops(omni: Omni, hasty: None) -> None:
    with running(omni) as up, line_to(up.url) as line:
        assert 3 < dripped(line, b"GET /health HTTP/1.1\r\nX: " + b"a" * 1000) < 1000
        up.check()


def test_a_head_that_stops_halfway(omni: Omni, hasty: None) -> None:
    with running(omni) as up:
        with line_to(up.url) as line:
            line.sendall(b"GET /health HTTP/1.1\r\nHost: he")
            assert everything(line).startswith(b"HTTP/1.1 408")
        with line_to(up.url) as line:  # also the second on a line
            line.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
            got = b""
            while not got.endswith(b'{"status":"ok"}'):
                got += line.recv(65536)
            line.sendall(b"GET /hea")
            assert everything(line).startswith(b"HTTP/1.1 408")
        with line_to(up.url) as line:
            assert everything(line) == b""  # nothing was asked, nothing is said
        up.check()


def test_a_request_that_takes_long_is_not_taken_for_a_slow_client(omni: Omni, hasty: None) -> None:
    with running(omni) as up, up.holding() as hold:
        answer = up.aside()
        hold.wait()
        time.sleep(0.5)
        hold.let_go()
        assert is_right(pictures(answer.result())[0])


@pytest.mark.parametrize("reads", [False, True], ids=["nothing", "slowly"])
def test_a_client_that_does_not_read_its_answer_is_cut_off_one_that_reads_slowly_is_not(
    hasty: None, reads: bool
) -> None:
    """Else it would hold the pictures, and a server that drains, for as long as it likes."""
    size = 20_000_000

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            length = (b"content-length", str(size).encode())
            await send({"type": "http.response.start", "status": 200, "headers": [length]})
            await send({"type": "http.response.body", "body": bytes(size)})

    class Quiet:
        def drain(self) -> None: ...

    server = Server(config_for(app, lifespan="off"), Quiet())  # type: ignore[arg-type]
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
    thread.start()
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        line.settimeout(PATIENCE)
        until(lambda: server.started)
        line.connect(listening.getsockname())
        line.sendall(b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        if reads:
            got = 0
            while more := len(line.recv(100_000)):
                got += more
                time.sleep(0.008)  # 2 seconds in all
            assert got > size
        server.should_exit = True
        thread.join(PATIENCE)
    assert not thread.is_alive()


# --- keys -------------------------------------------------------------------------------------------------


def test_two_keys_in_one_request_are_one_too_many(omni: Omni) -> None:
    """A proxy in front may have looked at the other one."""
    right, wrong = ("Authorization", "Bearer secret"), ("Authorization", "Bearer other")
    with running(omni, api_keys=(b"secret",)) as up:
        assert up.client.get("/v1/models", headers=[right]).status_code == 200
        for headers in ([right, wrong], [wrong, right], [right, right], [("Authorization", "")]):
            assert up.client.get("/v1/models", headers=headers).status_code == 401
        for odd in ("secret", "Bearer", "Bearer secret secret", "bearer\tsecret", "Basic secret"):
            assert up.client.get("/v1/models", headers={"Authorization": odd}).status_code == 401
        for path in ("/health/../v1/models", "/v1/models?/health", "/V1/MODELS", "/v1//models", "/health/x"):
            assert up.client.get(path).status_code == 401


def test_lines_of_a_key_file_that_are_no_keys_let_nobody_in(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbffirst\r\n\r\n   \n\tsecond \n")
    assert read_keys(file) == (b"first", b"second")
    for nothing in (b"", b"\n\n", b"  \r\n\t\n", b"\xef\xbb\xbf"):
        file.write_bytes(nothing)
        with pytest.raises(PolicyError, match="a file with one key a line"):
            read_keys(file)
    with pytest.raises(PolicyError, match="not shown"):
        ServeSettings(api_keys=(b"",))


# --- pages of other sites ---------------------------------------------------------------------------------


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_of_another_site_draws_nothing(service: Running, site: str) -> None:
    drawn = service.service.worker.tally.requests
    headers = {"Sec-Fetch-Site": site, "Content-Type": "text/plain"}
    answer = service.client.post("/v1/images/generations", content=GOOD, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cross_site")
    assert service.service.worker.tally.requests == drawn
    assert service.client.get("/", headers=headers).status_code == 200  # a link to the page works


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_a_body_that_does_not_say_it_is_json_draws_nothing(service: Running, kind: str | None) -> None:
    """What a form of any page may send without asking, in browsers that tell nothing of the page."""
    headers = {} if kind is None else {"Content-Type": kind}
    answer = service.client.post("/v1/images/generations", content=GOOD, headers=headers)
    assert answer.status_code == 400


def test_a_name_that_somebody_points_at_this_machine_is_refused(omni: Omni) -> None:
    with running(omni, hosts=("localhost", "Pictures.example")) as up:
        for name in (
            "localhost",
            "LOCALHOST:1",
            "localhost.",
            "pictures.example:80",
            "127.0.0.1:8000",
            "[::1]:8",
        ):
            assert up.client.get("/v1/models", headers={"Host": name}).status_code == 200, name
        for name in ("evil.example", "localhost.evil.example:8000", "127.0.0.1.evil.example", "a@localhost"):
            answer = up.client.get("/v1/models", headers={"Host": name})
            assert answer.status_code == 403, name
            assert "localhost, pictures.example" in answer.json()["error"]["message"]


# --- bodies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('{"prompt": "one", "prompt": "two"}', "a name is given twice"),
        ('{"prompt": "one", "x": {"a": 1, "a": 1}}', "a name is given twice"),
        ('{"prompt": "one", "guidance_scale": NaN}', "NaN is no number"),
        ('{"prompt": "one", "guidance_scale": -Infinity}', "-Infinity is no number"),
        ('{"prompt": "one", "guidance_scale": 1e999}', "guidance_scale"),
        ('{"prompt": "one", "seed": 9223372036854775808}', "seed"),
        ('{"prompt": "one", "seed": 3.0}', "seed"),
        ('{"prompt": "one", "seed": true}', "seed"),
        ('{"prompt": "one\\u0000two"}', "is not a word"),
        ('{"prompt": "\\udfff"}', "prompt"),
        ('{"prompt": "one", "size": "1x70000", "output_format": "jpeg"}', "65535 pixels a side"),
        ('{"prompt": "one", "size": "20000x1", "output_format": "webp"}', "16383 pixels a side"),
        ('{"prompt": "one", "size": "4096x4096"}', "4194304 pixels in all"),
        ('{"prompt": "one", "size": "\\u0661x\\u0661"}', "size"),
        ('{"prompt": "one", "size": "10x10\\n"}', "size"),
        ('{"prompt": "one", "n": 11}', "n=11 is not possible"),
        ('{"a":' * 9000, "body"),
    ],
    ids=lambda one: one[:60] if one.isprintable() else "odd",
)
def test_a_body_that_would_do_harm_is_refused(service: Running, body: str, says: str) -> None:
    answer = service.client.post(
        "/v1/images/generations", content=body.encode(), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize("size", ["1x60000", "60000x1", "3x5"])
@pytest.mark.parametrize("form", ["png", "jpeg"])
def test_a_picture_that_is_a_mere_line_is_one(service: Running, size: str, form: str) -> None:
    [picture] = pictures(service.draw("one two", size=size, output_format=form))
    assert picture.size == tuple(map(int, size.split("x")))


def test_the_largest_seeds_wrap_around(service: Running) -> None:
    answer = service.draw(seed=2**63 - 1, n=2)
    assert [one["seed"] for one in answer.json()["data"]] == [2**63 - 1, 0]
    assert is_right(pictures(answer)[1], seed=0)


def test_what_a_client_sends_does_not_come_back_as_markup_or_whole(service: Running) -> None:
    name = "<script>" + "x" * 5000
    answer = service.client.get(f"/v1/models/{name}")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert len(answer.text) < 1000


def test_an_answer_for_which_nobody_waits_is_no_fault(service: Running) -> None:
    """Hanging up in the middle of a body, or right after it."""
    for sent in (POST + b"Content-Length: 500\r\n\r\n{", POST + b"Content-Length: 2\r\n\r\n{}"):
        with line_to(service.url) as line:
            line.sendall(sent)
    assert httpx.get(f"{service.url}/health").status_code == 200
