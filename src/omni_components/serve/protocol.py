"""HTTP on a socket: uvicorn's, with patience that ends and refusals in OpenAI's shape."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import ApiError

HEAD_SECONDS = 10.0  # for the head of a request, from its first byte or from the connection's beginning
STALL_SECONDS = 60.0  # in which a client that is sent more than fits into the buffers must read something


class PatientProtocol(H11Protocol):
    """uvicorn waits for ever for a head that does not come whole, and for a client that reads nothing.

    Both cost a client nothing: they would hold sockets and pictures, and keep a server that drains.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head."""
        super().connection_made(transport)
        self._watch_head(waits=True)

    def data_received(self, data: bytes) -> None:
        """Take bytes in; whether the head of a request is whole shows after it."""
        super().data_received(data)
        self._watch_head(waits=self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0]))

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._watch_head(waits=False)
        self._watch_reading(waits=False)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The buffers are full: from now on the client must read. The transport calls it."""
        self.flow.pause_writing()
        self._watch_reading(waits=True)

    def resume_writing(self) -> None:
        """They have room again. The transport calls it."""
        self._watch_reading(waits=False)
        self.flow.resume_writing()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is refused as everything else is."""
        self._refuse(ApiError(400, msg, "invalid_http"))

    def _watch_head(self, *, waits: bool) -> None:
        if waits and self._head_timer is None:  # one that runs goes on: drops of a head win no time
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)
        elif not waits and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self.transport.is_closing():
            return
        if self.conn.trailing_data[0]:
            self._refuse(ApiError(408, "The head of the request did not come in time.", "head_timeout"))
        else:
            self.transport.close()  # a browser that connected ahead and has nothing to ask

    def _watch_reading(self, *, waits: bool) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        if waits:
            left = self.transport.get_write_buffer_size()
            self._stall_timer = self.loop.call_later(STALL_SECONDS, self._look_at_reading, left)

    def _look_at_reading(self, before: int) -> None:
        if self.transport.get_write_buffer_size() < before:
            self._watch_reading(waits=True)
        else:
            self.transport.abort()  # close() would wait for what is not read

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application, and close. Nobody can be told once an answer has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = error.response({"Connection": "close"})
            reason = HTTPStatus(error.status).phrase
            head = h11.Response(status_code=error.status, headers=answer.raw_headers, reason=reason)
            for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
