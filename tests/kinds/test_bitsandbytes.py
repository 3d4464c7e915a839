"""bitsandbytes' weights, where it is installed (it is no dependency of this package): refused by name."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from omni_components import UnsupportedTensorError, offload
from tests.helpers.pipelines import WIDTH, footprint
from tests.kinds.quantised import Pair

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    bnb = pytest.importorskip(
        "bitsandbytes", reason="bitsandbytes is not installed: `pip install bitsandbytes` to test its weights"
    )

LAYERS = {
    "Params4bit": lambda: bnb.nn.Linear4bit(WIDTH, WIDTH, compute_dtype=torch.float32),
    "Int8Params": lambda: bnb.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False),
}


@pytest.mark.parametrize("quantised", [False, True], ids=["fresh", "quantised"])
@pytest.mark.parametrize("name", LAYERS)
def test_bitsandbytes_weights_whose_state_would_stay_behind(sim, name, quantised):
    """Their scales lie in attributes that no move reaches: the error names component and tensor, nothing is touched."""
    model = Pair()
    layer = LAYERS[name]()
    if quantised:
        layer.to("cpu")  # going to a device, be it the same one, is what packs the weights
        assert layer.weight.dtype in (torch.uint8, torch.int8)
    model.A.layers[0] = layer.requires_grad_(False)
    before = footprint(model)
    with pytest.raises(
        UnsupportedTensorError, match=f"{name}, whose quantisation state lies outside of it"
    ) as caught:
        offload(model, sim.device)
    assert (caught.value.component, caught.value.tensor) == ("A", "A.layers.0.weight")
    assert footprint(model) == before
    assert isinstance(layer.weight, nn.Parameter)
    assert sim.stats().allocated == 0
