"""Tensors of the device behave as tensors do: storages, views, copies of all kinds, files."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

if TYPE_CHECKING:
    from pathlib import Path

    from omni_components.testing import SimulatedAccelerator

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_round_trip(sim: SimulatedAccelerator, dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 2, 3]).to(dtype)
    on_device = values.to(sim.device)
    assert on_device.device == sim.device
    assert torch.equal(on_device.cpu(), values)
    assert torch.equal(on_device.clone()[1:].contiguous().cpu(), values[1:])
    assert torch.equal(torch.from_dlpack(on_device).cpu(), values)


def test_float8_round_trips(sim: SimulatedAccelerator) -> None:
    values = torch.tensor([0.5, 1, 2]).to(torch.float8_e4m3fn)
    assert values.to(sim.device).float().tolist() == [0.5, 1, 2]


def test_dlpack_gives_a_storage_of_its_own_over_the_same_memory(sim: SimulatedAccelerator) -> None:
    arena = torch.zeros(4096, dtype=torch.uint8, device=sim.device)
    for convert in (torch.from_dlpack, lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t))):
        weight = convert(arena[256:768].view(torch.bfloat16).view(16, 16))
        assert weight.device == sim.device
        assert weight.data_ptr() == weight.untyped_storage().data_ptr() == arena.data_ptr() + 256
        assert weight.untyped_storage().nbytes() == 512
        weight.fill_(1)
        assert arena[:256].sum().item() == 0
        assert arena[256:768].view(torch.bfloat16).sum().item() == 256
        arena.zero_()
        assert weight.sum().item() == 0


def test_dlpack_keeps_the_arena_alive(sim: SimulatedAccelerator) -> None:
    arena = torch.ones(1024, device=sim.device)
    weight = torch.from_dlpack(arena[512:])
    del arena
    assert sim.stats().allocated == 4096
    assert weight.sum().item() == 512
    del weight
    assert sim.stats().allocated == 0


def test_data_may_be_exchanged(sim: SimulatedAccelerator) -> None:
    parameter = nn.Parameter(torch.ones(3, device=sim.device))
    other = torch.zeros(5, device=sim.device)
    parameter.data = other
    assert parameter.data_ptr() == other.data_ptr()
    assert parameter.shape == (5,)


def test_data_does_not_cross_devices(sim: SimulatedAccelerator) -> None:
    parameter = nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        parameter.data = torch.ones(3, device=sim.device)


def test_tensors_may_be_swapped(sim: SimulatedAccelerator) -> None:
    here, there = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3, device=sim.device))
    torch.utils.swap_tensors(here, there)
    assert (here.device.type, there.device.type) == ("sim", "cpu")


def test_set_in_all_forms(sim: SimulatedAccelerator) -> None:
    base, tensor = torch.arange(6.0, device=sim.device), torch.ones(3, device=sim.device)
    tensor.set_(base.untyped_storage(), 2, (2, 2), (2, 1))
    assert tensor.tolist() == [[2, 3], [4, 5]]
    tensor.set_(base)
    assert tensor.data_ptr() == base.data_ptr()
    tensor.set_(base.untyped_storage())
    assert tensor.shape == (6,)
    tensor.set_()
    assert tensor.numel() == 0


def test_views_and_writes_through_them(sim: SimulatedAccelerator) -> None:
    tensor = torch.zeros(4, 4, device=sim.device)
    version = tensor._version
    tensor[1:3, ::2] = 1
    tensor.t()[0].add_(2)
    tensor.view(16)[5] = 7
    tensor.as_strided((4,), (5,)).mul_(3)
    expected = torch.zeros(4, 4)
    expected[1:3, ::2] = 1
    expected.t()[0].add_(2)
    expected.view(16)[5] = 7
    expected.as_strided((4,), (5,)).mul_(3)
    assert torch.equal(tensor.cpu(), expected)
    assert tensor._version == expected._version
    assert tensor._version > version
    assert tensor[1:]._base is tensor


def test_out_arguments_grow(sim: SimulatedAccelerator) -> None:
    out = torch.empty(0, device=sim.device)
    torch.add(torch.ones(200, device=sim.device), 1, out=out)
    assert out.sum().item() == 400
    assert sim.stats().allocated == 1024
    del out
    assert sim.stats().allocated == 0


def test_complex_views(sim: SimulatedAccelerator) -> None:
    values = torch.randn(3, 4, dtype=torch.complex64)
    on_device = values.to(sim.device)
    assert torch.equal(on_device.conj().cpu().resolve_conj(), values.conj().resolve_conj())
    assert torch.equal((on_device.conj().t() @ on_device).cpu(), values.conj().t() @ values)
    assert torch.equal(on_device.conj().imag.cpu().resolve_neg(), values.conj().imag.resolve_neg())
    assert torch.equal(torch.view_as_real(on_device).cpu(), torch.view_as_real(values))


def test_inference_mode(sim: SimulatedAccelerator) -> None:
    layer = nn.Linear(4, 4).to(sim.device)
    with torch.inference_mode():
        result = layer(torch.ones(2, 4, device=sim.device)).view(4, 2).t().add_(1)
    assert result.is_inference()
    assert result.device == sim.device


def test_gradients_equal_the_cpus(run_python: Callable[..., str]) -> None:
    # In a process of its own: torch counts the devices when a process runs its first backward pass.
    code = """
