"""Models that a prompt is not enough for: refused at the start, by the name of what they lack."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import pytest

from omni_components import ModelError, Omni
from omni_components.serve import create_app
from omni_components.serve.needs import _SAID_TO_BE_OPTIONAL, unmet
from tests.diffusers import tiny
from tests.serve.test_refused_options import refused_at_last


def saved(pipeline: Any, place: Path) -> Path:
    pipeline.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Pipelines that need more, as ``save_pretrained`` writes them."""
    place = tmp_path_factory.mktemp("models")
    parts = tiny.stable_diffusion().components
    unconditional = diffusers.DDPMPipeline(
        diffusers.UNet2DModel(
            sample_size=8,
            block_out_channels=(8,),
            norm_num_groups=4,
            down_block_types=("DownBlock2D",),
            up_block_types=("UpBlock2D",),
        ),
        diffusers.DDPMScheduler(),
    )
    return {
        "control": saved(tiny.stable_diffusion_control_net(), place / "control"),
        "start": saved(diffusers.StableDiffusionImg2ImgPipeline(**parts), place / "start"),
        "mask": saved(diffusers.StableDiffusionInpaintPipeline(**parts), place / "mask"),
        "no prompt": saved(unconditional, place / "unconditional"),
    }


@pytest.mark.parametrize(
    ("which", "needs"), [("control", "image"), ("start", "image"), ("mask", "image and mask_image")]
)
def test_a_model_that_needs_a_picture_is_not_served(
    folders: Mapping[str, Path], which: str, needs: str
) -> None:
    line = refused_at_last(folders[which], "--device", "cpu", "--port", "0", "--enable-cpu-offload")
    given = ", ".join(f"{one}=..." for one in needs.split(" and "))
    assert (
        f"Invalid value for MODEL: '{folders[which]}' needs {needs}, which the endpoint has no field" in line
    )
    assert line.endswith(f"or use Python: Omni(...).generate(prompt, {given}).\n")


def test_a_model_that_takes_no_prompt_is_not_served(folders: Mapping[str, Path]) -> None:
    with (
        Omni(folders["no prompt"], device="cpu") as omni,
        pytest.raises(ModelError, match="takes no prompt"),
    ):
        create_app(omni)


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("CogVideoXImageToVideoPipeline", "image"),  # without a default
        ("CycleDiffusionPipeline", "source_prompt image"),
        ("StableDiffusionAttendAndExcitePipeline", "token_indices"),
        ("FluxControlNetInpaintPipeline", "image mask_image control_image"),  # the type allows no None
        ("WanVideoToVideoPipeline", "video"),
        ("QwenImageEditPipeline", "image"),  # by name
        ("StableDiffusionPipeline", ""),
        ("StableDiffusion3Pipeline", ""),
        ("FluxKontextPipeline", ""),  # takes a picture, and does without
        ("LTXConditionPipeline", ""),
        ("OmniGenPipeline", ""),
        ("StableCascadeCombinedPipeline", ""),
        ("KandinskyV22CombinedPipeline", ""),
        ("WanPipeline", ""),
    ],
)
def test_a_pipeline_of_diffusers_that_is_judged_wrongly(name: str, needs: str) -> None:
    assert unmet(getattr(diffusers, name)) == tuple(needs.split())


def test_names_that_no_pipeline_takes() -> None:
    """In the list of those that call optional what they need."""
    here = {name: kind for name in _SAID_TO_BE_OPTIONAL if (kind := getattr(diffusers, name, None))}
    assert len(here) >= 10
    for name, kind in here.items():
        assert set(_SAID_TO_BE_OPTIONAL[name]) <= set(unmet(kind)), name


def test_a_subclass_that_asks_for_something_else() -> None:
    class FromAPrompt(diffusers.FluxFillPipeline):
        def __call__(self, prompt: str, image: Any = None) -> None:
            """Draw."""

    class FromWords(FromAPrompt):
        def __call__(self, prompt: str, *more: Any, words: int, mood: str = "", **rest: Any) -> None:
            """Draw."""

    assert unmet(FromAPrompt) == ()
    assert unmet(FromWords) == ("words",)
    assert unmet(FromWords, ("prompt", "words")) == ()


def test_without_documentation_what_has_a_default_is_not_refused() -> None:
    """As ``python -OO`` runs it."""

    class Undocumented:
        def __call__(self, prompt: str, image: "diffusers.image_processor.PipelineImageInput" = None) -> None:  # noqa: UP037
            pass

    assert unmet(Undocumented) == ()
    Undocumented.__call__.__doc__ = "Draw."
    assert unmet(Undocumented) == ("image",)
