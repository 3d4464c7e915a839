"""What the sweep found: pipelines that go back and forth in their order, and components nobody calls."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn

from omni_components import Offload, offload
from omni_components.errors import DeclarationError
from omni_components.residency.events import EventKind
from omni_components.testing import SimulatedAccelerator

ORDER = ("text_encoder", "text_encoder_2", "transformer", "transformer_2", "vae")


class Weights(nn.Module):
    """What diffusers asks of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    @property
    def device(self) -> torch.device:
        return self.linear.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.linear.weight.dtype


class Part(Weights):
    """A component that is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Helper(Weights):
    """One that has a method of its own, and no ``forward``."""

    def check(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Pipeline(DiffusionPipeline):
    """Calls what it is told to."""

    model_cpu_offload_seq = "text_encoder->text_encoder_2->transformer->transformer_2->vae"

    def __init__(
        self, text_encoder, text_encoder_2, transformer, transformer_2, vae, latent_upsampler, helper
    ):
        super().__init__()
        parts = locals()
        self.register_modules(**{name: parts[name] for name in (*ORDER, "latent_upsampler", "helper")})

    def __call__(self, *names: str) -> torch.Tensor:
        x = torch.ones(1, 64, device=self._execution_device)
        for name in names:
            x = getattr(self, name)(x)
        self.maybe_free_model_hooks()
        return x.cpu()


class Headless(Pipeline):
    """A component outside of the order that is never called itself."""

    model_cpu_offload_seq = "text_encoder->transformer"


class Excluding(Headless):
    """Such a component, excluded from offload."""

    _exclude_from_cpu_offload: ClassVar[list[str]] = ["helper"]


class Combined(Pipeline):
    """Holds another pipeline, which has its own order, as Kandinsky's do; what that one uses is excluded from this."""

    model_cpu_offload_seq = "text_encoder->transformer->vae"
    _exclude_from_cpu_offload: ClassVar[list[str]] = ["transformer_2"]

    def __init__(
        self, text_encoder, text_encoder_2, transformer, transformer_2, vae, latent_upsampler, helper
    ):
        super().__init__(
            text_encoder, text_encoder_2, transformer, transformer_2, vae, latent_upsampler, helper
        )
        nobody = dict.fromkeys(("text_encoder_2", "transformer", "vae", "latent_upsampler", "helper"))
        self.prior_pipe = Pipeline(**nobody, text_encoder=text_encoder, transformer_2=transformer_2)

    def __call__(self, *names: str) -> torch.Tensor:
        self.prior_pipe("text_encoder", "transformer_2")
        return super().__call__(*names)


class Unordered(Pipeline):
    """No order at all, as in the latent upsamplers."""

    model_cpu_offload_seq = ""


def pipeline(kind: type[Pipeline] = Pipeline, names: tuple[str, ...] = ORDER, **more: nn.Module) -> Any:
    torch.manual_seed(0)
    nobody = dict.fromkeys((*ORDER, "latent_upsampler", "helper"))
    return kind(**{**nobody, **{name: Part().eval() for name in names}, **more})


def loads(handle: Offload) -> list[str]:
    return [event.component for event in handle.events if event.kind is EventKind.LOAD]


def theirs(
    kind: type[Pipeline], names: tuple[str, ...], calls: tuple[str, ...], sim: SimulatedAccelerator
) -> int:
    """Bytes that diffusers' own offload moves to the device for the same calls."""
    one = pipeline(kind, names)
    one.enable_model_cpu_offload(device=sim.device)
    sim.reset()
    one(*calls)
    return sim.stats().h2d_bytes


BACK_AND_FORTH = {
    "a VAE first": ("vae", "text_encoder", "transformer", "vae"),
    "two experts in turn": ("text_encoder", *("transformer", "transformer_2") * 4, "vae"),
    "encoders asked twice": ("text_encoder", "text_encoder_2") * 2 + ("transformer", "vae"),
    "the order": ORDER,
    "skipped": ("text_encoder_2", "transformer_2", "vae"),
}


@pytest.mark.parametrize("calls", BACK_AND_FORTH.values(), ids=BACK_AND_FORTH)
def test_back_and_forth_moves_no_more_than_diffusers_own(
    calls: tuple[str, ...], sim: SimulatedAccelerator
) -> None:
    """I2, I7: the same result, and the same bytes or fewer; all home at the end."""
    expected = pipeline()(*calls)
    most = theirs(Pipeline, ORDER, calls, sim)
    one = pipeline()
    with offload(one, device=sim.device) as handle:
        sim.reset()
        result = one(*calls)
        assert sim.stats().h2d_bytes <= most
        assert handle.ledger.present == ()
        handle.ledger.audit()
    assert torch.equal(result, expected)


def test_the_last_sends_the_others_home_each_time_it_is_called(sim: SimulatedAccelerator) -> None:
    """I8: a VAE that stays beside the denoiser does not decode beside it."""
    with offload(pipeline(), device=sim.device) as handle:
        handle.load("vae")
        handle.load("transformer")
        assert set(handle.ledger.present) == {"vae", "transformer"}
        with handle.scope("vae"):
            assert handle.ledger.present == ("vae",)


