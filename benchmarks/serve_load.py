"""Many clients at once: no picture wrong, none lost, the invariant after each, and the loads per request.

    python benchmarks/serve_load.py --json FILE

The server is the program in a process of its own. Each answer is judged by the classifier that has seen only
real digits. It is asked only for digits that it recognises when the pipeline draws them alone, so that every
digit it does not see is a fault of the service. Exits with 1 if a bound is missed.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from PIL import Image

from omni_components.demo import DemoPipeline

try:
    from benchmarks.harness import machine, parser, write
except ModuleNotFoundError:  # run as a script
    from harness import machine, parser, write

CLIENTS, REQUESTS, STEPS = 16, 200, 12
CHECK = Path(__file__).parents[1] / "examples" / "check_demo.py"


def main() -> int:
    options = parser(__doc__.splitlines()[0]).parse_args()
    requests = 5 if options.quick else REQUESTS
    result = measure(CLIENTS, requests) | {"machine": machine()}
    write(options.json, result)
    for name in ("requests", "wrong", "lost", "broken_invariants", "p50_ms", "p95_ms", "loads_per_request"):
        print(f"{name:20} {result[name]}")
    faults = result["wrong"] + result["lost"] + result["broken_invariants"]
    return int(faults > 0 or result["loads_per_request"] >= 1.0)


def measure(clients: int, requests: int) -> dict[str, Any]:
    """Let so many clients make so many requests each, one after the other."""
    torch.set_num_threads(1)
    check = _checker()
    judge, _ = check.train_judge()
    known = _recognised(check, judge)
    outcomes: list[tuple[str, float, bool]] = []
    with _serving() as url:
        work = threading.Barrier(clients)

        def client(number: int) -> list[tuple[str, float, bool]]:
            work.wait()
            return list(_ask(url, check, judge, known, number * requests, requests))

        with ThreadPoolExecutor(clients) as pool:
            for done in pool.map(client, range(clients)):
                outcomes += done
        state = httpx.get(f"{url}/v1/residency", timeout=60).json()
    times = [seconds for _, seconds, _ in outcomes]
    kinds = [kind for kind, _, _ in outcomes]
    loads = sum(one["loads"] for one in state["components"])
    cuts = statistics.quantiles(times, n=20)
    return {
        "requests": len(outcomes),
        "wrong": kinds.count("wrong"),
        "lost": clients * requests - len(outcomes) + kinds.count("lost"),
        "broken_invariants": sum(not holds for _, _, holds in outcomes),
        "p50_ms": round(statistics.median(times) * 1e3, 1),
        "p95_ms": round(cuts[18] * 1e3, 1),
        "loads": loads,
        "loads_per_request": round(loads / len(outcomes), 3),
        "batches": state["work"]["batches"],
    }


def _ask(
    url: str, check: Any, judge: Any, known: list[tuple[int, int]], first: int, count: int
) -> Iterator[tuple[str, float, bool]]:
    with httpx.Client(base_url=url, timeout=120) as client:
        for at in range(first, first + count):
            digit, seed = known[at % len(known)]
            body = {"prompt": str(digit), "seed": seed, "num_inference_steps": STEPS}
            start = time.perf_counter()
            answer = client.post("/v1/images/generations", json=body)
            seconds = time.perf_counter() - start
            holds = client.get("/v1/residency").json()["invariant"]["holds"]
            if answer.status_code != 200:
                yield "lost", seconds, holds
                continue
            file = io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))
            seen = judge.predict(check.read_tiles(Image.open(file), 1).reshape(1, -1))[0]
            yield "right" if seen == digit else "wrong", seconds, holds


def _recognised(check: Any, judge: Any) -> list[tuple[int, int]]:
    """Digits and seeds whose pictures the judge recognises when the pipeline draws them alone."""
    pipeline = DemoPipeline.from_pretrained()
    found = []
    for seed in range(6):
        for digit in range(10):
            picture = pipeline(str(digit), seed=seed, steps=STEPS).images[0]
            if judge.predict(check.read_tiles(picture, 1).reshape(1, -1))[0] == digit:
                found.append((digit, seed))
    return found


def _checker() -> Any:
    spec = importlib.util.spec_from_file_location("check_demo", CHECK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_demo"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@contextmanager
def _serving() -> Iterator[str]:
    """The program; its address."""
    command = [sys.executable, "-c", "from omni_components.cli import main; main()", "serve", "demo"]
    options = ["--enable-cpu-offload", "--device", "cpu", "--port", "0"]
    process = subprocess.Popen(
        [*command, *options],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        if " at http://" not in line:
            raise RuntimeError(f"the service did not start: {line}{process.stderr.read()}")
        url = line.split(" at ")[1].strip()
        while True:
            try:
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.communicate(timeout=60)


if __name__ == "__main__":
    sys.exit(main())
