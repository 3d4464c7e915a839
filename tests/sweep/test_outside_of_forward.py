"""What pipelines call past a component's ``forward``: modules inside it, and methods of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from benchmarks.sweep.classes import found
from benchmarks.sweep.compare import compare, modules, weight_bytes
from benchmarks.sweep.families import cases
from benchmarks.sweep.inputs import levels

from omni_components import Offload, offload
from omni_components.residency.events import EventKind
from omni_components.testing import SimulatedAccelerator
from omni_components.testing.plugin import require_simulated_accelerator

# What diffusers, transformers and torch say of themselves while old families are imported.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
MOTIF = "MotifVideoImage2VideoPipeline"
PARTS = ["text_encoder", "text_encoder.vision_tower", "transformer", "vae"]


@pytest.fixture
def pipeline() -> Any:
    """Its class shows the picture to ``text_encoder.vision_tower`` when the VAE has sent the text encoder home."""
    return cases()[MOTIF].build(found()[MOTIF])


def loads(handle: Offload) -> list[str]:
    return [event.component for event in handle.events if event.kind is EventKind.LOAD]


def test_a_module_that_is_called_alone_comes_by_itself_and_the_rest_stays_away(
    sim: SimulatedAccelerator, pipeline: Any
) -> None:
    """I2, I8: each of the two crosses once a request."""
    with offload(pipeline, device=sim.device) as handle:
        assert [one.name for one in handle.components] == PARTS
        for _ in range(2):
            cases()[MOTIF].request(pipeline)
        assert loads(handle).count("text_encoder") == loads(handle).count("text_encoder.vision_tower") == 2
        first = loads(handle)
        assert first.index("vae") < first.index("text_encoder.vision_tower") < first.index("transformer")
        handle.ledger.audit()


def test_it_and_what_is_left_of_the_component_share_no_weight(
    sim: SimulatedAccelerator, pipeline: Any
) -> None:
    """I3: together they are the text encoder, each byte once."""
    whole = {id(one) for one in pipeline.text_encoder.parameters()}
    pieces = dict(modules(pipeline))
    assert list(pieces) == [PARTS[3], PARTS[0], PARTS[2], PARTS[1]]
    owned = [id(one) for name in PARTS[:2] for part in pieces[name] for one in part.parameters(recurse=False)]
    assert set(owned) == whole
    assert len(owned) == len(whole)
    with offload(pipeline, device=sim.device) as handle:
        for name in PARTS[:2]:
            assert 0 < weight_bytes(pieces[name]) <= handle.ledger.size(name)


def test_called_by_the_component_itself_it_is_there_too(sim: SimulatedAccelerator, pipeline: Any) -> None:
    """I1, I4: a prompt with a picture in it opens its scope inside that of its component."""
    reader = pipeline.text_encoder
    ids = torch.full((1, 4), 7)
    expected = reader(input_ids=ids).last_hidden_state
    with offload(pipeline, device=sim.device) as handle:
        with handle.scope("text_encoder"), handle.scope("text_encoder.vision_tower"):
            assert set(PARTS[:2]) <= set(handle.ledger.present)
        assert torch.equal(reader(input_ids=ids).last_hidden_state.cpu(), expected)
        handle.ledger.audit()


def test_disabling_leaves_the_component_whole(sim: SimulatedAccelerator, pipeline: Any) -> None:
    """I6, I7."""
    before = {name: one.clone() for name, one in pipeline.text_encoder.state_dict().items()}
    with offload(pipeline, device=sim.device):
        cases()[MOTIF].request(pipeline)
    after = pipeline.text_encoder.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], one) for name, one in before.items())
    assert not any(one._forward_pre_hooks for one in pipeline.text_encoder.modules())


def test_a_film_that_is_encoded_past_encode_is_encoded_on_the_device() -> None:
    """AnyFlow's pipelines call ``vae._encode``, which diffusers' own offload does not see, and fails on."""
    require_simulated_accelerator()
    plain = cases()["AnyFlowPipeline"]
    case = dataclasses.replace(plain, call={**plain.call, "video": levels(1, 9, 3, 16, 16)})
    row = compare(case, found()[case.name])
    assert (row.runs_resident, row.runs_ours, row.equal, row.second_equal) == (True,) * 4, row.reason
    assert row.bytes_back == 0
    assert not row.runs_diffusers
