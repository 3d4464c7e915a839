"""The halves take turns on the simulated accelerator, where a tensor on the wrong side is an error."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SeaCacheConfig
from diffusers.models.transformers.transformer_cosmos3 import Cosmos3OmniTransformer
from peft import LoraConfig

from omni_components import DeclarationError, Offload, Role, offload
from omni_components.models.cosmos3 import Cosmos3SplitPipeline, Cosmos3SplitTransformer
from omni_components.testing import SimulatedAccelerator

from . import tiny

STEPS = 4
REQUESTS: dict[str, dict[str, Any]] = {
    "text-to-image": {},
    "image-to-video with sound": {},
    "policy": {},
    "guidance off": {"modality": "text-to-image", "guidance_scale": 1.0},
    "guidance switched off midway": {"modality": "text-to-image", "guided_steps": 2},
    "guidance off, decoded": {
        "modality": "text-to-video with sound",
        "guidance_scale": 1.0,
        "output_type": "pt",
    },
}


def asked(name: str) -> dict[str, Any]:
    return {"modality": name, "num_inference_steps": STEPS, **REQUESTS[name]}


def loads(handle: Offload) -> Counter[str]:
    """Loads of each component that takes turns."""
    swapped = {one.name for one in handle.components if not one.resident}
    return Counter(
        one.component for one in handle.events if str(one.kind) == "load" and one.component in swapped
    )


def peak(handle: Offload) -> int:
    """The most device bytes that weights had."""
    return max(one.device_bytes for one in handle.events)


def halves(handle: Offload) -> dict[str, int]:
    return {one.name: one.bytes for one in handle.components if one.role is Role.PART}


def residents(handle: Offload) -> int:
    return sum(one.bytes for one in handle.components if one.resident)


@pytest.mark.parametrize("kind", [Cosmos3SplitPipeline, None], ids=["split pipeline", "unchanged pipeline"])
@pytest.mark.parametrize("name", list(REQUESTS))
def test_offloaded_differs_from_resident(sim: SimulatedAccelerator, kind: type | None, name: str) -> None:
    """I1, I2, I5, I8: the same bits, twice in a row, and the ledger true afterwards; no race (the fixture)."""
    build = (lambda: tiny.pipeline(kind)) if kind else (lambda: tiny.pipeline(split=True))
    resident = tiny.request(build().to(sim.device), **asked(name))
    pipe = build()
    with offload(pipe, device=sim.device) as handle:
        for _ in range(2):
            assert tiny.request(pipe, **asked(name)).same(resident)
            assert handle.ledger.device_bytes == residents(handle)  # all went home
            handle.ledger.audit()
        assert peak(handle) <= handle.ledger.predicted_peak
        assert not any(one.kind == "write_back" for one in handle.events)


@pytest.mark.parametrize("name", list(REQUESTS))
def test_a_half_that_is_loaded_twice(sim: SimulatedAccelerator, name: str) -> None:
    """With guidance all prompts are read before the first step: one load of each half per request."""
    pipe = tiny.pipeline(Cosmos3SplitPipeline)
    with offload(pipe, device=sim.device) as handle:
        for request in (1, 2):
            tiny.request(pipe, **asked(name))
            found = loads(handle)
            assert found["reasoner"] == found["generator"] == request
            decoded = REQUESTS[name].get("output_type") == "pt"
            assert found["vae"] == request * (2 if decoded else 1)  # it encodes before and decodes after
            assert found["sound_tokenizer"] == (request if "sound" in asked(name)["modality"] else 0)


def test_the_unchanged_pipeline_needs_two_loads_at_most(sim: SimulatedAccelerator) -> None:
    """It shows its second prompt after the first one's first step: right, at the price of a second turn."""
    pipe = tiny.pipeline(split=True)
    with offload(pipe, device=sim.device) as handle:
        tiny.request(pipe, **asked("text-to-image"))
        assert loads(handle)["reasoner"] == loads(handle)["generator"] == 2
        tiny.request(pipe, **asked("guidance off"))
        assert loads(handle)["reasoner"] == loads(handle)["generator"] == 3


