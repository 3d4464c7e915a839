"""Every diffusers pipeline that declares an offload order: resident, by diffusers' own offload, by ours.

``python benchmarks/diffusers_sweep.py --json FILE`` runs all; ``--only NAME`` some; ``--quick`` one of a kind;
``--resume`` keeps the rows that FILE has; ``--docs`` writes ``docs/diffusers.md`` from FILE's rows.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.sweep import page  # noqa: E402 (the path first: this file runs as a script, too)
from benchmarks.sweep.classes import found  # noqa: E402
from benchmarks.sweep.families import cases  # noqa: E402
from benchmarks.sweep.reasons import NO_CASE  # noqa: E402

QUICK = (
    "StableDiffusion3Pipeline",
    "FluxPipeline",
    "WanPipeline",
    "SanaControlNetPipeline",
    "ZImageControlNetPipeline",
    "LTXLatentUpsamplePipeline",
    "LTX2ImageToVideoPipeline",
    "KandinskyV22CombinedPipeline",
    "VisualClozePipeline",
    "ShapEPipeline",
    "LEditsPPPipelineStableDiffusionXL",
    "MotifVideoImage2VideoPipeline",
    "RFD4ProteinaPipeline",
    "DDIMPipeline",
)


class Worker:
    """A process that runs cases one after another; started anew when one takes too long or dies."""

    def __init__(self, *, timeout: float, verbose: bool) -> None:
        self._timeout = timeout
        self._command = [sys.executable, "-m", "benchmarks.sweep.worker", *["--verbose"] * verbose]
        self._verbose = verbose
        self._process: subprocess.Popen[str] | None = None

    def run(self, name: str) -> dict[str, Any]:
        """The row of one class."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Timer(self._timeout, process.kill)
        late.start()
        try:
            process.stdin.write(f"{name}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            late.cancel()
        if answer:
            return json.loads(answer)
        self._process = None
        process.communicate()  # waits, and closes the pipes
        return {"class": name, "reason": f"no answer in {self._timeout:.0f} s (exit {process.returncode})"}

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()

    def _start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        errors = None if self._verbose else subprocess.DEVNULL
        return subprocess.Popen(
            self._command,
            cwd=ROOT,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )


def run_all(
    names: list[str], *, workers: int, timeout: float, verbose: bool = False, each: Any = None
) -> None:
    """Run cases on some workers; ``each`` is given every row as it comes."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)

    def work() -> None:
        worker = Worker(timeout=timeout, verbose=verbose)
        while True:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                break
            each(worker.run(name))
        worker.close()

    threads = [threading.Thread(target=work) for _ in range(min(workers, len(names)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=120.0)
    asked = parser.parse_args(arguments)
    rows: dict[str, dict[str, Any]] = {}
    if asked.json is not None and asked.json.exists() and (asked.resume or asked.docs):
        rows = {row["class"]: row for row in json.loads(asked.json.read_text())["rows"]}
    if not asked.docs:
        known = cases()
        names = [*asked.only] if asked.only else [*QUICK] if asked.quick else list(found())
        todo = [
            name for name in names if name in known and not (asked.resume and name in rows and not asked.only)
        ]
        rows.update({name: {"class": name, "reason": NO_CASE} for name in names if name not in known})
        _sweep(todo, rows, asked)
    summary = page.summary(list(rows.values()))
    print(json.dumps(summary, indent=1))
    if asked.docs:
        (ROOT / "docs" / "diffusers.md").write_text(page.text(list(rows.values())))
    return 0


def _sweep(todo: list[str], rows: dict[str, dict[str, Any]], asked: argparse.Namespace) -> None:
    lock = threading.Lock()

    def note(row: dict[str, Any]) -> None:
        with lock:
            rows[row["class"]] = row
            print(page.line(row), flush=True)
            if asked.json is not None:
                written = {"summary": page.summary(list(rows.values())), "rows": list(rows.values())}
                asked.json.write_text(json.dumps(written, indent=1))

    run_all(todo, workers=asked.workers, timeout=asked.timeout, verbose=asked.verbose, each=note)


if __name__ == "__main__":
    sys.exit(main())
