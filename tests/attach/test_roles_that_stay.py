"""``offload_components`` names some of the roles: the others stay on the device, and send these home when used."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from omni_components import Offload, OmniOffloadMixin, SplitModel, offload
from omni_components.residency.events import EventKind
from omni_components.testing import SimulatedAccelerator
from tests.helpers.pipelines import Stack, frozen


class Halves(SplitModel):
    """A split DiT."""

    _offload_components: ClassVar[dict[str, list[str]]] = {"reasoner": ["reader"], "generator": ["writer"]}

    def __init__(self) -> None:
        super().__init__()
        self.reader, self.writer = Stack(), Stack(depth=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self._offload_context("reasoner"):
            x = self.reader(x)
        with self._offload_context("generator"):
            return self.writer(x)


class Pipe(OmniOffloadMixin, nn.Module):
    """Two encoders, two DiTs, a VAE; notes what is on the device beside whom while each computes."""

    _dit_modules: ClassVar[list[str]] = ["transformer", "transformer_2"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "vision_model"]
    _vae_modules: ClassVar[list[str]] = ["vae"]

    def __init__(self, transformer: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.text_encoder, self.vision_model = Stack(depth=2), Stack(depth=3)
        self.transformer, self.transformer_2 = transformer or Stack(depth=4), Stack(depth=5)
        self.vae = Stack(depth=1)
        self.seen: dict[str, set[str]] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in ("text_encoder", "vision_model", "transformer", "transformer_2", "transformer", "vae"):
            x = getattr(self, name)(x)
        return x

    def watch(self, device: torch.device) -> None:
        parts = {name: one for name, one in self.named_children() if isinstance(one, Stack)}
        for name, part in parts.items():
            part.layers[0].register_forward_hook(
                lambda *_, name=name: self.seen.update(
                    {name: {key for key, one in parts.items() if one.layers[0].weight.device == device}}
                )
            )


def run(sim: SimulatedAccelerator, pipe: Pipe, x: torch.Tensor) -> torch.Tensor:
    pipe.watch(sim.device)
    out = pipe(x)
    assert not sim.races
    return out.cpu()


def wanted(pipe: Pipe, x: torch.Tensor, sim: SimulatedAccelerator) -> torch.Tensor:
    return type(pipe)().to(sim.device)(x.to(sim.device)).cpu()


ALL = {"text_encoder", "vision_model", "transformer", "transformer_2", "vae"}
ENCODERS, DITS = {"text_encoder", "vision_model"}, {"transformer", "transformer_2"}


@pytest.mark.parametrize("word", ["encoder", "text_encoder"])
def test_encoders_alone_come_when_used_and_leave_before_a_dit_computes(sim, word) -> None:
    """I2, I5, I8: they stand beside the DiTs, which stay; while these compute, their bytes are free."""
    pipe, x = frozen(Pipe()), torch.randn(2, 16)
    expected = wanted(pipe, x, sim)
    handle = pipe.enable_omni_model_cpu_offload(device=sim.device, offload_components={word})
    assert {one.name for one in handle.components if one.resident} == ALL - ENCODERS
    assert torch.equal(run(sim, pipe, x), expected)
    assert pipe.seen["text_encoder"] == ALL - {"vision_model"}
    assert pipe.seen["vision_model"] == ALL
    assert pipe.seen["transformer"] == pipe.seen["vae"] == ALL - ENCODERS
    handle.ledger.audit()
    assert handle.ledger.device_bytes == sum(handle.ledger.size(name) for name in ALL - ENCODERS)
    pipe.disable_omni_model_cpu_offload()


def test_their_device_memory_is_given_back_while_a_dit_computes(sim) -> None:
    """I8, measured on the device: an arena that is kept would hold their bytes for nobody."""
    pipe, x = frozen(Pipe()), torch.randn(2, 16, device=sim.device)
    with offload(pipe, sim.device, offload_components={"encoder"}) as handle:
        resident = sim.stats().allocated
        pipe.text_encoder(x)
        assert sim.stats().allocated >= resident + handle.ledger.size("text_encoder")
        pipe.transformer(x)
        assert sim.stats().allocated <= resident + 1024  # no more than an activation
        assert handle.ledger.predicted_peak == sum(map(handle.ledger.size, ALL))


def test_dits_alone_leave_when_an_encoder_is_used(sim) -> None:
    """I1, I2: they exclude each other as ever, and stand beside the encoders, which stay."""
    pipe, x = frozen(Pipe()), torch.randn(2, 16)
    expected = wanted(pipe, x, sim)
    with offload(pipe, sim.device, offload_components={"dit"}) as handle:
        for _ in range(2):
            assert torch.equal(run(sim, pipe, x), expected)
        assert handle.ledger.rivals("transformer") == ("transformer_2",)
        assert pipe.seen["text_encoder"] == pipe.seen["vision_model"] == ALL - DITS
        assert pipe.seen["transformer"] == ALL - {"transformer_2"}
        assert pipe.seen["transformer_2"] == ALL - {"transformer"}
        handle.ledger.audit()


def test_each_offloaded_component_crosses_once_a_request_and_nothing_comes_back(sim) -> None:
    """I7; link bytes of two requests are the encoders' twice."""
    pipe, x = frozen(Pipe()), torch.randn(2, 16, device=sim.device)
    with offload(pipe, sim.device, offload_components={"encoder"}) as handle:
        sim.reset()
        for _ in range(2):
            pipe(x)
        assert loads(handle) == ["text_encoder", "vision_model"] * 2
        weights = sum(one.nbytes for name in ENCODERS for one in getattr(pipe, name).parameters())
        assert 2 * weights <= sim.stats().h2d_bytes <= 2 * sum(map(handle.ledger.size, ENCODERS))
        assert sim.stats().d2h_bytes == 0


