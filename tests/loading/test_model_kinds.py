"""Unusual models through ``load_components``: the classes, settings and bits that ``from_pretrained`` gives."""

from __future__ import annotations

import json
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diffusers import ConfigMixin, DiTTransformer2DModel, ModelMixin, Transformer2DModel
from diffusers.configuration_utils import register_to_config
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from omni_components import SplitModel, load_components, offload
from omni_components.cli.output import loading_bar
from omni_components.models.cosmos3 import Cosmos3SplitPipeline, Cosmos3SplitTransformer
from tests.models import tiny as cosmos3

WEIGHTS = "diffusion_pytorch_model.safetensors"
LINUX = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="mapped files are recognised on Linux only"
)
MASTERS = [pytest.param("pinned"), pytest.param("mapped", marks=LINUX)]


def same_bits(one: nn.Module, other: nn.Module) -> bool:
    """Every parameter and buffer, persistent or not."""
    mine, theirs = tensors(one), tensors(other)
    return mine.keys() == theirs.keys() and all(
        (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape)
        and torch.equal(bits(tensor), bits(theirs[name]))
        for name, tensor in mine.items()
    )


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


# --- split models -----------------------------------------------------------------------------------------------


class Split(SplitModel, ModelMixin, ConfigMixin):
    """Two parts, interleaved; a scale in neither."""

    _offload_components: ClassVar[dict[str, list[str]]] = {
        "reasoner": ["layers.*.reason"],
        "generator": ["layers.*.generate"],
    }

    @register_to_config
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))
        self.layers = nn.ModuleList(
            nn.ModuleDict({"reason": nn.Linear(width, width), "generate": nn.Linear(width, width)})
            for _ in range(3)
        )

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self._offload_context("reasoner"):
            for layer in self.layers:
                x = torch.tanh(layer["reason"](x)) * self.scale
        with self._offload_context("generator"):
            for layer in self.layers:
                x = torch.tanh(layer["generate"](x)) * self.scale
        return x


def addresses(model: nn.Module) -> dict[str, int]:
    return {name: one.data_ptr() for name, one in model.named_parameters()}


@pytest.mark.parametrize("masters", MASTERS)
def test_a_split_model_whose_parts_are_loaded_into_each_others_masters(tmp_path, sim, masters):
    """I3, I7: each part has slabs of its own, which are its masters: none is copied when offload is enabled."""
    Split().save_pretrained(tmp_path)
    model, twin = load_components(Split, tmp_path, masters=masters), Split.from_pretrained(tmp_path)
    assert type(model) is Split
    assert same_bits(model, twin)
    before, x = addresses(model), torch.randn(2, 16)
    with offload(model, sim.device, masters=masters) as handle:
        parts = [name for name in before if name != "scale"]  # which is resident, and has left
        assert {name: addresses(model)[name] for name in parts} == {name: before[name] for name in parts}
        assert (handle.report().facts.mapped_bytes > 0) is (masters == "mapped")
        for _ in range(2):
            assert torch.equal(model(x.to(sim.device)).cpu(), twin(x))
            handle.ledger.audit()


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")  # diffusers' sound tokenizer
@pytest.mark.parametrize("saved", ["joint", "split"])
def test_cosmos3_whose_masters_are_made_twice(tmp_path, sim, saved):
    """Saved by diffusers or by our class, its halves are read straight into their masters."""
    pipe = cosmos3.pipeline(split=saved == "split")
    expected = cosmos3.request(pipe, num_inference_steps=2)
    pipe.save_pretrained(tmp_path)
    loaded = load_components(Cosmos3SplitPipeline, tmp_path, masters="pinned", enable_safety_checker=False)
    loaded.set_progress_bar_config(disable=True)
    assert type(loaded.transformer) is Cosmos3SplitTransformer
    assert same_bits(loaded.transformer, pipe.transformer)
    assert expected.same(cosmos3.request(loaded, num_inference_steps=2))
    before = addresses(loaded.transformer)
    with offload(loaded, sim.device):
        home = {
            name: one.data_ptr()
            for name, one in loaded.transformer.named_parameters()
            if one.device.type == "cpu"
        }
    assert {name: before[name] for name in home} == home
    assert len(home) > 50


