"""Faults of traffic: bytes that travel for nothing. Cases C01, C04, C05, C07 and C36."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

from omni_components import SplitModel, TransferError, offload
from tests.helpers.pipelines import KINDS, Stack, build, frozen, kinds_of, payload, resident_copy

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# Sizes that fill whole 256-byte lines, sizes that never do, and sizes that nearly do: padding must not travel.
WIDTHS = [64, 17, 100]


@pytest.mark.parametrize("arena", ["keep", "fit"])
@pytest.mark.parametrize("kind", KINDS)
def test_c01_alternation_sends_nothing_home_and_each_component_once(sim, kind, arena):
    """I7, I8: ten alternations cost 5·A + 5·B towards the device and nothing back."""
    target = build(kind, width=64)
    a, b = payload(target.module("A")), payload(target.module("B"))
    x = torch.randn(3, 64, device=sim.device)
    twin = resident_copy(target, sim.device)
    expected = [twin.use(which, x).cpu() for which in "AB"]
    with offload(target, sim.device, arena=arena) as handle:
        sim.reset()
        for _ in range(5):
            assert torch.equal(target.use("A", x).cpu(), expected[0])
            assert torch.equal(target.use("B", x).cpu(), expected[1])
            handle.ledger.audit()
        stats = sim.stats()
        # Reading the ten results back is the test's own traffic.
        assert stats.d2h_bytes == 10 * expected[0].nbytes
        assert stats.h2d_bytes == 5 * a + 5 * b
        loads = [
            one for one in handle.events if str(one.kind) == "load" and one.component in target.names.values()
        ]
        assert sum(one.bytes for one in loads) == 5 * a + 5 * b


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_c01_padding_does_not_travel_whatever_the_sizes(sim, width, dtype):
    """I8: bytes over the link are the weights' own, in every dtype."""
    target = build("pipeline", width=width, depth=4, dtype=dtype)
    a, b = payload(target.A), payload(target.B)
    x = torch.randn(3, width, dtype=dtype, device=sim.device)
    with offload(target, sim.device):
        sim.reset()
        for _ in range(5):
            target.use("A", x)
            target.use("B", x)
        assert (sim.stats().h2d_bytes, sim.stats().d2h_bytes) == (5 * a + 5 * b, 0)


def test_c01_weights_that_start_on_the_device_are_fetched_once_and_never_again(sim):
    """I7: enabling takes the masters once; no switch after it sends a byte home."""
    target = build("pipeline", width=64).to(sim.device)
    x = torch.randn(3, 64, device=sim.device)
    expected = target.use("B", target.use("A", x)).cpu()
    with offload(target, sim.device):
        sim.reset()
        for _ in range(5):
            result = target.use("B", target.use("A", x))
        assert sim.stats().d2h_bytes == 0
        assert torch.equal(result.cpu(), expected)


