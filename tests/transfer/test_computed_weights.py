"""Weights that a module computes before each call leave the device with what they are computed from. I8, I7."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, remove_spectral_norm, remove_weight_norm, spectral_norm, weight_norm
from torch.nn.utils.parametrizations import spectral_norm as parametrized_spectral_norm
from torch.nn.utils.parametrizations import weight_norm as parametrized_weight_norm

from omni_components import ResidencyLedger, SplitModel, TransferError, offload
from omni_components.testing import SimulatedAccelerator
from tests.helpers.pipelines import resident_copy

WIDTH = 32
NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "weight_norm, parametrized": parametrized_weight_norm,
    "spectral_norm, parametrized": parametrized_spectral_norm,
}
OLD = [name for name in NORMS if "parametrized" not in name]
REMOVE = {"weight_norm": remove_weight_norm, "spectral_norm": remove_spectral_norm}


@pytest.fixture(autouse=True)
def _deprecated() -> Iterator[None]:
    """torch says that there are newer ones; diffusers' audio decoders use these."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*weight_norm.*", category=FutureWarning)
        yield


class Normed(nn.Module):
    """Two convolutions, both normed; the second is called twice."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = (norm(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.second(self.first(x)))


class Modules(nn.Module):
    _dit_modules: ClassVar[list[str]] = ["B"]
    _encoder_modules: ClassVar[list[str]] = ["A"]
    _vae_modules: ClassVar[list[str]] = []

    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.A, self.B = Normed(norm).eval(), Normed(norm).eval()

    def use(self, which: str, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, which)(x)


class Parts(SplitModel):
    _offload_components: ClassVar[dict[str, list[str]]] = {"A": ["A.*"], "B": ["B"]}

    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.A, self.B = Normed(norm).eval(), Normed(norm).eval()

    def use(self, which: str, x: torch.Tensor) -> torch.Tensor:
        with self._offload_context(which):
            return getattr(self, which)(x)


def made(kind: type, norm: str) -> Any:
    torch.manual_seed(3)
    with torch.no_grad():  # else torch itself refuses to copy what it computed
        return kind(NORMS[norm]).requires_grad_(False)


def outputs(target: Any, x: torch.Tensor, order: str = "AB") -> list[torch.Tensor]:
    with torch.no_grad():
        return [target.use(which, x).cpu() for which in order]


@pytest.mark.parametrize("cached", [False, True], ids=["", "cached"])
@pytest.mark.parametrize("kind", [Modules, Parts])
@pytest.mark.parametrize("norm", NORMS)
def test_a_component_that_left_holds_no_byte_of_a_computed_weight(
    sim: SimulatedAccelerator, norm: str, kind: type, cached: bool
) -> None:
    """I8: nothing at all is allocated; I7: and each call computes what it computes where all is resident."""
    target = made(kind, norm)
    x = torch.randn(1, WIDTH, 8, device=sim.device)
    expected = outputs(resident_copy(target, sim.device), x)
    before = sim.stats().allocated
    with offload(target, sim.device, arena="fit") as handle:
        for _ in range(2):
            with parametrize.cached() if cached else nullcontext():
                for got, wanted in zip(outputs(target, x, "ABAB"), expected * 2, strict=True):
                    assert torch.equal(got, wanted)
                sizes = {one.name: one.bytes for one in handle.components}
                assert set(handle.ledger.present) & {"A", "B"} == {"B"}
                own = sum(sizes[name] for name in handle.ledger.present)
                assert sim.stats().allocated - before <= own * (2 if cached or norm in OLD else 1)
                handle.release()
                left = sum(sizes[name] for name in handle.ledger.present)
                assert sim.stats().allocated - before <= left + 256
        handle.ledger.audit()
    assert sim.stats().allocated == before


@pytest.mark.parametrize("norm", OLD)
def test_a_target_that_was_on_the_device_leaves_nothing_there(sim: SimulatedAccelerator, norm: str) -> None:
    """I8: computed before enabling."""
    target = made(Modules, norm).to(sim.device)
    x = torch.randn(1, WIDTH, 8)
    outputs(target, x.to(sim.device))
    with offload(target, sim.device):
        assert sim.stats().allocated == 0


@pytest.mark.parametrize("norm", OLD)
def test_enabling_that_fails_leaves_them_computed(
    sim: SimulatedAccelerator, norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I6: the target is as it was, the weight that no slot names included."""
    target = made(Modules, norm)
    target._resident_modules = ["tail"]
    target.tail = nn.Linear(64, 64)
    target.to(sim.device)
    x = torch.randn(1, WIDTH, 8, device=sim.device)
    before = outputs(target, x)

    def load(ledger: ResidencyLedger, name: str) -> None:
        raise TransferError(name, 1, 0, "a resident does not fit")

    monkeypatch.setattr(ResidencyLedger, "load", load)
    with pytest.raises(TransferError):
        offload(target, sim.device)
    for conv in (target.A.first, target.B.second):
        assert conv.weight.device == sim.device
        assert bool(conv.weight.isfinite().all())
    assert all(torch.equal(one, other) for one, other in zip(outputs(target, x), before, strict=True))


