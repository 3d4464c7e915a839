"""One safetensors file: its header, checked before anything is believed; its bytes, read or mapped.

The format: eight bytes with the length of a JSON header (little endian), the header, then the bytes of all
tensors without gaps (https://huggingface.co/docs/safetensors). A header is data from elsewhere: it is read only
if the file can hold it, and each of its claims is compared with the file's size.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..components.tensors import own_storage
from ..errors import WeightsError

HEADER_LIMIT = 100_000_000  # bytes; what the format's own reader takes at most
CHUNK = 64 << 20  # bytes read at a time: what a bar can show
PIECE = 1 << 20  # bytes converted at a time: they stay in the processor's cache between reading and casting
_PREFIX = 8
_WHOLE = "Copy or download the file again: it is not as it was written."
_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
_DTYPES = {name: getattr(torch, one) for name, one in _NAMES.items() if hasattr(torch, one)}
Progress = Callable[[int], None]  # told how many bytes more are there


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file: ``begin`` and ``end`` are bytes from the start of the file."""

    file: WeightsFile
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.end - self.begin

    def read(self, target: torch.Tensor, told: Progress) -> None:
        """Fill host memory (uint8, as many bytes) from the file.

        Raises:
            WeightsError: The file ends too early, or the system cannot read it.
        """
        self.file.read(self.name, self.begin, target, told)

    def convert(self, target: torch.Tensor, told: Progress) -> None:
        """Fill a tensor of another element type, from the file's pages where they can be read in place."""
        values = self.mapped()
        if values is not None:
            target.copy_(values)
            told(self.nbytes)
            return
        flat, size = target.view(-1), self.dtype.itemsize
        scratch = torch.empty(min(self.nbytes, PIECE), dtype=torch.uint8)
        for start in range(0, self.nbytes, PIECE):
            piece = scratch[: min(PIECE, self.nbytes - start)]
            self.file.read(self.name, self.begin + start, piece, told)
            values = piece.view(self.dtype)
            flat[start // size : start // size + values.numel()].copy_(values)

    def mapped(self) -> torch.Tensor | None:
        """The tensor over the file's own pages; ``None`` where they do not lie as its element type needs."""
        if self.nbytes == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        raw = own_storage(self.file.pages()[self.begin : self.end])
        if raw.data_ptr() % self.dtype.itemsize:
            return None
        return raw.view(self.dtype).view(self.shape)


class WeightsFile:
    """A safetensors file whose header has been checked.

    Raises:
        WeightsError: It is not there, is no such file, or is shorter than it says.
    """

    def __init__(self, path: Path, component: str) -> None:
        self.path, self.component = path, component
        self._pages: torch.Tensor | None = None
        try:
            self.size = path.stat().st_size
            with path.open("rb") as file:
                header, start = self._header(file.read(_PREFIX), file)
        except OSError as error:
            raise self._broken(f"cannot be read: {error.strerror or error}.") from error
        self.entries = self._entries(header, start)

    def pages(self) -> torch.Tensor:
        """The whole file, mapped."""
        if self._pages is None:
            self._pages = map_file(self.path, self.size)
        return self._pages

    def read(self, name: str, begin: int, target: torch.Tensor, told: Progress) -> None:
        """Fill host memory (uint8) with the bytes from ``begin``."""
        if self._pages is not None:
            target.copy_(self._pages[begin : begin + target.numel()])
            told(target.numel())
            return
        memory = memoryview(target.numpy())  # type: ignore[arg-type]  # numpy types it so from 3.12 on
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(begin)
                done = 0
                while done < len(memory):
                    count = file.readinto(memory[done : done + CHUNK])
                    if not count:
                        raise self._broken("ends in the middle of it.", name)
                    done += count
                    told(count)
        except OSError as error:
            raise self._broken(f"cannot be read: {error.strerror or error}.", name) from error

    # --- the header ---------------------------------------------------------------------------------------

    def _header(self, prefix: bytes, file: Any) -> tuple[dict[str, Any], int]:
        if len(prefix) < _PREFIX:
            raise self._broken(f"is no safetensors file: it has {self.size} bytes.")
        length = int.from_bytes(prefix, "little")
        if length > min(HEADER_LIMIT, self.size - _PREFIX):
            text = f"is truncated or no safetensors file: its header claims {length} bytes, the file has {self.size}."
            raise self._broken(text)
        try:
            header = json.loads(file.read(length), object_pairs_hook=self._unique)
        except (ValueError, RecursionError) as error:
            raise self._broken("is no safetensors file: its header is no JSON.") from error
        if not isinstance(header, dict):
            raise self._broken("is no safetensors file: its header is no table of tensors.")
        header.pop("__metadata__", None)
        return header, _PREFIX + length

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise self._broken("lists it twice.", twice)
        return found

    def _entries(self, header: dict[str, Any], start: int) -> dict[str, Entry]:
        entries = [self._entry(name, facts, start) for name, facts in header.items()]
        end = start
        for one in sorted(entries, key=lambda one: (one.begin, one.end)):
            if one.end > self.size:
                missing = one.end - self.size
                raise self._broken(f"is truncated: {missing} of its bytes are missing.", one.name)
            if one.begin != end:
                raise self._broken("is corrupt: its place overlaps another's, or leaves a gap.", one.name)
            end = one.end
        if end != self.size:
            raise self._broken(f"is corrupt: {self.size - end} bytes at its end belong to no tensor.")
        return {one.name: one for one in entries}

    def _entry(self, name: str, facts: Any, start: int) -> Entry:
        try:
            kind, shape, (low, high) = facts["dtype"], facts["shape"], facts["data_offsets"]
        except (TypeError, KeyError, ValueError) as error:
            raise self._broken("is corrupt: its entry lacks dtype, shape or data_offsets.", name) from error
        if kind not in _DTYPES:
            text = f"has element type {kind!r}; known: {', '.join(_DTYPES)}."
            raise self._broken(text, name, "Save it in one of these, or load it with its own library.")
        if not (isinstance(shape, list) and all(map(_is_count, (*shape, low, high)))):
            raise self._broken("is corrupt: its shape or place is no list of whole numbers.", name)
        dtype = _DTYPES[kind]
        if high - low != math.prod(shape) * dtype.itemsize:
            text = f"is corrupt: {shape} of {kind} does not take {high - low} bytes."
            raise self._broken(text, name)
        return Entry(self, name, dtype, tuple(shape), start + low, start + high)

    def _broken(self, problem: str, tensor: str | None = None, advice: str = _WHOLE) -> WeightsError:
        return WeightsError(self.component, os.fspath(self.path), tensor, problem, advice)


def map_file(path: Path, nbytes: int) -> torch.Tensor:
    """A file's pages as uint8, private: what is written to them never reaches the file."""
    storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=nbytes)
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
