"""An IP-adapter: an encoder outside the text's path, and weights that join the UNet after it was built."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.sweep.families.stable_diffusion_xl import pictured
from benchmarks.sweep.inputs import picture
from diffusers import StableDiffusionXLPipeline
from diffusers.models.embeddings import ImageProjection

from omni_components import offload
from omni_components.testing import SimulatedAccelerator


def adapter(unet: Any, tokens: int = 4) -> dict[str, dict[str, torch.Tensor]]:
    """Random weights in the layout of IP-Adapter's files: a projection, and two matrices per cross-attention."""
    generator = torch.Generator().manual_seed(3)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.1

    context = unet.config.cross_attention_dim
    layers: dict[str, torch.Tensor] = {}
    crossing = [name for name in unet.attn_processors if name.endswith("attn2.processor")]
    for index, name in enumerate(crossing):
        width = unet.get_submodule(name.removesuffix(".processor")).to_k.out_features
        for which in ("to_k_ip", "to_v_ip"):
            layers[f"{2 * index + 1}.{which}.weight"] = numbers(width, context)
    projection = ImageProjection(
        cross_attention_dim=context, image_embed_dim=32, num_image_text_embeds=tokens
    )
    shapes = {name: one.shape for name, one in projection.state_dict().items()}
    named = {"image_embeds.weight": "proj.weight", "image_embeds.bias": "proj.bias"}
    return {
        "image_proj": {named.get(name, name): numbers(*shape) for name, shape in shapes.items()},
        "ip_adapter": layers,
    }


def build() -> Any:
    torch.manual_seed(0)
    pipeline = StableDiffusionXLPipeline(**pictured())
    for one in pipeline.components.values():
        if isinstance(one, torch.nn.Module):
            one.eval()
    pipeline.set_progress_bar_config(disable=True)
    pipeline.unet._load_ip_adapter_weights([adapter(pipeline.unet)])
    pipeline.set_ip_adapter_scale(0.7)
    return pipeline


def drawn(pipeline: Any) -> torch.Tensor:
    with torch.no_grad():
        images = pipeline(
            prompt="a lighthouse",
            ip_adapter_image=picture(32),
            height=32,
            width=32,
            num_inference_steps=2,
            output_type="pt",
            generator=torch.Generator("cpu").manual_seed(7),
        ).images
    return torch.as_tensor(images).cpu()


def test_an_ip_adapter_gives_what_the_resident_run_gives_and_moves_nothing_back(
    simulated_accelerator: SimulatedAccelerator,
) -> None:
    """I2, I5, I7: the picture's encoder is loaded for its own call, the adapter's weights travel with the UNet."""
    sim = simulated_accelerator
    wanted = drawn(build().to(sim.device))
    pipeline = build()
    with offload(pipeline, sim.device) as handle:
        for _ in range(2):
            assert torch.equal(drawn(pipeline), wanted)
        handle.ledger.audit()
        assert not any(event.bytes for event in handle.events if event.kind == "write_back")
        assert "image_encoder" in {event.component for event in handle.events if event.kind == "load"}
        pipeline.set_ip_adapter_scale(0.0)
        assert not torch.equal(drawn(pipeline), wanted)  # the adapter was at work
