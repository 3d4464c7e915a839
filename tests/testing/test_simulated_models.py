"""Real models of diffusers and transformers, tiny and with random weights: equal to the CPU bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from omni_components.testing import SimulatedAccelerator

pytestmark = pytest.mark.filterwarnings("ignore")  # what other libraries warn about while they are imported


def wan_transformer() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    inputs = {
        "hidden_states": torch.randn(1, 4, 2, 8, 8),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 6, 16),
    }
    return model, inputs


def wan_vae() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from diffusers import AutoencoderKLWan

    model = AutoencoderKLWan(base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    return model, {"sample": torch.randn(1, 3, 5, 16, 16)}


def image_vae() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4)
    return model, {"sample": torch.randn(1, 3, 16, 16)}


def flux_transformer() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    inputs = {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 6, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.randn(6, 3),
    }
    return model, inputs


def clip_text() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=99, hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4
    )
    return CLIPTextModel(config), {"input_ids": torch.randint(0, 99, (2, 7))}


def t5_encoder() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    return T5EncoderModel(config), {"input_ids": torch.randint(0, 99, (2, 7))}


MODELS = [wan_transformer, wan_vae, image_vae, flux_transformer, clip_text, t5_encoder]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("make", MODELS)
def test_outputs_equal_the_cpus(
    sim: SimulatedAccelerator,
    make: Callable[[], tuple[torch.nn.Module, dict[str, torch.Tensor]]],
    dtype: torch.dtype,
    one_thread: None,
) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    model = model.eval().to(dtype)
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    there = copy.deepcopy(model).to(sim.device)
    moved = {name: value.to(sim.device) for name, value in inputs.items()}

    def first(output: Any) -> torch.Tensor:
        return next(value for value in output.values() if isinstance(value, torch.Tensor))

    with torch.no_grad():
        here_output, there_output = first(model(**inputs)), first(there(**moved))
    assert there_output.device == sim.device
    assert here_output.isfinite().all()
    assert torch.equal(there_output.cpu(), here_output)
    assert sim.races == []
