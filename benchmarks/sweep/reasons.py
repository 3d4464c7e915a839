"""Why a class is not run, or not by diffusers' own offload, in words for the page."""

from __future__ import annotations

_OUTSIDE = "diffusers' own offload fails: it uses a component outside of `forward`, with an image that is on the host"

NO_CASE = "no tiny components were made for it"
REASONS: dict[str, str] = {
    "LEditsPPPipelineStableDiffusion": _OUTSIDE,
    "LEditsPPPipelineStableDiffusionXL": _OUTSIDE,
    "AnyFlowFARPipeline": "torch's flex attention knows no device but its own list; the simulated one is not on it",
    "ChromaInpaintPipeline": "diffusers: it reads `guidance_embeds`, which its transformer's configuration has not",
    "EasyAnimateControlPipeline": "diffusers: it passes `text_encoder_index`, which its `encode_prompt` does not take",
    "EasyAnimateInpaintPipeline": "diffusers: it reads `cache_mag_vae`, which its VAE's configuration has not",
    "I2VGenXLPipeline": "diffusers: it reads `text_encoder.text_model`, which transformers 5 has no more",
    "OmniGenPipeline": "needs torchvision",
}