class TwoTransformers(nn.Module):
    """As Wan 2.2: one encoder, a transformer for high noise and one for low noise."""

    _dit_modules: ClassVar[list[str]] = ["transformer", "transformer_2"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder, self.transformer, self.transformer_2 = Stack(), Stack(), Stack(depth=3)


@pytest.mark.parametrize("arena", ["keep", "fit"])
def test_c04_each_change_of_transformer_is_one_evict_and_one_load(sim, arena):
    """I1: never both; the calls t, t, t, t2, t2, t switch twice and nowhere else."""
    pipe = frozen(TwoTransformers())
    x = torch.randn(2, 16, device=sim.device)
    with offload(pipe, sim.device, arena=arena) as handle:
        for module in (pipe.transformer, pipe.transformer, pipe.transformer):
            module(x)
        assert kinds_of(handle.events, "load", "evict") == [("load", "transformer")]
        for module in (pipe.transformer_2, pipe.transformer_2, pipe.transformer):
            module(x)
        assert kinds_of(handle.events, "load", "evict") == [
            ("load", "transformer"),
            ("evict", "transformer"),
            ("load", "transformer_2"),
            ("evict", "transformer_2"),
            ("load", "transformer"),
        ]
        sizes = {one.name: one.bytes for one in handle.components}
        assert max(one.device_bytes for one in handle.events) <= max(sizes.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["A", "B"])
def test_c05_fifty_calls_in_a_row_load_once(sim, kind, which):
    """I2: a component stays until a rival needs the room."""
    target = build(kind)
    x = torch.randn(2, 16, device=sim.device)
    with offload(target, sim.device) as handle:
        start = len(handle.events)
        for _ in range(50):
            target.use(which, x)
        assert kinds_of(handle.events[start:], "load", "evict") == [("load", target.names[which])]


@pytest.mark.parametrize("arena", ["keep", "fit"])
def test_c07_healthy_switches_never_flush_the_allocator_cache(sim, arena):
    """A flush synchronises the device: over 100 switches there is none."""
    target = build("pipeline")
    x = torch.randn(2, 16, device=sim.device)
    with offload(target, sim.device, arena=arena) as handle:
        sim.reset()
        for _ in range(50):
            target.use("A", x)
            target.use("B", x)
        assert len(kinds_of(handle.events, "load")) == 100
        stats = sim.stats()
        assert (stats.flushes, stats.syncs, stats.host_waits) == (0, 0, 0)  # nor does the host wait otherwise


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_addresses_that_change_or_are_not_aligned(sim, dtype):
    """I8: a weight comes back to where it was, at a multiple of 256 bytes; compiled code and kernels rely on it."""
    target = build("pipeline", width=17, depth=4, dtype=dtype)  # no tensor fills whole 256-byte lines
    with offload(target, sim.device, arena="keep") as handle:
        seen = []
        for _ in range(3):
            for which in "AB":
                with handle.scope(which):
                    seen.append([one.data_ptr() for one in target.module(which).parameters()])
        assert seen[:2] == seen[2:4] == seen[4:]
        (base,) = {min(one) for one in seen}  # both begin where the arena does
        assert all((address - base) % 256 == 0 for one in seen for address in one)
        assert base % 256 == 0
        assert all(len({*one}) == 8 for one in seen)


def test_a_profile_that_does_not_name_the_switch(sim):
    """Each load, eviction and copy ahead is a range of torch's profiler, with the component's name."""
    target = build("pipeline")
    with (
        offload(target, sim.device, prefetch=("A", "B"), device_memory=1 << 16) as handle,
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
    ):
        handle.load("A")
        handle.load("B")
    ranges = [one.key for one in profile.key_averages() if one.key.startswith("omni::")]
    assert {"omni::load A", "omni::prefetch B", "omni::evict A", "omni::load B"} <= {*ranges}


@pytest.mark.parametrize("arena", ["keep", "fit"])
def test_c07_a_failed_load_flushes_the_allocator_cache_once(sim, arena):
    """The load is tried again after one flush; a second failure is the truth. I6."""
    target = build("pipeline", width=64)
    x = torch.randn(2, 64, device=sim.device)
    with offload(target, sim.device, arena=arena) as handle:
        sim.reset()
        sim.fail(allocation=0, persistent=True)
        with pytest.raises(TransferError):
            target.use("A", x)
        assert sim.stats().flushes == 1
        handle.ledger.audit()


def test_c07_a_flush_that_frees_the_room_makes_the_load_succeed(sim):
    """I6: one failed allocation is retried, and nobody sees it."""
    target = build("pipeline", width=64)
    x = torch.randn(2, 64, device=sim.device)
    expected = resident_copy(target, sim.device).use("A", x)
    with offload(target, sim.device) as handle:
        sim.fail(allocation=0)
        assert torch.equal(target.use("A", x).cpu(), expected.cpu())
        assert kinds_of(handle.events, "load", "rollback") == [("load", "A")]


class Guided(SplitModel):
    """Reads each prompt once, then denoises with both at every step."""

    _offload_components: ClassVar[dict[str, list[str]]] = {"reasoner": ["reader"], "generator": ["denoiser"]}

    def __init__(self) -> None:
        super().__init__()
        self.reader, self.denoiser = Stack(), Stack()

    def forward(self, prompts: list[torch.Tensor], steps: int, *, once: bool) -> torch.Tensor:
        if once:
            with self._offload_context("reasoner"):
                memories = [self.reader(prompt) for prompt in prompts]
        x = torch.zeros_like(prompts[0])
        for _ in range(steps):
            for index in range(len(prompts)):
                if not once:
                    with self._offload_context("reasoner"):
                        memories = [self.reader(one) for one in prompts]
                with self._offload_context("generator"):
                    x = x + self.denoiser(x + memories[index]) / steps
        return x


def test_c36_two_prompts_per_step_load_reasoner_and_generator_once(sim):
    """Guidance runs the generator twice a step; each part is still loaded once."""
    model = frozen(Guided())
    prompts = [torch.randn(2, 16, device=sim.device) for _ in range(2)]
    with offload(model, sim.device) as handle:
        model(prompts, 10, once=True)
        assert kinds_of(handle.events, "load", "evict") == [
            ("load", "reasoner"),
            ("evict", "reasoner"),
            ("load", "generator"),
        ]


def test_c36_phases_in_the_wrong_order_show_their_cost_in_the_report(sim):
    """A repeated reasoner-generator pair costs a switch each time, and the report's bytes say so."""
    model = frozen(Guided())
    prompts = [torch.randn(2, 16, device=sim.device) for _ in range(2)]
    with offload(model, sim.device) as handle:
        good = model(prompts, 3, once=True)
        handle.release()
        before = handle.report().to_dict()["rows"]
        assert torch.equal(model(prompts, 3, once=False).cpu(), good.cpu())
        after = handle.report().to_dict()["rows"]
    rows = {one["name"]: (one["loads"], one["bytes_in"]) for one in after}
    earlier = {one["name"]: (one["loads"], one["bytes_in"]) for one in before}
    for part, module in (("reasoner", model.reader), ("generator", model.denoiser)):
        assert rows[part][0] - earlier[part][0] == 6
        assert rows[part][1] - earlier[part][1] == 6 * payload(module)
