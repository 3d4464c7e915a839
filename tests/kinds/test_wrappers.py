"""Faults of weights that hold their bytes in other tensors (quantised weights, any ``__tensor_flatten__`` subclass)."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from omni_components import TransferError, offload
from omni_components.components.wrappers import leaves
from tests.helpers.pipelines import WIDTH, Stack, frozen, kinds_of, resident_copy
from tests.kinds.quantised import KINDS, WRAPPERS, Int8Weight, int8, two, wrap

ARENAS = ["keep", "fit"]
each_arena = pytest.mark.parametrize("arena", ARENAS)
each_kind = pytest.mark.parametrize("kind", KINDS)
each_wrapper = pytest.mark.parametrize("how", WRAPPERS)


def build(kind: str = "modules", how: str = "int8") -> Any:
    return wrap(KINDS[kind](), WRAPPERS[how])


def plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Host copies of what a tensor consists of."""
    return [one.detach().cpu().clone() for _, one in leaves(tensor)]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    mine, yours = plain(one), plain(other)
    return type(one) is type(other) and len(mine) == len(yours) and all(map(torch.equal, mine, yours))


def contents(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: plain(one) for name, one in tensors}


def unchanged(model: nn.Module, before: dict[str, list[torch.Tensor]]) -> bool:
    now = contents(model)
    return now.keys() == before.keys() and all(
        all(map(torch.equal, now[name], before[name])) for name in before
    )


def weight_of(model: Any, which: str = "A", layer: int = 0) -> Any:
    return getattr(model, which).layers[layer].weight


def payload(module: nn.Module) -> int:
    return sum(leaf.nbytes for one in module.parameters() for _, leaf in leaves(one))


# --- taking turns ---------------------------------------------------------------------------------------------


@each_arena
@each_kind
@each_wrapper
def test_a_wrapped_weight_that_does_not_follow_its_component(sim, how, kind, arena):
    """I1, I2, I5: results equal those of the resident run, and every inner tensor is where its component is."""
    model = build(kind, how)
    before = contents(model)
    x = torch.randn(3, WIDTH, device=sim.device)
    twin = resident_copy(model, sim.device)
    expected = {which: twin.use(which, x) for which in "AB"}
    with offload(model, sim.device, arena=arena) as handle:
        for which in "ABAABB":
            assert same(model.use(which, x), expected[which])
            handle.ledger.audit()
            inside = [leaf for one in getattr(model, which).parameters() for _, leaf in leaves(one)]
            assert {one.device for one in inside} == {sim.device}
            assert weight_of(model, which).device == sim.device
        assert {one.device.type for one in model.A.parameters()} == {"cpu"}
        assert unchanged(model, before)
    assert unchanged(model, before)
    assert all(one.device.type == "cpu" for one in model.parameters())


