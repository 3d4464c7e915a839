"""What a pipeline declares, by the sentences of the design's section 4: paths, lists, nothing to swap, tensors."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from omni_components import (
    DeclarationError,
    Offload,
    ResidencyWarning,
    Role,
    SplitModel,
    UnsupportedTensorError,
    declares_components,
    offload,
)
from tests.helpers.pipelines import Holder, Stack, build, footprint, frozen, places, resident_copy

ENCODER_AND_DIT = {"_encoder_modules": ["text_encoder"], "_dit_modules": ["transformer"]}


class Pipe(nn.Module):
    """A module pipeline; tests give it other lists."""

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = []
    _resident_modules: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder, self.transformer = Stack(), Stack()


def pipe_with(lists: dict[str, Any] | None = None, **children: Any) -> Pipe:
    """A pipeline with other lists and more attributes."""
    pipe = type("Pipe", (Pipe,), lists or {})()
    for name, child in children.items():
        setattr(pipe, name, child)
    return frozen(pipe)


def roles(handle: Offload) -> dict[str, str]:
    return {one.name: str(one.role) for one in handle.components}


# --- paths --------------------------------------------------------------------------------------------------


def test_paths_are_dotted_through_modules_attributes_and_indices(sim):
    """Modules, plain objects, lists and ModuleLists may lie on the way; the component is named by its path."""

    class Box:
        def __init__(self, module: nn.Module) -> None:
            self.module = module

    lists = {
        "_encoder_modules": ["inner.text.model", "box.module", "encoders.1"],
        "_dit_modules": ["stages.0"],
    }
    pipe = pipe_with(
        lists,
        inner=Holder(text=Holder(model=Stack())),
        box=Box(frozen(Stack())),
        encoders=[frozen(Stack()), frozen(Stack())],
        stages=nn.ModuleList([Stack(), Stack()]),
    )
    x = torch.randn(2, 16, device=sim.device)
    with offload(pipe, sim.device) as handle:
        assert roles(handle) == {
            "stages.0": "dit",
            "inner.text.model": "encoder",
            "box.module": "encoder",
            "encoders.1": "encoder",
            "(rest)": "resident",
        }
        for path, module in (
            ("box.module", pipe.box.module),
            ("encoders.1", pipe.encoders[1]),
            ("stages.0", pipe.stages[0]),
        ):
            module(x)
            assert path in handle.ledger.present
        handle.ledger.audit()


@pytest.mark.parametrize("path", ["optional", "optional.model", "inner.missing", "inner.missing.model.deep"])
@pytest.mark.parametrize(
    "attribute", ["_dit_modules", "_encoder_modules", "_vae_modules", "_resident_modules"]
)
def test_an_attribute_that_is_there_but_none_is_skipped(sim, attribute, path):
    """An optional module that this checkpoint lacks, wherever on the path it is missing."""
    lists: dict[str, list[str]] = {**ENCODER_AND_DIT}
    lists[attribute] = [path, *lists.get(attribute, [])]
    inner = Holder(here=Stack())
    inner.register_module("missing", None)
    pipe = pipe_with(lists, optional=None, inner=inner)
    with offload(pipe, sim.device) as handle:
        assert roles(handle) == {"transformer": "dit", "text_encoder": "encoder", "(rest)": "resident"}


@pytest.mark.parametrize("kind", [list, tuple, nn.ModuleList])
@pytest.mark.parametrize("count", [1, 3])
def test_a_list_of_modules_under_one_path_is_one_component(sim, kind, count):
    """I1: calling one of them brings all of them in, and a rival sends all of them home."""
    pipe = pipe_with(
        {**ENCODER_AND_DIT, "_dit_modules": ["blocks"]}, blocks=kind([frozen(Stack()) for _ in range(count)])
    )
    x = torch.randn(2, 16, device=sim.device)
    with offload(pipe, sim.device) as handle:
        assert roles(handle)["blocks"] == "dit"
        assert handle.components[0].tensors == count * 4
        for block in pipe.blocks:
            start = len(handle.events)
            block(x)
            assert all(one.device == sim.device for other in pipe.blocks for one in other.parameters())
        assert len(handle.events) == start or count == 1
        pipe.text_encoder(x)
        assert all(one.device.type == "cpu" for other in pipe.blocks for one in other.parameters())
        handle.ledger.audit()


def test_a_list_of_paths_may_be_a_tuple_and_differ_per_instance(sim):
    """A property may compute it from the checkpoint that was loaded."""

    class Flexible(Pipe):
        def __init__(self, deep: bool) -> None:
            super().__init__()
            self.extra = Stack() if deep else None
            self._dit_modules = ("transformer", "extra") if deep else ("transformer",)

        @property
        def _encoder_modules(self) -> list[str]:
            return ["text_encoder"]

    for deep in (False, True):
        with offload(frozen(Flexible(deep)), sim.device) as handle:
            assert list(roles(handle)) == ["transformer", *(["extra"] if deep else []), "text_encoder"]


def test_what_a_module_pipeline_holds_besides_its_components_is_resident(sim):
    """I8: on the device, counted, reported as ``(rest)``; also a tensor of the pipeline itself."""
    pipe = pipe_with(None, connector=Stack())
    pipe.register_buffer("sigmas", torch.rand(16))
    with offload(pipe, sim.device) as handle:
        assert roles(handle)["(rest)"] == "resident"
        assert pipe.sigmas.device == sim.device
        assert pipe.connector.layers[0].weight.device == sim.device
        assert sum(one.tensors for one in handle.components) == 4 * 3 + 1
        handle.ledger.audit()
    assert pipe.sigmas.device.type == "cpu"


# --- nothing to swap ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lists", "found"),
    [
        ({"_dit_modules": ["transformer"], "_encoder_modules": []}, ["transformer (dit)"]),
        ({"_dit_modules": [], "_encoder_modules": ["text_encoder"]}, ["text_encoder (encoder)"]),
        (
            {"_dit_modules": [], "_encoder_modules": ["text_encoder", "transformer"]},
            ["text_encoder", "transformer"],
        ),
        ({"_dit_modules": [], "_encoder_modules": []}, ["(rest) (resident)"]),
        (
            {
                "_dit_modules": [],
                "_encoder_modules": [],
                "_resident_modules": ["text_encoder"],
                "_vae_modules": ["transformer"],
            },
            ["text_encoder (resident)", "transformer (vae)"],
        ),
        ({"_dit_modules": ["nothing"], "_encoder_modules": ["text_encoder"]}, ["text_encoder (encoder)"]),
    ],
    ids=["no encoder", "no DiT", "encoders only", "nothing", "residents only", "DiT is None"],
)
def test_nothing_to_swap_is_an_error_that_says_what_was_found(sim, lists, found):
    """Never a warning and a silent no-op; nothing is touched."""
    pipe = pipe_with(lists, nothing=None)
    before = footprint(pipe), places(pipe)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DeclarationError, match="nothing to swap") as caught:
            offload(pipe, sim.device)
    assert all(one in str(caught.value) for one in found)
    assert (footprint(pipe), places(pipe)) == before


def test_a_role_that_nobody_would_send_home_is_refused_likewise(sim):
    """There is no encoder that the one DiT could make way for."""
    with pytest.raises(DeclarationError, match="nothing to swap"):
        offload(pipe_with({"_encoder_modules": []}), sim.device, offload_components={"dit"})


@pytest.mark.parametrize(
    "target", [nn.Linear(2, 2), Holder(text_encoder=Stack()), object.__new__(type("Plain", (), {}))]
)
def test_a_target_that_declares_nothing_is_refused_with_the_ways_to_declare(sim, target):
    """No name is guessed, however well known: a module called ``text_encoder`` is not taken for an encoder."""
    with pytest.raises(DeclarationError, match="declares no components") as caught:
        offload(target, sim.device)
    assert "_dit_modules" in str(caught.value)
    assert "SplitModel" in str(caught.value)


def test_declares_components_needs_three_lists_and_not_the_fourth():
    """``_resident_modules`` is optional: on classes and instances, for modules and plain objects."""
    lists = {"_dit_modules": [], "_encoder_modules": [], "_vae_modules": []}
    assert declares_components(type("Duck", (), lists)())
    assert declares_components(type("Duck", (), lists))
    assert declares_components(type("Duck", (), {**lists, "_resident_modules": []})())
    for missing in lists:
        assert not declares_components(type("Duck", (), {k: v for k, v in lists.items() if k != missing})())
    assert not declares_components(object())


# --- tensors that cannot be moved -------------------------------------------------------------------------


def test_loose_tensors_are_warned_about_by_name_once(sim):
    """Plain attributes of a component's modules, and of no other: nothing can move them."""
    pipe = pipe_with()
    pipe.transformer.layers[0].cache = torch.zeros(3)
    pipe.text_encoder.freqs = torch.zeros(3)
    with pytest.warns(ResidencyWarning, match="neither parameters nor buffers") as caught:
        handle = offload(pipe, sim.device)
    with handle:
        assert len(caught) == 1
        text = str(caught[0].message)
        assert "transformer.layers.0.cache" in text
        assert "text_encoder.freqs" in text
        assert caught[0].filename == __file__  # where the user called