def test_the_peak_is_the_larger_half(sim: SimulatedAccelerator) -> None:
    """I8. The other components are smaller and take turns with the halves; a VAE that encodes first, on request."""
    pipe = tiny.pipeline(Cosmos3SplitPipeline)
    with offload(pipe, device=sim.device, vae="exclusive") as handle:
        sizes = halves(handle)
        assert set(sizes) == {"reasoner", "generator"}
        tiny.request(pipe, **asked("image-to-video with sound"))
        assert peak(handle) == residents(handle) + max(sizes.values())
        assert residents(handle) <= 1024  # the frequencies of the positions, which both halves use


def test_halves_that_both_stay_when_they_alternate(sim: SimulatedAccelerator) -> None:
    """I1: whatever else a sequence lets stay beside each other, the halves of one model never do."""
    with offload(tiny.pipeline(Cosmos3SplitPipeline), device=sim.device) as handle:
        assert "generator" in handle.ledger.rivals("reasoner")
        for name in ("generator", "reasoner", "generator", "reasoner"):
            with handle.scope(name):
                assert len({"reasoner", "generator"} & set(handle.ledger.present)) == 1


def test_a_device_that_cannot_hold_both_halves(sim: SimulatedAccelerator) -> None:
    """It runs where the resident run does not."""
    more = {"width": 256, "layers": 4, "action_gen": False}
    expected = tiny.request(
        tiny.pipeline(Cosmos3SplitPipeline, **more).to(sim.device), **asked("text-to-image")
    )
    pipe = tiny.pipeline(Cosmos3SplitPipeline, **more)
    with offload(pipe, device=sim.device) as handle:
        sizes = halves(handle)
        activations = 2 * 2**20
        sim.capacity = sim.stats().allocated + max(sizes.values()) + activations
        assert min(sizes.values()) > activations
        assert tiny.request(pipe, **asked("text-to-image")).same(expected)
    with pytest.raises(torch.OutOfMemoryError):
        tiny.request(pipe.to(sim.device), **asked("text-to-image"))


def test_the_transformer_by_itself(sim: SimulatedAccelerator) -> None:
    """A split model needs no pipeline; I4: no scope stays open."""
    split = tiny.transformer(Cosmos3SplitTransformer)
    call = on(sim.device, tiny.call())
    with torch.no_grad(), offload(split, device=sim.device) as handle:
        outputs = [split(**call).sample[0].cpu() for _ in range(3)]
        assert loads(handle) == {"reasoner": 1, "generator": 1}
        assert handle.ledger.pins("reasoner") == handle.ledger.pins("generator") == 0
        split.forget()
        outputs.append(split(**call).sample[0].cpu())
        assert loads(handle) == {"reasoner": 2, "generator": 2}
    assert all(torch.equal(one, outputs[0]) for one in outputs)
    with torch.no_grad():
        assert torch.allclose(split(**tiny.call()).sample[0], outputs[0], atol=1e-5)


def test_two_threads_with_their_own_prompts(sim: SimulatedAccelerator) -> None:
    """I1, I4: each request reads its prompt once, and neither ends with the other's."""
    split = tiny.transformer(Cosmos3SplitTransformer, layers=2)
    calls = [on(sim.device, tiny.call(length)) for length in (7, 12)]
    with torch.no_grad():
        expected = [split(**tiny.call(length)).sample[0] for length in (7, 12)]
    outputs: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    with offload(split, device=sim.device) as handle:

        def work(index: int) -> None:
            with torch.no_grad():
                for _ in range(5):
                    outputs[index].append(split(**calls[index]).sample[0].cpu())
            split.forget()

        threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert loads(handle)["reasoner"] <= 2
        handle.ledger.audit()
    for index in (0, 1):
        assert len(outputs[index]) == 5
        assert all(torch.allclose(one, expected[index], atol=1e-5) for one in outputs[index])


