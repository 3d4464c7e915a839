"""LoRA through PEFT while offloaded: add, scale, fuse, unfuse, delete, unload, on the host and on the device. C25."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from diffusers.utils.peft_utils import recurse_remove_peft_layers
from peft import LoHaConfig, LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch import nn

from omni_components import SplitModel, offload
from tests.diffusers.tiny import seeded as noise
from tests.diffusers.tiny import stable_diffusion_3
from tests.helpers.pipelines import (
    WIDTH,
    Stack,
    footprint,
    frozen,
    kinds_of,
    resident_copy,
    same_values,
    values,
)

Step = Callable[[nn.Module], Any]


class Modules(nn.Module):
    """An encoder and a DiT."""

    _dit_modules: ClassVar[list[str]] = ["B"]
    _encoder_modules: ClassVar[list[str]] = ["A"]
    _vae_modules: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        self.A, self.B = Stack(), Stack()

    def use(self, which: str, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, which)(x)


class Parts(SplitModel):
    """The same as parts of one model, each layer declared by itself."""

    _offload_components: ClassVar[dict[str, list[str]]] = {"A": ["A.layers.*"], "B": ["B.layers.*"]}

    def __init__(self) -> None:
        super().__init__()
        self.A, self.B = Stack(), Stack()

    def use(self, which: str, x: torch.Tensor) -> torch.Tensor:
        with self._offload_context(which):
            return getattr(self, which)(x)


class Weights(Parts):
    """The same, each weight and each bias declared by itself."""

    _offload_components: ClassVar[dict[str, list[str]]] = {
        "A": ["A.layers.*.weight", "A.layers.*.bias"],
        "B": ["B.layers.0.weight", "B.layers.0.bias", "B.layers.1"],
    }


KINDS = [Modules, Parts, Weights]


def tuners(module: nn.Module) -> list[Any]:
    return [one for one in module.modules() if isinstance(one, BaseTunerLayer)]


def add(name: str, config: type = LoraConfig) -> Step:
    def step(module: nn.Module) -> None:
        torch.manual_seed(sum(map(ord, name)))  # the twin's adapter has the same weights
        values = {"init_lora_weights": False} if config is LoraConfig else {"init_weights": False}
        wanted = config(target_modules=["layers.0", "layers.1"], r=2, **values)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # two, as asked
            inject_adapter_in_model(wanted, module, name)
        for tensor in module.parameters():
            tensor.requires_grad_(False)

    step.__name__ = f"add_{name}"
    return step


def choose(*names: str) -> Step:
    def step(module: nn.Module) -> None:
        for one in tuners(module):
            one.set_adapter(list(names))
        for tensor in module.parameters():
            tensor.requires_grad_(False)

    return step


def scale(module: nn.Module) -> None:
    for one in tuners(module):
        one.set_scale("one", 0.25)


def fuse(module: nn.Module) -> None:
    for one in tuners(module):
        one.merge()


def fuse_safely(module: nn.Module) -> None:
    for one in tuners(module):
        one.merge(safe_merge=True)


def unfuse(module: nn.Module) -> None:
    for one in tuners(module):
        one.unmerge()


def delete(name: str) -> Step:
    def step(module: nn.Module) -> None:
        for one in tuners(module):
            one.delete_adapter(name)

    return step


def unload(module: nn.Module) -> None:
    recurse_remove_peft_layers(module)


def write(module: nn.Module) -> None:
    """An adapter's weight changed in place, as a training step does."""
    for one in tuners(module):
        one.lora_A["one"].weight.mul_(1.5)


