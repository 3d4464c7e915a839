"""Faults of enabling and disabling again and again, and of saving meanwhile. Cases C23 and C30."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import safetensors.torch
import torch
from diffusers import AutoencoderKL, DiffusionPipeline, UNet2DModel
from torch import nn

from omni_components import offload
from tests.helpers.pipelines import (
    KINDS,
    build,
    footprint,
    modules,
    places,
    resident_copy,
    same_values,
    tensors,
    values,
)

# --- C23 ----------------------------------------------------------------------------------------------------


def hook_counts(target) -> list[tuple[int, int]]:
    """Pre-hooks and post-hooks of every module that has any."""
    return [
        (len(module._forward_pre_hooks), len(module._forward_hooks))
        for root in modules(target)
        for module in root.modules()
        if module._forward_pre_hooks or module._forward_hooks
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_c23_enabling_twice_attaches_once(sim, kind):
    """The second handle is the first; there is one pre-hook and one post-hook per called module."""
    target = build(kind)
    x = torch.randn(2, 16, device=sim.device)
    handle = offload(target, sim.device)
    marks = footprint(target)
    assert offload(target, sim.device) is handle
    assert footprint(target) == marks
    counts = hook_counts(target)
    assert counts == [(1, 1)] * {"pipeline": 2, "duck": 2, "nested": 3, "split": 0, "interleaved": 0}[kind]
    start = len(handle.events)
    target.use("A", x)
    assert len([one for one in handle.events[start:] if str(one.kind) == "load"]) == 1
    handle.disable()


@pytest.mark.parametrize("arena", ["keep", "fit"])
@pytest.mark.parametrize("kind", KINDS)
def test_c23_three_times_enable_run_disable_leaves_nothing(sim, kind, arena):
    """I7: the same results each time; no hook, no attribute, no pinned byte, no device byte is left."""
    target = build(kind)
    marks, before, where = footprint(target), values(target), places(target)
    objects = list(tensors(target))
    x = torch.randn(2, 16)
    on_device = x.to(sim.device)
    expected = [resident_copy(target, sim.device).use(which, on_device).cpu() for which in "AB"]
    floor = sim.stats().allocated
    for _ in range(3):
        handle = offload(target, sim.device, arena=arena)
        assert [target.use(which, on_device).cpu().tolist() for which in "AB"] == [
            one.tolist() for one in expected
        ]
        handle.disable()
        handle.disable()  # idempotent
        assert footprint(target) == marks
        assert places(target) == where
        assert same_values(target, before)
        assert all(one is other for one, other in zip(tensors(target), objects, strict=True))
        assert (sim.stats().pinned, sim.stats().allocated) == (0, floor)
        assert [target.use(which, x).shape for which in "AB"] == [
            x.shape,
            x.shape,
        ]  # it computes on the host again


# --- C30 ----------------------------------------------------------------------------------------------------


def states(handle, names):
    """Put the offload in each residency state in turn."""
    yield "after enable"
    for name in names:
        with handle.scope(name):
            yield f"inside {name}"
        yield f"after {name}"
    handle.release()
    yield "released"


def saved(module: nn.Module) -> bytes:
    return safetensors.torch.save({name: one.contiguous() for name, one in module.state_dict().items()})


@pytest.mark.parametrize("arena", ["keep", "fit"])
@pytest.mark.parametrize("kind", ["pipeline", "nested", "split", "interleaved"])
def test_c30_state_dict_saves_the_same_bytes_in_every_state(sim, kind, arena):
    """I7: through safetensors, torch.save, pickle and deepcopy; and no file takes a slab or an arena with it."""
    target = build(kind)
    expected = saved(target)
    before = values(target)
    plain = len(torch_saved(target.state_dict()))
    with offload(target, sim.device, arena=arena) as handle:
        for _ in states(handle, target.names.values()):
            assert saved(target) == expected
            blob = torch_saved(target.state_dict())
            assert len(blob) <= plain * 1.2
            loaded = torch.load(io.BytesIO(blob), map_location="cpu")
            assert all(torch.equal(one, before[f"0.{name}"]) for name, one in loaded.items())
            assert same_values(pickle.loads(pickle.dumps(target)), before)
            twin = copy.deepcopy(target)
            assert same_values(twin, before)
            handle.ledger.audit()


def torch_saved(state: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["pipeline", "split"])
def test_c30_a_state_dict_taken_on_the_device_can_be_loaded_back_in_any_state(sim, kind):
    """I7: ``load_state_dict`` copies in place; the new values are the master's, whichever side they were written on."""
    target, source = build(kind), build(kind, seed=1)
    x = torch.randn(2, 16, device=sim.device)
    new = {name: one.clone() for name, one in source.state_dict().items()}
    old = {name: one.clone() for name, one in target.state_dict().items()}
    expected = {id(state): resident_of(kind, state, sim.device) for state in (new, old)}
    with offload(target, sim.device) as handle:
        for index, _ in enumerate(states(handle, target.names.values())):
            state = new if index % 2 == 0 else old
            target.load_state_dict(state)
            handle.ledger.audit()
            twin = expected[id(state)]
            assert saved(target) == safetensors.torch.save(state)
            if handle.ledger.pins("A") + handle.ledger.pins("B") == 0:
                for which in "ABA":
                    assert torch.equal(target.use(which, x).cpu(), twin.use(which, x).cpu())
    assert same_values(target, {f"0.{name}": one for name, one in state.items()})