def test_an_adapter_of_the_joint_model(sim: SimulatedAccelerator, tmp_path: Path) -> None:
    """I7. A LoRA made with diffusers' class, loaded into the offloaded split model, does what it did there."""
    torch.manual_seed(3)
    joint = tiny.pipeline()
    joint.transformer.add_adapter(
        LoraConfig(
            r=4, target_modules=["to_q", "to_v", "mlp.down_proj", "add_q_proj"], init_lora_weights=False
        )
    )
    joint.transformer.save_lora_adapter(tmp_path)
    plain, expected = (
        tiny.request(tiny.pipeline(), num_inference_steps=2),
        tiny.request(joint, num_inference_steps=2),
    )
    assert plain.distance(expected) > 1e-2
    pipe = tiny.pipeline(Cosmos3SplitPipeline)
    with offload(pipe, device=sim.device) as handle:
        assert plain.distance(tiny.request(pipe, num_inference_steps=2)) <= 1e-5
        pipe.transformer.load_lora_adapter(
            tmp_path, prefix=None, weight_name="pytorch_lora_weights.safetensors"
        )
        assert expected.distance(tiny.request(pipe, num_inference_steps=2)) <= 1e-5
        assert loads(handle)["reasoner"] == loads(handle)["generator"] == 2
        handle.ledger.audit()
        pipe.transformer.unload_lora()
        assert plain.distance(tiny.request(pipe, num_inference_steps=2)) <= 1e-5
        handle.ledger.audit()


def test_an_edit_of_an_offloaded_reasoner(sim: SimulatedAccelerator) -> None:
    """I7, and the prompt is read again."""
    split = tiny.transformer(Cosmos3SplitTransformer, layers=2)
    call = on(sim.device, tiny.call())
    with torch.no_grad(), offload(split, device=sim.device) as handle:
        before = split(**call).sample[0].cpu()
        with handle.scope("reasoner"):
            split.layers[0].mlp.up_proj.weight.mul_(3.0)
        after = split(**call).sample[0].cpu()
    with torch.no_grad():
        assert torch.allclose(split(**tiny.call()).sample[0], after, atol=1e-5)
    assert not torch.allclose(before, after, atol=1e-3)


def test_the_host_as_the_device() -> None:
    """Nothing to move there; the phases are kept all the same."""
    pipe = tiny.pipeline(Cosmos3SplitPipeline)
    expected = tiny.request(pipe, **asked("text-to-image"))
    with offload(pipe, device="cpu") as handle:
        assert tiny.request(pipe, **asked("text-to-image")).same(expected)
        assert loads(handle) == {"reasoner": 1, "generator": 1, "vae": 1}


def test_under_the_offload_of_diffusers(sim: SimulatedAccelerator) -> None:
    """Which moves the transformer as a whole: right there, too."""
    expected = tiny.request(tiny.pipeline(Cosmos3SplitPipeline).to(sim.device), **asked("text-to-image"))
    pipe = tiny.pipeline(Cosmos3SplitPipeline)
    pipe.enable_model_cpu_offload(device=sim.device)
    for _ in range(2):
        assert tiny.request(pipe, **asked("text-to-image")).same(expected)
    pipe.remove_all_hooks()


def test_the_pipeline_knows_where_it_computes(sim: SimulatedAccelerator) -> None:
    """diffusers asks the transformer, whose first weight is in the part that is away."""
    pipe = tiny.pipeline(split=True)
    with offload(pipe, device=sim.device):
        assert pipe._get_execution_device() == sim.device
    assert pipe._get_execution_device() == torch.device("cpu")
    assert not hasattr(pipe.transformer, "_hf_hook")


