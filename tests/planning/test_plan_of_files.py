"""A plan of a pipeline in files is what its runs move and pin: the first request, and those that follow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import diffusers
import pytest
import torch
from benchmarks.plan_vs_run import planned, ran
from diffusers import ConfigMixin, DiffusionPipeline, ModelMixin
from diffusers.configuration_utils import register_to_config
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import nn

from omni_components import SplitModel, load_components, plan
from omni_components.components.unread import Unread
from omni_components.demo import DemoPipeline
from omni_components.planning.plan import Option, Plan
from omni_components.testing import SimulatedAccelerator
from omni_components.transfer import masters
from tests.diffusers import tiny

LINUX = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="mapped files are recognised on Linux only"
)
# Each example writes files, loads them twice and answers three requests.
a_share = settings(max_examples=max(10, settings().max_examples // 3))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Net(ModelMixin, ConfigMixin):
    """Parameters of given lengths, buffers that are stored, tables that the constructor computes, and a head.

    The tables come as a buffer each, as two views of one memory, and expanded from a single value.
    """

    @register_to_config
    def __init__(self, sizes: list[int], stored: list[int], tables: list[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(one)) for one in sizes)
        for index, length in enumerate(stored):
            self.register_buffer(f"stored{index}", torch.arange(length))
        for index, length in enumerate(tables):
            table = torch.arange(float(length + 8))
            self.register_buffer(f"table{index}", table, persistent=False)
            self.register_buffer(f"view{index}", table[4:], persistent=False)
            self.register_buffer(f"one{index}", torch.ones(1).expand(length + 1), persistent=False)
        self.head = nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _SplitNet(SplitModel, _Net):
    """The same in two parts; its buffers stay on the device."""

    _offload_components: ClassVar[dict[str, list[str]]] = {
        "first": ["weights.0"],
        "second": ["weights.1", "weights.2"],
    }


class _Pipeline(DiffusionPipeline):
    model_cpu_offload_seq = "text_encoder->transformer->vae"

    def __init__(self, text_encoder: Any, transformer: Any, vae: Any) -> None:
        super().__init__()
        self.register_modules(text_encoder=text_encoder, transformer=transformer, vae=vae)


class _Declared(_Pipeline):
    """It has the lists: its VAE stays on the device."""

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vae"]


class _Nested(_Declared):
    """A part of its transformer stays on the device: a slab that a loader fills is of two components."""

    _resident_modules: ClassVar[list[str]] = ["transformer.head"]


@pytest.fixture(scope="module", autouse=True)
def known() -> Iterator[None]:
    """A saved pipeline names its classes by their library: these are diffusers' for as long as the tests run."""
    with pytest.MonkeyPatch.context() as patch:
        for one in (_Net, _SplitNet, _Pipeline, _Declared, _Nested):
            patch.setattr(one, "__module__", "diffusers")
            patch.setattr(diffusers, one.__name__, one, raising=False)
        yield


LENGTHS = st.integers(1, 3) | st.integers(1, 600) | st.sampled_from([64, 128, 256, 1024])
SIZES = st.lists(LENGTHS, min_size=3, max_size=12)
SMALL = st.lists(st.integers(0, 40), max_size=2)


@st.composite
def pipelines(draw: st.DrawFn) -> _Pipeline:
    def net(kind: type[_Net] = _Net) -> Any:
        made: Any = kind(draw(SIZES), draw(SMALL), draw(SMALL))
        return made

    kind = draw(st.sampled_from([_Pipeline, _Declared, _Nested]))
    split = draw(st.booleans()) and kind is _Declared
    return kind(text_encoder=net(), transformer=net(_SplitNet if split else _Net), vae=net())


@st.composite
def slab_sizes(draw: st.DrawFn) -> dict[str, int]:
    """So small that a component takes several; each at least as large as the alignment."""
    return {
        "SLAB_BYTES": 256 * draw(st.integers(1, 30)),
        "_SMALL": draw(st.sampled_from([0, 1 << 20])),
        "_RAGGED": draw(st.sampled_from([0, 2, 16])),
        "STAGING_BYTES": 256 * draw(st.integers(1, 30)),
    }


def patched(patch: pytest.MonkeyPatch, sizes: dict[str, int]) -> None:
    for name in ("SLAB_BYTES", "_SMALL", "_RAGGED"):
        patch.setattr(masters, name, sizes[name])
    for user in ("omni_components.planning.paper", "omni_components.attach.fleet"):
        patch.setattr(f"{user}.STAGING_BYTES", sizes["STAGING_BYTES"])


def swapping(found: Plan) -> list[Option]:
    return [one for one in found.options if one.arguments is not None]


def options(found: Plan) -> dict[str, Any]:
    return {one.name: planned(one, found) for one in found.options}


# --- random pipelines ---------------------------------------------------------------------------------------


@LINUX
@a_share
@given(data=st.data())
def test_a_first_or_later_request_of_a_pipeline_from_files_that_is_not_as_planned(
    data: st.DataObject,
) -> None:
    """I8: from the folder and from the loaded pipeline; cast or not, in shards or not, read at once or lazily."""
    stored, wanted = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(DTYPES))
    shards, lazy = data.draw(st.sampled_from(["1KB", "5GB"])), data.draw(st.booleans())
    with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch, SimulatedAccelerator() as sim:
        patched(patch, data.draw(slab_sizes()))
        data.draw(pipelines()).to(stored).save_pretrained(place, max_shard_size=shards)

        def loaded() -> Any:
            return tiny.quiet(load_components(place, dtype=wanted, lazy=lazy))

        found = plan(place, dtype=wanted)
        assert options(plan(loaded())) == options(found)
        option = data.draw(st.sampled_from(swapping(found)))
        event(f"{option.name}, {'as stored' if stored is wanted else 'cast'}")
        assert ran(loaded(), sim, dict(option.arguments or {})) == planned(option, found)


