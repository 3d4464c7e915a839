"""Two pipelines made of the same components (``from_pipe``) take turns under one ledger; LoRA included. I1, I3, I7."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionImg2ImgPipeline
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model

from omni_components import Offload, offload
from omni_components.residency.events import EventKind
from omni_components.testing import SimulatedAccelerator
from tests.diffusers import tiny
from tests.diffusers.runs import modules, weight_bytes
from tests.diffusers.test_entry_points import img2img
from tests.diffusers.test_with_diffusers import text2img, untouched

REQUESTS = 20


def pair() -> tuple[Any, Any]:
    """Text to image, and image to image of the same components."""
    first = tiny.stable_diffusion()
    return first, tiny.quiet(StableDiffusionImg2ImgPipeline.from_pipe(first))


@contextmanager
def shared(first: Any, second: Any, sim: SimulatedAccelerator) -> Iterator[tuple[Offload, Offload]]:
    """Both offloaded under one ledger."""
    with (
        offload(first, sim.device) as one,
        offload(second, sim.device, ledger=one.ledger) as other,
    ):
        yield one, other


def resident(first: Any, second: Any, device: torch.device) -> tuple[Any, Any]:
    """Copies of both, still of the same components, on the device."""
    first, second = copy.deepcopy((first, second))
    return first.to(device), second.to(device)


def test_twenty_requests_in_turn_are_those_of_the_resident_pipelines(sim: SimulatedAccelerator) -> None:
    """I1, I3, I7: each request loads what it uses, once; nothing goes home, and nothing is loaded twice over."""
    first, second = pair()
    on_device = resident(first, second, sim.device)
    expected = [text2img(on_device[0]), img2img(on_device[1])]
    del on_device
    gc.collect()
    weights = {name: weight_bytes(one) for name, one in modules(first)}
    sim.capacity = "40MiB"
    with shared(first, second, sim) as (one, other):
        assert other.components == one.components
        for request in range(REQUESTS):
            draw = (text2img, img2img)[request % 2]
            assert torch.equal(draw((first, second)[request % 2]), expected[request % 2])
            assert one.ledger.present == ()
        one.ledger.audit()
        loads = [event for event in one.events if event.kind is EventKind.LOAD]
        order = [["text_encoder", "unet", "vae"], ["text_encoder", "vae", "unet"]]
        assert [event.component for event in loads] == (order[0] + order[1]) * (REQUESTS // 2)
        assert all(event.bytes == weights[event.component] for event in loads)
        assert not [event for event in one.events if event.kind is EventKind.WRITE_BACK]
    assert untouched(first)
    assert untouched(second)


# --- LoRA ------------------------------------------------------------------------------------------------


def lora_file(folder: Path) -> Path:
    """A LoRA as diffusers saves it, with weights that change the picture."""
    pipeline = tiny.stable_diffusion()
    for module, layers in ((pipeline.unet, ["to_q", "to_v"]), (pipeline.text_encoder, ["q_proj", "v_proj"])):
        config = LoraConfig(r=2, target_modules=layers, init_lora_weights=False)
        inject_adapter_in_model(config, module, "default")
    pipeline.save_lora_weights(
        folder,
        unet_lora_layers=get_peft_model_state_dict(pipeline.unet),
        text_encoder_lora_layers=get_peft_model_state_dict(pipeline.text_encoder),
    )
    return folder


STEPS = {
    "load": lambda pipe, file: pipe.load_lora_weights(file, adapter_name="one"),
    "scale": lambda pipe, file: pipe.set_adapters(["one"], [0.25]),
    "switch off": lambda pipe, file: pipe.disable_lora(),
    "switch on": lambda pipe, file: pipe.enable_lora(),
    "fuse": lambda pipe, file: pipe.fuse_lora(adapter_names=["one"]),
    "unfuse": lambda pipe, file: pipe.unfuse_lora(),
    "unload": lambda pipe, file: pipe.unload_lora_weights(),
}


@pytest.mark.parametrize("loaded", [None, "unet"])
@pytest.mark.parametrize("by", [0, 1])
def test_a_lora_of_one_pipeline_is_the_others_too(
    sim: SimulatedAccelerator, tmp_path: Path, by: int, loaded: str | None
) -> None:
    """I5, I7: adopted once; both pipelines then draw what diffusers' own two resident pipelines draw."""
    file = lora_file(tmp_path)
    pipes = pair()
    plain = resident(*pipes, sim.device)
    pictures = [text2img(plain[0])]
    with shared(*pipes, sim) as (handle, _):
        size = handle.ledger.size("unet")
        for name, step in STEPS.items():
            if loaded is not None:
                handle.load(loaded)
            for which in (plain, pipes):
                step(which[by], file)
            for draw, ours, theirs in zip((text2img, img2img), pipes, plain, strict=True):
                expected = draw(theirs)
                assert torch.equal(draw(ours), expected), name
                pictures += [expected] if draw is text2img else []
            assert (handle.ledger.size("unet") > size) is (name != "unload")
            handle.ledger.audit()
        assert handle.ledger.present == ()
    before, on, scaled, off, again, fused, unfused, unloaded = pictures
    assert torch.equal(off, before)
    assert torch.equal(unloaded, before) is torch.equal(unfused, again)
    assert torch.equal(again, scaled)
    assert not torch.equal(on, before)
    assert not torch.equal(scaled, on)
    assert (fused - scaled).abs().max() < (scaled - before).abs().max()
