"""Safetensors files that are not what they say: found by file and tensor, before memory is taken. I6."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_components import WeightsError
from omni_components.loading.checkpoint import find_weights
from omni_components.loading.files import WeightsFile


def header_file(path: Path, header: object, data: bytes = b"", claim: int | None = None) -> Path:
    """A file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if claim is None else claim).to_bytes(8, "little") + text + data)
    return path


def entry(low: int, high: int, shape: object = (1,), kind: str = "F32") -> dict[str, object]:
    return {"dtype": kind, "shape": shape, "data_offsets": [low, high]}


WRONG = {
    "a header larger than its file": (b"{}", b"", 1 << 62),
    "a header that is no JSON": (b"{not json", b"", None),
    "a header that is no table": ([1], b"", None),
    "a name twice": (b'{"w":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"w":1}', b"0000", None),
    "a truncated tensor": ({"w": entry(0, 4)}, b"00", None),
    "overlapping tensors": ({"w": entry(0, 4), "v": entry(2, 6)}, b"000000", None),
    "a gap": ({"w": entry(4, 8)}, b"00000000", None),
    "bytes of nobody": ({"w": entry(0, 4)}, b"000000", None),
    "a shape that does not take its bytes": ({"w": entry(0, 4, [3])}, b"0000", None),
    "a negative shape": ({"w": entry(0, 4, [-1])}, b"0000", None),
    "an unknown element type": ({"w": entry(0, 4, [1], "F4")}, b"0000", None),
    "an entry without a place": ({"w": {"dtype": "F32"}}, b"", None),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_header_that_lies(tmp_path, fault):
    header, data, claim = WRONG[fault]
    path = header_file(tmp_path / "w.safetensors", header, data, claim)
    with pytest.raises(WeightsError) as caught:
        WeightsFile(path, "vae")
    assert caught.value.file == str(path)
    assert str(path) in str(caught.value)
    if "header" not in fault and fault != "bytes of nobody":
        assert caught.value.tensor in ("w", "v")


@pytest.mark.parametrize("size", [0, 7])
def test_a_file_too_short_for_a_header(tmp_path, size):
    (tmp_path / "w").write_bytes(b"0" * size)
    with pytest.raises(WeightsError, match="no safetensors file"):
        WeightsFile(tmp_path / "w", "vae")


def test_a_file_that_shrinks_after_its_header_was_read(tmp_path):
    save_file({"w": torch.ones(64)}, tmp_path / "w")
    found = WeightsFile(tmp_path / "w", "vae").entries["w"]
    (tmp_path / "w").write_bytes((tmp_path / "w").read_bytes()[:-8])
    with pytest.raises(WeightsError, match="ends in the middle"):
        found.read(torch.empty(256, dtype=torch.uint8), lambda count: None)


KINDS = [
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.bool,
    torch.int64,
    torch.complex64,
    torch.float64,
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (3, 5)], ids=str)
def test_an_element_type_or_shape_that_comes_out_other_than_the_formats_own_reader_gives(
    tmp_path, kind, shape
):
    values = torch.arange(15)[: math.prod(shape)].reshape(shape).to(kind)
    save_file({"w": values}, tmp_path / "w")
    right = load_file(tmp_path / "w")["w"]
    found = WeightsFile(tmp_path / "w", "vae").entries["w"]
    read = torch.empty(found.shape, dtype=found.dtype)
    if read.numel():
        found.read(read.view(-1).view(torch.uint8), lambda count: None)
    mapped = found.mapped()
    for one in (read, mapped):
        assert one.dtype == kind
        assert one.shape == right.shape
        assert torch.equal(one.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def shards(folder: Path, placed: dict[str, str], **files: list[str]) -> None:
    for name, tensors in files.items():
        save_file({one: torch.ones(2) for one in tensors}, folder / f"{name}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


def refused(folder: Path) -> WeightsError:
    with pytest.raises(WeightsError) as caught:
        find_weights(folder, "model", None, "encoder")
    return caught.value


def test_an_index_that_names_a_file_that_is_not_there(tmp_path):
    shards(tmp_path, {"a": "one.safetensors", "b": "gone.safetensors"}, one=["a"])
    error = refused(tmp_path)
    assert error.tensor == "b"
    assert "gone.safetensors" in str(error)


def test_an_index_that_leaves_its_folder(tmp_path):
    shards(tmp_path, {"a": "../one.safetensors"})
    assert "no plain file name" in str(refused(tmp_path))


def test_an_index_that_places_a_tensor_in_a_file_without_it(tmp_path):
    shards(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"}, one=["a"])
    assert refused(tmp_path).tensor == "b"


def test_a_tensor_in_two_shards(tmp_path):
    shards(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}, one=["a"], two=["a", "b"])
    error = refused(tmp_path)
    assert error.tensor == "a"
    assert "one.safetensors" in str(error)


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": {}}', "{"])
def test_an_index_that_is_none(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "no index of shards" in str(refused(tmp_path))


def test_a_tensor_of_a_shard_that_the_index_does_not_list_is_found_all_the_same(tmp_path):
    shards(tmp_path, {"a": "one.safetensors"}, one=["a", "extra"])
    assert set(find_weights(tmp_path, "model", None, "encoder")) == {"a", "extra"}


def test_pickles_only(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"")
    assert "model.bin" in str(refused(tmp_path))
    assert "save_pretrained" in refused(tmp_path).advice


def test_an_empty_folder(tmp_path):
    assert "there is: nothing" in str(refused(tmp_path))
