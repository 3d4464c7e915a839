"""What a pipeline must be given: the arguments without which no prompt gives a picture."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Sequence

# What ``Omni.generate`` passes by itself, or can for anybody.
ALWAYS_GIVEN = ("prompt", "seed", "generator", "output_type", "callback", "callback_on_step_end")

# Pipelines of diffusers that call these optional and fail without; found by reading 0.42.
_SAID_TO_BE_OPTIONAL = {
    "AnimateDiffControlNetPipeline": ("conditioning_frames",),
    "AnimateDiffSparseControlNetPipeline": ("conditioning_frames",),
    "CogVideoXFunControlPipeline": ("control_video",),
    "Cosmos2VideoToWorldPipeline": ("image",),  # or video
    "CosmosVideoToWorldPipeline": ("image",),  # or video
    "Flux2KleinInpaintPipeline": ("image", "mask_image"),
    "FluxFillPipeline": ("image", "mask_image"),
    "HunyuanImageRefinerPipeline": ("image",),
    "LTX2DFRTemporalRefinePipeline": ("latents", "audio_latents", "keyframes_latents", "keyframe_positions"),
    "LongCatImageEditPipeline": ("image",),
    "QwenImageControlNetInpaintPipeline": ("control_image", "control_mask"),
    "QwenImageControlNetPipeline": ("control_image",),
    "QwenImageEditPipeline": ("image",),
    "QwenImageEditPlusPipeline": ("image",),
    "QwenImageLayeredPipeline": ("image",),
    "StableDiffusionGLIGENPipeline": ("gligen_phrases", "gligen_boxes"),
    "StableDiffusionPix2PixZeroPipeline": ("source_embeds", "target_embeds"),
    "StableDiffusionXLControlNetUnionPipeline": ("control_image",),
    "VideoToVideoSDPipeline": ("video",),
}


def unmet(pipeline: type, given: Collection[str] = ALWAYS_GIVEN) -> tuple[str, ...]:
    """The arguments that calls of a pipeline need and nobody gives, in the pipeline's order.

    One without a default is needed. diffusers gives most pictures to start from the default ``None`` all the same:
    they are needed where neither their type nor their documentation allows to leave them out.

    Args:
        pipeline: Its class.
        given: The arguments that are passed in every call.
    """
    call = pipeline.__call__
    owner = call.__qualname__.partition(".")[0]  # a subclass may take others
    known, says = _SAID_TO_BE_OPTIONAL.get(owner, ()), call.__doc__ or ""
    parameters = list(inspect.signature(call).parameters.values())[1:]
    return tuple(
        one.name
        for one in parameters
        if one.name not in given and (one.name in known or _has_no_default(one) or _is_start(one, says))
    )


def in_python(arguments: Sequence[str]) -> str:
    """How to give them."""
    return f"Omni(...).generate(prompt, {', '.join(f'{one}=...' for one in arguments)})"


def _has_no_default(one: inspect.Parameter) -> bool:
    return one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)


def _is_start(one: inspect.Parameter, says: str) -> bool:
    """Whether it is a picture, or several, that the pipeline starts from."""
    kind = str(one.annotation)
    if one.default is not None or "Image" not in kind or "None" in kind or "Optional" in kind:
        return False
    if not says or one.name.endswith("_latents"):  # python -OO leaves no documentation: nothing is known then
        return False
    said = re.search(rf"^\s*`?{re.escape(one.name)}`?\s*\((.*)$", says, re.MULTILINE)
    return said is None or not re.search("optional|default", said[1], re.IGNORECASE)
