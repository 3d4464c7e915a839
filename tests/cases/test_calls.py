"""Faults of calls: methods, inputs and devices. Cases C16, C17, C18, C27 and C28."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn

from omni_components import AbsentComponentError, DeclarationError, OffloadPolicy, PolicyError, offload
from tests.helpers.pipelines import (
    KINDS,
    Stack,
    build,
    footprint,
    frozen,
    kinds_of,
    resident_copy,
    same_values,
    values,
)


class Encoder(nn.Module):
    """A module with methods besides forward; ``position`` is a buffer that they all use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack()
        self.register_buffer("position", torch.rand(16))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.body(x) * scale + self.position

    def encode(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Encodes."""
        return self.body(x) * scale - self.position

    def decode(self, z: torch.Tensor, *, return_dict: bool = True) -> Any:
        """Decodes."""
        out = self.body(z) + 2 * self.position
        return {"sample": out} if return_dict else (out,)

    def generate(self, ids: torch.Tensor) -> torch.Tensor:
        """Generates."""
        return self(ids.float() @ torch.ones(ids.shape[-1], 16, device=ids.device))

    def get_text_features(self, ids: torch.Tensor) -> torch.Tensor:
        """Features."""
        return self.generate(ids)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        """Embeds; nobody declares it."""
        return x * self.position


class Pipeline(nn.Module):
    """Encoder, DiT and VAE."""

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vae"]

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder, self.transformer, self.vae = Encoder(), Encoder(), Encoder()


def calls(pipe: Pipeline, x: torch.Tensor) -> dict[str, Any]:
    return {
        "text_encoder.encode": lambda: pipe.text_encoder.encode(x, scale=2.0),
        "text_encoder.generate": lambda: pipe.text_encoder.generate(x.long()),
        "text_encoder.get_text_features": lambda: pipe.text_encoder.get_text_features(x.long()),
        "vae.encode": lambda: pipe.vae.encode(x),
        "vae.decode": lambda: pipe.vae.decode(x, return_dict=False)[0],
    }


# --- C16: inference mode ------------------------------------------------------------------------------------


@pytest.mark.parametrize("arena", ["keep", "fit"])
@pytest.mark.parametrize("made", ["inside", "outside"])
@pytest.mark.parametrize("kind", KINDS)
def test_c16_enabled_and_run_inside_inference_mode_works_outside_it_later(sim, kind, made, arena):
    """I5, I7: moves happen outside inference mode: no weight is left an inference tensor that refuses writes."""
    with torch.inference_mode(made == "inside"):
        target = build(kind)
    with torch.inference_mode():
        x = torch.randn(2, 16, device=sim.device)
        twin = resident_copy(target, sim.device)
        expected = {which: twin.use(which, x).cpu() for which in "AB"}
        handle = offload(target, sim.device, arena=arena)
        for which in "ABA":
            assert torch.equal(target.use(which, x).cpu(), expected[which])
    x = x.clone()
    for which in "BA":
        assert torch.equal(target.use(which, x).cpu(), expected[which])
        handle.ledger.audit()
    with handle.scope(target.names["A"]):
        next(target.module("A").parameters()).fill_(2.0)  # an in-place write needs a version counter
    handle.release()
    assert bool((next(target.module("A").parameters()) == 2.0).all())
    with torch.inference_mode():
        handle.disable()


def test_c16_gradients_flow_to_the_input_outside_inference_mode(sim):
    """The first request ran without gradients; the second may ask for them."""
    pipe = build("pipeline")
    twin = resident_copy(pipe, sim.device)
    x = torch.randn(2, 16)
    with torch.inference_mode():
        handle = offload(pipe, sim.device)
        pipe.use("A", x)
    with handle:
        gradients = []
        for one in (twin, pipe):
            leaf = x.to(sim.device).requires_grad_()
            one.use("A", leaf).sum().backward()
            gradients.append(leaf.grad.cpu())
    assert torch.equal(*gradients)


# --- C17: entry points ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", list(calls(Pipeline(), torch.zeros(1, 16))))
def test_c17_a_first_call_through_an_entry_point_finds_its_component(sim, first):
    """I2: present during the call, whichever method comes first; gone when a rival has been in between."""
    pipe = frozen(Pipeline())
    x = torch.randn(2, 16).abs() * 10
    expected = calls(resident_copy(pipe, sim.device), x.to(sim.device))[first]().cpu()
    with offload(pipe, sim.device, vae="exclusive") as handle:
        start = len(handle.events)
        name = first.split(".")[0]
        assert torch.equal(calls(pipe, x)[first]().cpu(), expected)
        assert kinds_of(handle.events[start:], "load") == [("load", name)]
        assert str(handle.events[-1].cause) == "entry_point"
        pipe.transformer(x)
        assert torch.equal(calls(pipe, x)[first]().cpu(), expected)
        assert handle.ledger.pins(name) == 0


class Nested(nn.Module):
    """Calls an entry point from forward and forward from an entry point."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Encoder()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner.decode(x, return_dict=False)[0]


def test_c17_entry_points_and_forward_call_each_other_without_a_second_load(sim):
    """I4: nested scopes of one component are pins, not transfers."""
    pipe = Pipeline()
    pipe.text_encoder = Nested()
    pipe = frozen(pipe)
    x = torch.randn(2, 16)
    expected = resident_copy(pipe, sim.device).text_encoder(x.to(sim.device)).cpu()
    with offload(pipe, sim.device) as handle:
        start = len(handle.events)
        assert torch.equal(pipe.text_encoder.encode(x).cpu(), expected)
        assert kinds_of(handle.events[start:], "load", "evict") == [("load", "text_encoder")]
        assert handle.ledger.pins("text_encoder") == 0


@pytest.mark.parametrize("policy", [{}, {"entry_points": {"text_encoder": ("embed",)}, "vae": "exclusive"}])
def test_c17_the_original_methods_are_back_after_disable(sim, policy):
    """And while it is on, each keeps its name, its documentation and its signature."""
    pipe = frozen(Pipeline())
    before = footprint(pipe)
    signatures = {
        name: inspect.signature(getattr(pipe.vae, name)) for name in ("forward", "encode", "decode", "embed")
    }
    with offload(pipe, sim.device, **policy):
        for name, signature in signatures.items():
            assert inspect.signature(getattr(pipe.vae, name)) == signature
        assert pipe.text_encoder.encode.__name__ == "encode"
        assert pipe.text_encoder.encode.__doc__ == "Encodes."
    assert footprint(pipe) == before
    assert pipe.text_encoder.encode.__func__ is Encoder.encode


def test_c17_an_entry_point_of_the_instance_is_put_back_as_it_was(sim):
    """A method that somebody had patched on the instance is called meanwhile, and there again after disable."""
    pipe = frozen(Pipeline())
    seen = []
    original = pipe.text_encoder.encode

    def patched(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape)
        return original(x)

    pipe.text_encoder.encode = patched
    with offload(pipe, sim.device):
        pipe.text_encoder.encode(torch.randn(2, 16))
    assert seen
    assert pipe.text_encoder.encode is patched


def test_c17_a_declared_entry_point_that_does_not_exist_is_refused_with_the_nearest(sim):
    pipe = frozen(Pipeline())
    before = footprint(pipe)
    with pytest.raises(DeclarationError, match="'embd'") as caught:
        offload(pipe, sim.device, policy=OffloadPolicy(entry_points={"text_encoder": ("embd",)}))
    assert "embed" in str(caught.value)
    assert footprint(pipe) == before


def test_c17_entry_points_for_a_component_that_does_not_exist_are_refused(sim):
    """A typo in the component's name would otherwise switch the entry point off in silence."""
    pipe = frozen(Pipeline())
    before = footprint(pipe)
    with pytest.raises(PolicyError, match=r"'text_encodr'.*text_encoder"):
        offload(pipe, sim.device, entry_points={"text_encodr": ("embed",)})
    assert footprint(pipe) == before


# --- C18: a method that is no entry point -----------------------------------------------------------------------


class ConvEncoder(nn.Module):
    """Fails with another text than a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3)
        self.table = nn.Embedding(8, 4)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)

    def convolve(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.reshape(1, 4, -1))

    def look_up(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.long().clamp(0, 7))

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.reshape(-1, 4))

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.reshape(-1, 4))

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, 4) * self.norm.weight

    def index(self, x: torch.Tensor) -> torch.Tensor:
        return self.table.weight[x.long().clamp(0, 7)]

    def join(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.reshape(-1, 4), self.linear.weight])


@pytest.mark.parametrize("method", ["convolve", "look_up", "project", "scale", "multiply", "index", "join"])
def test_c18_an_undeclared_method_called_while_away_names_the_component_and_the_two_ways_out(sim, method):
    """Not a raw device-mismatch text, whatever the operation: which component, who has the device, what to do."""
    pipe = Pipeline()
    pipe.text_encoder = ConvEncoder()
    pipe = frozen(pipe)
    x = torch.rand(4, 16, device=sim.device)
    twin = resident_copy(pipe, sim.device)
    with offload(pipe, sim.device) as handle:
        pipe.transformer(x)
        with pytest.raises(AbsentComponentError) as caught:
            getattr(pipe.text_encoder, method)(x)
        error = caught.value
        assert (error.component, error.method, error.device) == ("text_encoder", method, str(sim.device))
        assert "transformer" in error.present
        assert "handle.scope('text_encoder')" in str(error)
        assert f"entry_points={{'text_encoder': ({method!r},)}}" in str(error)
        assert isinstance(error.__cause__, RuntimeError)
        with handle.scope("text_encoder"):  # the first way out
            inside = getattr(pipe.text_encoder, method)(x).cpu()
        handle.ledger.audit()
    with offload(pipe, sim.device, entry_points={"text_encoder": (method,)}):  # the second
        pipe.transformer(x)
        assert torch.equal(getattr(pipe.text_encoder, method)(x).cpu(), inside)
    assert torch.equal(getattr(twin.text_encoder, method)(x).cpu(), inside)


def test_c18_a_method_with_its_own_runtime_error_keeps_it(sim):
    """Only a device mismatch of an absent component is explained; everything else goes on untouched."""
    pipe = frozen(Pipeline())
    pipe.text_encoder.embed = lambda x: (_ for _ in ()).throw(RuntimeError("my own"))
    with offload(pipe, sim.device), pytest.raises(RuntimeError, match="my own"):
        pipe.text_encoder.embed(torch.ones(16))


# --- C27: where a component computes ------------------------------------------------------------------------------


class AsksForItsDevice(nn.Module):
    """Builds ids where its parameters are, as transformers' models and diffusers' pipelines do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 16)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


