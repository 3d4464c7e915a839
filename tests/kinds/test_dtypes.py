"""Faults by element type and by parameter class: what moves must be the same bits of the same kind."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from omni_components import SplitModel, offload
from tests.helpers.pipelines import WIDTH, frozen

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_arena = pytest.mark.parametrize("arena", ["keep", "fit"])


def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Values that the type can hold exactly."""
    if dtype.is_complex:
        return torch.randn(*shape, dtype=dtype)
    if dtype is torch.bool:
        return torch.rand(*shape) > 0.5
    return torch.randint(0 if dtype is torch.uint8 else -8, 8, shape).to(dtype)


class Scaled(nn.Module):
    """Multiplies with a weight of any type, a buffer of the same, and one of each odd size beside it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(random(dtype, WIDTH, WIDTH), requires_grad=False)
        self.register_buffer("offset", random(dtype, 7))
        self.register_buffer("flags", torch.rand(3) > 0.5)
        self.plain = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.complex128 if self.weight.dtype.is_complex else torch.float64
        y = self.plain(x).to(wide) @ self.weight.to(wide)
        return y + self.offset.to(wide).sum() + self.flags.sum()


class Pair(nn.Module):
    _dit_modules: ClassVar[list[str]] = ["B"]
    _encoder_modules: ClassVar[list[str]] = ["A"]
    _vae_modules: ClassVar[list[str]] = []

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.A, self.B = Scaled(dtype), Scaled(dtype)

    def use(self, which: str, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, which)(x)


class Parts(SplitModel):
    _offload_components: ClassVar[dict[str, list[str]]] = {
        "A": ["A.weight", "A.offset", "A.flags", "A.plain"],
        "B": ["B"],
    }

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.A, self.B = Scaled(dtype), Scaled(dtype)

    def use(self, which: str, x: torch.Tensor) -> torch.Tensor:
        with self._offload_context(which):
            return getattr(self, which)(x)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(torch.uint8)


@each_arena
@pytest.mark.parametrize("kind", [Pair, Parts])
@each_dtype
def test_an_element_type_that_does_not_travel_bit_by_bit(sim, dtype, kind, arena):
    """I5, I7: results, dtypes and bits are those of the resident run, and so is the traffic."""
    model = frozen(kind(dtype))
    before = {name: bits(one) for name, one in model.state_dict().items()}
    x = torch.randn(3, WIDTH)
    expected = {which: getattr(copy.deepcopy(model), which)(x) for which in "AB"}
    with offload(model, sim.device, arena=arena) as handle:
        sim.reset()
        for which in "ABAB":
            result = model.use(which, x.to(sim.device))
            assert torch.equal(result.cpu(), expected[which])
            assert getattr(model, which).weight.dtype is dtype
            handle.ledger.audit()
        weights = sum(one.nbytes for one in [*model.parameters(), *model.buffers()])
        assert sim.stats().h2d_bytes == 2 * weights + 4 * x.nbytes
    assert all(torch.equal(bits(one), before[name]) for name, one in model.state_dict().items())


@each_arena
@each_dtype
def test_a_write_to_an_element_type_that_goes_unseen(sim, dtype, arena):
    """I7: written in place on the device, the value is on the host after the switch, and only its bytes came."""
    model = frozen(Pair(dtype))
    fresh = random(dtype, 7)
    with offload(model, sim.device, arena=arena) as handle:
        with handle.scope("A"):
            model.A.offset.copy_(fresh.to(sim.device))
        sim.reset()
        handle.load("B")
        assert torch.equal(bits(model.A.offset), bits(fresh))
        assert sim.stats().d2h_bytes == fresh.nbytes
        handle.ledger.audit()


def test_aliases_of_different_element_types_that_come_apart(sim):
    """I3: a view as bytes and a view as numbers are one piece of memory, on both sides."""
    model = frozen(Pair(torch.float8_e4m3fn))
    model.A.register_buffer("raw", model.A.weight.detach().view(torch.uint8))
    model.A.register_buffer("real", torch.view_as_real(torch.randn(4, dtype=torch.complex64)))
    model.A.register_buffer("both", torch.view_as_complex(model.A.real))
    with offload(model, sim.device) as handle:
        for _ in range(2):
            with handle.scope("A"):
                assert model.A.raw.data_ptr() == model.A.weight.data_ptr()
                model.A.raw.fill_(3)
                model.A.real.fill_(2)
                assert torch.equal(bits(model.A.weight), torch.full((WIDTH, WIDTH), 3, dtype=torch.uint8))
                assert torch.equal(model.A.both.cpu(), torch.full((4,), 2 + 2j))
            handle.load("B")
            handle.ledger.audit()
            assert model.A.raw.data_ptr() == model.A.weight.data_ptr()
            assert torch.equal(bits(model.A.weight), torch.full((WIDTH, WIDTH), 3, dtype=torch.uint8))
            assert torch.equal(model.A.both, torch.full((4,), 2 + 2j))


# --- parameter classes ------------------------------------------------------------------------------------------


class Packed(nn.Parameter):
    """As GGUF's parameter: bytes, with the way to read them as an attribute, and operators of its own."""

    asked: ClassVar[list[str]] = []
    quant_type: int

    def __new__(cls, data: torch.Tensor, requires_grad: bool = False, quant_type: int = 0) -> Packed:
        self = torch.Tensor._make_subclass(cls, data, requires_grad)
        self.quant_type = quant_type
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked.append(getattr(func, "__name__", str(func)))
        result = super().__torch_function__(func, types, args, kwargs or {})
        kind = next((one.quant_type for one in args if isinstance(one, Packed)), 0)
        return cls(result, quant_type=kind) if type(result) is torch.Tensor else result

    def unpacked(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return (self.data.view(torch.int8).float() * self.quant_type).view(WIDTH, WIDTH)


class Unpacking(nn.Module):
    def __init__(self, quant_type: int) -> None:
        super().__init__()
        self.weight = Packed(
            torch.randint(0, 255, (WIDTH * WIDTH,), dtype=torch.uint8), quant_type=quant_type
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.unpacked()


@each_arena
def test_a_parameter_class_that_loses_its_attributes_or_is_asked_for_a_move(sim, arena):
    """The class, its attributes and its bytes follow; its own operators have no say in a move."""
    model = Pair(torch.float32)
    model.A, model.B = Unpacking(3), Unpacking(5)
    x = torch.randn(2, WIDTH)
    expected = {which: model.use(which, x) for which in "AB"}
    with offload(model, sim.device, arena=arena) as handle:
        on_device = x.to(sim.device)
        for which, kind in zip("ABAB", (3, 5, 3, 5), strict=True):
            handle.release()
            Packed.asked.clear()
            handle.load(which)
            assert Packed.asked == []
            weight = getattr(model, which).weight
            assert (type(weight), weight.quant_type) == (Packed, kind)
            assert weight.device == sim.device
            assert torch.equal(model.use(which, on_device).cpu(), expected[which])
            handle.ledger.audit()
        model.B.weight.quant_type = 7
        handle.release()
        assert model.B.weight.quant_type == 7
        with handle.scope("A"):
            model.A.weight.data.zero_()
            torch.autograd.graph.increment_version(model.A.weight)
        handle.release()
        assert not model.A.weight.unpacked().any()
    assert type(model.A.weight) is Packed
