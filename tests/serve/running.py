"""Services to test: behind a real uvicorn in a thread, or as the program in a process of its own."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image

from omni_components import Omni
from omni_components.demo import DemoPipeline
from omni_components.serve import ServeSettings, create_app
from omni_components.serve.server import Server, config_for
from omni_components.serve.service import Service

PATIENCE = 30.0  # seconds: these machines are slow at times
STEPS = 4  # enough to tell pictures apart
LONG = 1000  # steps: nobody waits for such a picture


def demo(device: torch.device | str = "cpu") -> Omni:
    return Omni("demo", enable_cpu_offload=True, device=device)


def asked(prompt: str = "seven", **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "seed": 3, "num_inference_steps": STEPS, **more}


def pictures(answer: httpx.Response) -> list[Image.Image]:
    assert answer.status_code == 200, answer.text
    return [Image.open(io.BytesIO(base64.b64decode(one["b64_json"]))) for one in answer.json()["data"]]


_ALONE: dict[tuple[str, int], Image.Image] = {}


def alone(prompt: str, seed: int) -> Image.Image:
    """What the pipeline draws by itself, with no service and no offload around it."""
    if (prompt, seed) not in _ALONE:
        _ALONE[prompt, seed] = DemoPipeline.from_pretrained()(prompt, seed=seed, steps=STEPS).images[0]
    return _ALONE[prompt, seed]


def is_right(picture: Image.Image, prompt: str = "seven", seed: int = 3) -> bool:
    """Whether it is the picture of that prompt and seed, but for rounding."""
    expected = alone(prompt, seed)
    if picture.size != expected.size:
        return False
    difference = np.asarray(picture, dtype=float) - np.asarray(expected, dtype=float)
    return bool(np.abs(difference).max() <= 2)


def until(true: Callable[[], Any], patience: float = PATIENCE) -> None:
    end = time.monotonic() + patience
    while not true():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)


class Hold:
    """Holds the pipeline at the beginning of each run, until it is let go."""

    def __init__(self, pipeline: Any) -> None:
        self.reached = threading.Semaphore(0)
        self._go = threading.Event()
        self._hook = pipeline.text_encoder.register_forward_pre_hook(self._wait)

    def _wait(self, module: torch.nn.Module, args: Any) -> None:
        self.reached.release()
        assert self._go.wait(PATIENCE)

    def wait(self) -> None:
        assert self.reached.acquire(timeout=PATIENCE)

    def let_go(self) -> None:
        """From now on nothing is held; idempotent."""
        self._go.set()
        self._hook.remove()


class Running:
    """A service behind a real server."""

    def __init__(self, service: Service, url: str) -> None:
        self.service = service
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=PATIENCE)
        self._pool = ThreadPoolExecutor(40)

    def draw(self, prompt: str = "seven", **more: Any) -> httpx.Response:
        return self.client.post("/v1/images/generations", json=asked(prompt, **more))

    def aside(self, prompt: str = "seven", **more: Any) -> Future[httpx.Response]:
        """Ask, and go on once the request is in the queue or is being drawn."""
        before = self.present
        answer = self._pool.submit(self.draw, prompt, **more)
        until(lambda: self.present > before)
        return answer

    @property
    def present(self) -> int:
        """Requests that wait or are being drawn."""
        return len(self.service.queue) + self.service.worker.tally.running

    def close(self) -> None:
        self._pool.shutdown()
        self.client.close()

    def check(self) -> None:
        """The next request is answered rightly, and the invariant holds (I1, I2, I4, I6, I8; audited: I3, I5)."""
        assert is_right(pictures(self.draw())[0])
        assert self.client.get("/v1/residency").json()["invariant"] == {"holds": True, "problem": None}
        if self.service.ledger is not None:
            until(lambda: self.service.worker.tally.running == 0)
            self.service.ledger.audit()

    @contextmanager
    def holding(self) -> Iterator[Hold]:
        hold = Hold(self.service.model.omni.pipeline)
        try:
            yield hold
        finally:
            hold.let_go()


@contextmanager
def running(omni: Omni, **settings: Any) -> Iterator[Running]:
    """Serve from a thread; at the end it drains."""
    app = create_app(omni, ServeSettings(**settings))
    server = Server(config_for(app), app.state.service)
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
    thread.start()
    up = Running(app.state.service, f"http://127.0.0.1:{listening.getsockname()[1]}")
    try:
        until(lambda: server.started)
        yield up
    finally:
        up.close()
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the server does not end"


class Program:
    """``omni-components serve demo`` in a process of its own."""

    def __init__(self, *options: str, model: str = "demo") -> None:
        command = [sys.executable, "-c", "from omni_components.cli import main; main()", "serve", model]
        self.process = subprocess.Popen(
            [*command, "--enable-cpu-offload", "--device", "cpu", "--port", "0", *options],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stderr is not None
        said = ""
        for line in self.process.stderr:  # bars and remarks of other packages may come first
            said += line
            if " at http://" in line:
                break
        assert " at http://" in said, said  # else it has ended
        self.first_line = said.splitlines()[-1]
        self.url = self.first_line.split(" at ")[1].strip()
        until(lambda: _answers(self.url))

    def post(self, **more: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/images/generations", json=asked(**more), timeout=PATIENCE)

    def working(self) -> bool:
        """Whether a picture is being drawn."""
        return bool(httpx.get(f"{self.url}/v1/residency").json()["work"]["running"])

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Its exit status, and what else it has said."""
        _, said = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, said


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def program(*options: str, model: str = "demo") -> Iterator[Program]:
    up = Program(*options, model=model)
    try:
        yield up
    finally:
        if up.process.poll() is None:
            up.process.kill()
        up.process.communicate()


def write_keys(folder: Path, *keys: bytes) -> Path:
    file = folder / "keys"
    file.write_bytes(b"\n".join(keys) + b"\n")
    return file
