"""Parts by pattern, checked as a partition; and the split model's own context. Design section 4."""

from __future__ import annotations

import pickle
from typing import ClassVar

import pytest
import torch
from torch import nn

from omni_components import (
    ComponentNotFoundError,
    DeclarationError,
    Role,
    SplitModel,
    UnknownComponentError,
    offload,
)
from tests.helpers.pipelines import footprint, frozen, resident_copy


class Attention(nn.Module):
    """Two halves in one block, as in Cosmos3."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.add_q_proj = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("scale", torch.rand(16))


class Block(nn.Module):
    """A block with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp, self.mlp_moe_gen = nn.Linear(16, 16), nn.Linear(16, 16)
        self.gate = nn.Parameter(torch.rand(16))


class Cosmos(SplitModel):
    """The declaration of the design's section 1."""

    _offload_components: ClassVar[dict[str, list[str]]] = {
        "reasoner": ["embed_tokens", "layers.*.self_attn.to_q", "layers.*.mlp"],
        "generator": ["proj_in", "proj_out", "layers.*.self_attn.add_q_proj", "layers.*.mlp_moe_gen"],
    }

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(32, 16)
        self.proj_in, self.proj_out = nn.Linear(16, 16), nn.Linear(16, 16)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(16)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with self._offload_context("reasoner"):
            memory = self.norm(self.embed_tokens(ids).mean(-2))
            for layer in self.layers:
                memory = torch.tanh(layer.mlp(layer.self_attn.to_q(memory) * layer.self_attn.scale)) + memory
        with self._offload_context("generator"):
            x = self.proj_in(x)
            for layer in self.layers:
                x = torch.tanh(layer.mlp_moe_gen(layer.self_attn.add_q_proj(x) + memory)) * layer.gate
            return self.proj_out(self.norm(x))


def cosmos(**parts: list[str]) -> Cosmos:
    return frozen(type("Cosmos", (Cosmos,), {"_offload_components": parts} if parts else {})())


def owned(handle) -> dict[str, int]:
    return {one.name: one.tensors for one in handle.components}


@pytest.mark.parametrize("arena", ["keep", "fit"])
def test_interleaved_parts_run_as_the_design_shows(sim, arena):
    """I1, I2, I3: a part is the tensors its patterns match, wherever they lie; the rest is resident."""
    model = cosmos()
    ids, x = torch.arange(4, device=sim.device), torch.randn(1, 16, device=sim.device)
    expected = resident_copy(model, sim.device)(ids, x).cpu()
    with offload(model, sim.device, arena=arena) as handle:
        assert owned(handle) == {"reasoner": 1 + 4 + 4, "generator": 4 + 4 + 4, "(rest)": 2 + 2 + 2}
        assert {one.role for one in handle.components} == {Role.PART, Role.RESIDENT}
        for _ in range(3):
            assert torch.equal(model(ids, x).cpu(), expected)
            handle.ledger.audit()
        with handle.scope("reasoner"):
            assert model.layers[1].mlp.weight.device == model.norm.weight.device == sim.device
            assert model.layers[1].mlp_moe_gen.weight.device.type == "cpu"


@pytest.mark.parametrize(
    ("patterns", "count"),
    [
        (["layers.*.gate"], 2),
        (["layers.0.gate", "layers.1.gate"], 2),
        (["layers.*.self_attn.scale"], 2),
        (["layers.*.self_attn"], 10),
        (["layers.*.self_attn.*"], 10),
        (["layers.*.mlp.weight"], 2),
        (["layers.*.mlp.bias", "layers.*.mlp.weight"], 4),
        (["layers"], 2 * 10),
        (["layers.*"], 2 * 10),
        (["*.*.gate"], 2),
        (["layers.0"], 10),
        (["embed_tokens", "embed_tokens.weight"], 1),
        (["layers.0", "layers.*.gate"], 11),
    ],
    ids=str,
)
def test_a_pattern_names_modules_parameters_or_buffers_and_a_star_is_one_segment(sim, patterns, count):
    """I3: down to single tensors; overlapping patterns of one part count once."""
    with offload(cosmos(first=patterns, second=["proj_in"]), sim.device) as handle:
        total = sum(1 for _ in (*Cosmos().parameters(), *Cosmos().buffers()))
        assert owned(handle) == {"first": count, "second": 2, "(rest)": total - count - 2}
        handle.ledger.load("first")
        handle.ledger.audit()


def test_a_tensor_in_no_part_is_resident_and_a_full_partition_leaves_none(sim):
    with offload(
        cosmos(first=["layers"], second=["embed_tokens", "proj_in", "proj_out", "norm"]), sim.device
    ) as handle:
        assert set(owned(handle)) == {"first", "second"}