class Located(Encoder):
    """Tells its device, as every diffusers model does."""

    @property
    def device(self) -> torch.device:
        return self.position.device


class NoParameters(nn.Module):
    """A component without a parameter, as a scheduler-like module is."""

    device = torch.device("cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class TinyDiffusers(DiffusionPipeline):
    """A diffusers pipeline that nobody here adapted."""

    model_cpu_offload_seq = "text_encoder->plain->transformer->vae"

    def __init__(
        self, text_encoder: nn.Module, plain: nn.Module, transformer: nn.Module, vae: nn.Module
    ) -> None:
        super().__init__()
        self.register_modules(text_encoder=text_encoder, plain=plain, transformer=transformer, vae=vae)

    def __call__(self, count: int) -> torch.Tensor:
        # Before any hook has run: the ids are on the host while the encoder is.
        ids = torch.arange(count, device=next(self.text_encoder.parameters()).device)
        x = self.plain(self.text_encoder(ids).to(self._execution_device))
        x = self.vae.decode(self.transformer(x), return_dict=False)[0]
        self.maybe_free_model_hooks()
        return x


def tiny_diffusers() -> TinyDiffusers:
    return TinyDiffusers(frozen(AsksForItsDevice()), NoParameters(), frozen(Located()), frozen(Located()))


def test_c27_execution_device_is_the_device_in_every_state(sim):
    """diffusers' ``_execution_device`` agrees before the first call, during phases and after release."""
    pipe = tiny_diffusers()
    expected = resident_diffusers(pipe, sim.device)(5).cpu()
    with offload(pipe, sim.device) as handle:
        for step in (
            lambda: None,
            *(lambda name=name: handle.load(name) for name in pipe.components),
            handle.release,
        ):
            step()
            assert handle.execution_device == sim.device
            assert pipe._execution_device == sim.device
        assert torch.equal(pipe(5).cpu(), expected)
        assert pipe._execution_device == sim.device
    assert pipe._execution_device == torch.device("cpu")


def resident_diffusers(pipe: TinyDiffusers, device: torch.device) -> TinyDiffusers:
    twin = tiny_diffusers()
    for name, module in pipe.components.items():
        getattr(twin, name).load_state_dict(module.state_dict())
    for module in twin.components.values():
        module.to(device)
    return twin


@pytest.mark.parametrize("scheme", ["lists", "diffusers"])
def test_c27_ids_made_before_the_hook_could_run_reach_the_device(sim, scheme):
    """An encoder that asks its own parameters for the device gets the host while it is away; the hook moves the ids."""
    if scheme == "diffusers":
        pipe = tiny_diffusers()
    else:
        pipe = Pipeline()
        pipe.text_encoder = AsksForItsDevice()
        pipe = frozen(pipe)
    with offload(pipe, sim.device):
        for _ in range(2):
            ids = torch.arange(5, device=pipe.text_encoder.device)
            assert ids.device.type == "cpu"
            assert pipe.text_encoder(ids).device == sim.device
            pipe.transformer(torch.randn(2, 16))


@pytest.mark.parametrize("role", ["_encoder_modules", "_dit_modules", "_vae_modules", "_resident_modules"])
def test_c27_a_component_without_parameters_raises_no_stop_iteration(sim, role):
    """I8: it has 0 bytes and takes turns like any other."""
    pipe = Pipeline()
    pipe.plain = NoParameters()
    type_ = type("WithPlain", (Pipeline,), {role: [*getattr(Pipeline, role, []), "plain"]})
    pipe.__class__ = type_
    with offload(frozen(pipe), sim.device, vae="exclusive") as handle:
        assert pipe.plain(torch.ones(2, device=sim.device)).device == sim.device
        assert handle.ledger.size("plain") == 0
        pipe.transformer(torch.ones(1, 16))
        handle.ledger.audit()


# --- C28: inputs from the host ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["positional", "keyword", "in a list", "in a dict", "in a tuple in a list"])
def test_c28_host_inputs_work_the_same_however_they_are_passed(sim, how):
    """Both work: the hook moves tensors in arguments of every shape to the execution device."""

    class Taker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Stack()

        def forward(self, x: Any) -> torch.Tensor:
            while not isinstance(x, torch.Tensor):
                x = next(iter(x.values())) if isinstance(x, dict) else x[0]
            return self.body(x)

    pipe = Pipeline()
    pipe.transformer = Taker()
    pipe = frozen(pipe)
    x = torch.randn(2, 16)
    expected = resident_copy(pipe, sim.device).transformer(x.to(sim.device)).cpu()
    with offload(pipe, sim.device):
        for _ in range(2):
            call = {
                "positional": lambda: pipe.transformer(x),
                "keyword": lambda: pipe.transformer(x=x),
                "in a list": lambda: pipe.transformer([x]),
                "in a dict": lambda: pipe.transformer(x={"hidden_states": x}),
                "in a tuple in a list": lambda: pipe.transformer([(x, None)]),
            }[how]
            result = call()
            assert result.device == sim.device
            assert torch.equal(result.cpu(), expected)
            pipe.text_encoder(x)
    assert x.device.type == "cpu"


@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_c28_an_entry_point_takes_host_inputs_as_a_call_does(sim, how):
    pipe = frozen(Pipeline())
    before = values(pipe)
    x = torch.randn(2, 16)
    with offload(pipe, sim.device, vae="exclusive"):
        result = pipe.vae.decode(z=x) if how == "keyword" else pipe.vae.decode(x)
        assert result["sample"].device == sim.device
    assert same_values(pipe, before)
