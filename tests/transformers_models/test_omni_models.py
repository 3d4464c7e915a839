"""Omni models of transformers under their own ``generate``: equal to the resident run, each phase loaded once.

Shows I1, I2, I5, I7 and I8 on models nobody here wrote; the classes are real, the sizes tiny.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from omni_components import ComponentNotFoundError, DeclarationError, Recipe, offload
from omni_components.testing import SimulatedAccelerator

from .tiny import janus, qwen2_5_omni, qwen3_omni

Run = Callable[[Any, Any], list[torch.Tensor]]
_CHAT = [[110, 115, 5, 6, 111, 110, 116, 7, 8, 9, 111, 110, 117, 10]]


def _speaks(model: Any, device: Any) -> list[torch.Tensor]:
    ids = torch.tensor([[4, 5, 6, 7, 8, 9]], device=device)
    return _speech_2_5(model, input_ids=ids)


def _hears_and_speaks(model: Any, device: Any) -> list[torch.Tensor]:
    """16 frames of sound make 4 tokens."""
    ids = torch.tensor([[4, 123, 120, 120, 120, 120, 124, 9]], device=device)
    sound = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(3)).to(device)
    heard = torch.ones(1, 16, dtype=torch.long, device=device)
    return _speech_2_5(model, input_ids=ids, input_features=sound, feature_attention_mask=heard)


def _speech_2_5(model: Any, **inputs: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return list(
        model.generate(
            attention_mask=torch.ones_like(inputs["input_ids"]),
            thinker_max_new_tokens=5,
            thinker_eos_token_id=None,
            talker_max_new_tokens=8,
            talker_do_sample=False,
            talker_eos_token_id=[62],
            **inputs,
        )
    )


def _speaks_3(model: Any, device: Any) -> list[torch.Tensor]:
    ids = torch.tensor(_CHAT, device=device)
    torch.manual_seed(0)
    return list(
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            thinker_max_new_tokens=5,
            thinker_eos_token_id=None,
            talker_max_new_tokens=6,
            talker_do_sample=False,
        )
    )


def _draws(model: Any, device: Any) -> list[torch.Tensor]:
    ids = torch.tensor([[1, 5, 6, 3]], device=device)
    tokens = model.generate(
        inputs=ids,
        attention_mask=torch.ones_like(ids),
        generation_mode="image",
        do_sample=False,
        guidance_scale=2,
    )
    return [tokens, model.decode_image_tokens(tokens)]


def _sees(model: Any, device: Any) -> list[torch.Tensor]:
    ids = torch.tensor([[1, 5, *[120] * 16, 7]], device=device)
    picture = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(3)).to(device)
    words = model.generate(
        inputs=ids,
        pixel_values=picture,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=6,
        min_new_tokens=6,
    )
    return [words]


SPEECH_2_5, SPEECH_3 = ("thinker", "talker", "token2wav"), ("thinker", "talker", "code2wav")
LANGUAGE, VISION = "model.language_model", "model.vision_model"
CASES = [
    pytest.param(qwen2_5_omni, _speaks, SPEECH_2_5, id="qwen2.5-omni, text to speech"),
    pytest.param(qwen2_5_omni, _hears_and_speaks, SPEECH_2_5, id="qwen2.5-omni, speech to speech"),
    pytest.param(qwen3_omni, _speaks_3, SPEECH_3, id="qwen3-omni, text to speech"),
    pytest.param(janus, _draws, (LANGUAGE,), id="janus, text to image"),
    pytest.param(janus, _sees, (VISION, LANGUAGE), id="janus, image to text"),
]


def weight_bytes(model: Any, path: str) -> int:
    """Bytes of a module's parameters and buffers, embeddings that others need too excepted."""
    module = model.get_submodule(path)
    hoisted = {id(one) for one in _hoisted(model)}
    tensors = {id(one): one for one in (*module.parameters(), *module.buffers()) if id(one) not in hoisted}
    return sum(one.numel() * one.element_size() for one in tensors.values())


def _hoisted(model: Any) -> list[torch.Tensor]:
    from omni_components.components.omni_models import recipe_for

    recipe = recipe_for(model)
    assert recipe is not None
    return [one for path in recipe.resident_modules for one in model.get_submodule(path).parameters()]


