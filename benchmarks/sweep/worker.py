"""Runs the cases whose names come in on stdin; a row of JSON goes out for each. Started by the sweep."""

from __future__ import annotations

import json
import os
import sys
import time

import torch

from . import compare
from .classes import found
from .families import cases


def main() -> None:
    """Until stdin ends."""
    torch.set_num_threads(1)
    compare.VERBOSE = "--verbose" in sys.argv
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    modules, known = found(), cases()
    for line in sys.stdin:
        name = line.strip()
        start = time.perf_counter()
        row = compare.compare(known[name], modules[name]).as_json()
        row["seconds"] = round(time.perf_counter() - start, 2)
        print(json.dumps(row), file=answers, flush=True)


if __name__ == "__main__":
    main()