# --- text models that generate ----------------------------------------------------------------------------------


def text_model(**more: Any) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen2ForCausalLM(Qwen2Config(**shape, **heads, **more))


@pytest.mark.parametrize("masters", MASTERS)
def test_an_encoder_that_forgets_how_it_generates(tmp_path, masters):
    """``generation_config.json`` beside the weights says when to stop, and what to sample."""
    model = text_model(tie_word_embeddings=True)
    model.generation_config.max_new_tokens = 7
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = 31
    model.generation_config.repetition_penalty = 1.5
    model.save_pretrained(tmp_path)
    assert (tmp_path / "generation_config.json").is_file()
    mine, theirs = load_components(tmp_path, masters=masters), Qwen2ForCausalLM.from_pretrained(tmp_path)
    assert type(mine) is Qwen2ForCausalLM
    assert same_bits(mine, theirs)
    assert mine.lm_head.weight is mine.model.embed_tokens.weight
    assert mine.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert mine.generation_config.repetition_penalty == 1.5
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(mine.generate(ids, do_sample=False), theirs.generate(ids, do_sample=False))


# --- old names --------------------------------------------------------------------------------------------------


def dit(folder: Path, **renamed: Any) -> None:
    """A tiny DiT whose configuration says something else of it."""
    torch.manual_seed(0)
    DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        sample_size=8,
        norm_num_groups=2,
        num_embeds_ada_norm=10,
    ).save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **renamed}))


@pytest.mark.parametrize("kind", [None, Transformer2DModel], ids=["by_the_folder", "by_the_caller"])
def test_an_old_class_name_that_gives_another_class_than_from_pretrained(tmp_path, kind):
    """diffusers says which class an old name means by the configuration; and nothing is loaded twice for it."""
    dit(tmp_path, _class_name="Transformer2DModel")
    mine = load_components(tmp_path) if kind is None else load_components(kind, tmp_path)
    theirs = Transformer2DModel.from_pretrained(str(tmp_path))
    assert type(mine) is type(theirs) is DiTTransformer2DModel
    assert same_bits(mine, theirs)
    assert dict(mine.config) == dict(theirs.config)


def test_an_old_class_name_that_means_itself(tmp_path):
    Transformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=1, norm_num_groups=2
    ).save_pretrained(tmp_path)
    mine, theirs = load_components(tmp_path), Transformer2DModel.from_pretrained(tmp_path)
    assert type(mine) is type(theirs) is Transformer2DModel
    assert same_bits(mine, theirs)


# --- element types and shapes -----------------------------------------------------------------------------------


def with_float8(folder: Path, name: str) -> Path:
    """One weight of a folder's file as eight bits."""
    state = load_file(folder / name)
    chosen = [one for one in state if one.endswith(("ff.net.0.proj.weight", "mlp.up_proj.weight"))]
    assert chosen
    state |= {one: state[one].to(torch.float8_e4m3fn) for one in chosen}
    save_file(state, folder / name, metadata={"format": "pt"})
    return folder


FLOAT8 = torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32, FLOAT8], ids=str)
def test_float8_weights_of_diffusers_that_are_cast_otherwise(tmp_path, dtype):
    """Stored as eight bits: cast as asked; asked for, they stay, and the others become it."""
    dit(tmp_path)
    folder = with_float8(tmp_path, WEIGHTS)
    theirs = DiTTransformer2DModel.from_pretrained(folder, torch_dtype=dtype)
    mine = load_components(folder, dtype=dtype)
    assert same_bits(mine, theirs)
    assert {one.dtype for one in mine.parameters()} == {dtype or torch.float32}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_float8_weights_of_transformers_that_are_cast_otherwise(tmp_path, dtype):
    text_model().save_pretrained(tmp_path)
    folder = with_float8(tmp_path, "model.safetensors")
    mine = load_components(folder, dtype=dtype)
    assert same_bits(mine, Qwen2ForCausalLM.from_pretrained(folder, dtype=dtype or "auto"))