@pytest.mark.parametrize(("build", "run", "phases"), CASES)
@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`:UserWarning")
def test_generate_equals_the_resident_run_and_loads_each_phase_once(
    simulated_accelerator: SimulatedAccelerator, build: Callable[[], Any], run: Run, phases: tuple[str, ...]
) -> None:
    sim = simulated_accelerator
    resident = build().to(sim.device)
    wanted = [one.cpu() for one in run(resident, sim.device)]
    assert all(one.numel() for one in wanted)
    assert wanted[-1].float().unique().numel() > 3, "an output that says nothing proves nothing"
    del resident
    model = build()
    with offload(model, sim.device) as handle:
        for request in range(2):
            sim.reset()
            before = len(handle.events)
            got = [one.cpu() for one in run(model, sim.device if request else None)]
            handle.release()
            assert all(map(torch.equal, got, wanted))
            loads = [event.component for event in handle.events[before:] if event.kind == "load"]
            assert loads == list(phases)
            moved = sum(event.bytes for event in handle.events[before:] if event.kind == "load")
            assert moved == sum(weight_bytes(model, phase) for phase in phases)
            assert all(event.bytes == 0 for event in handle.events[before:] if event.kind == "write_back")
            handle.ledger.audit()
        assert not sim.races
        resident_bytes = sum(one.bytes for one in handle.components if one.resident)
        largest = max(one.bytes for one in handle.components if not one.resident)
        assert handle.ledger.predicted_peak == resident_bytes + largest


def test_a_second_enable_does_not_warn_of_what_a_run_leaves_behind(
    simulated_accelerator: SimulatedAccelerator,
) -> None:
    """Position deltas are plain tensor attributes, made anew by every prefill."""
    model = qwen2_5_omni()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with offload(model, simulated_accelerator.device):
                _speaks(model, simulated_accelerator.device)


def test_a_checkpoint_without_speech_has_nothing_to_swap_and_says_so(
    simulated_accelerator: SimulatedAccelerator,
) -> None:
    model = qwen2_5_omni()
    del model.talker, model.token2wav
    with pytest.raises(DeclarationError, match=r"nothing to swap; found: thinker"):
        offload(model, simulated_accelerator.device)


def test_a_recipe_of_ones_own_goes_before_the_built_in_one(
    simulated_accelerator: SimulatedAccelerator,
) -> None:
    """Here thinker and talker stay; only what the recipe names takes turns."""
    sim, model = simulated_accelerator, qwen2_5_omni()
    mine = Recipe(dit_modules=("thinker.model.language_model", "token2wav"), methods=("generate",))
    wanted = [one.cpu() for one in _speaks(qwen2_5_omni().to(sim.device), sim.device)]
    hoisted = Recipe(
        dit_modules=mine.dit_modules,
        resident_modules=("thinker.model.language_model.embed_tokens",),
        methods=mine.methods,
    )
    with offload(model, sim.device, recipe=hoisted) as handle:
        assert offload(model, sim.device, recipe=hoisted) is handle
        assert all(map(torch.equal, [one.cpu() for one in _speaks(model, None)], wanted))
        swapped = [one.name for one in handle.components if not one.resident]
        assert swapped == list(mine.dit_modules)
    with offload(model, sim.device) as handle:
        assert [one.name for one in handle.components if not one.resident] == list(SPEECH_2_5)
        other = offload(model, sim.device, recipe=hoisted)
        assert other is not handle
        assert not handle.enabled
    other.disable()
    assert "generate" not in vars(model)


def test_a_recipe_with_a_wrong_path_names_it_and_touches_nothing(
    simulated_accelerator: SimulatedAccelerator,
) -> None:
    model = qwen2_5_omni()
    with pytest.raises(ComponentNotFoundError, match="'thinkr'"):
        offload(model, simulated_accelerator.device, recipe=Recipe(dit_modules=("thinkr", "talker")))
    assert not any(one._forward_pre_hooks for one in model.modules())
    assert "generate" not in vars(model)