def test_the_parts_of_a_split_dit_that_stay_send_the_encoders_home_by_their_scopes(sim) -> None:
    pipe, x = frozen(Pipe(Halves())), torch.randn(2, 16, device=sim.device)
    with offload(pipe, sim.device, offload_components={"encoder"}) as handle:
        pipe.text_encoder(x)
        assert "text_encoder" in handle.ledger.present
        pipe.transformer(x)
        assert handle.ledger.present == ("reasoner", "generator", "transformer_2", "vae")
        handle.ledger.audit()


def test_a_vae_sends_them_home_only_where_it_could_take_turns(sim) -> None:
    """With ``vae="resident"``, the default, nothing follows from its use."""
    pipe, x = frozen(Pipe()), torch.randn(2, 16, device=sim.device)
    for vae, there in (("resident", True), ("exclusive", False)):
        with offload(pipe, sim.device, vae=vae, offload_components={"encoder"}) as handle:
            pipe.text_encoder(x)
            pipe.vae(x)
            assert ("text_encoder" in handle.ledger.present) is there


def test_one_in_use_in_another_thread_stays(sim) -> None:
    """I4: a pinned component is not evicted; nobody has to wait, since there is room for both."""
    pipe, x = frozen(Pipe()), torch.randn(2, 16)
    inside, go_on = threading.Event(), threading.Event()
    with offload(pipe, sim.device, offload_components={"encoder"}) as handle:

        def encode() -> None:
            with handle.scope("text_encoder"):
                inside.set()
                assert go_on.wait(10)

        thread = threading.Thread(target=encode)
        thread.start()
        assert inside.wait(10)
        pipe.transformer(x)
        assert handle.ledger.state("text_encoder").name == "DEVICE"
        handle.ledger.check()
        go_on.set()
        thread.join()
        pipe.transformer(x)
        assert "text_encoder" not in handle.ledger.present


def test_nothing_of_it_is_left_when_it_is_disabled(sim) -> None:
    """I6: those that stay had hooks, too."""
    pipe = frozen(Pipe())
    with offload(pipe, sim.device, offload_components={"encoder"}):
        assert pipe.transformer._forward_pre_hooks
    assert not any(one._forward_pre_hooks or one._forward_hooks for one in pipe.modules())
    assert all(one.device.type == "cpu" for one in pipe.parameters())


class OwnPair:
    """A pipeline with a pair of its own, which knows vLLM-Omni's words."""

    asked: Any = None

    def enable_omni_model_cpu_offload(
        self, *, device: Any, pin_memory: bool, use_hsdp: bool, offload_components: Any = None
    ) -> None:
        self.asked = offload_components

    def disable_omni_model_cpu_offload(self) -> None:
        pass


@pytest.mark.parametrize("word", ["encoder", "text_encoder"])
def test_a_pair_of_its_own_is_asked_in_its_words(sim, word) -> None:
    """vLLM-Omni's pipelines look for ``text_encoder``; by another word they would offload nothing, in silence."""
    target = OwnPair()
    with offload(target, sim.device, offload_components={word, "dit"}):
        assert target.asked == frozenset({"text_encoder", "dit"})


def loads(handle: Offload) -> list[str]:
    names = {one.name for one in handle.components if not one.resident}
    return [one.component for one in handle.events if one.kind is EventKind.LOAD and one.component in names]