@pytest.mark.parametrize("norm", OLD)
def test_after_disable_a_call_past_the_hooks_finds_them(sim: SimulatedAccelerator, norm: str) -> None:
    """I7: ``forward`` itself runs no pre-hook; torch's own users call it in traces and exports."""
    target = made(Modules, norm)
    outputs(target, torch.randn(1, WIDTH, 8))
    wanted = [conv.weight.clone() for conv in (target.A.first, target.B.second)]
    with offload(target, sim.device):
        outputs(target, torch.randn(1, WIDTH, 8), "AB")
    for conv, weight in zip((target.A.first, target.B.second), wanted, strict=True):
        assert torch.allclose(conv.weight, weight, atol=1e-6)
        assert conv.weight.untyped_storage().nbytes() == weight.nbytes


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("norm", OLD)
def test_copies_of_an_absent_component_compute(sim: SimulatedAccelerator, norm: str, copied: Any) -> None:
    target = made(Modules, norm)
    x = torch.randn(1, WIDTH, 8)
    expected = outputs(target, x)[0]
    with offload(target, sim.device) as handle:
        outputs(target, x)
        handle.release()
        assert target.A.first.weight.shape == (WIDTH, WIDTH, 3)  # what asks for its shape is answered
        twin = copied(target.A)
    with torch.no_grad():
        assert torch.allclose(twin(x), expected, atol=1e-6)


@pytest.mark.parametrize("present", [False, True])
@pytest.mark.parametrize("norm", OLD)
def test_a_norm_can_be_removed_while_offloaded(sim: SimulatedAccelerator, norm: str, present: bool) -> None:
    """I5, I7: what was computed becomes a weight, and is adopted."""
    target = made(Modules, norm)
    x = torch.randn(1, WIDTH, 8, device=sim.device)
    expected = outputs(resident_copy(target, sim.device), x)
    with offload(target, sim.device, arena="fit") as handle:
        outputs(target, x, "AB")
        with handle.scope("A") if present else nullcontext():
            with torch.no_grad():
                for conv in (target.A.first, target.A.second):
                    REMOVE[norm](conv)
            for one in target.A.parameters():
                one.requires_grad_(False)
        for got, wanted in zip(outputs(target, x), expected, strict=True):
            assert torch.allclose(got, wanted, atol=1e-5)
        handle.release()
        handle.ledger.audit()
        assert isinstance(target.A.first.weight, nn.Parameter)
        assert sim.stats().allocated <= x.nbytes + 256


def test_a_weight_cached_on_the_host_is_not_used_on_the_device(sim: SimulatedAccelerator) -> None:
    """I2: somebody looked at it, inside of ``cached()``, before its component came."""
    target = made(Modules, "weight_norm, parametrized")
    x = torch.randn(1, WIDTH, 8, device=sim.device)
    expected = outputs(resident_copy(target, sim.device), x)
    with offload(target, sim.device), parametrize.cached():
        assert target.A.first.weight.device.type == "cpu"
        assert torch.equal(outputs(target, x)[0], expected[0])