def test_an_alias_of_a_parameter_as_a_plain_attribute_follows_nobody_and_is_named(sim):
    """``self.first = self.layers[0].weight`` as a tensor, not a parameter, keeps the host's memory."""
    pipe = pipe_with()
    pipe.transformer.layers[0].__dict__["alias"] = pipe.transformer.layers[0].weight.data
    with pytest.warns(ResidencyWarning, match=r"layers\.0\.alias"):
        offload(pipe, sim.device).disable()


def test_a_warning_that_is_an_error_leaves_nothing_attached(sim):
    """I6: all or nothing holds for ``-W error`` too."""
    pipe = pipe_with()
    pipe.transformer.cache = torch.zeros(3)
    before = footprint(pipe), places(pipe)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ResidencyWarning):
            offload(pipe, sim.device)
    assert (footprint(pipe), places(pipe)) == before


@pytest.mark.parametrize("part", [False, True], ids=["component", "part"])
@pytest.mark.parametrize("what", ["meta", "lazy", "sparse"])
def test_a_tensor_that_cannot_be_moved_is_refused_by_name_at_enable(sim, what, part):
    """I6: nothing was touched, and the error says what to do."""
    model = build("split") if part else pipe_with()
    module = model.B if part else model.transformer
    if what == "meta":
        module.layers[0].weight = nn.Parameter(torch.empty(2, 2, device="meta"), requires_grad=False)
    elif what == "lazy":
        module.layers[0] = nn.LazyLinear(16)
    else:
        module.layers[0].weight = nn.Parameter(torch.eye(16).to_sparse(), requires_grad=False)
    before = footprint(model)
    with pytest.raises(UnsupportedTensorError) as caught:
        offload(model, sim.device)
    assert caught.value.tensor.endswith("layers.0.weight")
    assert footprint(model) == before


