"""torchao's int8 weights, where torchao is installed: it is no dependency of this package."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from omni_components import offload
from omni_components.components.wrappers import leaves
from tests.helpers.pipelines import WIDTH, resident_copy
from tests.kinds.quantised import KINDS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it was built for other versions of torch, and says so
    quantization = pytest.importorskip(
        "torchao.quantization", reason="torchao is not installed: `pip install torchao` to test its weights"
    )


def quantised(kind: str) -> nn.Module:
    model = KINDS[kind]()
    for tensor in model.parameters():
        tensor.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


@pytest.mark.parametrize("arena", ["keep", "fit"])
@pytest.mark.parametrize("kind", KINDS)
def test_torchao_weights_that_do_not_follow_their_component(sim, kind, arena):
    """I5, I7, I8: results equal those of the resident run; the int8 values and their scales travel, nothing else."""
    model = quantised(kind)
    assert type(model.A.layers[0].weight).__module__.startswith("torchao.")
    x = torch.randn(3, WIDTH, device=sim.device)
    twin = resident_copy(model, sim.device)
    expected = {which: twin.use(which, x).cpu() for which in "AB"}
    before = {name: copy.deepcopy(one) for name, one in model.state_dict().items()}
    payload = sum(leaf.nbytes for one in model.parameters() for _, leaf in leaves(one))
    with offload(model, sim.device, arena=arena) as handle:
        sim.reset()
        for which in "ABAB":
            assert torch.equal(model.use(which, x).cpu(), expected[which])
            handle.ledger.audit()
        assert sim.stats().h2d_bytes == 2 * payload
        with handle.scope("A"):
            weight = model.A.layers[0].weight
            inner = dict(leaves(weight))
            inner["scale"].mul_(2)
        handle.release()
        assert torch.equal(
            dict(leaves(model.A.layers[0].weight))["scale"],
            dict(leaves(before["A.layers.0.weight"]))["scale"] * 2,
        )
        with handle.scope("A"):
            dict(leaves(model.A.layers[0].weight))["scale"].div_(2)
    for name, one in model.state_dict().items():
        assert all(
            torch.equal(mine, yours)
            for (_, mine), (_, yours) in zip(leaves(one), leaves(before[name]), strict=True)
        )