def on(device: torch.device, call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call on another device."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device)
        return [moved(one) for one in value] if isinstance(value, list) else value

    return {name: moved(value) for name, value in call.items()}


# --- declaring ------------------------------------------------------------------------------------------


def owners(split: Cosmos3SplitTransformer) -> dict[str, str]:
    """The part of each tensor, by pattern."""
    found = {}
    for part, patterns in split._offload_components.items():
        for pattern in patterns:
            for name in dict(split.named_parameters()):
                segments, wanted = name.split("."), pattern.split(".")
                if all(one in ("*", other) for one, other in zip(wanted, segments, strict=False)) and len(
                    wanted
                ) <= len(segments):
                    assert found.setdefault(name, part) == part
    return found


@pytest.mark.parametrize("backbone", list(tiny.BACKBONES))
@pytest.mark.parametrize(
    "heads", [{}, {"sound_gen": False}, {"action_gen": False}, {"sound_gen": False, "action_gen": False}]
)
def test_a_tensor_in_no_half(backbone: str, heads: dict[str, Any]) -> None:
    """I3. Every parameter is in one half, in every configuration."""
    split = tiny.transformer(Cosmos3SplitTransformer, layers=2, **tiny.BACKBONES[backbone], **heads)
    assert set(owners(split)) == set(dict(split.named_parameters()))


def test_the_published_configuration() -> None:
    """Cosmos3-Nano's are the defaults of diffusers' class: 15 GiB and more, in two halves."""
    with torch.device("meta"):
        split = Cosmos3SplitTransformer(sound_gen=True, sound_dim=64, action_gen=True, action_dim=32)
    sizes: Counter[str] = Counter()
    of = owners(split)
    for name, one in split.named_parameters():
        sizes[of[name]] += one.numel()
    assert sizes["reasoner"] / 1e9 == pytest.approx(8.19, abs=0.01)
    assert sizes["generator"] / 1e9 == pytest.approx(6.98, abs=0.03)


# --- loading --------------------------------------------------------------------------------------------


def test_a_checkpoint_of_the_joint_model(tmp_path: Path) -> None:
    joint = tiny.transformer(layers=2)
    joint.save_pretrained(tmp_path / "joint")
    split = Cosmos3SplitTransformer.from_pretrained(tmp_path / "joint")
    assert split.state_dict().keys() == joint.state_dict().keys()
    with torch.no_grad():
        assert torch.equal(split(**tiny.call()).sample[0], joint(**tiny.call()).sample[0])
    split.save_pretrained(tmp_path / "split")
    back = Cosmos3OmniTransformer.from_pretrained(tmp_path / "split")
    with torch.no_grad():
        assert torch.equal(back(**tiny.call()).sample[0], joint(**tiny.call()).sample[0])


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")  # diffusers' sound tokenizer
def test_a_pipeline_of_the_joint_model(tmp_path: Path) -> None:
    """One line for the user: the class splits what it loads, and loads what it saved."""
    joint = tiny.pipeline()
    expected = tiny.request(joint, num_inference_steps=2)
    joint.save_pretrained(tmp_path / "joint")
    pipe = Cosmos3SplitPipeline.from_pretrained(tmp_path / "joint")
    assert isinstance(pipe.transformer, Cosmos3SplitTransformer)
    pipe.set_progress_bar_config(disable=True)
    assert expected.same(tiny.request(pipe, num_inference_steps=2))
    pipe.save_pretrained(tmp_path / "split")
    again = Cosmos3SplitPipeline.from_pretrained(tmp_path / "split")
    again.set_progress_bar_config(disable=True)
    assert expected.same(tiny.request(again, num_inference_steps=2))


def test_a_pipeline_made_of_another() -> None:
    """``from_pipe`` shares the weights, and nothing else: a cache on one is not on the other."""
    joint = tiny.pipeline()
    expected = tiny.request(joint, num_inference_steps=2)
    pipe = Cosmos3SplitPipeline.from_pipe(joint)
    pipe.set_progress_bar_config(disable=True)
    assert pipe.transformer.layers[0] is joint.transformer.layers[0]
    assert expected.same(tiny.request(pipe, num_inference_steps=2))
    pipe.transformer.enable_cache(SeaCacheConfig(threshold=10.0))
    assert expected.same(tiny.request(joint, num_inference_steps=2))
    assert not joint.transformer.is_cache_enabled
    assert "forward" not in vars(joint.transformer)


def test_a_split_of_a_wrapped_model(sim: SimulatedAccelerator) -> None:
    joint = tiny.transformer(layers=1)
    joint.enable_cache(SeaCacheConfig())
    with pytest.raises(DeclarationError, match="wrapped"):
        Cosmos3SplitTransformer.from_joint(joint)
    pipe = tiny.pipeline()
    with offload(pipe, device=sim.device), pytest.raises(DeclarationError, match="wrapped"):
        Cosmos3SplitPipeline.from_pipe(pipe)
    split = tiny.transformer(Cosmos3SplitTransformer, layers=1)
    assert Cosmos3SplitTransformer.from_joint(split) is split