# --- torch.compile -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arena", ["keep", "fit"])
def test_compiled_components_keep_their_declared_names_and_take_turns(sim, arena):
    """I2: unwrapped for naming; the hook is where the pipeline calls; no recompilation per switch."""
    torch._dynamo.reset()
    pipe = pipe_with()
    x = torch.randn(2, 16, device=sim.device)
    expected = resident_copy(pipe, sim.device)
    expected = [expected.text_encoder(x).cpu(), expected.transformer(x).cpu()]
    pipe.text_encoder = torch.compile(pipe.text_encoder, backend="eager")
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    with offload(pipe, sim.device, arena=arena) as handle:
        assert roles(handle) == {"transformer": "dit", "text_encoder": "encoder"}
        for _ in range(2):
            assert torch.equal(pipe.text_encoder(x).cpu(), expected[0])
            assert torch.equal(pipe.transformer(x).cpu(), expected[1])
        compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for _ in range(4):
            assert torch.equal(pipe.text_encoder(x).cpu(), expected[0])
            assert torch.equal(pipe.transformer(x).cpu(), expected[1])
            handle.ledger.audit()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled
    torch._dynamo.reset()


def test_a_path_through_a_compiled_module_does_not_name_the_wrapper(sim):
    """``inner.text`` is found in a compiled ``inner``, and a typo there suggests the real names."""
    pipe = pipe_with({**ENCODER_AND_DIT, "_encoder_modules": ["inner.text"]}, inner=Holder(text=Stack()))
    pipe.inner = torch.compile(pipe.inner, backend="eager")
    x = torch.randn(2, 16, device=sim.device)
    with offload(pipe, sim.device) as handle:
        assert "inner.text" in roles(handle)
        pipe.inner.text(x)
        assert "inner.text" in handle.ledger.present
    pipe = pipe_with({**ENCODER_AND_DIT, "_encoder_modules": ["inner.txt"]}, inner=pipe.inner)
    with pytest.raises(DeclarationError, match="Did you mean 'text'"):
        offload(pipe, sim.device)


class Halves(SplitModel):
    """A split model to be compiled."""

    _offload_components: ClassVar[dict[str, list[str]]] = {"first": ["one"], "second": ["other"]}

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Stack(), Stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self._offload_context("first"):
            x = self.one(x)
        with self._offload_context("second"):
            return self.other(x)


def test_a_split_model_behind_a_compile_wrapper_is_found_as_dit_and_as_target(sim):
    """Its parts are named as without the wrapper."""
    model = frozen(Halves())
    pipe = pipe_with(None, transformer=torch.compile(model, backend="eager"))
    with offload(pipe, sim.device) as handle:
        assert roles(handle) == {"first": "part", "second": "part", "text_encoder": "encoder"}
        assert {one.model for one in handle.components if one.role is Role.PART} == {"transformer"}
    with offload(torch.compile(model, backend="eager"), sim.device) as handle:
        assert roles(handle) == {"first": "part", "second": "part"}