def resident_of(kind, state, device):
    twin = build(kind)
    twin.load_state_dict(state)
    return twin.to(device)


class Painter(DiffusionPipeline):
    """A pipeline of two real diffusers models."""

    model_cpu_offload_seq = "unet->vae"

    def __init__(self, unet: UNet2DModel, vae: AutoencoderKL) -> None:
        super().__init__()
        self.register_modules(unet=unet, vae=vae)

    @torch.no_grad()
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = self.unet(x, 1).sample
        x = self.vae.decode(x).sample
        self.maybe_free_model_hooks()
        return x


def painter() -> Painter:
    torch.manual_seed(0)
    blocks = {"block_out_channels": (8,), "layers_per_block": 1, "norm_num_groups": 4}
    unet = UNet2DModel(sample_size=8, in_channels=4, out_channels=4, down_block_types=("DownBlock2D",),
                       up_block_types=("UpBlock2D",), **blocks)  # fmt: skip
    vae = AutoencoderKL(sample_size=8, latent_channels=4, **blocks)
    return Painter(unet.eval(), vae.eval())


def test_c30_save_pretrained_writes_the_same_files_in_every_state(sim, tmp_path):
    """I7: of a real diffusers pipeline, byte for byte, weights and configuration."""
    pipe = painter()
    pipe.save_pretrained(tmp_path / "before")
    expected = files(tmp_path / "before")
    assert any(name.endswith(".safetensors") for name in expected)
    with offload(pipe, sim.device) as handle:
        for index, _ in enumerate(states(handle, ("unet", "vae"))):
            pipe.save_pretrained(tmp_path / str(index))
            assert files(tmp_path / str(index)) == expected
            handle.ledger.audit()
        loaded = UNet2DModel.from_pretrained(tmp_path / "0" / "unet")
        assert same_values(loaded, values(pipe.unet))


def files(folder) -> dict[str, bytes]:
    return {
        str(one.relative_to(folder)): one.read_bytes() for one in sorted(folder.rglob("*")) if one.is_file()
    }


def test_c30_a_copy_of_an_offloaded_target_is_whole_and_not_offloaded(sim):
    """It has no hook that acts, no method of the original's, and can be offloaded by itself."""
    pipe = build("pipeline")
    x = torch.randn(2, 16, device=sim.device)
    expected = resident_copy(pipe, sim.device).use("A", x).cpu()
    with offload(pipe, sim.device) as handle:
        pipe.use("A", x)
        twin = copy.deepcopy(pipe)
        start = len(handle.events)
        device = next(twin.A.parameters()).device
        assert torch.equal(twin.A(x.to(device)).cpu(), expected)
        twin.to("cpu").B(torch.randn(2, 16))
        assert len(handle.events) == start
        with offload(twin, sim.device) as other:
            assert other is not handle
            assert torch.equal(twin.use("A", x).cpu(), expected)
            other.ledger.audit()
        handle.ledger.audit()