class Odd(ModelMixin, ConfigMixin):
    """Tensors of every sort that a file can hold, and an expanded one."""

    @register_to_config
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.turns = nn.Parameter(torch.randn(width, dtype=torch.complex64), requires_grad=False)
        self.codes = nn.Parameter(torch.randint(-100, 100, (width,), dtype=torch.int8), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0, width))
        self.wide = nn.Parameter(torch.randn(width, 1).expand(width, 3), requires_grad=False)
        self.register_buffer("steps", torch.arange(width))
        self.register_buffer("mask", torch.rand(width) > 0.5)
        self.register_buffer("scalar", torch.tensor(1.5))
        self.register_buffer("table", torch.linspace(0, 1, width, dtype=torch.float64), persistent=False)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.weight * self.codes + self.steps * self.mask * self.scalar
        return x * self.turns.real + self.wide.sum() + self.table.float() + self.nothing.sum()


class OddPipeline(nn.Module):
    _dit_modules: ClassVar[list[str]] = ["B"]
    _encoder_modules: ClassVar[list[str]] = ["A"]
    _vae_modules: ClassVar[list[str]] = []

    def __init__(self, a: Odd, b: Odd) -> None:
        super().__init__()
        self.A, self.B = a, b


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masters", MASTERS)
def test_a_tensor_that_is_no_matrix_of_floats(tmp_path, sim, masters, dtype):
    """I5, I7: complex, integer, boolean, empty, expanded, scalar; read, moved and moved back bit by bit."""
    Odd().save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mapped: it says how much has to be converted
        pair = [load_components(Odd, tmp_path, masters=masters, dtype=dtype) for _ in "AB"]
    twin = Odd.from_pretrained(tmp_path, torch_dtype=dtype)
    assert all(same_bits(one, twin) for one in pair)
    x = torch.randn(2, 6, dtype=dtype or torch.float32)
    pipe = OddPipeline(*pair)
    with offload(pipe, sim.device, masters=masters) as handle:
        for name in "ABAB":
            assert torch.equal(getattr(pipe, name)(x.to(sim.device)).cpu(), twin(x))
            handle.ledger.audit()
    assert all(same_bits(one, twin) for one in pair)


# --- the bar ----------------------------------------------------------------------------------------------------


@contextmanager
def a_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """Standard error is a terminal; at the end the list has what came there."""
    master, slave = os.openpty()
    shown: list[bytes] = []

    def read() -> None:
        try:
            while piece := os.read(master, 4096):
                shown.append(piece)
        except OSError:
            pass  # how Linux says that the other end is closed

    reader = threading.Thread(target=read)
    reader.start()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    try:
        with os.fdopen(slave, "w") as terminal, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", terminal)
            yield shown
    finally:
        reader.join()
        os.close(master)


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="this system has no pseudo-terminals")
def test_a_bar_over_the_bytes_that_a_terminal_does_not_show(tmp_path, monkeypatch):
    Split(width=64).save_pretrained(tmp_path)
    nbytes = (tmp_path / WEIGHTS).stat().st_size
    with a_terminal(monkeypatch) as shown, loading_bar("loading a model") as on_bytes:
        load_components(Split, tmp_path, on_bytes=on_bytes)
    text = b"".join(shown).decode()
    assert "loading a model" in text
    amount = f"{nbytes // 1024 - 1}"  # its header is none of the weights
    assert any(f"{size}/{size} KiB" in text for size in (f"{amount}.{tenth}" for tenth in range(10))), text


def test_a_bar_in_a_file_or_a_pipe(tmp_path, capfd):
    Split().save_pretrained(tmp_path)
    told: list[tuple[int, int]] = []
    with loading_bar("loading a model") as on_bytes:
        load_components(
            Split, tmp_path, on_bytes=lambda done, total: (on_bytes(done, total), told.append((done, total)))
        )
    assert told[-1][0] == told[-1][1] > 0
    assert capfd.readouterr() == ("", "")
