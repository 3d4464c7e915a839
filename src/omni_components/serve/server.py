"""Running the app: SIGTERM drains, a second signal forces."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import uvicorn

from .protocol import PatientProtocol

if TYPE_CHECKING:
    from fastapi import FastAPI

    from .service import Service

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_GRACE = 2.0  # seconds for the step that is being computed, where the user forces the end


def serve(app: FastAPI, sockets: list[socket.socket]) -> int:
    """Serve until a signal comes, and answer what is there.

    Args:
        app: As ``create_app`` makes it.
        sockets: Bound; they are closed at the end.

    Returns:
        The exit status: 0 if every request was answered, 128 plus the signal's number if a second one forced it.
    """
    server = Server(config_for(app), app.state.service)
    server.run(sockets=sockets)
    if not server.force_exit:
        return 0
    if not app.state.service.abort(_GRACE):
        # The device is busy, and the interpreter cannot end in good order while a thread computes there.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + server.signal)
    return 128 + server.signal


def config_for(app: Any, lifespan: Literal["on", "off"] = "on") -> uvicorn.Config:
    """How an ASGI application is served."""
    return uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        lifespan=lifespan,
        log_level="error",  # a client that sends nonsense is no news
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here asks who the client is
    )


class Server(uvicorn.Server):
    """uvicorn's server, with the end as its users expect it: exit status 0 after SIGTERM, and open streams closed."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self.signal = 0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but it does not raise the signals again at the end: the exit status would tell of a kill."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {one: signal.signal(one, self.handle_exit) for one in _SIGNALS}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second forces."""
        self.signal = sig
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, end the streams, wait for the rest."""
        self._service.drain()
        await super().shutdown(sockets)
