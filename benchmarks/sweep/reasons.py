"""Why a class is not run, or not by diffusers' own offload, in words for the page."""

from __future__ import annotations

_OUTSIDE = "diffusers' own offload fails: it uses a component outside of `forward`, with an image that is on the host"
_FLEX = "torch's flex attention knows no device but its own list; the simulated one is not on it"
_BLIP = "diffusers: its Q-Former calls `invert_attention_mask`, which models of transformers 5 have no more"
_ALL_THERE = (
    "diffusers: the order names nothing that the class has, so that its own offload keeps all on the device; ours "
    "takes turns: more bytes in, less room"
)

NO_CASE = "no tiny components were made for it"
REASONS: dict[str, str] = {
    "LEditsPPPipelineStableDiffusion": _OUTSIDE,
    "LEditsPPPipelineStableDiffusionXL": _OUTSIDE,
    "AnyFlowFARPipeline": _FLEX,
    "Kandinsky6SRPipeline": _FLEX,
    "LTX2VideoDiffusionDecodePipeline": _FLEX,
    "UniDiffuserPipeline": "diffusers' own offload fails: it uses the text decoder outside of `forward`",
    "VersatileDiffusionTextToImagePipeline": _ALL_THERE,
    "VersatileDiffusionImageVariationPipeline": _ALL_THERE,
    "ChromaInpaintPipeline": "diffusers: it reads `guidance_embeds`, which its transformer's configuration has not",
    "EasyAnimateControlPipeline": "diffusers: it passes `text_encoder_index`, which its `encode_prompt` does not take",
    "EasyAnimateInpaintPipeline": "diffusers: it reads `cache_mag_vae`, which its VAE's configuration has not",
    "BlipDiffusionPipeline": _BLIP,
    "BlipDiffusionControlNetPipeline": _BLIP,
    "VersatileDiffusionDualGuidedPipeline": (
        "diffusers: its UNet's blocks pass `encoder_attention_mask`, which `DualTransformer2DModel` does not take"
    ),
    "I2VGenXLPipeline": "diffusers: it reads `text_encoder.text_model`, which transformers 5 has no more",
    "OmniGenPipeline": "needs torchvision",
}