@pytest.mark.parametrize(
    ("first", "second", "tensor"),
    [
        (["layers"], ["layers.*.mlp"], "layers.0.mlp.weight"),
        (["layers.*.mlp"], ["layers.1"], "layers.1.mlp.weight"),
        (["norm"], ["norm.bias"], "norm.bias"),
        (["layers.*.gate"], ["layers.0.gate"], "layers.0.gate"),
        (["layers.*.self_attn.scale"], ["*.*.self_attn"], "layers.0.self_attn.scale"),
    ],
    ids=str,
)
def test_a_tensor_in_two_parts_is_an_error_that_names_it_and_both(sim, first, second, tensor):
    """I3: and nothing is touched."""
    model = cosmos(first=first, second=second)
    before = footprint(model)
    with pytest.raises(DeclarationError) as caught:
        offload(model, sim.device)
    text = str(caught.value)
    assert f"{tensor!r} is in two parts, 'first' and 'second'" in text
    assert footprint(model) == before


@pytest.mark.parametrize(
    ("pattern", "broke_at", "hint"),
    [
        ("layer.*.mlp", "layer", "layers"),
        ("layers.*.mlpp", "mlpp", "mlp"),
        ("layers.*.self_attn.to_p", "to_p", "to_q"),
        ("layers.7.mlp", "7", None),
        ("*.mlp", "mlp", None),
        ("norm.wieght", "wieght", "weight"),
        ("layers.*.gate.data", "data", None),
        ("", "", None),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_name(sim, pattern, broke_at, hint):
    model = cosmos(first=["proj_in"], second=["proj_out", pattern])
    with pytest.raises(ComponentNotFoundError) as caught:
        offload(model, sim.device)
    assert (caught.value.path, caught.value.broke_at) == (pattern, broke_at)
    if hint:
        assert f"Did you mean {hint!r}" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    "parts",
    [{"only": ["layers"]}, {"first": ["layers"], "second": []}, {"first": ["layers"], "second": "norm"}],
    ids=["one part", "a part without a pattern", "a string for a list"],
)
def test_parts_that_cannot_take_turns_are_refused(sim, parts):
    with pytest.raises(DeclarationError):
        offload(cosmos(**parts), sim.device)


def test_a_model_with_parts_but_without_contexts_is_refused_with_advice(sim):
    class NoContext(nn.Module):
        _offload_components: ClassVar[dict[str, list[str]]] = {"first": ["one"], "second": ["other"]}

        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)

    with pytest.raises(DeclarationError, match="SplitModel"):
        offload(frozen(NoContext()), sim.device)


def test_storages_that_two_parts_share_are_resident_and_reported_once(sim):
    """I3, I8: a tie between parts, and between a part and what is in none."""
    model = cosmos()
    model.proj_in.weight = model.layers[0].mlp.weight
    model.norm.bias = nn.Parameter(model.layers[0].mlp.bias.detach(), requires_grad=False)
    ids, x = torch.arange(4, device=sim.device), torch.randn(1, 16, device=sim.device)
    expected = resident_copy(model, sim.device)(ids, x).cpu()
    with offload(model, sim.device) as handle:
        assert torch.equal(model(ids, x).cpu(), expected)
        assert model.proj_in.weight is model.layers[0].mlp.weight
        shared = [one for one in handle.components if one.name == "(shared)"]
        assert [(one.resident, one.bytes) for one in shared] == [(True, 1024 + 256)]
        handle.ledger.audit()


# --- the context ------------------------------------------------------------------------------------------


def test_without_offload_the_context_does_nothing_and_an_unknown_name_is_still_an_error():
    """A typo in a phase is found on the first run, offloaded or not."""
    model = cosmos()
    with model._offload_context("reasoner"), model._offload_context("generator"):
        pass
    with pytest.raises(UnknownComponentError, match="Did you mean 'reasoner'"):
        model._offload_context("reasnor")


@pytest.mark.parametrize("name", ["reasnor", "transformer", "(rest)", ""])
def test_an_unknown_phase_lists_the_known_ones(sim, name):
    model = cosmos()
    with (
        offload(model, sim.device),
        pytest.raises(UnknownComponentError, match="declared: reasoner, generator"),
    ):
        model._offload_context(name)


def test_the_context_of_a_disabled_model_does_nothing_again(sim):
    model = cosmos()
    offload(model, sim.device).disable()
    with model._offload_context("reasoner"):
        assert model.proj_in.weight.device.type == "cpu"
