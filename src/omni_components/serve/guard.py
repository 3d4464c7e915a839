"""What stands before the routes: keys, the size of bodies, and the last word on errors. Plain ASGI."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .errors import ApiError, shutting_down, unexpected

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from .settings import ServeSettings

log = logging.getLogger("omni_components.serve")

_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'self'; img-src 'self' data:; frame-ancestors 'none'"),
)


class Gone(Exception):
    """The client went away while it sent: there is nobody to tell."""


class Keys:
    """Compares a client's key with those that are let in, in constant time.

    Args:
        keys: None at all lets everybody in.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        # Digests are all of one length: not even the length of a key shows in the time.
        self._digests = [hashlib.sha256(key).digest() for key in keys]

    def admit(self, header: bytes) -> bool:
        """Whether ``Authorization`` holds one of the keys."""
        if not self._digests:
            return True
        scheme, _, given = header.partition(b" ")
        digest = hashlib.sha256(given.strip()).digest()
        same = [hmac.compare_digest(digest, one) for one in self._digests]  # each of them, always
        return any(same) and scheme.lower() == b"bearer"


class Guard:
    """Lets in what may come in, with a body that has been read whole.

    Args:
        app: What comes after.
        settings: Keys and limits.
        public: Paths that need no key.
    """

    def __init__(self, app: ASGIApp, settings: ServeSettings, public: Sequence[str]) -> None:
        self._app = app
        self._keys = Keys(settings.api_keys)
        self._most = settings.max_body
        self._patience = settings.body_timeout
        self._public = frozenset(public)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        try:
            await self._pass(scope, receive, answer)
        except ApiError as error:
            await error.response()(scope, receive, answer)
        except Gone:
            return
        except asyncio.CancelledError:
            if not answer.begun:  # the server is being forced to end, and would say 500
                await shutting_down().response()(scope, receive, answer)
            raise
        except Exception:
            log.exception("a request failed")
            if answer.begun:
                raise  # half of an answer is on its way: only closing the connection tells the client
            await unexpected().response()(scope, receive, answer)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if scope["path"] not in self._public and not self._keys.admit(headers.get(b"authorization", b"")):
            given = b"authorization" in headers
            text = "Incorrect API key provided." if given else "No API key: send Authorization: Bearer KEY."
            raise ApiError(401, text, "invalid_api_key")
        self._refuse_by_length(headers.get(b"content-length", b"0"))
        try:
            body = await asyncio.wait_for(self._body(receive), self._patience)
        except asyncio.TimeoutError:
            raise ApiError(408, "The body of the request did not come in time.", "body_timeout") from None
        await self._app(scope, _replayed(body, receive), send)

    def _refuse_by_length(self, told: bytes) -> None:
        if not told.isdigit() or len(told) > 18 or int(told) > self._most:
            raise self._too_large()

    async def _body(self, receive: Receive) -> bytes:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Gone
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._most:
                raise self._too_large()
        return body

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is too large; {self._most} bytes are possible.", "body_too_large")


class _Answer:
    """Sends, with our headers; knows whether the answer has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
        await self._send(message)


def _replayed(body: bytes, receive: Receive) -> Receive:
    first: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
