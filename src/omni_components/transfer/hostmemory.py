"""How much host memory there is to pin, and the memory that belongs to files."""

from __future__ import annotations

import bisect
import ctypes
import os
from contextlib import suppress
from pathlib import Path

# A container's folder, the files with its limit and usage, and the prefix of its figures in memory.stat.
_V2 = ("sys/fs/cgroup", "memory.max", "memory.current", "")
_V1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_POPULATE_READ = 22  # MADV_POPULATE_READ of madvise(2), Linux 5.14
_SHARE = 0.9  # pinned pages cannot be swapped out: leave the system some


def pinnable_bytes(root: Path = Path("/")) -> int:
    """Bytes that may be pinned: a share of what the machine, and the container's limit, leave free.

    Args:
        root: Where ``proc`` and ``sys`` are mounted; tests give another.
    """
    limits = [available_bytes(root), *(limit - usage for limit, usage in container_limits(root))]
    return max(0, int(_SHARE * min(limits)))


def container_limits(root: Path = Path("/")) -> list[tuple[int, int]]:
    """``(limit, usage)`` in bytes of each container limit that there is; none on a plain machine.

    Files that the system keeps in memory, such as weights that have been read, are no usage: they give way.
    """
    found = []
    for folder, limit_in, usage_in, prefix in (_V2, _V1):
        limit = _number(root / folder / limit_in)
        if limit is not None:
            used = (_number(root / folder / usage_in) or 0) - _kept_files(
                root / folder / "memory.stat", prefix
            )
            found.append((limit, max(0, used)))
    return found


def _kept_files(stat: Path, prefix: str) -> int:
    try:
        lines = [line.split() for line in stat.read_text().splitlines()]
    except OSError:
        return 0
    kept = (f"{prefix}inactive_file", f"{prefix}active_file")
    return sum(int(line[1]) for line in lines if len(line) == 2 and line[0] in kept)


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes of the machine that a program can have without driving others out."""
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    if hasattr(os, "sysconf"):
        return int(os.sysconf("SC_PAGE_SIZE")) * int(os.sysconf("SC_PHYS_PAGES"))
    return 1 << 62  # unknown: let pinning itself find out


def give_freed_back() -> None:
    """Let the C library give freed memory to the system; a large heap is kept otherwise (glibc; else nothing)."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def read_pages(address: int, nbytes: int) -> bool:
    """Have the system read whole pages of a mapped file, while other threads run; returns whether it did.

    Python's own ``mmap.madvise`` lets no other thread run meanwhile.
    """
    try:
        madvise = ctypes.CDLL(None).madvise
    except (AttributeError, OSError, TypeError):
        return False
    done: int = madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _POPULATE_READ)
    return done == 0


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # v2 says "max" where there is no limit


class FileMappings:
    """The address ranges of this process that are pages of a file, as the system tells (Linux; else none)."""

    def __init__(self, maps: Path = Path("/proc/self/maps")) -> None:
        self._ranges = sorted(_file_ranges(maps))
        self._starts = [low for low, _ in self._ranges]

    def __contains__(self, pointer: int) -> bool:
        index = bisect.bisect_right(self._starts, pointer) - 1
        return index >= 0 and pointer < self._ranges[index][1]


def _file_ranges(maps: Path) -> list[tuple[int, int]]:
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        addresses, _mode, _offset, _device, inode, *path = line.split(maxsplit=5)
        if inode != "0" and path and not path[0].startswith(("/dev/", "/memfd:")):
            low, high = addresses.split("-")
            found.append((int(low, 16), int(high, 16)))
    return found
