"""Files are brought into memory while the models they belong to are built, in the order in which they will run.

Only the page cache is filled: memory that the system takes back when it wants it.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..transfer.hostmemory import pinnable_bytes, read_pages
from .files import Entry, WeightsFile, map_file

PIECE = 16 << 20  # bytes asked for at a time
READERS = 4  # a disk is faster with several questions open than with one
_SAMPLE = 2 << 20  # bytes between two looks at whether a piece is there already
_PATIENCE = 5.0  # seconds for a piece at the interpreter's end: a disk that hangs must not keep it
_SHARE = 0.5  # of what may be pinned: what is read ahead must not drive out what was there


class ReadAhead:
    """Reads files in the background, in the order given, as far as free memory goes.

    Args:
        files: Which ones, the first needed first.
        limit: Most bytes; by default half of what may be pinned: free memory, the container's limit respected.
    """

    def __init__(self, files: Iterable[WeightsFile], limit: int | None = None) -> None:
        most = int(_SHARE * pinnable_bytes()) if limit is None else limit
        self._pieces = _pieces(files, most)
        self._lock = threading.Lock()
        self._stopped = False
        self._readers: list[threading.Thread] = []
        _RUNNING.add(self)
        with suppress(RuntimeError):  # no more threads may be started here: so many read, or nobody
            for _ in range(READERS):
                reader = threading.Thread(target=self._run, name="omni-read-ahead", daemon=True)
                reader.start()
                self._readers.append(reader)

    def stop(self) -> None:
        """Begin no further piece."""
        self._stopped = True  # without the lock, which a forked process may find taken for good

    def wait(self, timeout: float | None = None) -> None:
        """Return when everything has been read, or each reader has been given so many seconds."""
        for one in self._readers:
            one.join(timeout)

    def _run(self) -> None:
        while (piece := self._next()) is not None:
            # A file that cannot be read says so to whoever needs its values.
            with suppress(OSError, RuntimeError):
                bring_in(*piece)

    def _next(self) -> tuple[Path, torch.Tensor, int] | None:
        with self._lock:
            return None if self._stopped else next(self._pieces, None)


_RUNNING: weakref.WeakSet[ReadAhead] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    """A thread that is in torch's code when the interpreter ends would take the process down with an abort."""
    running = list(_RUNNING)
    for one in running:
        one.stop()
    for one in running:
        one.wait(timeout=_PATIENCE)


def bring_in(path: Path, pages: torch.Tensor, start: int) -> None:
    """Have a piece of a file in memory.

    Args:
        path: The file's.
        pages: The piece, mapped; its address is a multiple of the page size.
        start: Of the piece, bytes from the start of the file.

    Raises:
        OSError: It is not there.
    """
    with path.open("rb") as file:
        if is_in_memory(file.fileno(), start, pages.numel()):
            return
        if read_pages(pages.data_ptr(), pages.numel()) or not hasattr(os, "posix_fadvise"):
            return
        # An older system: ask, and do not wait.
        os.posix_fadvise(file.fileno(), start, pages.numel(), os.POSIX_FADV_WILLNEED)


def is_in_memory(descriptor: int, start: int, nbytes: int) -> bool:
    """Whether samples of a range can be read without waiting for the disk."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    byte = bytearray(1)
    try:
        return all(
            os.preadv(descriptor, [byte], start + at, os.RWF_NOWAIT) == 1
            for at in (*range(0, nbytes, _SAMPLE), nbytes - 1)
        )
    except OSError:
        return False  # would have to wait, or the file system does not tell


def in_order(entries: Mapping[str, Mapping[str, Entry]], order: Iterable[str]) -> list[WeightsFile]:
    """The files of components, those that are named in ``order`` first.

    Args:
        entries: What each component's files hold.
        order: Names of components; others are left out of account.
    """
    names = [name for name in order if name in entries]
    files = (one.file for name in dict.fromkeys([*names, *entries]) for one in entries[name].values())
    return list(dict.fromkeys(files))


def running_order(pipeline: Any) -> list[str]:
    """In which order the components of a pipeline's class run, as far as it says."""
    sequence = getattr(pipeline, "model_cpu_offload_seq", None)
    if isinstance(sequence, str):
        return sequence.split("->")
    lists = (getattr(pipeline, name, None) for name in ("_encoder_modules", "_dit_modules", "_vae_modules"))
    return [path.partition(".")[0] for listed in lists for path in listed or ()]


def _pieces(files: Iterable[WeightsFile], limit: int) -> Iterator[tuple[Path, torch.Tensor, int]]:
    for file in files:
        if limit <= 0:
            return
        try:
            pages = map_file(file.path, file.size)  # of its own: the file's user may want none
        except (OSError, RuntimeError):
            continue  # the next may be whole
        for start in range(0, min(file.size, limit), PIECE):
            yield file.path, pages[start : min(start + PIECE, limit)], start
        limit -= min(file.size, limit)