@LINUX
@a_share
@given(data=st.data())
def test_a_pipeline_whose_masters_were_filled_by_its_loader_and_that_is_not_as_planned(
    data: st.DataObject,
) -> None:
    """I8: slabs that are there already are taken as they are, what the constructor computed gets others."""
    with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch, SimulatedAccelerator() as sim:
        patched(patch, data.draw(slab_sizes()))
        data.draw(pipelines()).save_pretrained(place)
        pipe = tiny.quiet(load_components(place, masters="pinned", lazy=data.draw(st.booleans())))
        found = plan(pipe)
        assert {one.name for one in swapping(found)} == {"model level", "exclusive VAE"}
        option = data.draw(st.sampled_from(swapping(found)))
        assert ran(pipe, sim, dict(option.arguments or {})) == planned(option, found)


# --- single facts -------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three components: 20 weights of 100 values, a head, 8 bytes that are stored, a table and its views."""
    nets = [_Net([100] * 20, [1], [2]) for _ in range(3)]
    _Pipeline(*nets).save_pretrained(tmp_path)
    return tmp_path


def by_name(found: Plan, name: str) -> Option:
    return next(one for one in found.options if one.name == name)


PAGE = masters.pages(1)
WEIGHTS, STORED = 20 * 400 + 60 + 20, 8  # bytes
TABLES = 40 + 4  # two of three share their memory, and the third is a single value


@LINUX
def test_the_bytes_of_one_component_as_a_person_adds_them_up(folder: Path) -> None:
    """I8: staged, weights lie 512 bytes apart; under ``mapped`` tables alone are pinned, a page for each component."""
    found = plan(folder)
    mapped, usual = by_name(found, "mapped"), by_name(found, "model level")
    # A component's own buffer comes first, the head's bias last; the last of a copy brings no padding.
    through = 3 * (256 + 20 * 512 + 256 + 20 + TABLES)
    payload = 3 * (WEIGHTS + STORED + TABLES)
    assert mapped.first.link_bytes == mapped.link_bytes == usual.first.link_bytes == through
    assert usual.link_bytes == by_name(found, "pinned").first.link_bytes == payload
    slab = masters.pages(256 + 20 * 512 + 4 * 256)  # the staging slabs are as large as the largest component
    assert mapped.pinned_bytes == usual.first.pinned_bytes == 2 * slab + 3 * PAGE
    assert usual.pinned_bytes == 3 * (masters.pages(256 + 20 * 512 + 2 * 256) + PAGE)
    assert usual.host_bytes == usual.pinned_bytes + 2 * slab


@LINUX
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slab_that_is_filled_for_two_components_and_is_not_as_planned(
    tmp_path: Path, sim: Any, dtype: torch.dtype
) -> None:
    """I3: what no component has all of is packed anew, together with what a constructor computed."""
    _Nested(*[_Net([100] * 20, [1], [2]) for _ in range(3)]).save_pretrained(tmp_path)
    found = plan(tmp_path, dtype=dtype)
    for option in swapping(found):
        pipe = tiny.quiet(load_components(tmp_path, dtype=dtype))
        assert ran(pipe, sim, dict(option.arguments or {})) == planned(option, found)


@LINUX
def test_a_second_staging_slab_that_only_the_second_request_takes(tmp_path: Path, sim: Any) -> None:
    """I8: all that stays in pages goes as one copy a request; the rest is cast."""
    _Pipeline(*[_Net([100] * 3, stored, [2]) for stored in ([40], [], [])]).save_pretrained(tmp_path)
    found = plan(tmp_path, dtype=torch.bfloat16)
    option = by_name(found, "mapped")
    assert option.pinned_bytes - option.first.pinned_bytes == PAGE
    pipe = tiny.quiet(load_components(tmp_path, dtype=torch.bfloat16))
    assert ran(pipe, sim, dict(option.arguments or {})) == planned(option, found)


def test_a_plan_that_reads_what_was_left_for_later(folder: Path) -> None:
    pipe = load_components(folder, dtype=torch.bfloat16, lazy=True)
    found = plan(pipe)
    weights = [one for net in pipe.components.values() for one in net.parameters()]
    assert {type(one) for one in weights} == {Unread}
    assert options(found) == options(plan(folder, dtype=torch.bfloat16))


@LINUX
def test_residents_in_pages_of_files_that_are_not_as_planned(sim: Any) -> None:
    """I8: they pass through the staging slabs, which are pinned from then on."""

    def loaded() -> DemoPipeline:
        return DemoPipeline.from_pretrained(mapped=True)

    found = plan(loaded())
    for option in swapping(found):
        assert ran(loaded(), sim, dict(option.arguments or {})) == planned(option, found)
    assert (
        by_name(found, "model level").resident_link_bytes
        > by_name(plan("demo"), "model level").resident_link_bytes
    )