def test_whoever_is_in_use_is_not_sent_home(sim: SimulatedAccelerator) -> None:
    """I2, I4: neither by a nested call in its own thread, nor by another thread's."""
    one = pipeline()
    with offload(one, device=sim.device) as handle, handle.scope("transformer"):
        other = threading.Thread(target=lambda: one.vae(torch.ones(1, 64, device=sim.device)))
        other.start()
        other.join(10)
        assert not other.is_alive()
        with handle.scope("transformer_2"):
            assert set(handle.ledger.present) >= {"transformer", "transformer_2"}
        assert "transformer" in handle.ledger.present
        handle.ledger.check()


def test_encoder_and_denoiser_exclude_each_other_still(sim: SimulatedAccelerator) -> None:
    """I1."""
    with offload(pipeline(), device=sim.device) as handle:
        assert set(handle.ledger.rivals("text_encoder")) == {"transformer", "transformer_2"}
        handle.load("transformer")
        handle.load("text_encoder")
        assert handle.ledger.present == ("text_encoder",)


def test_on_request_the_vae_excludes_everyone(sim: SimulatedAccelerator) -> None:
    """I1: less room for more traffic."""
    one = pipeline()
    with offload(one, device=sim.device, vae="exclusive") as handle:
        one("vae", "text_encoder", "transformer", "vae")
        assert loads(handle) == ["vae", "text_encoder", "transformer", "vae"]


def test_without_an_order_the_vae_is_the_last(sim: SimulatedAccelerator) -> None:
    names, calls = ("vae", "latent_upsampler"), ("vae", "latent_upsampler", "vae")
    most = theirs(Unordered, names, calls, sim)
    one = pipeline(Unordered, names)
    with offload(one, device=sim.device) as handle:
        sim.reset()
        one(*calls)
        assert sim.stats().h2d_bytes <= most
        assert loads(handle) == ["vae", "latent_upsampler"]


def test_a_component_that_is_never_called_is_left_to_its_pipeline(sim: SimulatedAccelerator) -> None:
    """Cosmos' guardrail: no hook could bring it in, and the pipeline moves it by itself."""
    one = pipeline(Headless, ("text_encoder", "transformer"), helper=Helper())
    with offload(one, device=sim.device) as handle:
        assert [component.name for component in handle.components] == ["text_encoder", "transformer"]
        assert one.helper.linear.weight.device.type == "cpu"


def test_one_that_is_excluded_is_resident_all_the_same(sim: SimulatedAccelerator) -> None:
    """Shap-E's renderer: it is asked by a method of its own, with latents on the device."""
    one = pipeline(Excluding, ("text_encoder", "transformer"), helper=Helper())
    with offload(one, device=sim.device) as handle:
        assert handle.ledger.present == ("helper",)
        assert one.helper.check(torch.ones(1, 64, device=sim.device)).device == sim.device


def test_one_in_the_order_that_is_never_called_is_refused(sim: SimulatedAccelerator) -> None:
    """It would be waited for in vain."""
    one = pipeline(Headless, ("text_encoder",), transformer=Helper())
    with pytest.raises(DeclarationError, match="never called itself"):
        offload(one, device=sim.device)


def test_a_pipeline_that_another_holds_frees_its_own_at_the_end_of_its_call(
    sim: SimulatedAccelerator,
) -> None:
    """I8: the prior is not there beside the denoiser, and is home between requests."""
    one = pipeline(Combined, ("text_encoder", "transformer", "transformer_2", "vae"))
    expected = one("transformer", "vae")
    with offload(one, device=sim.device) as handle:
        assert handle.ledger.present == ()
        for _ in range(2):
            assert torch.equal(one("transformer", "vae"), expected)
        assert loads(handle) == ["text_encoder", "transformer_2", "transformer", "vae"] * 2
        assert max(event.device_bytes for event in handle.events) == handle.ledger.size("vae")
    assert "maybe_free_model_hooks" not in vars(one.prior_pipe)


def test_encoders_alone_leave_before_the_others_compute(sim: SimulatedAccelerator) -> None:
    """I8: with ``offload_components={"encoder"}`` a DiT and the VAE stay, and the room of the encoder is free then."""
    one = pipeline(names=("text_encoder", "transformer", "vae"))
    expected = one("text_encoder", "transformer", "vae")
    with offload(one, device=sim.device, offload_components={"encoder"}) as handle:
        assert handle.ledger.present == ("transformer", "vae")
        for used in ("transformer", "vae"):
            x = one.text_encoder(torch.ones(1, 64, device=sim.device))
            assert handle.ledger.present == ("text_encoder", "transformer", "vae")
            getattr(one, used)(x)
            assert handle.ledger.present == ("transformer", "vae")
        assert torch.equal(one("text_encoder", "transformer", "vae"), expected)
        handle.ledger.audit()
