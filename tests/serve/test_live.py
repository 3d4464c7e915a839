"""Events as they happen: in order, to whoever reads, and never at the expense of who draws."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from omni_components import Omni
from omni_components.serve import live
from omni_components.serve.live import Live
from tests.serve.running import PATIENCE, is_right, pictures, running, until

Told = tuple[str, dict[str, Any]]


def read(message: str) -> Told:
    kind, data, *_ = message.splitlines()
    return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def some(stream: AsyncIterator[str], count: int) -> list[Told]:
    return [read(await anext(stream)) for _ in range(count)]


def in_order(told: list[Told]) -> bool:
    times = [facts["at"] for _, facts in told]
    return times == sorted(times)


def test_the_whole_state_comes_first_and_then_what_happens_in_order() -> None:
    async def watch() -> list[Told]:
        source = Live(1)
        stream = source.follow(lambda: {"all": "well"})
        first = await some(stream, 1)
        for number in range(50):
            source.tell("step", {"done": number})
        return first + await some(stream, 50)

    told = asyncio.run(watch())
    assert told[0][0] == "state"
    assert told[0][1]["all"] == "well"
    assert [facts["done"] for _, facts in told[1:]] == list(range(50))
    assert in_order(told)


def test_who_cannot_keep_up_is_told_how_much_is_missing_and_then_how_things_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "_BACKLOG", 10)

    async def watch() -> list[Told]:
        source, done = Live(1), 0
        stream = source.follow(lambda: {"done": done})
        told = await some(stream, 1)
        for done in range(35):
            source.tell("step", {"done": done})
        await asyncio.sleep(0)
        told += await some(stream, 2)
        source.tell("step", {"done": 35})
        return told + await some(stream, 1)

    told = asyncio.run(watch())
    assert [kind for kind, _ in told] == ["state", "skipped", "state", "step"]
    assert told[1][1]["messages"] == 35
    assert [facts["done"] for _, facts in told[2:]] == [34, 35]
    assert in_order(told)


def test_what_is_older_than_the_state_does_not_come_after_it() -> None:
    """Told in another thread before the state was read, but delivered after."""

    async def watch() -> list[Told]:
        source = Live(1)

        def state() -> dict[str, Any]:
            source.tell("step", {"done": 1})  # newer than the state: it comes again
            return {}

        stream = source.follow(state)
        told = await some(stream, 1)
        watcher = source._watchers[0]
        watcher.tell("event: step\ndata: {}\n\n", watcher.since - 0.1)
        source.tell("step", {"done": 2})
        return told + await some(stream, 2)

    told = asyncio.run(watch())
    assert [facts.get("done") for _, facts in told] == [None, 1, 2]
    assert in_order(told)


def test_a_watcher_whose_loop_is_gone_is_forgotten() -> None:
    source = Live(1)
    asyncio.run(_begin(source))
    source.tell("step", {})
    assert not source.full


async def _begin(source: Live) -> None:
    stream = source.follow(dict)
    await anext(stream)
    source._kept = stream  # type: ignore[attr-defined]  # as a server that was killed: it says no good-bye


def test_a_stream_that_is_left_makes_room_and_one_too_many_is_refused(omni: Omni) -> None:
    with running(omni, max_watchers=1) as up:
        with up.client.stream("GET", "/v1/events") as stream:
            lines = stream.iter_lines()  # kept: httpx hangs up when it goes
            assert next(lines) == "event: state"
            answer = up.client.get("/v1/events")
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_streams")
            assert "retry-after" in answer.headers
            lines.close()
        until(lambda: not up.service.live.full)
        with up.client.stream("GET", "/v1/events") as stream:
            assert stream.status_code == 200


def test_a_reader_that_stops_blocks_nobody_and_then_reads_on_in_order(
    omni: Omni, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I2 goes on being served: the picture is made while nobody reads; over a real socket, its buffers full."""
    monkeypatch.setattr(live, "_BACKLOG", 50)
    with running(omni) as up, socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        line.settimeout(PATIENCE)
        host, port = up.url.removeprefix("http://").split(":")
        line.connect((host, int(port)))
        line.sendall(b"GET /v1/events HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        until(lambda: up.service.live.full or up.service.live._watchers)
        for _ in range(300):
            up.service.live.tell("step", {"done": 0, "total": 1, "filler": "x" * 100_000})
        assert is_right(pictures(up.draw())[0])
        got = received(line, until=b"event: skipped")
        up.service.drain()
        told = messages(got + received(line))
    assert told[0][0] == "state"
    kinds = [kind for kind, _ in told]
    assert kinds.count("skipped") >= 1
    for at, kind in enumerate(kinds):
        if kind == "skipped":
            assert kinds[at + 1] == "state"
    assert in_order(told)


def received(line: socket.socket, until: bytes | None = None) -> bytes:
    """What comes until this does, or until the server ends the stream."""
    got = b""
    while until is None or until not in got[-2_000_000:]:
        if not (more := line.recv(1_000_000)):
            break
        got += more
    return got


def messages(got: bytes) -> list[Told]:
    """The messages of an answer."""
    text = unchunked(got.partition(b"\r\n\r\n")[2]).decode()
    return [read(one) for one in text.split("\n\n") if one.startswith("event: ")]


def unchunked(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        count = int(size, 16)
        parts.append(body[:count])
        body = body[count + 2 :]
    return b"".join(parts)
