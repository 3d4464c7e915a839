"""Files are in memory before they are needed, in the order in which they are; I7: and nothing else depends on it."""

from __future__ import annotations

import json
import os
import time

import pytest
import torch
from diffusers import DiffusionPipeline, FluxPipeline, StableDiffusionXLPipeline
from safetensors.torch import save_file

from omni_components import WeightsError, load_components
from omni_components.demo import DemoPipeline
from omni_components.loading import readahead
from omni_components.loading.files import WeightsFile
from omni_components.loading.readahead import (
    PIECE,
    ReadAhead,
    bring_in,
    in_order,
    is_in_memory,
    running_order,
)
from omni_components.transfer import hostmemory
from tests.diffusers import tiny

MIB = 1 << 20


@pytest.fixture
def file(tmp_path):
    """More than two pieces, the last of them not whole."""
    save_file({"w": torch.arange(9 * MIB, dtype=torch.int32)}, tmp_path / "w.safetensors")
    return WeightsFile(tmp_path / "w.safetensors", "encoder")


@pytest.fixture
def asked(monkeypatch):
    """What was to be brought in: ``(path, start, bytes)``."""
    found = []

    def note(path, pages, start):
        found.append((path, start, pages.numel()))

    monkeypatch.setattr(readahead, "bring_in", note)
    return found


def dropped(file):
    """Whether the system has dropped a file from memory."""
    with file.path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return not is_in_memory(opened.fileno(), 0, file.size)


def there(file):
    with file.path.open("rb") as opened:
        return is_in_memory(opened.fileno(), 0, file.size)


# --- what is read ----------------------------------------------------------------------------------------


def test_every_byte_is_asked_for_once(file, asked):
    ReadAhead([file]).wait()
    ends = [(start, start + count) for _, start, count in sorted(asked)]
    assert ends == [(0, PIECE), (PIECE, 2 * PIECE), (2 * PIECE, file.size)]


def test_a_host_without_room_for_all_of_it(file, asked):
    """I8: no more than the limit, counted over all files."""
    ReadAhead([file, file], limit=file.size + 4096).wait()
    assert sum(count for *_, count in asked) == file.size + 4096


def test_a_container_that_has_less_memory_than_the_machine(file, asked, monkeypatch):
    monkeypatch.setattr(readahead, "pinnable_bytes", lambda: 2 * MIB)
    ReadAhead([file]).wait()
    assert asked == [(file.path, 0, int(0.5 * 2 * MIB))]


def test_a_file_that_was_on_the_disk_only(file):
    if not dropped(file):
        pytest.skip("this file system keeps its files in memory, whatever it is told")
    ReadAhead([file]).wait()
    assert there(file)


def test_an_older_system_is_asked_another_way(file, monkeypatch):
    """Linux before 5.14 refuses what reads pages at once."""
    told = []
    monkeypatch.setattr(readahead, "is_in_memory", lambda *asked: False)
    monkeypatch.setattr(hostmemory, "_POPULATE_READ", -1)
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *asked: told.append(asked))
    bring_in(file.path, file.pages()[:PIECE], 0)
    assert told == [(0, PIECE, os.POSIX_FADV_WILLNEED)]


@pytest.mark.parametrize("gone", [{"posix_fadvise", "RWF_NOWAIT"}, {"posix_fadvise"}])
def test_a_system_that_has_none_of_it(file, monkeypatch, gone):
    for name in gone:
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(hostmemory, "_POPULATE_READ", -1)
    ReadAhead([file]).wait()  # an exception in a thread would fail this test
    assert file.entries["w"].mapped()[-1] == 9 * MIB - 1


def test_a_file_that_is_deleted_meanwhile(file):
    file.path.unlink()
    ReadAhead([file]).wait()
    with pytest.raises(WeightsError):
        file.entries["w"].read(torch.empty(36 * MIB, dtype=torch.uint8), lambda count: None)


def test_a_file_that_is_cut_short_meanwhile(file):
    """Its pages past the end must not be touched: the system would end the process."""
    os.truncate(file.path, MIB)
    ReadAhead([file]).wait()
    with pytest.raises(WeightsError, match="ends in the middle"):
        file.entries["w"].read(torch.empty(36 * MIB, dtype=torch.uint8), lambda count: None)


# --- when ------------------------------------------------------------------------------------------------


def test_a_transformer_that_is_read_before_the_encoder_that_runs_first(tmp_path, asked, monkeypatch):
    """The folder lists its components by name, whatever runs first."""
    monkeypatch.setattr(readahead, "READERS", 1)
    index = tmp_path / "model_index.json"
    tiny.stable_diffusion_3().save_pretrained(tmp_path)
    listed = json.loads(index.read_text())
    index.write_text(json.dumps(dict(reversed(listed.items()))))
    load_components(tmp_path)
    files = set(tmp_path.rglob("*.safetensors"))
    for _ in range(1000):
        if len({path for path, *_ in asked}) == len(files):
            break
        time.sleep(0.01)
    read = list(dict.fromkeys(path.parent.name for path, *_ in asked))
    assert read == ["text_encoder", "text_encoder_2", "text_encoder_3", "transformer", "vae"]


@pytest.mark.parametrize(
    ("kind", "first", "last"),
    [
        (FluxPipeline, "text_encoder", "vae"),
        (StableDiffusionXLPipeline, "text_encoder", "vae"),
        (DemoPipeline, "text_encoder", "vae"),
    ],
)
def test_the_order_in_which_a_class_runs(kind, first, last):
    order = running_order(kind)
    assert (order[0], order[-1]) == (first, last)


def test_a_class_that_does_not_say_in_which_order_it_runs():
    assert running_order(DiffusionPipeline) == []
    assert running_order(None) == []


def test_components_that_the_order_does_not_name_come_last(tmp_path):
    made = {}
    for name in ("adapter", "transformer", "text_encoder"):
        save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / f"{name}.safetensors")
        made[name] = WeightsFile(tmp_path / f"{name}.safetensors", name).entries
    found = in_order(made, ["text_encoder", "image_encoder", "transformer"])
    assert [one.path.stem for one in found] == ["text_encoder", "transformer", "adapter"]