SEQUENCES: dict[str, list[Step]] = {
    "add": [add("one")],
    "scale": [add("one"), scale],
    "write": [add("one"), write],
    "fuse": [add("one"), fuse],
    "fuse_safely": [add("one"), fuse_safely],
    "unfuse": [add("one"), fuse, unfuse],
    "fuse_again": [add("one"), fuse, unfuse, scale, fuse],
    "two": [add("one"), add("two"), choose("one", "two"), fuse],
    "delete": [add("one"), add("two"), choose("two"), delete("one")],
    "unload": [add("one"), unload],
    "fuse_and_unload": [add("one"), fuse, unload],
    "other_kind": [add("one", LoHaConfig), fuse, unfuse, fuse],
}
PLACES = ["host", "device", "alternating", "in_one_go"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("arena", ["keep", "fit"])
def test_c25_an_adapter_operation_whose_result_is_lost(sim, arena, sequence, place, kind):
    """I5, I7: outputs and weights equal, bit for bit, those of the same steps without offload."""
    model = frozen(kind())
    twin = resident_copy(model, sim.device)
    x = torch.randn(3, WIDTH, device=sim.device)
    with offload(model, sim.device, arena=arena) as handle:
        handle.load("A")
        for count, step in enumerate(SEQUENCES[sequence]):
            step(twin.A)
            if place == "in_one_go":
                with handle.scope("A"):
                    step(model.A)
                continue
            if place == "host" or (place == "alternating" and count % 2):
                handle.load("B")
                step(model.A)
            else:
                with handle.scope("A"):
                    step(model.A)
            assert torch.equal(model.use("A", x).cpu(), twin.use("A", x).cpu())
            handle.ledger.audit()
        assert torch.equal(model.use("A", x).cpu(), twin.use("A", x).cpu())
        handle.load("B")
        handle.ledger.audit()
        assert all(one.device.type == "cpu" for one in model.A.parameters())
        assert same_values(model, values(twin))
        for which in "AB":
            assert torch.equal(model.use(which, x).cpu(), twin.use(which, x).cpu())
            handle.ledger.audit()
    assert same_values(model, values(twin))


@pytest.mark.parametrize("arena", ["keep", "fit"])
@pytest.mark.parametrize("where", ["before", "host", "device"])
def test_adapters_that_cost_traffic_when_nobody_uses_them(sim, where, arena):
    """I7, I8: once adopted, switches send nothing back; a merge costs the merged layers' bytes, once."""
    model = frozen(Modules())
    x = torch.randn(3, WIDTH, device=sim.device)
    if where == "before":
        add("one")(model.A)
    with offload(model, sim.device, arena=arena) as handle:
        if where == "device":
            with handle.scope("A"):
                add("one")(model.A)
        elif where == "host":
            add("one")(model.A)
        for which in "AB":
            handle.load(which)
        sim.reset()
        for which in "ABAB":
            model.use(which, x)
        own = sum(one.nbytes for one in model.A.parameters())
        rival = sum(one.nbytes for one in model.B.parameters())
        assert (sim.stats().h2d_bytes, sim.stats().d2h_bytes) == (2 * own + 2 * rival, 0)
        with handle.scope("A"):
            tuners(model.A)[0].merge()
        handle.load("B")
        base = tuners(model.A)[0].get_base_layer()
        assert sim.stats().d2h_bytes == sum(one.nbytes for one in base.parameters())
        handle.load("A")
        assert handle.ledger.size("A") == sum(-(-one.nbytes // 256) * 256 for one in model.A.parameters())
        handle.load("B")
        assert sim.stats().d2h_bytes == sum(one.nbytes for one in base.parameters())


def test_a_merge_that_raises_half_way(sim):
    """I7: what it has written so far is kept, as it would be without offload."""
    model = frozen(Modules())
    add("one")(model.A)
    twin = copy.deepcopy(model)
    for one in (model, twin):
        tuners(one.A)[1].lora_A["one"].weight.fill_(float("nan"))
    with offload(model, sim.device) as handle:
        with handle.scope("A"), pytest.raises(ValueError, match="NaNs detected"):
            fuse_safely(model.A)
        with pytest.raises(ValueError, match="NaNs detected"):
            fuse_safely(twin.A)
        handle.release()
        assert same_values(model, values(twin))


def test_a_merged_component_mapped_from_a_file(tmp_path):
    """I7: with ``device="cpu"`` a merge in private memory survives the way back to the mapped pages."""
    model = frozen(Modules())
    path = tmp_path / "weights.safetensors"
    save_file(model.state_dict(), path)
    model.load_state_dict(load_file(path), assign=True)
    frozen(model)
    twin = copy.deepcopy(model)
    x = torch.randn(3, WIDTH)
    with offload(model, "cpu") as handle:
        for step in (add("one"), fuse, unfuse, fuse, unload):
            step(twin.A)
            with handle.scope("A"):
                step(model.A)
            handle.load("B")
            handle.ledger.audit()
            assert same_values(model, values(twin))
            assert torch.equal(model.use("A", x), twin.use("A", x))


def test_disabling_that_leaves_wrapped_merges_behind(sim):
    """Nothing of ours stays on an adapter layer, nor among torch's hooks."""
    hooks = torch.nn.modules.module._global_module_registration_hooks
    before_hooks = list(hooks.values())
    model = frozen(Modules())
    add("one")(model.A)
    before = footprint(model)
    handle = offload(model, sim.device)
    with handle.scope("A"):
        assert "merge" in vars(tuners(model.A)[0])
        add("two")(model.A)
    handle.disable()
    choose("one")(model.A)
    delete("two")(model.A)
    after = footprint(model)
    assert {path: one for path, one in after.items() if "two" not in path} == before
    assert list(hooks.values()) == before_hooks
    fuse(model.A)
    assert tuners(model.A)[0].merged


def test_an_offload_that_is_dropped_and_watches_on():
    """The hook that all modules share goes with the offload it was for."""
    gc.collect()
    hooks = torch.nn.modules.module._global_module_registration_hooks
    count = len(hooks)
    model = frozen(Modules())
    offload(model, "cpu")
    assert len(hooks) == count + 1
    del model
    gc.collect()
    assert len(hooks) == count


def test_adapters_of_a_model_that_is_not_offloaded_are_left_alone(sim):
    """An adapter layer made meanwhile for another model carries nothing."""
    with offload(frozen(Modules()), sim.device):
        other = frozen(Stack())
        add("one")(other)
        assert not {"merge", "unmerge"} & vars(tuners(other)[0]).keys()


class Extended(nn.Linear):
    """A linear layer with two more, added by hand."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.lora_B(self.lora_A(x))


def extend(linear: nn.Linear, down: torch.Tensor, up: torch.Tensor) -> None:
    device = linear.weight.device
    linear.__class__ = Extended
    linear.lora_A, linear.lora_B = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
    linear.lora_A.weight = nn.Parameter(down.to(device), requires_grad=False)
    linear.lora_B.weight = nn.Parameter(up.to(device), requires_grad=False)


@pytest.mark.parametrize("kind", [Modules, Parts])
@pytest.mark.parametrize("place", ["host", "device"])
def test_c25_children_that_someone_adds_to_a_linear_by_hand(sim, place, kind):
    """I5, I7: new tensors move with their component from the next switch on, values kept, and leave with it."""
    model = frozen(kind())
    down, up = torch.randn(2, WIDTH), torch.randn(WIDTH, 2)
    twin = resident_copy(model, sim.device)
    extend(twin.A.layers[0], down, up)
    x = torch.randn(3, WIDTH, device=sim.device)
    with offload(model, sim.device) as handle:
        if place == "host":
            extend(model.A.layers[0], down, up)
        else:
            with handle.scope("A"):
                extend(model.A.layers[0], down, up)
        for which in "BABA":
            assert torch.equal(model.use(which, x).cpu(), twin.use(which, x).cpu())
            handle.ledger.audit()
        with handle.scope("A"):
            assert {one.device for one in model.A.layers[0].parameters()} == {sim.device}
        handle.load("B")
        assert torch.equal(model.A.layers[0].lora_A.weight, down)
        assert [one for one in kinds_of(handle.events, "adopt") if one[1] == "A"] == [("adopt", "A")]
    assert same_values(model, values(twin))


# --- a diffusers pipeline -------------------------------------------------------------------------------------------


def lora_file() -> dict[str, torch.Tensor]:
    """What a LoRA file for the pipeline's transformer holds."""
    transformer = stable_diffusion_3().transformer
    torch.manual_seed(5)
    transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    return {f"transformer.{name}": one for name, one in get_peft_model_state_dict(transformer).items()}


PIPELINE_STEPS: list[Callable[[Any], Any]] = [
    lambda pipe: pipe.load_lora_weights(lora_file(), adapter_name="one"),
    lambda pipe: pipe.set_adapters(["one"], [0.5]),
    lambda pipe: pipe.fuse_lora(components=["transformer"]),
    lambda pipe: pipe.unfuse_lora(components=["transformer"]),
    lambda pipe: pipe.fuse_lora(components=["transformer"], lora_scale=0.7),
    lambda pipe: pipe.unload_lora_weights(),
]


@pytest.mark.parametrize("on_device", [True, False], ids=["device", "host"])
def test_a_diffusers_pipeline_whose_lora_is_lost(sim, on_device):
    """I5, I7: after each step of its own LoRA interface the picture is that of the pipeline without offload."""

    def picture(pipe: Any) -> torch.Tensor:
        size = {"height": 32, "width": 32, "num_inference_steps": 1, "guidance_scale": 1.0}
        return pipe("a cat", **size, generator=noise(), output_type="latent")[0].cpu()

    pipe, plain = stable_diffusion_3(), stable_diffusion_3().to(sim.device)
    with torch.no_grad(), offload(pipe, sim.device) as handle:
        pictures = [picture(plain)]
        assert torch.equal(picture(pipe), pictures[0])
        for step in PIPELINE_STEPS:
            step(plain)
            if on_device:
                with handle.scope("transformer"):
                    step(pipe)
            else:
                step(pipe)
            pictures.append(picture(plain))
            assert torch.equal(picture(pipe), pictures[-1])
            handle.ledger.audit()
        assert sum(not torch.equal(one, other) for one, other in pairwise(pictures)) >= 3
    before = dict(plain.transformer.named_parameters())
    assert all(torch.equal(one, before[name].cpu()) for name, one in pipe.transformer.named_parameters())