@each_arena
@each_kind
@each_wrapper
def test_inner_tensors_that_travel_more_than_once_or_back(sim, how, kind, arena):
    """I7, I8: a switch costs the inner tensors' bytes, one way, and the component counts them all."""
    model = build(kind, how)
    x = torch.randn(3, WIDTH, device=sim.device)
    with offload(model, sim.device, arena=arena) as handle:
        sim.reset()
        for which in "ABABAB":
            model.use(which, x)
        assert (sim.stats().h2d_bytes, sim.stats().d2h_bytes) == (
            3 * payload(model.A) + 3 * payload(model.B),
            0,
        )
        sizes = {one.name: (one.bytes, one.tensors) for one in handle.components}
        aligned = sum(-(-leaf.nbytes // 256) * 256 for one in model.A.parameters() for _, leaf in leaves(one))
        assert sizes["A"] == (aligned, len(list(model.A.parameters())))


def test_a_kept_arena_that_makes_a_wrapper_anew_at_each_switch(sim):
    """Two stable objects alternate, so that compiled code and references to the parameter stay good."""
    model = build()
    original = weight_of(model)
    x = torch.randn(3, WIDTH, device=sim.device)
    seen = []
    with offload(model, sim.device, arena="keep"):
        assert weight_of(model) is original
        for _ in range(3):
            model.use("A", x)
            seen.append(
                (id(weight_of(model)), id(weight_of(model).values), weight_of(model).values.data_ptr())
            )
            model.use("B", x)
            assert weight_of(model) is original
    assert len(set(seen)) == 1
    assert weight_of(model) is original
    assert isinstance(original, nn.Parameter)


def test_a_wrapper_with_views_of_its_own_that_keeps_memory_it_has_left(sim):
    """I8: where each switch takes fresh memory, the wrapper of the last one goes, and with it all that it holds."""

    class Cached(Int8Weight):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = super().__torch_dispatch__(func, types, args, kwargs)
            return cls(made.values, made.scale, made.group) if type(made) is Int8Weight else made

        def __init__(self, values: torch.Tensor, scale: torch.Tensor, group: int) -> None:
            super().__init__(values, scale, group)
            self.turned = (values.t(),)

        @staticmethod
        def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Cached:
            return Cached(inner["values"], inner["scale"], context["group"])

    def cached(weight: torch.Tensor) -> Cached:
        one = Int8Weight.of(weight)
        return Cached(one.values, one.scale, one.group)

    model = wrap(KINDS["modules"](), cached)
    x = torch.randn(3, WIDTH, device=sim.device)
    with offload(model, sim.device, arena="fit") as handle:
        for which in "ABAB":
            model.use(which, x)
            turned = weight_of(model, which).turned[0]
            assert torch.equal(turned.cpu(), weight_of(model, which).values.t().cpu())
            assert turned.data_ptr() == weight_of(model, which).values.data_ptr()
        del turned
        handle.release()
        del x
        assert sim.stats().allocated == 0


@each_arena
def test_attributes_of_a_wrapper_that_stay_on_one_side(sim, arena):
    """What someone sets on, or deletes from, a parameter is there on the other side too."""
    model = build()
    weight_of(model).mark = "loader"
    with offload(model, sim.device, arena=arena) as handle:
        with handle.scope("A"):
            assert weight_of(model).mark == "loader"
            weight_of(model).note = [1]
            weight_of(model).group = 5
        handle.release()
        assert (weight_of(model).note, weight_of(model).mark, weight_of(model).group) == ([1], "loader", 5)
        del weight_of(model).mark
        with handle.scope("A"):
            assert not hasattr(weight_of(model), "mark")
            assert (weight_of(model).note, weight_of(model).group) == ([1], 5)
    assert weight_of(model).group == 5


def test_weights_that_start_on_the_device_and_are_not_fetched_whole(sim):
    """I7: wrappers that were there before enabling end on the host, and the device memory they had is free."""
    model = build()
    before = contents(model)
    x = torch.randn(3, WIDTH, device=sim.device)
    model.to(sim.device)
    expected = model.use("A", x).cpu()
    with offload(model, sim.device) as handle:
        assert weight_of(model).device.type == "cpu"
        assert torch.equal(model.use("A", x).cpu(), expected)
        handle.ledger.audit()
        handle.release(free_arena=True)
        del x
        assert sim.stats().allocated == 0
    assert unchanged(model, before)


def test_enabling_that_fails_half_way_and_leaves_wrappers_torn(sim):
    """I6: weights that were on the device are there again, whole, whichever copy failed."""
    for count in range(8):
        model = build().to(sim.device)
        before = contents(model)
        sim.reset()
        sim.fail(copy=count)
        with contextlib.suppress(RuntimeError):
            offload(model, sim.device).disable(to=sim.device)
        sim.reset()
        assert {leaf.device for one in model.parameters() for _, leaf in leaves(one)} == {sim.device}
        assert {one.device for one in model.parameters()} == {sim.device}
        assert unchanged(model, before)


@each_arena
def test_a_load_that_fails_and_tears_a_wrapper_in_two(sim, arena):
    """I6: whichever copy fails, each wrapper is whole on one side, and the next call is right."""
    model = build()
    before = contents(model)
    x = torch.randn(3, WIDTH, device=sim.device)
    expected = resident_copy(model, sim.device).use("A", x).cpu()
    with offload(model, sim.device, arena=arena) as handle:
        failed = 0
        for count in range(4):
            model.use("B", x)
            sim.fail(copy=count)
            try:
                model.use("A", x)
            except TransferError:
                failed += 1
            sim.reset()
            handle.ledger.audit()
            assert torch.equal(model.use("A", x).cpu(), expected)
        assert failed > 0
    assert unchanged(model, before)


# --- what changes while it is away or there -------------------------------------------------------------------


def scale_in_place(weight: Any) -> None:
    weight.scale.mul_(2)


def whole_in_place(weight: Any) -> None:
    weight.mul_(2)


def scale_replaced(weight: Any) -> None:
    weight.scale = weight.scale * 2


def scale_data(weight: Any) -> None:
    weight.scale.data = weight.scale * 2


CHANGES: list[Callable[[Any], None]] = [scale_in_place, whole_in_place, scale_replaced, scale_data]


@each_arena
@each_kind
@pytest.mark.parametrize("on_device", [True, False], ids=["device", "host"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
def test_an_inner_tensor_changed_or_replaced_whose_new_values_are_lost(sim, change, on_device, kind, arena):
    """I7: read on the host, on the device, and after disable."""
    model = build(kind)
    twin = copy.deepcopy(model)
    change(weight_of(twin))
    x = torch.randn(3, WIDTH, device=sim.device)
    expected = resident_copy(twin, sim.device).use("A", x).cpu()
    with offload(model, sim.device, arena=arena) as handle:
        if on_device:
            with handle.scope("A"):
                change(weight_of(model))
        else:
            change(weight_of(model))
        model.use("B", x)
        handle.ledger.audit()
        assert same(weight_of(model), weight_of(twin))
        for which in "ABA":
            result = model.use(which, x)
            handle.ledger.audit()
        assert torch.equal(result.cpu(), expected)
    assert unchanged(model, contents(twin))


@each_arena
def test_a_changed_inner_tensor_that_costs_more_than_its_own_bytes(sim, arena):
    """I7, I8: of a weight with a million values only its scales come back."""
    model = build()
    x = torch.randn(3, WIDTH, device=sim.device)
    with offload(model, sim.device, arena=arena) as handle:
        with handle.scope("A"):
            weight_of(model).scale.mul_(2)
            sim.reset()
        model.use("B", x)
        assert sim.stats().d2h_bytes == weight_of(model).scale.nbytes
        assert [one for one, _ in kinds_of(handle.events, "write_back", "adopt")] == ["write_back"]


def test_edits_of_inner_data_inside_editing_that_are_lost(sim):
    """I7: ``.data`` arithmetic leaves no trace; ``handle.editing`` is the scope for it."""
    model = build()
    twin = copy.deepcopy(model)
    weight_of(twin).scale.data.mul_(3)
    with offload(model, sim.device) as handle:
        with handle.editing("A"):
            weight_of(model).scale.data.mul_(3)
        handle.release()
        assert same(weight_of(model), weight_of(twin))


@each_arena
@each_kind
@pytest.mark.parametrize("on_device", [True, False], ids=["device", "host"])
def test_a_wrapped_parameter_replaced_by_another_that_is_not_adopted(sim, on_device, kind, arena):
    """I7: by a wrapper of another class, by a plain weight, and the other way round."""
    model = build(kind)
    x = torch.randn(3, WIDTH, device=sim.device)
    fresh = [torch.randn(WIDTH, WIDTH) for _ in range(2)]
    twin = copy.deepcopy(model)

    def replace(one: Any, device: Any) -> None:
        one.A.layers[0].weight = nn.Parameter(Int8Weight.of(fresh[0].to(device)), requires_grad=False)
        one.A.layers[1].weight = nn.Parameter(fresh[1].to(device), requires_grad=False)

    replace(twin, "cpu")
    expected = resident_copy(twin, sim.device).use("A", x).cpu()
    with offload(model, sim.device, arena=arena) as handle:
        if on_device:
            with handle.scope("A"):
                replace(model, sim.device)
        else:
            replace(model, "cpu")
        for which in "BABA":
            result = model.use(which, x)
            handle.ledger.audit()
        assert torch.equal(result.cpu(), expected)
        replace(model, sim.device)  # plain to wrapped happens at once: the second layer's weight was plain
        model.A.layers[1].weight = nn.Parameter(Int8Weight.of(fresh[1].to(sim.device)), requires_grad=False)
        twin.A.layers[1].weight = nn.Parameter(Int8Weight.of(fresh[1]), requires_grad=False)
        model.use("B", x)
        handle.ledger.audit()
    assert unchanged(model, contents(twin))


@each_arena
@pytest.mark.parametrize("assign", [True, False], ids=["assign", "copy"])
@pytest.mark.parametrize("on_device", [True, False], ids=["device", "host"])
def test_a_state_dict_loaded_into_wrappers_that_is_lost(sim, on_device, assign, arena):
    """I7: with ``assign`` the parameters are other objects, without it the inner tensors are written."""
    torch.manual_seed(1)
    other = build()
    state = other.state_dict()
    model = build()
    with offload(model, sim.device, arena=arena) as handle:
        if on_device:
            with handle.scope("A"):
                model.load_state_dict(state, assign=assign)
        else:
            model.load_state_dict(state, assign=assign)
        handle.load("B")
        handle.ledger.audit()
        handle.load("A")
        handle.ledger.audit()
        assert unchanged(model, contents(other))
    assert unchanged(model, contents(other))


@each_arena
@pytest.mark.parametrize("on_device", [True, False], ids=["device", "host"])
def test_a_component_converted_while_offloaded_that_loses_its_wrappers(sim, on_device, arena):
    """I7: ``.to()`` swaps the contents of wrapped parameters (torch.utils.swap_tensors) and keeps the objects."""
    model = wrap(KINDS["modules"](), two)
    twin = copy.deepcopy(model)
    twin.A.to(torch.float64)
    with offload(model, sim.device, arena=arena) as handle:
        if on_device:
            with handle.scope("A"):
                model.A.to(torch.float64)
                model.A.to(torch.float64)
        else:
            model.A.to(torch.float64)
        for which in "BAB":
            handle.load(which)
            handle.ledger.audit()
        assert weight_of(model).dtype is torch.float64
        assert unchanged(model, contents(twin))


def test_a_wrapper_taken_out_that_goes_on_moving(sim):
    """I7: whoever took a wrapper out on the host keeps it whole, whatever happens to its old memory."""
    model = build()
    with offload(model, sim.device) as handle:
        gone = weight_of(model, "A", 1)
        kept = plain(gone)
        model.A.layers[1] = nn.Identity()
        for which in "ABA":
            handle.load(which)
            handle.ledger.audit()
        assert all(map(torch.equal, plain(gone), kept))


# --- shared -----------------------------------------------------------------------------------------------------


def tie_wrapper(model: Any) -> None:
    model.B.layers[0].weight = model.A.layers[0].weight


def tie_one_inner_tensor(model: Any) -> None:
    mine, yours = weight_of(model), weight_of(model, "B")
    model.B.layers[0].weight = nn.Parameter(
        Int8Weight(mine.values, yours.scale, mine.group), requires_grad=False
    )


def tie_inner_to_buffer(model: Any) -> None:
    model.B.register_buffer("scale", weight_of(model).scale)


@each_arena
@pytest.mark.parametrize(
    "tie", [tie_wrapper, tie_one_inner_tensor, tie_inner_to_buffer], ids=lambda one: one.__name__
)
def test_a_wrapper_torn_between_two_components(sim, tie, arena):
    """I3: what shares any bytes stays together, resident, and a wrapper is never half on each side."""
    model = build()
    tie(model)
    before = contents(model)
    x = torch.randn(3, WIDTH, device=sim.device)
    twin = resident_copy(model, sim.device)
    with offload(model, sim.device, arena=arena) as handle:
        for which in "ABAB":
            assert torch.equal(model.use(which, x).cpu(), twin.use(which, x).cpu())
            handle.ledger.audit()
            assert weight_of(model).device == sim.device
        assert [one.name for one in handle.components if one.resident] == ["(shared)"]
    assert unchanged(model, before)


def test_an_inner_tensor_that_is_a_buffer_too(sim):
    """I3, I5: one tensor, one place: the buffer and the wrapper show the same bytes on both sides."""
    model = build()
    model.A.register_buffer("scale", weight_of(model).scale)
    with offload(model, sim.device) as handle:
        for _ in range(2):
            with handle.scope("A"):
                assert model.A.scale is weight_of(model).scale
                assert model.A.scale.device == sim.device
                model.A.scale.mul_(2)
            handle.load("B")
            handle.ledger.audit()
            assert model.A.scale is weight_of(model).scale
            assert model.A.scale.device.type == "cpu"


# --- copies and files ---------------------------------------------------------------------------------------------


def states(handle: Any) -> Iterator[str]:
    yield "host"
    with handle.scope("A"):
        yield "device"
    handle.load("B")
    yield "evicted"


@each_arena
@each_wrapper
def test_state_dicts_and_copies_that_differ_by_residency_state(sim, how, arena):
    """I7: ``state_dict``, ``deepcopy`` and ``torch.save`` give the values from before enabling, in every state."""
    model = build(how=how)
    before = contents(model)
    with offload(model, sim.device, arena=arena) as handle:
        for _ in states(handle):
            state = {name: plain(one) for name, one in model.state_dict().items()}
            assert all(all(map(torch.equal, state[name], before[name])) for name in before)
            assert state.keys() == before.keys()
            twin = copy.deepcopy(model)
            assert unchanged(twin, before)
            twin.A.layers[0].bias.fill_(7)
            mine, yours = weight_of(model), weight_of(twin)
            assert not {id(one) for _, one in leaves(mine)} & {id(one) for _, one in leaves(yours)}
            assert unchanged(model, before)
            handle.ledger.audit()


def test_a_file_of_one_wrapped_weight_that_takes_the_whole_slab_along(sim):
    """Saving one weight writes its own bytes, not those of the slab that it lies in."""
    model = build()
    with offload(model, sim.device):
        file = io.BytesIO()
        torch.save(weight_of(model).values, file)
        assert file.tell() < 4096


# --- other ways to enable -------------------------------------------------------------------------------------------


@each_kind
def test_wrappers_made_and_enabled_under_inference_mode(sim, kind):
    """I7: inference tensors have no version counter; writes to what takes their place are still seen."""
    with torch.inference_mode():
        model = build(kind)
        x = torch.randn(3, WIDTH, device=sim.device)
        expected = resident_copy(model, sim.device).use("A", x)
        handle = offload(model, sim.device)
        assert torch.equal(model.use("A", x), expected)
    x = torch.randn(3, WIDTH, device=sim.device)
    with handle.scope("A"):
        weight_of(model).scale.fill_(0.5)
    model.use("B", x)
    assert torch.equal(weight_of(model).scale, torch.full((WIDTH, 1), 0.5))
    handle.ledger.audit()
    handle.disable()


@each_kind
@each_wrapper
def test_wrappers_without_an_accelerator_that_are_touched_at_all(how, kind):
    """With ``device="cpu"`` and weights in memory there is nothing to move: the same objects, the same bytes."""
    model = build(kind, how)
    before = contents(model)
    identity = {name: id(one) for name, one in model.named_parameters()}
    x = torch.randn(3, WIDTH)
    expected = {which: copy.deepcopy(model).use(which, x) for which in "AB"}
    with offload(model, "cpu") as handle:
        for which in "ABAB":
            assert same(model.use(which, x), expected[which])
            handle.ledger.audit()
        assert {name: id(one) for name, one in model.named_parameters()} == identity
        assert sum(one.bytes for one in handle.events) == 0
    assert unchanged(model, before)


@pytest.mark.parametrize("mapped", ["all", "values"])
def test_inner_tensors_mapped_from_a_file(tmp_path, mapped):
    """I5, I7: with ``device="cpu"`` the mapped inner tensors go to private memory and back; a write is kept."""
    model = build()
    path = tmp_path / "weights.safetensors"
    inner = {f"{name}.{path}": leaf for name, one in model.named_parameters() for path, leaf in leaves(one)}
    save_file({name: leaf.detach().clone() for name, leaf in inner.items()}, path)
    stored = load_file(path)
    for layer in [*model.A.layers, *model.B.layers]:
        name = next(name for name, one in model.named_parameters() if one is layer.weight)
        scale = stored[f"{name}.scale"] if mapped == "all" else layer.weight.scale
        weight = Int8Weight(stored[f"{name}.values"], scale, layer.weight.group)
        layer.weight = nn.Parameter(weight, requires_grad=False)
    before = contents(model)
    x = torch.randn(3, WIDTH)
    expected = {which: copy.deepcopy(model).use(which, x) for which in "AB"}
    file_pages = weight_of(model).values.data_ptr()
    with offload(model, "cpu") as handle:
        for which in "ABAB":
            assert torch.equal(model.use(which, x), expected[which])
            handle.ledger.audit()
            home = weight_of(model).values.data_ptr() == file_pages
            assert home is (which == "B")
        with handle.scope("A"):
            weight_of(model).values.fill_(3)
        model.use("B", x)
        assert torch.equal(weight_of(model).values, torch.full((WIDTH, WIDTH), 3, dtype=torch.int8))
        with handle.scope("A"):
            weight_of(model).values.copy_(before["A.layers.0.weight"][0])
    assert unchanged(model, before)


def test_a_nested_wrapper_whose_inner_wrapper_is_replaced(sim):
    """I7: at any depth."""
    model = wrap(KINDS["modules"](), WRAPPERS["two_of_int8"])
    fresh = Int8Weight.of(torch.randn(WIDTH, WIDTH))
    with offload(model, sim.device) as handle:
        with handle.scope("A"):
            assert isinstance(weight_of(model), TwoTensor)
            weight_of(model).b = fresh.to(sim.device)
        handle.load("B")
        handle.ledger.audit()
        assert all(map(torch.equal, plain(weight_of(model))[2:], plain(fresh)))
        with handle.scope("A"):
            assert {leaf.device for _, leaf in leaves(weight_of(model))} == {sim.device}


def test_a_resident_whose_weights_are_wrapped(sim):
    """I5: residents are never swapped, but their wrappers have to get there once."""
    model = build()
    model.head = wrap(Stack(), int8)
    with offload(frozen(model), sim.device) as handle:
        assert {leaf.device for one in model.head.parameters() for _, leaf in leaves(one)} == {sim.device}
        handle.ledger.audit()
    assert {leaf.device.type for one in model.head.parameters() for _, leaf in leaves(one)} == {"cpu"}
