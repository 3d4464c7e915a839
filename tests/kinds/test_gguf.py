"""diffusers' GGUF weights, where gguf is installed: it is no dependency of this package."""

from __future__ import annotations

import warnings
from typing import ClassVar

import pytest
import torch
from torch import nn

from omni_components import SplitModel, offload

gguf = pytest.importorskip(
    "gguf", reason="gguf is not installed: `pip install gguf` to test diffusers' GGUF weights"
)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

WIDTH = 64  # two blocks of 32 weights in a row
QUANTS = [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.BF16]


def linear(quant: gguf.GGMLQuantizationType) -> GGUFLinear:
    values = torch.randn(WIDTH, WIDTH).numpy()
    packed = torch.from_numpy(gguf.quantize(values, quant).view("uint8").reshape(WIDTH, -1).copy())
    layer = GGUFLinear(WIDTH, WIDTH, bias=True, compute_dtype=torch.float32)
    layer.weight = GGUFParameter(packed, quant_type=quant)
    layer.bias.requires_grad_(False)
    return layer


class Pair(nn.Module):
    _dit_modules: ClassVar[list[str]] = ["B"]
    _encoder_modules: ClassVar[list[str]] = ["A"]
    _vae_modules: ClassVar[list[str]] = []

    def __init__(self, quant: gguf.GGMLQuantizationType) -> None:
        super().__init__()
        self.A, self.B = linear(quant), linear(quant)

    def use(self, which: str, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, which)(x)


class Parts(SplitModel):
    _offload_components: ClassVar[dict[str, list[str]]] = {"A": ["A"], "B": ["B"]}

    def __init__(self, quant: gguf.GGMLQuantizationType) -> None:
        super().__init__()
        self.A, self.B = linear(quant), linear(quant)

    def use(self, which: str, x: torch.Tensor) -> torch.Tensor:
        with self._offload_context(which):
            return getattr(self, which)(x)


@pytest.mark.parametrize("arena", ["keep", "fit"])
@pytest.mark.parametrize("kind", [Pair, Parts])
@pytest.mark.parametrize("quant", QUANTS, ids=lambda one: one.name)
def test_gguf_weights_that_do_not_follow_their_component(sim, quant, kind, arena):
    """I5, I7, I8: the packed bytes travel with the way to read them; results equal those of the resident run."""
    model = kind(quant)
    before = model.B.weight.as_tensor().clone()
    x = torch.randn(3, WIDTH)
    expected = {
        which: model.use(which, x) for which in "AB"
    }  # diffusers' class can neither be copied nor sent
    payload = sum(one.nbytes for one in model.parameters())
    assert payload < 4 * WIDTH * WIDTH * 2
    with offload(model, sim.device, arena=arena) as handle:
        for which in "ABAB":
            assert torch.equal(model.use(which, x.to(sim.device)).cpu(), expected[which])
            handle.ledger.audit()
            weight = getattr(model, which).weight
            assert (type(weight), weight.quant_type, weight.device) == (GGUFParameter, quant, sim.device)
        assert sum(row.bytes_in for row in handle.report().rows) == 2 * payload
        with handle.scope("A"), torch.no_grad():
            model.A.bias.fill_(2.0)
            model.A.weight.as_tensor().zero_()
            torch.autograd.graph.increment_version(model.A.weight)
        handle.release()
        assert not model.A.weight.as_tensor().any()
        assert bool((model.A.bias == 2.0).all())
    assert (type(model.B.weight), model.B.weight.quant_type) == (GGUFParameter, quant)
    assert torch.equal(model.B.weight.as_tensor(), before)
