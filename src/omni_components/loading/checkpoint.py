"""The safetensors files of one component: one file, or shards with an index; of a variant where there is one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import WeightsError
from .files import Entry, WeightsFile

_SUFFIX = ".safetensors"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def find_weights(folder: Path, base: str, variant: str | None, component: str) -> dict[str, Entry]:
    """Every stored tensor by name; headers are read, weights are not.

    Args:
        folder: The component's own.
        base: How its library calls the file: ``diffusion_pytorch_model``, or ``model``.
        variant: Such as ``"fp16"``; where the component has no files of it, the plain ones are taken, as
            diffusers does.
        component: For messages.

    Raises:
        WeightsError: There are no such files, or one of them is not whole.
    """
    for one in [variant, None] if variant is not None else [None]:
        index = next((file for file in _index_names(folder, base, one) if file.is_file()), None)
        if index is not None:
            return _sharded(index, component)
        whole = folder / f"{_named(base, one)}{_SUFFIX}"
        if whole.is_file():
            return WeightsFile(whole, component).entries
    raise _nothing_there(folder, base, component)


def has_variant(folder: Path, base: str, variant: str) -> bool:
    """Whether a component's folder has files of a variant."""
    candidates = [*_index_names(folder, base, variant), folder / f"{_named(base, variant)}{_SUFFIX}"]
    return any(file.is_file() for file in candidates)


def _named(base: str, variant: str | None) -> str:
    return base if variant is None else f"{base}.{variant}"


def _index_names(folder: Path, base: str, variant: str | None) -> Iterator[Path]:
    if variant is None:
        yield folder / f"{base}{_SUFFIX}.index.json"
    else:
        yield folder / f"{base}{_SUFFIX}.index.{variant}.json"
        yield folder / f"{base}.{variant}{_SUFFIX}.index.json"  # what older releases wrote


def _sharded(index: Path, component: str) -> dict[str, Entry]:
    placed = _weight_map(index, component)
    files = {}
    for name, shard in placed.items():
        if not isinstance(shard, str) or os.path.basename(shard) != shard:
            raise _broken_index(
                index, component, name, f"names the file {shard!r}, which is no plain file name."
            )
        if shard not in files:
            if not (index.parent / shard).is_file():
                raise _broken_index(index, component, name, f"names the file {shard!r}, which is not there.")
            files[shard] = WeightsFile(index.parent / shard, component)
    found: dict[str, Entry] = {}
    for file in files.values():
        for name, entry in file.entries.items():
            if name in found:
                other = found[name].file.path.name
                raise WeightsError(component, str(file.path), name, f"is also in {other!r}.", _SAVE_AGAIN)
            found[name] = entry
    for name, shard in placed.items():
        if name not in files[shard].entries:
            raise _broken_index(index, component, name, f"places it in {shard!r}, which does not have it.")
    return found


_SAVE_AGAIN = "Copy or download the folder again, or save it again."


def _weight_map(index: Path, component: str) -> dict[str, str]:
    try:
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _broken_index(index, component, None, "is no index of shards: it has no weight_map.") from error
    if not isinstance(placed, dict) or not placed:
        raise _broken_index(index, component, None, "is no index of shards: its weight_map is empty.")
    return placed


def _broken_index(index: Path, component: str, tensor: str | None, problem: str) -> WeightsError:
    return WeightsError(component, str(index), tensor, problem, _SAVE_AGAIN)


def _nothing_there(folder: Path, base: str, component: str) -> WeightsError:
    names = sorted(one.name for one in folder.iterdir()) if folder.is_dir() else []
    pickled = [one for one in names if one.endswith(_PICKLED)]
    if pickled:
        problem = (
            f"has its weights only as {', '.join(pickled)}: pickles, which can run code when they are read."
        )
        advice = (
            "If you trust it, convert it once: load it with from_pretrained, then save_pretrained(folder)."
        )
    else:
        problem = f"has no {base}{_SUFFIX} and no index of shards; there is: {', '.join(names) or 'nothing'}."
        advice = "Check the folder, or pass the variant= that was saved."
    return WeightsError(component, str(folder), None, problem, advice)