import copy, torch
from torch import nn
from omni_components.testing import SimulatedAccelerator

torch.set_num_threads(1)
layers = [nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Flatten(), nn.Linear(64, 2), nn.LayerNorm(2)]
model, inputs = nn.Sequential(*layers), torch.randn(2, 3, 6, 6)
with SimulatedAccelerator() as sim:
    there = copy.deepcopy(model).to(sim.device)
    model(inputs).square().sum().backward()
    there(inputs.to(sim.device)).square().sum().backward()
    pairs = zip(model.parameters(), there.parameters(), strict=True)
    print(all(torch.equal(ours.grad, theirs.grad.cpu()) for ours, theirs in pairs))
"""
    assert run_python(code).strip() == "True"


# --- copies and files ----------------------------------------------------------------------------------


def test_deepcopy_copies_the_values(sim: SimulatedAccelerator) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(sim.device)
    twin = copy.deepcopy(model)
    for (name, ours), theirs in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert theirs.device == sim.device, name
        assert theirs.data_ptr() != ours.data_ptr()
        assert torch.equal(theirs, ours)
    twin.load_state_dict(model.state_dict(), assign=True)
    assert twin[0].weight.data_ptr() == model[0].weight.data_ptr()


def test_pickle_and_torch_save(sim: SimulatedAccelerator) -> None:
    weight = nn.Parameter(torch.randn(4, 5, device=sim.device, dtype=torch.bfloat16))
    again = pickle.loads(pickle.dumps(weight))
    assert isinstance(again, nn.Parameter)
    assert again.device == sim.device
    assert torch.equal(again.cpu(), weight.cpu())
    file = io.BytesIO()
    torch.save({"weight": weight}, file)
    for target in (None, "cpu", sim.device):
        file.seek(0)
        loaded = torch.load(file, map_location=target)["weight"]
        assert loaded.device == (sim.device if target is None else torch.device(target))
        assert torch.equal(loaded.cpu(), weight.cpu())


def test_safetensors_writes_them(sim: SimulatedAccelerator, tmp_path: Path) -> None:
    tensors = {
        "weight": torch.randn(4, 5, device=sim.device),
        "bias": torch.ones(4, device=sim.device).half(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor.cpu()) for name, tensor in tensors.items())


# --- mixing devices ------------------------------------------------------------------------------------

MIXED: list[Callable[[Any, Any], Any]] = [
    lambda here, there: there + here,
    lambda here, there: here.clone().add_(there),
    lambda here, there: here.sum().add_(there.sum()),
    lambda here, there: here @ there,
    lambda here, there: torch.cat([there, here]),
    lambda here, there: nn.functional.linear(there, here),
    lambda here, there: nn.functional.layer_norm(there, (2,), here[0]),
    lambda here, there: nn.functional.conv2d(there[None, None], here[None, None]),
    lambda here, there: nn.functional.conv2d(here[None, None], there[None, None]),
    lambda here, there: nn.functional.scaled_dot_product_attention(there, here, there),
    lambda here, there: nn.functional.embedding(torch.tensor([0]), there),
    lambda here, there: there.index_select(0, torch.tensor([0])),
    lambda here, there: torch.where(there > 0, there, here),
]


@pytest.mark.parametrize("operation", MIXED)
def test_host_tensors_do_not_mix_with_device_tensors(
    sim: SimulatedAccelerator, operation: Callable[[Any, Any], Any]
) -> None:
    here = torch.ones(2, 2)
    with pytest.raises(RuntimeError, match="same device"):
        operation(here, here.to(sim.device))


def test_scalars_and_indices_may_come_from_the_host(sim: SimulatedAccelerator) -> None:
    tensor = torch.arange(4.0, device=sim.device)
    assert (tensor * torch.tensor(2.0)).tolist() == [0, 2, 4, 6]
    assert tensor[torch.tensor([1, 2])].tolist() == [1, 2]
    tensor[torch.tensor([0])] = 5
    tensor[1] = torch.tensor(6.0)
    assert tensor.tolist() == [5, 6, 2, 3]
    assert torch.where(tensor > 4, tensor, torch.tensor(0.0)).tolist() == [5, 6, 0, 0]


# --- random numbers, autocast, torch.compile -------------------------------------------------------------

RANDOM: list[Callable[[torch.device | str], torch.Tensor]] = [
    lambda device: torch.randn(9, device=device),
    lambda device: torch.rand(9, device=device),
    lambda device: torch.randint(0, 9, (9,), device=device),
    lambda device: torch.randperm(9, device=device),
    lambda device: torch.empty(9, device=device).normal_(),
    lambda device: torch.bernoulli(torch.full((9,), 0.5, device=device)),
    lambda device: torch.multinomial(torch.ones(9, device=device), 3),
    lambda device: torch.rand_like(torch.ones(9, device=device)),
    lambda device: nn.functional.dropout(torch.ones(30, device=device)),
]


@pytest.mark.parametrize("draw", RANDOM)
def test_the_same_seed_draws_what_the_cpu_draws(
    sim: SimulatedAccelerator, draw: Callable[[torch.device | str], torch.Tensor]
) -> None:
    torch.manual_seed(5)
    here = draw("cpu")
    torch.manual_seed(5)
    assert torch.equal(draw(sim.device).cpu(), here)


def test_generators_belong_to_the_device(sim: SimulatedAccelerator) -> None:
    generator = torch.Generator(device=sim.device).manual_seed(3)
    assert generator.device == sim.device
    state = generator.get_state()
    drawn = torch.randn(5, device=sim.device, generator=generator)
    assert torch.equal(drawn.cpu(), torch.randn(5, generator=torch.Generator().manual_seed(3)))
    generator.set_state(state)
    assert torch.equal(torch.randn(5, device=sim.device, generator=generator), drawn)


def test_the_devices_random_state_is_its_own(sim: SimulatedAccelerator) -> None:
    torch.manual_seed(5)
    state = torch.sim.get_rng_state()
    torch.randn(3)
    first = torch.randn(3, device=sim.device)
    torch.sim.set_rng_state(state)
    assert torch.equal(torch.randn(3, device=sim.device), first)
    with torch.random.fork_rng(devices=[sim.device.index], device_type="sim"):
        torch.randn(3, device=sim.device)
    second = torch.randn(3, device=sim.device)
    torch.sim.manual_seed(5)
    assert torch.equal(torch.randn(6, device=sim.device)[:3], first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_equals_the_cpus(sim: SimulatedAccelerator, dtype: torch.dtype, one_thread: None) -> None:
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.Linear(6, 5), nn.LayerNorm(5), nn.Softmax(-1))
    inputs = torch.randn(2, 3, 8)

    def run(device: torch.device) -> list[torch.Tensor]:
        moved, values = copy.deepcopy(model).to(device), inputs.to(device)
        with torch.autocast(device.type, dtype=dtype):
            hidden = moved(values)
            return [hidden, torch.cat([hidden, hidden.float()]), hidden.prod(-1), hidden @ hidden.mT]

    for here, there in zip(run(torch.device("cpu")), run(sim.device), strict=True):
        assert there.dtype == here.dtype
        assert torch.equal(there.cpu(), here)


def test_compiled_code_runs(sim: SimulatedAccelerator) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(sim.device)
    inputs = torch.randn(2, 4, device=sim.device)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(inputs), model(inputs))


def test_names_that_torch_makes_for_the_device(sim: SimulatedAccelerator) -> None:
    tensor = torch.ones(2).sim()
    assert tensor.is_sim
    assert nn.Linear(2, 2).sim().weight.is_sim
    assert "device='sim:0'" in repr(tensor)
    with torch.sim.device(sim.device):
        assert torch.sim.current_device() == 0
