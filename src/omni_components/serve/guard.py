"""What stands before the routes: keys, the size of bodies, and the last word on errors. Plain ASGI."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .errors import CLIENT_GONE, ApiError, shutting_down, unexpected

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from .settings import ServeSettings

log = logging.getLogger("omni_components.serve")

_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'self'; img-src 'self' data:; frame-ancestors 'none'"),
)
_HARMLESS = ("GET", "HEAD")  # a page of another site may ask for these, and is shown nothing of the answer
_OWN = (b"", b"same-origin", b"none")  # Sec-Fetch-Site: no browser, our page, the user's own hand


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

    def admit(self, headers: Sequence[bytes]) -> bool:
        """Whether ``Authorization`` holds one of the keys; of two headers, a proxy may have checked the other."""
        if not self._digests:
            return True
        if len(headers) != 1:
            return False
        scheme, _, given = headers[0].partition(b" ")
        digest = hashlib.sha256(given.strip()).digest()
        same = [hmac.compare_digest(digest, one) for one in self._digests]  # each of them, always
        return any(same) and scheme.lower() == b"bearer"


class Guard:
    """Lets in what may come in, with a body that has been read whole.

    Args:
        app: What comes after.
        settings: Keys and limits.
        public: Paths that need no key.
        counted: By path, what is told the status and the seconds of each answer, refusals included.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServeSettings,
        public: Sequence[str],
        counted: Mapping[str, Callable[[int, float], None]],
    ) -> None:
        self._app = app
        self._hosts = frozenset(one.lower() for one in settings.hosts)
        self._counted = counted
        self._keys = Keys(settings.api_keys)
        self._most = settings.max_body
        self._patience = settings.body_timeout
        self._public = frozenset(public)
        name = [] if settings.replica is None else [(b"x-replica", settings.replica.encode())]
        self._headers = (*_HEADERS, *name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer, start = _Answer(send, self._headers), time.perf_counter()
        try:
            await self._serve(scope, receive, answer)
        finally:
            if scope["path"] in self._counted:
                self._counted[scope["path"]](answer.status, time.perf_counter() - start)

    async def _serve(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
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
        self._refuse_other_names(headers.get(b"host", b""))
        if scope["method"] not in _HARMLESS and headers.get(b"sec-fetch-site", b"") not in _OWN:
            raise ApiError(403, "Pages of other sites may not ask for anything here.", "cross_site")
        keys = [value for name, value in scope["headers"] if name == b"authorization"]
        if scope["path"] not in self._public and not self._keys.admit(keys):
            text = "Incorrect API key provided." if keys else "No API key: send Authorization: Bearer KEY."
            raise ApiError(401, text, "invalid_api_key")
        self._refuse_by_length(headers.get(b"content-length", b"0"))
        try:
            body = await asyncio.wait_for(self._body(receive), self._patience)
        except asyncio.TimeoutError:
            raise ApiError(408, "The body of the request did not come in time.", "body_timeout") from None
        await self._app(scope, _replayed(body, receive), send)

    def _refuse_other_names(self, told: bytes) -> None:
        """A site whose name is made to point here is, to a browser, the origin of our page."""
        name = _name_of(told)
        if self._hosts and name.lower() not in self._hosts and not _is_address(name):
            known = ", ".join(sorted(self._hosts))
            text = f"'{name}' is not a name of this service; it is called {known}. See --allowed-host."
            raise ApiError(403, text, "unknown_host")

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
    """Sends, with our headers.

    Attributes:
        begun: Whether the answer has begun.
        status: Of the answer; ``CLIENT_GONE`` where there was none.
    """

    def __init__(self, send: Send, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers
        self.begun = False
        self.status = CLIENT_GONE

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun, self.status = True, message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
        await self._send(message)


def _name_of(host: bytes) -> str:
    """``Host`` without its port, and without the dot that a name may end in."""
    text = host.decode("latin-1")
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == ""  # HTTP/1.0, which no browser speaks
    return True


def _replayed(body: bytes, receive: Receive) -> Receive:
    first: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
