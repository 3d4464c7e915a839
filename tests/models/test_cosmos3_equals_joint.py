"""Split = joint: diffusers' own class, same weights, same request, ten steps in float32."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from diffusers import Cosmos3OmniPipeline, SeaCacheConfig

from omni_components.models.cosmos3 import Cosmos3SplitPipeline, Cosmos3SplitTransformer

from . import tiny

NAMES = ("unchanged pipeline", "split pipeline")
CASES = [("qwen3", one) for one in tiny.MODALITIES] + [("nemotron", "text-to-video with sound")]


def made(backbone: str = "qwen3") -> dict[str, Any]:
    """A joint pipeline, the same class with a split transformer, and the split pipeline."""
    more = tiny.BACKBONES[backbone]
    return {
        "joint": tiny.pipeline(**more),
        "unchanged pipeline": tiny.pipeline(split=True, **more),
        "split pipeline": tiny.pipeline(Cosmos3SplitPipeline, **more),
    }


@pytest.fixture(scope="module")
def backbones() -> dict[str, dict[str, Any]]:
    return {name: made(name) for name in tiny.BACKBONES}


@pytest.fixture(scope="module")
def pipes(backbones: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return backbones["qwen3"]


@pytest.mark.parametrize(("backbone", "modality"), CASES)
def test_a_modality_that_the_split_changes(
    backbones: dict[str, dict[str, Any]], backbone: str, modality: str
) -> None:
    """Latents of every step, sound and actions, with guidance, in both pipelines."""
    pipes = backbones[backbone]
    joint = tiny.request(pipes["joint"], modality)
    assert len(joint.steps) == tiny.STEPS
    for name in NAMES:
        assert joint.distance(tiny.request(pipes[name], modality)) <= 1e-5, name


@pytest.mark.parametrize(
    "guidance",
    [{"guidance_scale": 1.0}, {"guided_steps": 4}, {"negative_prompt": None}],
    ids=["off", "switched off midway", "against nothing"],
)
def test_guidance_that_the_split_changes(pipes: dict[str, Any], guidance: dict[str, Any]) -> None:
    joint = tiny.request(pipes["joint"], **guidance)
    for name in NAMES:
        assert joint.distance(tiny.request(pipes[name], **guidance)) <= 1e-5, name


def test_text_that_does_not_matter(pipes: dict[str, Any]) -> None:
    """Another prompt must show in the latents: else nothing above would tell right from wrong."""
    one = tiny.request(pipes["split pipeline"], prompt="A lighthouse in the rain.")
    other = tiny.request(pipes["split pipeline"], prompt="Two trees in the snow....")
    assert one.distance(other) > 1e-2


def test_half_precision() -> None:
    outputs = []
    for pipe in made().values():
        pipe.transformer.to(torch.bfloat16)
        outputs.append(tiny.request(pipe, "image-to-video with sound", num_inference_steps=3))
    assert outputs[0].same(outputs[1])
    assert outputs[0].same(outputs[2])


def test_a_second_request_that_hears_of_the_first(pipes: dict[str, Any]) -> None:
    """Other prompts, other sizes, other modalities, on one pipeline."""
    for asked in (
        {"modality": "text-to-image", "prompt": "one"},
        {"modality": "text-to-video with sound", "prompt": "one"},
        {"modality": "text-to-image", "prompt": "two", "negative_prompt": "one"},
    ):
        asked["num_inference_steps"] = 2
        assert tiny.request(pipes["joint"], **asked).same(tiny.request(pipes["unchanged pipeline"], **asked))


def test_a_cache_of_diffusers_over_the_layers(pipes: dict[str, Any]) -> None:
    """SeaCache skips the layers of some steps: the same ones, with the same result."""
    outputs = []
    for name in ("joint", "split pipeline"):
        pipe = pipes[name]
        pipe.transformer.enable_cache(SeaCacheConfig(threshold=10.0))
        outputs.append(tiny.request(pipe))
        pipe.transformer.disable_cache()
    assert outputs[0].same(outputs[1])
    assert outputs[0].distance(tiny.request(pipes["joint"])) > 1e-4  # it did skip some


def test_halves_that_are_compiled() -> None:
    split = tiny.transformer(Cosmos3SplitTransformer)
    with torch.no_grad():
        before = split(**tiny.call()).sample[0]
        split.forget()
        split.compile_repeated_blocks(backend="eager")
        assert torch.equal(split(**tiny.call()).sample[0], before)


def test_gradients_through_both_halves() -> None:
    """With gradients nothing is kept from one call to the next, and both halves' weights get theirs."""
    torch.manual_seed(0)
    joint = tiny.transformer(layers=2)
    split = Cosmos3SplitTransformer.from_joint(joint)
    call = tiny.call()
    with torch.no_grad():
        split(**call)  # what is kept now has no graph
    gradients = []
    for model in (joint, split, split):
        model.requires_grad_(True)
        model.zero_grad()
        model(**call).sample[0].square().sum().backward()
        gradients.append(
            {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        )
    assert gradients[0].keys() == gradients[1].keys()
    assert "layers.0.mlp.up_proj.weight" in gradients[0]
    for name, gradient in gradients[0].items():
        for other in gradients[1:]:
            torch.testing.assert_close(other[name], gradient)


def test_gradient_checkpointing() -> None:
    split = tiny.transformer(Cosmos3SplitTransformer, layers=2).requires_grad_(True).train()
    call = tiny.call()
    gradients = []
    for enable in (split.disable_gradient_checkpointing, split.enable_gradient_checkpointing):
        enable()
        split.zero_grad()
        split(**call).sample[0].square().sum().backward()
        gradients.append([one.grad.clone() for one in split.parameters() if one.grad is not None])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_the_output_is_diffusers_own() -> None:
    split = tiny.transformer(Cosmos3SplitTransformer, layers=1)
    with torch.no_grad():
        as_record, as_tuple = split(**tiny.call()), split(**tiny.call(), return_dict=False)
    assert type(as_record).__name__ == "Cosmos3OmniTransformerOutput"
    assert torch.equal(as_record.sample[0], as_tuple[0][0])
    assert as_tuple[1:] == (None, None)
    positional = split(*tiny.call().values())
    assert torch.equal(positional.sample[0], as_record.sample[0])


def test_the_pipelines_keep_their_signatures() -> None:
    """diffusers, and users' tools, inspect them."""
    for mine, theirs in (
        (Cosmos3SplitPipeline.__init__, Cosmos3OmniPipeline.__init__),
        (Cosmos3SplitPipeline.__call__, Cosmos3OmniPipeline.__call__),
        (Cosmos3SplitTransformer.forward, Cosmos3SplitTransformer.__mro__[3].forward),
    ):
        assert inspect.signature(mine) == inspect.signature(theirs)
