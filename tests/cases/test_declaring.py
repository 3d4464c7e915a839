"""Faults of declarations: refused before anything is touched. Cases C13, C19, C31, C32 and C35."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import pytest
import torch
from torch import nn

from omni_components import (
    ComponentNotFoundError,
    DeclarationError,
    OmniComponentsError,
    OwnershipError,
    PolicyError,
    SplitModel,
    SupportsComponentDiscovery,
    declares_components,
    offload,
)
from tests.helpers.pipelines import (
    Holder,
    PlainPair,
    Stack,
    build,
    footprint,
    frozen,
    places,
    resident_copy,
    same_values,
    values,
)


def declared(target: object, **lists: list[str]) -> object:
    """The target with other lists; those not named are empty."""
    empty = {"_dit_modules": [], "_encoder_modules": [], "_vae_modules": [], "_resident_modules": []}
    target.__class__ = type(type(target).__name__, (type(target),), {**empty, **lists})
    return target


def refused(target: object, device: torch.device, kind: type[OmniComponentsError], **fields: object) -> str:
    """The text with which a target is refused, having made sure that nothing was touched."""
    before, marks, where = values(target), footprint(target), places(target)
    with pytest.raises(kind) as caught:
        offload(target, device, **fields)
    assert footprint(target) == marks
    assert places(target) == where
    assert same_values(target, before)
    return str(caught.value)


# --- C13: one component inside another -------------------------------------------------------------------


class Transformer(nn.Module):
    """A DiT that holds an encoder of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.context_embedder = Holder(text_encoder=Stack())
        self.body = Stack()
        self.norms = nn.ModuleList([Stack(depth=1), Stack(depth=1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm in self.norms:
            x = norm(x)
        return self.body(x) + self.context_embedder.text_encoder(x)


class Nest(nn.Module):
    """A pipeline around it."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer, self.text_encoder, self.vae = Transformer(), Stack(), Stack()


INNER = "transformer.context_embedder.text_encoder"


@pytest.mark.parametrize(
    ("lists", "inner", "outer"),
    [
        ({"_dit_modules": ["transformer"], "_encoder_modules": [INNER]}, INNER, "transformer"),
        (
            {
                "_dit_modules": ["transformer"],
                "_encoder_modules": ["text_encoder"],
                "_vae_modules": ["transformer.body"],
            },
            "transformer.body",
            "transformer",
        ),
        ({"_dit_modules": ["transformer", "transformer.body"]}, "transformer.body", "transformer"),
        (
            {"_dit_modules": ["transformer.body"], "_encoder_modules": ["transformer"]},
            "transformer.body",
            "transformer",
        ),
        (
            {"_dit_modules": ["transformer"], "_encoder_modules": ["transformer.norms"]},
            "transformer.norms",
            "transformer",
        ),
        (
            {
                "_dit_modules": ["vae"],
                "_encoder_modules": ["transformer"],
                "_resident_modules": ["transformer.body"],
            },
            "transformer.body",
            "transformer",
        ),
    ],
    ids=[
        "encoder in DiT",
        "VAE in DiT",
        "DiT in DiT",
        "DiT in encoder",
        "list in DiT",
        "resident in encoder",
    ],
)
def test_c13_a_component_inside_another_is_refused_with_both_paths(sim, lists, inner, outer):
    """I3: two owners of one weight are never attached."""
    pipe = declared(frozen(Nest()), **lists)
    text = refused(pipe, sim.device, DeclarationError)
    assert repr(inner) in text
    assert repr(outer) in text


@pytest.mark.parametrize("vae", ["resident", "exclusive"])
def test_c13_an_encoder_in_a_compiled_dit_is_refused_too(sim, vae):
    """I3: a torch.compile wrapper hides nothing."""
    pipe = Nest()
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    pipe = declared(frozen(pipe), _dit_modules=["transformer"], _encoder_modules=[INNER])
    text = refused(pipe, sim.device, DeclarationError, vae=vae)
    assert repr(INNER) in text
    assert "'transformer'" in text


class SplitTransformer(SplitModel):
    """A split DiT: two parts, and a module in neither."""

    _offload_components: ClassVar[dict[str, list[str]]] = {"reasoner": ["reader"], "generator": ["writer"]}

    def __init__(self) -> None:
        super().__init__()
        self.reader, self.writer, self.shared = Holder(inner=Stack()), Stack(), Stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self._offload_context("reasoner"):
            x = self.shared(self.reader.inner(x))
        with self._offload_context("generator"):
            return self.writer(self.shared(x))


class SplitNest(nn.Module):
    """A pipeline around a split DiT."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer, self.text_encoder = SplitTransformer(), Stack()


@pytest.mark.parametrize("attribute", ["_encoder_modules", "_vae_modules", "_dit_modules"])
@pytest.mark.parametrize("inner", ["reader.inner", "writer", "shared"])
def test_c13_a_component_inside_a_split_model_is_refused_whether_in_a_part_or_in_none(sim, inner, attribute):
    """I3: what is in no part is resident already, and belongs to the split model."""
    lists = {"_dit_modules": ["transformer"], "_encoder_modules": ["text_encoder"]}
    lists[attribute] = [*lists.get(attribute, []), f"transformer.{inner}"]
    text = refused(declared(frozen(SplitNest()), **lists), sim.device, DeclarationError)
    assert f"'transformer.{inner}'" in text
    assert {"reader.inner": "reasoner", "writer": "generator", "shared": "transformer"}[inner] in text


def test_c13_a_component_around_a_split_model_is_refused_with_both_names(sim):
    """I3: the outer one would move the parts of the inner one."""
    pipe = frozen(SplitNest())
    pipe.wrapper = nn.Sequential(pipe.transformer)
    pipe = declared(pipe, _dit_modules=["transformer"], _encoder_modules=["wrapper"])
    text = refused(pipe, sim.device, DeclarationError)
    assert "'wrapper'" in text
    assert "'reasoner'" in text


@pytest.mark.parametrize("inner", ["transformer.body", "transformer.norms"])
def test_c13_a_resident_inside_a_dit_is_allowed_and_taken_out_of_it(sim, inner):
    """I3, I8: its bytes are counted once, for the resident; the rest of the DiT takes turns."""
    pipe = declared(
        frozen(Nest()),
        _dit_modules=["transformer"],
        _encoder_modules=["text_encoder"],
        _resident_modules=[inner],
    )
    x = torch.randn(2, 16, device=sim.device)
    expected = resident_copy(pipe, sim.device).transformer(x).cpu()
    with offload(pipe, sim.device) as handle:
        pipe.text_encoder(x)
        assert (
            pipe.get_parameter(f"{inner}.{'layers.0' if 'body' in inner else '0.layers.0'}.weight").device
            == sim.device
        )
        assert torch.equal(pipe.transformer(x).cpu(), expected)
        pipe.text_encoder(x)
        assert pipe.transformer.context_embedder.text_encoder.layers[0].weight.device.type == "cpu"
        handle.ledger.audit()
        sizes = {one.name: one.tensors for one in handle.components}
        assert sizes[inner] == len(list(pipe.get_submodule(inner).parameters()))
        assert sizes["transformer"] + sizes[inner] == len(list(pipe.transformer.parameters()))


def test_c13_a_resident_in_no_part_of_a_split_model_is_one_resident(sim):
    """I3, I8: it would be resident anyway; declaring it does not count it twice."""
    pipe = declared(
        frozen(SplitNest()),
        _dit_modules=["transformer"],
        _encoder_modules=["text_encoder"],
        _resident_modules=["transformer.shared"],
    )
    x = torch.randn(2, 16, device=sim.device)
    expected = resident_copy(pipe, sim.device).transformer(x).cpu()
    with offload(pipe, sim.device) as handle:
        assert torch.equal(pipe.transformer(x).cpu(), expected)
        handle.ledger.audit()
        assert sum(one.tensors for one in handle.components) == len(list(pipe.parameters()))
        assert [one.name for one in handle.components if one.resident] == ["transformer.shared"]


# --- C19: components that are never called --------------------------------------------------------------


class Bare(SplitModel):
    """Parts that no hook could serve: a bare ModuleList, single parameters, a ParameterList, a buffer."""

    _offload_components: ClassVar[dict[str, list[str]]] = {
        "blocks": ["blocks"],
        "tables": ["table", "tables", "offset"],
        "dictionary": ["heads"],
    }

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.table = nn.Parameter(torch.randn(16))
        self.tables = nn.ParameterList([torch.randn(16), torch.randn(16)])
        self.register_buffer("offset", torch.randn(16))
        self.heads = nn.ModuleDict({"left": nn.Linear(16, 16), "right": nn.Linear(16, 16)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self._offload_context("blocks"):
            for block in self.blocks:
                x = block(x)
        with self._offload_context("tables"):
            x = x * self.table + self.tables[0] + self.tables[1] + self.offset
        with self._offload_context("dictionary"):
            return self.heads["left"](x) + self.heads["right"](x)


@pytest.mark.parametrize("arena", ["keep", "fit"])
def test_c19_a_bare_module_list_and_single_parameters_are_parts_like_any_other(sim, arena):
    """I1, I2: scopes need no call to hang on."""
    model = frozen(Bare())
    x = torch.randn(2, 16, device=sim.device)
    expected = resident_copy(model, sim.device)(x).cpu()
    with offload(model, sim.device, arena=arena) as handle:
        for _ in range(2):
            assert torch.equal(model(x).cpu(), expected)
            handle.ledger.audit()
        with handle.scope("tables"):
            assert model.table.device == model.tables[1].device == model.offset.device == sim.device
            assert model.blocks[0].weight.device.type == "cpu"


class Uncalled(nn.Module):
    """A pipeline with things that are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder, self.transformer = Stack(), Stack()
        self.heads = nn.ModuleDict({"left": nn.Linear(16, 16)})
        self.nested = nn.ModuleList([nn.ModuleList([Stack()])])
        self.holder = Holder(inner=Stack())
        self.tables = nn.ParameterList([torch.randn(16)])


@pytest.mark.parametrize("attribute", ["_dit_modules", "_encoder_modules", "_vae_modules"])
@pytest.mark.parametrize("path", ["heads", "nested", "holder", "tables"])
def test_c19_a_component_that_is_never_called_is_refused_with_advice(sim, path, attribute):
    """No hook could bring it in: the error names it, its kind, and ``_offload_context``."""
    lists = {"_dit_modules": ["transformer"], "_encoder_modules": ["text_encoder"]}
    lists[attribute] = [*lists.get(attribute, []), path]
    text = refused(declared(frozen(Uncalled()), **lists), sim.device, DeclarationError, vae="exclusive")
    assert path in text
    assert "_offload_context" in text


# --- C31: paths that name nothing, or nothing that moves --------------------------------------------------


def test_c31_a_duck_typed_pipeline_without_the_resident_list_conforms(sim):
    """``isinstance`` refuses it, as Python's protocols do; ``declares_components`` and ``offload`` accept it."""
    pipe = frozen(PlainPair())
    assert not isinstance(pipe, SupportsComponentDiscovery)
    assert declares_components(pipe)
    x = torch.randn(2, 16, device=sim.device)
    expected = resident_copy(pipe, sim.device).use("B", x).cpu()
    with offload(pipe, sim.device) as handle:
        assert torch.equal(pipe.use("B", x).cpu(), expected)
        handle.ledger.audit()


class Odd:
    """A pipeline with attributes of every wrong kind."""

    label = "a string"

    def __init__(self) -> None:
        self.text_encoder, self.transformer = Stack(), Stack()
        self.inner = Holder(text_model=Stack())
        self.optional = None
        self.number = 7
        self.weight = torch.zeros(3)
        self.empty: list[nn.Module] = []
        self.mixed = [Stack(), "no module"]

    @property
    def broken(self) -> nn.Module:
        return self.text_encoder.no_such_thing

    @cached_property
    def cached(self) -> nn.Module:
        return self.text_encoder.no_such_thing

    @property
    def refusing(self) -> nn.Module:
        raise ValueError("not loaded yet")

    @property
    def keyed(self) -> nn.Module:
        return {}["not loaded yet"]

    def method(self) -> None:
        """No module either."""


LISTS = ["_dit_modules", "_encoder_modules", "_vae_modules", "_resident_modules"]


@pytest.mark.parametrize("attribute", LISTS)
@pytest.mark.parametrize(
    ("path", "broke_at", "hint"),
    [
        ("transfomer", "transfomer", "transformer"),
        ("inner.text_modle", "text_modle", "text_model"),
        ("inner.text_model.layer", "layer", "layers"),
        ("iner.text_model", "iner", "inner"),
        ("text_encoder.layers.7", "7", None),
    ],
)
def test_c31_a_typo_in_a_path_is_named_with_where_it_broke_and_the_nearest_name(
    sim, path, broke_at, hint, attribute
):
    lists = {"_dit_modules": ["transformer"], "_encoder_modules": ["text_encoder"]}
    lists[attribute] = [*lists.get(attribute, []), path]
    pipe = declared(Odd(), **lists)
    with pytest.raises(ComponentNotFoundError) as caught:
        offload(pipe, sim.device)
    assert (caught.value.path, caught.value.broke_at) == (path, broke_at)
    assert repr(path) in str(caught.value)
    if hint:
        assert hint in caught.value.known
        assert f"Did you mean {hint!r}" in str(caught.value)


@pytest.mark.parametrize("path", ["broken", "cached", "inside.broken", "inside.cached"])
def test_c31_an_attribute_error_inside_a_property_is_shown_as_it_is(sim, path):
    """The name is there; what it says when asked is the fault, not a missing path. Also inside a module."""

    class Inside(Holder):
        broken, cached = Odd.broken, cached_property(lambda self: self.text_encoder.no_such_thing)

    Inside.cached.__set_name__(Inside, "cached")
    pipe = declared(Odd(), _dit_modules=["transformer"], _encoder_modules=[path])
    pipe.inside = Inside(text_encoder=Stack())
    with pytest.raises(DeclarationError, match="no_such_thing") as caught:
        offload(pipe, sim.device)
    assert not isinstance(caught.value, ComponentNotFoundError)
    assert isinstance(caught.value.__cause__, AttributeError)
    assert repr(path) in str(caught.value)


@pytest.mark.parametrize(
    "attribute", ["_dit_modules", "_encoder_modules", "_vae_modules", "_resident_modules"]
)
@pytest.mark.parametrize("base", [Stack, object])
def test_c31_an_attribute_error_inside_a_list_that_is_computed_is_shown_as_it_is(sim, base, attribute):
    """It does not read as a pipeline that declares nothing."""
    lists = {"_dit_modules": ["transformer"], "_encoder_modules": ["text_encoder"], "_vae_modules": []}
    computed = property(lambda self: self.config.no_such_thing)
    pipe = type("Computed", (base,), {**lists, attribute: computed, "config": None})()
    pipe.text_encoder, pipe.transformer = Stack(), Stack()
    with pytest.raises(DeclarationError, match="no_such_thing"):
        offload(pipe, sim.device)


def test_c31_a_resident_list_of_none_is_no_list(sim):
    """It is optional."""
    pipe = declared(
        Odd(), _dit_modules=["transformer"], _encoder_modules=["text_encoder"], _resident_modules=None
    )
    with offload(pipe, sim.device) as handle:
        assert {one.name for one in handle.components} == {"transformer", "text_encoder"}


@pytest.mark.parametrize(("path", "error"), [("refusing", ValueError), ("keyed", KeyError)])
def test_c31_any_other_error_inside_a_property_goes_on_untouched(sim, path, error):
    pipe = declared(Odd(), _dit_modules=["transformer"], _encoder_modules=[path])
    with pytest.raises(error, match="not loaded yet"):
        offload(pipe, sim.device)


@pytest.mark.parametrize("attribute", LISTS)
@pytest.mark.parametrize(
    "path", ["label", "number", "weight", "empty", "mixed", "method", "text_encoder.layers.0.weight"]
)
def test_c31_a_path_to_anything_but_modules_is_refused_by_name(sim, path, attribute):
    lists = {"_dit_modules": ["transformer"], "_encoder_modules": ["text_encoder"]}
    lists[attribute] = [*lists.get(attribute, []), path]
    with pytest.raises(DeclarationError, match=repr(path).replace(".", r"\.")) as caught:
        offload(declared(Odd(), **lists), sim.device)
    assert not isinstance(caught.value, ComponentNotFoundError)


@pytest.mark.parametrize(
    "lists",
    [
        {"_encoder_modules": "text_encoder"},
        {"_encoder_modules": [7]},
        {"_dit_modules": None},
        {"_resident_modules": "transformer"},
        {"_resident_modules": 7},
    ],
)
def test_c31_lists_that_are_no_lists_of_paths_are_refused(sim, lists):
    pipe = declared(Odd(), **{"_dit_modules": ["transformer"], "_encoder_modules": ["text_encoder"], **lists})
    with pytest.raises(DeclarationError):
        offload(pipe, sim.device)


# --- C32: claimed twice ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lists", "owners"),
    [
        (
            {
                "_dit_modules": ["transformer"],
                "_encoder_modules": ["text_encoder", "vae"],
                "_vae_modules": ["vae"],
            },
            ("encoder", "vae"),
        ),
        (
            {
                "_dit_modules": ["transformer", "vae"],
                "_encoder_modules": ["text_encoder"],
                "_vae_modules": ["vae"],
            },
            ("dit", "vae"),
        ),
        (
            {"_dit_modules": ["transformer"], "_encoder_modules": ["text_encoder", "transformer"]},
            ("dit", "encoder"),
        ),
        (
            {
                "_dit_modules": ["transformer"],
                "_encoder_modules": ["text_encoder"],
                "_resident_modules": ["text_encoder"],
            },
            ("encoder", "resident"),
        ),
    ],
)
def test_c32_a_module_in_two_lists_is_refused_with_both_roles(sim, lists, owners):
    """I3: a VAE listed as VAE and as a phase, and every other pair of roles."""
    text = refused(declared(frozen(Nest()), **lists), sim.device, OwnershipError, vae="exclusive")
    assert all(f"({role})" in text for role in owners)


def test_c32_a_module_under_two_paths_of_one_list_is_one_component(sim):
    """I3: an alias is no second component."""
    pipe = frozen(Nest())
    pipe.alias = pipe.text_encoder
    pipe = declared(pipe, _dit_modules=["transformer"], _encoder_modules=["text_encoder", "alias"])
    with offload(pipe, sim.device) as handle:
        assert [one.name for one in handle.components if not one.resident] == ["transformer", "text_encoder"]


@pytest.mark.parametrize("shared", ["whole encoder", "submodule", "tensor", "split model"])
def test_c32_a_component_claimed_by_two_ledgers_is_refused_with_both_owners(sim, shared):
    """I3: by the module itself, by a module or a tensor inside it, or as a split model."""
    one, other = frozen(Nest()), frozen(SplitNest())
    lists = {"_dit_modules": ["transformer"], "_encoder_modules": ["text_encoder"]}
    one, other = declared(one, **lists), declared(other, **lists)
    if shared == "whole encoder":
        other.text_encoder = one.text_encoder
    elif shared == "submodule":
        other.text_encoder.layers[0] = one.text_encoder.layers[0]
    elif shared == "tensor":
        other.text_encoder.layers[0].weight = one.text_encoder.layers[0].weight
    else:
        one.transformer = other.transformer
    x = torch.randn(2, 16, device=sim.device)
    with offload(one, sim.device) as handle:
        before = footprint(other)
        with pytest.raises(OwnershipError) as caught:
            offload(other, sim.device)
        assert {"Nest", "SplitNest"} <= set(str(caught.value).replace(".", " ").split())
        assert footprint(other) == before
        one.text_encoder(x)
        one.transformer(x)
        handle.ledger.audit()
    with offload(other, sim.device) as handle:  # the first has let go
        other.text_encoder(x)
        other.transformer(x)
        handle.ledger.audit()


# --- C35: roles that cannot be selected -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("roles", "valid"),
    [
        ({"vae"}, ("encoder", "dit")),
        ({"transformr"}, ("encoder", "dit")),
        ({"encoder", "decoder"}, ("encoder", "dit")),
        (set(), ("encoder", "dit")),
        ("dit", ("encoder", "dit")),
    ],
    ids=["vae", "unknown", "one unknown", "none", "a string"],
)
def test_c35_roles_that_cannot_be_selected_are_refused_with_the_valid_ones(sim, roles, valid):
    """Nothing is touched, and an offload that is on stays on."""
    pipe = build("pipeline")
    text = refused(pipe, sim.device, PolicyError, offload_components=roles)
    assert all(one in text for one in valid)
    with offload(pipe, sim.device) as handle:
        with pytest.raises(PolicyError):
            offload(pipe, sim.device, offload_components=roles)
        assert handle.enabled
        pipe.use("A", torch.randn(2, 16))
        handle.ledger.audit()


@pytest.mark.parametrize("kind", ["pipeline", "duck", "split"])
def test_c35_a_selected_role_that_the_pipeline_lacks_is_refused_with_those_it_has(sim, kind):
    target = build(kind)
    fields = (
        {"offload_components": {"encoder"}}
        if kind == "split"
        else {"offload_components": {"vae"}, "vae": "exclusive"}
    )
    text = refused(target, sim.device, PolicyError, **fields)
    assert "dit" in text


def test_c35_vae_may_be_selected_where_it_takes_turns(sim):
    """The same words are fine with ``vae="exclusive"``; vLLM-Omni's names for the roles are understood."""
    pipe = declared(
        frozen(Nest()), _dit_modules=["transformer"], _encoder_modules=["text_encoder"], _vae_modules=["vae"]
    )
    with offload(
        pipe, sim.device, vae="exclusive", offload_components={"vae", "transformer", "text_encoder"}
    ) as handle:
        assert not [one.name for one in handle.components if one.resident]
    with offload(pipe, sim.device, offload_components={"transformer", "text_encoder"}) as handle:
        assert [one.name for one in handle.components if one.resident] == ["vae"]
