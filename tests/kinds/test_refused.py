"""Kinds of tensors that nobody can move: refused at enable, by name, with advice, and nothing is touched."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from omni_components import UnsupportedTensorError, offload
from tests.helpers.pipelines import footprint
from tests.kinds.quantised import Int8Weight, Pair, Parts


class Opaque(torch.Tensor):
    """A wrapper that does not say where its bytes are."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Opaque:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return "Opaque()"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(func)


class Rooted(Int8Weight):
    """A wrapper that keeps its own device, wherever its inner tensors are."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor, group: int) -> Rooted:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype, device="cpu")

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Rooted:
        return Rooted(inner["values"], inner["scale"], context["group"])


class Stubborn(Int8Weight):
    """A wrapper that cannot be made from its inner tensors again."""

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Stubborn:
        raise NotImplementedError("only by the loader")


class Fading(Int8Weight):
    """A wrapper whose inner tensors make one of another class."""


def as_kind(kind: type[Int8Weight]) -> Callable[[], torch.Tensor]:
    plain = Int8Weight.of(torch.randn(16, 16))
    return lambda: kind(plain.values, plain.scale, plain.group)


def quantised_the_old_way() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this kind is on its way out; users have it still
        return torch.quantize_per_tensor(torch.randn(16, 16), 0.1, 0, torch.qint8)


def with_sparse_inside() -> torch.Tensor:
    weight = Int8Weight.of(torch.randn(16, 16))
    weight.scale = weight.scale.to_sparse()
    return weight


Params = type("Params4bit", (nn.Parameter,), {"__module__": "bitsandbytes.nn.modules"})

REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "no_flatten": (lambda: Opaque(torch.randn(16, 16)), r"Opaque.*__tensor_flatten__"),
    "own_device": (as_kind(Rooted), "Rooted, which stays on cpu"),
    "no_rebuild": (as_kind(Stubborn), r"Stubborn, which cannot be rebuilt.*only by the loader"),
    "other_class": (as_kind(Fading), "Fading, which its inner tensors make a Int8Weight"),
    "sparse": (lambda: torch.eye(16).to_sparse(), "sparse_coo"),
    "sparse_inside": (with_sparse_inside, r"weight\.scale.*sparse_coo"),
    "mkldnn": (lambda: torch.randn(16, 16).to_mkldnn(), "_mkldnn"),
    "old_quantised": (quantised_the_old_way, "not a plain strided tensor"),
    "meta": (lambda: torch.empty(16, 16, device="meta"), "meta device"),
    "meta_inside": (
        lambda: Int8Weight.of(torch.randn(16, 16)).to("meta"),
        r"weight\.values is on the meta device",
    ),
    "conjugate": (lambda: torch.randn(16, 16, dtype=torch.complex64).conj(), "not a plain strided"),
    "bitsandbytes": (lambda: Params(torch.randn(16, 16), False), "Params4bit, whose quantisation state"),
}


@pytest.mark.parametrize("pipeline", [Pair, Parts])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_tensor_that_cannot_be_moved_and_is_let_in(sim, kind, pipeline):
    """The error names the component, the tensor and the reason; nothing was touched."""
    make, reason = REFUSED[kind]
    model = pipeline()
    tensor = make()
    layer = model.A.layers[0]
    del layer.weight
    if isinstance(tensor, nn.Parameter):
        layer.weight = tensor
    else:
        layer.register_buffer("weight", tensor)
    before = footprint(model)
    with pytest.raises(UnsupportedTensorError, match=reason) as caught:
        offload(model, sim.device)
    assert caught.value.component == "A"
    assert caught.value.tensor.startswith("A.layers.0.weight")
    assert caught.value.advice
    assert footprint(model) == before
    assert layer.weight is tensor
    assert sim.stats().allocated == 0


def test_a_sharded_tensor_that_is_taken_for_a_whole_one(sim):
    """A DTensor says which inner tensor it has, but the others lie in other processes."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        model = Pair()
        sharded = DTensor.from_local(torch.randn(8, 16), mesh, [Shard(0)], run_check=False)
        model.A.layers[0].weight = nn.Parameter(sharded, requires_grad=False)
        with pytest.raises(UnsupportedTensorError, match="DTensor, whose bytes lie in several processes"):
            offload(model, sim.device)
    finally:
        dist.destroy_process_group()


def test_what_cannot_be_moved_put_into_a_slot_later(sim):
    """I6: found at the next switch, before anything moves; the component stays whole where it is."""
    model = Pair()
    x = torch.randn(2, 16, device=sim.device)
    with offload(model, sim.device) as handle:
        whole = model.A.layers[0].weight
        model.A.layers[0].weight = nn.Parameter(Opaque(torch.randn(16, 16)), requires_grad=False)
        with pytest.raises(UnsupportedTensorError, match="Opaque"):
            model.use("A", x)
        handle.ledger.check()
        model.A.layers[0].weight = whole
        model.use("A", x)
        handle.ledger.audit()
