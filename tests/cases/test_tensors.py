"""Faults of single tensors: shared, aliased, strided, buffers, counters. Cases C12, C14 and C15."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import nn

from omni_components import DeclarationError, SplitModel, offload
from tests.helpers.pipelines import Stack, frozen, resident_copy, same_values, tensors, values

# --- C12: tensors that two components share ---------------------------------------------------------------


class Embedding(nn.Module):
    """Looks token ids up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 16, bias=False)
        self.body = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.body(self.embed(x)))


class Headed(nn.Module):
    """A body and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 16, bias=False)
        self.register_buffer("table", torch.rand(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x))) + self.table


class TiedPipeline(nn.Module):
    """An encoder and a DiT."""

    _dit_modules: ClassVar[list[str]] = ["B"]
    _encoder_modules: ClassVar[list[str]] = ["A"]
    _vae_modules: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        self.A, self.B = Embedding(), Headed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.B(self.A(x))


class TiedSplit(SplitModel):
    """The same as parts of one model."""

    _offload_components: ClassVar[dict[str, list[str]]] = {"A": ["A"], "B": ["B"]}

    def __init__(self) -> None:
        super().__init__()
        self.A, self.B = Embedding(), Headed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self._offload_context("A"):
            x = self.A(x)
        with self._offload_context("B"):
            return self.B(x)


def tie_parameter(model: nn.Module) -> int:
    model.B.head.weight = model.A.embed.weight
    return model.A.embed.weight.nbytes


def tie_storage_by_view(model: nn.Module) -> int:
    model.B.head.weight = nn.Parameter(model.A.embed.weight.detach().T, requires_grad=False)
    return model.A.embed.weight.nbytes


def tie_half_of_a_storage(model: nn.Module) -> int:
    whole = torch.randn(24, 16)
    model.A.embed.weight = nn.Parameter(whole[:16], requires_grad=False)
    model.B.head.weight = nn.Parameter(whole[8:], requires_grad=False)
    return whole.nbytes


def tie_buffer_to_parameter(model: nn.Module) -> int:
    model.B.table = model.A.body.bias.detach()
    return model.A.body.bias.nbytes


TIES: list[Callable[[nn.Module], int]] = [
    tie_parameter,
    tie_storage_by_view,
    tie_half_of_a_storage,
    tie_buffer_to_parameter,
]


def aligned(nbytes: int) -> int:
    return -(-nbytes // 256) * 256


@pytest.mark.parametrize("arena", ["keep", "fit"])
@pytest.mark.parametrize("tie", TIES, ids=lambda tie: tie.__name__)
@pytest.mark.parametrize("kind", [TiedPipeline, TiedSplit])
def test_c12_a_storage_that_two_components_share_is_resident_and_counted_once(sim, kind, tie, arena):
    """I3, I8: bitwise equal results; one resident holds the shared bytes, and nobody else counts them."""
    model = frozen(kind())
    shared = tie(model)
    before = values(model)
    x = torch.randn(2, 16, device=sim.device)
    expected = resident_copy(model, sim.device)(x).cpu()
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors(model)}
    with offload(model, sim.device, arena=arena) as handle:
        for _ in range(3):
            assert torch.equal(model(x).cpu(), expected)
            handle.ledger.audit()
        residents = [one for one in handle.components if one.resident]
        assert [one.bytes for one in residents] == [aligned(shared)]
        assert sum(one.bytes for one in handle.components) == sum(map(aligned, storages.values()))
        row = {one["name"]: one for one in handle.report().to_dict()["rows"]}[residents[0].name]
        assert (row["resident"], row["bytes"], row["evictions"]) == (True, aligned(shared), 0)
    assert same_values(model, before)
    now = {one.untyped_storage().data_ptr() for one in tensors(model)}
    assert len(now) == len(storages)  # what was shared still is


@pytest.mark.parametrize("kind", [TiedPipeline, TiedSplit])
def test_c12_tied_weights_are_the_same_object_in_every_state_and_after_disable(sim, kind):
    """I3: and the object that was there before enabling is there again after it."""
    model = frozen(kind())
    tie_parameter(model)
    original = model.A.embed.weight
    x = torch.randn(2, 16, device=sim.device)
    with offload(model, sim.device) as handle:
        for name in ("A", "B"):
            with handle.scope(name):
                assert model.B.head.weight is model.A.embed.weight
                assert model.A.embed.weight.device == sim.device
        model(x)
    assert model.B.head.weight is model.A.embed.weight is original


@pytest.mark.parametrize("arena", ["keep", "fit"])
def test_c12_a_module_that_lies_in_two_components_is_resident_and_counted_once(sim, arena):
    """I3, I8: a shared submodule shares all its storages, and neither component owns them."""
    pipe = frozen(TiedPipeline())
    pipe.B.body = pipe.A.body
    x = torch.randn(2, 16, device=sim.device)
    expected = resident_copy(pipe, sim.device)(x).cpu()
    with offload(pipe, sim.device, arena=arena) as handle:
        for _ in range(2):
            assert torch.equal(pipe(x).cpu(), expected)
            handle.ledger.audit()
        assert [(one.bytes, one.tensors) for one in handle.components if one.resident] == [(1024 + 256, 2)]
        assert sum(one.tensors for one in handle.components) == len({id(one) for one in tensors(pipe)})


def test_c12_a_module_in_two_parts_of_a_split_model_is_refused_with_both_names(sim):
    """I3: parts are a partition by pattern, so the author has to say whose it is."""
    model = frozen(TiedSplit())
    model.B.body = model.A.body
    with pytest.raises(DeclarationError, match=r"'A\.body\.weight' is in two parts, 'A' and 'B'"):
        offload(model, sim.device)


def test_c12_a_tie_inside_one_component_stays_a_tie_and_travels_once(sim):
    """I3: within one component a tied weight is one tensor in two slots."""
    model = frozen(TiedPipeline())
    model.A.body.weight = model.A.embed.weight
    x = torch.randn(2, 16, device=sim.device)
    expected = resident_copy(model, sim.device)(x).cpu()
    with offload(model, sim.device) as handle:
        sim.reset()
        assert torch.equal(model(x).cpu(), expected)
        assert not [one for one in handle.components if one.resident]
        assert model.A.body.weight is model.A.embed.weight
        distinct = {id(one): one.nbytes for one in tensors(model)}
        assert sim.stats().h2d_bytes == sum(distinct.values())


# --- C14: views, strides, offsets ----------------------------------------------------------------------


class Views(nn.Module):
    """Parameters and buffers of every layout in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16))
        self.register_buffer("row", self.weight.detach()[3])
        self.register_buffer("column", self.weight.detach()[:, 5])
        self.transposed = nn.Parameter(torch.randn(8, 16).T)
        self.expanded = nn.Parameter(torch.randn(8, 1).expand(8, 1000))
        self.stepped = nn.Parameter(torch.randn(40)[3:35:2])
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.channels_last = nn.Parameter(
            torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
        )
        self.register_buffer("ids", torch.arange(7, dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False, True]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.weight.T @ self.transposed.T + self.stepped * self.scalar
        x = (
            x + self.row.amax() + self.column.amax()
        )  # no sums: `.to()` changes some strides, and their order with them
        return x + self.expanded.amax() + self.channels_last.amax() + self.ids.sum() + self.mask.sum()


class ViewsPipeline(nn.Module):
    """A component of views and a rival."""

    _dit_modules: ClassVar[list[str]] = ["B"]
    _encoder_modules: ClassVar[list[str]] = ["A"]
    _vae_modules: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        self.A, self.B = Views(), Stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.B(self.A(x))


def layout(module: nn.Module) -> dict[str, tuple]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: (one.shape, one.stride(), one.dtype, one.requires_grad) for name, one in named}


@pytest.mark.parametrize("arena", ["keep", "fit"])
def test_c14_views_strides_and_offsets_survive_switches(sim, arena):
    """I3, I7: after two switches every layout is as it was, and expanded bytes count by storage."""
    pipe = frozen(ViewsPipeline())
    shapes, before = layout(pipe), values(pipe)
    x = torch.randn(2, 16, device=sim.device)
    expected = resident_copy(pipe, sim.device)(x).cpu()
    with offload(pipe, sim.device, arena=arena) as handle:
        for _ in range(2):
            with handle.scope("A"):
                assert layout(pipe) == shapes
                assert pipe.A.weight.device == sim.device
            assert torch.equal(pipe(x).cpu(), expected)
            assert layout(pipe) == shapes
            handle.ledger.audit()
        size = next(one.bytes for one in handle.components if one.name == "A")
        assert (
            size
            <= sum(-(-one.untyped_storage().nbytes() // 256) * 256 for one in frozen(Views()).parameters())
            + 512
        )
        handle.release()
        sim.reset()
        handle.load("A")
        assert sim.stats().h2d_bytes < 8 * 1000 * 4  # the expanded parameter alone would be that
    assert layout(pipe) == shapes
    assert same_values(pipe, before)


@pytest.mark.parametrize("arena", ["keep", "fit"])
@pytest.mark.parametrize("where", ["host", "device", "host after switch"])
def test_c14_a_view_follows_a_write_through_its_base(sim, where, arena):
    """I3, I7: a buffer that is a view of a parameter sees the write, on the side it happens and on the other."""
    pipe = frozen(ViewsPipeline())
    x = torch.randn(2, 16, device=sim.device)
    with offload(pipe, sim.device, arena=arena) as handle:
        pipe(x)
        if where == "host":
            pipe.A.weight.fill_(2.0)
        elif where == "device":
            with handle.scope("A"):
                pipe.A.weight.fill_(2.0)
                assert torch.equal(pipe.A.row.cpu(), torch.full((16,), 2.0))
        else:
            pipe(x)
            pipe.A.weight.fill_(2.0)
        for scope in ("A", "B", "A"):
            with handle.scope(scope):
                assert torch.equal(pipe.A.row.cpu(), torch.full((16,), 2.0))
                assert torch.equal(pipe.A.column.cpu(), torch.full((8,), 2.0))
                assert torch.equal(pipe.A.weight.cpu(), torch.full((8, 16), 2.0))
        handle.ledger.audit()
    assert pipe.A.row.data_ptr() == pipe.A.weight.data_ptr() + 3 * 16 * 4


@pytest.mark.parametrize("where", ["host", "device"])
def test_c14_a_write_through_the_view_reaches_its_base(sim, where):
    """I3, I7: the same the other way round, through the buffer."""
    pipe = frozen(ViewsPipeline())
    with offload(pipe, sim.device) as handle:
        if where == "device":
            with handle.scope("A"):
                pipe.A.row.fill_(5.0)
        else:
            pipe.A.row.fill_(5.0)
        for scope in ("A", "B", "A"):
            with handle.scope(scope):
                assert torch.equal(pipe.A.weight[3].cpu(), torch.full((16,), 5.0))


# --- C15: buffers ------------------------------------------------------------------------------------------


class Buffers(nn.Module):
    """Every kind of buffer, and a counter that forward moves on."""

    def __init__(self, *, replace: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("secret", torch.rand(16), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.replace = replace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.replace:
            self.count = self.count + 1
        else:
            self.count += 1
        assert self.nothing is None
        return self.norm(x) * self.secret


class BufferPipeline(nn.Module):
    """Two components with buffers."""

    _dit_modules: ClassVar[list[str]] = ["B"]
    _encoder_modules: ClassVar[list[str]] = ["A"]
    _vae_modules: ClassVar[list[str]] = []

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.A, self.B = Buffers(**options), Buffers(**options)


class BufferSplit(SplitModel):
    """The same as parts."""

    _offload_components: ClassVar[dict[str, list[str]]] = {"A": ["A"], "B": ["B"]}

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.A, self.B = Buffers(**options), Buffers(**options)


def run(model: nn.Module, which: str, x: torch.Tensor) -> torch.Tensor:
    if isinstance(model, SplitModel):
        with model._offload_context(which):
            return getattr(model, which)(x)
    return getattr(model, which)(x)


@pytest.mark.parametrize("arena", ["keep", "fit"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("replace", [False, True], ids=["in place", "replaced"])
@pytest.mark.parametrize("kind", [BufferPipeline, BufferSplit])
def test_c15_every_buffer_follows_and_a_counter_is_not_lost(sim, kind, replace, training, arena):
    """I5, I7: six alternations count to 3 in each component, read on the device and on the host."""
    model = frozen(kind(replace=replace)).train(training)
    twin = resident_copy(model, sim.device)
    batches = [torch.randn(4, 16, device=sim.device) for _ in range(6)]
    with offload(model, sim.device, arena=arena) as handle:
        for which, x in zip("ABABAB", batches, strict=True):
            assert torch.equal(run(model, which, x).cpu(), run(twin, which, x).cpu())
            handle.ledger.audit()
        with handle.scope("A"):
            assert all(one.device == sim.device for one in model.A.buffers())
            assert model.A.count.item() == 3
        with handle.scope("B"):
            assert all(one.device == sim.device for one in model.B.buffers())
            assert all(one.device.type == "cpu" for one in model.A.buffers())
            assert (model.A.count.item(), model.B.count.item()) == (3, 3)
        assert same_values(model, values(twin))
    assert same_values(model, values(twin))
    assert "secret" not in model.A.state_dict()


class Norms(nn.Module):
    """Norms that write their statistics in ways autograd does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(16)
        self.instance = nn.InstanceNorm1d(16, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.instance(self.batch(x)[..., None].expand(-1, -1, 3))


def test_c15_statistics_written_behind_autograd_are_not_lost(sim):
    """I7: batch_norm moves no version counter; also when the module is back in eval mode before it leaves."""
    pipe = BufferPipeline(replace=False)
    pipe.A = Norms()
    twin = resident_copy(pipe, sim.device)
    x = torch.randn(4, 16, device=sim.device)
    with offload(pipe, sim.device) as handle, torch.no_grad():
        for _ in range(2):
            pipe.A.train()(x)
            twin.A.train()(x)
            pipe.A.batch.eval()
            handle.release()
            assert same_values(pipe, values(twin))


class Passing(nn.Module):
    """A module without a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_c15_a_component_without_tensors_takes_turns_like_any_other(sim):
    """I1, I2: no bytes move for it, and its rival still leaves."""
    pipe = frozen(BufferPipeline(replace=False)).eval()
    pipe.A = Passing()
    with offload(pipe, sim.device) as handle:
        pipe.B(torch.ones(1, 16, device=sim.device))
        pipe.A(torch.ones(1))
        assert handle.ledger.present == ("A",)
        handle.ledger.audit()


# --- modules that keep a second list of their weights ---------------------------------------------------------


class Recurrent(nn.Module):
    """RNNs hold their weights twice: as parameters, and in a list that the kernels get."""

    _dit_modules: ClassVar[list[str]] = ["B"]
    _encoder_modules: ClassVar[list[str]] = ["A"]
    _vae_modules: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        self.A = nn.RNN(16, 16, batch_first=True)
        self.B = nn.RNN(16, 16, num_layers=2, nonlinearity="relu", batch_first=True)


@pytest.mark.parametrize("arena", ["keep", "fit"])
def test_c14_a_second_list_of_weights_follows_the_parameters(sim, arena):
    """I3, I5: on both sides the list holds the registered objects."""
    pipe = frozen(Recurrent())
    x = torch.randn(2, 3, 16, device=sim.device)
    twin = resident_copy(pipe, sim.device)
    with offload(pipe, sim.device, arena=arena) as handle:
        for which in "ABAB":
            assert torch.equal(getattr(pipe, which)(x)[0].cpu(), getattr(twin, which)(x)[0].cpu())
            for module in (pipe.A, pipe.B):
                assert [id(one) for one in module._flat_weights] == [id(one) for one in module.parameters()]
            handle.ledger.audit()
    assert all(one.device.type == "cpu" for module in (pipe.A, pipe.B) for one in module._flat_weights)
    assert pipe.A(x.cpu())[0].shape == x.shape
