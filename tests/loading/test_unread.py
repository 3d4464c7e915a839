"""Weights that a loader converts are read when somebody first wants them; to everybody they are ordinary tensors."""

from __future__ import annotations

import copy
import io
import pickle
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from omni_components import WeightsError, load_components, offload
from omni_components.components.unread import Source, Unread
from omni_components.loading.deferred import Plan
from omni_components.transfer.masters import PinBudget
from tests.diffusers import tiny
from tests.transformers_models import tiny as omni

ASKED = {"height": 16, "width": 16, "num_frames": 5, "num_inference_steps": 2, "output_type": "pt"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("wan")
    tiny.wan().save_pretrained(made)
    return made


@pytest.fixture
def fills(monkeypatch):
    """How many tensors were read, and a switch that makes it fail."""
    plain, seen = Plan.fill, []

    def fill(plan, target, told):
        seen.append(target.shape)
        plain(plan, target, told)

    monkeypatch.setattr(Plan, "fill", fill)
    return seen


def ours(folder, **asked):
    asked = {"lazy": True} | asked
    return tiny.quiet(load_components(folder, dtype=torch.bfloat16, **asked))


def run(pipe):
    return pipe("a", **ASKED, generator=tiny.seeded()).frames.cpu()


def unread(module):
    return [one for one in module.parameters() if type(one) is Unread]


# --- when they are read -----------------------------------------------------------------------------------


def test_a_component_that_is_read_before_it_is_used(folder, sim, fills, monkeypatch):
    """Enabling, auditing and asking for types read nothing, and pin nothing; a scope reads its own component."""
    pinned = []
    pin = PinBudget.pin
    monkeypatch.setattr(PinBudget, "pin", lambda budget, slab: pinned.append(slab) or pin(budget, slab))
    pipe = ours(folder)
    assert pipe.transformer.dtype == pipe.dtype == torch.bfloat16
    with offload(pipe, sim.device) as handle:
        handle.ledger.audit()
        handle.report()
        assert fills == []
        before = len(pinned)  # what is in no file: position ids and the like
        assert sum(one.tensor.numel() for one in pinned) < 100_000
        assert handle.report().facts.mapped_bytes > 0
        with handle.scope("text_encoder"):
            assert unread(pipe.text_encoder) == []
        assert len(fills) == len(list(pipe.text_encoder.parameters()))
        assert len(unread(pipe.transformer)) > 50  # the others are kept in float32, and so stay in the file
        assert len(pinned) == before + 1
        handle.ledger.audit()
    assert len(unread(pipe.transformer)) > 0  # nor does disabling


def test_other_values_than_with_everything_read_at_once(folder, sim):
    """I1, I5: and the same bytes cross."""
    outputs, crossed = [], []
    for lazy in (False, True):
        pipe = ours(folder, lazy=lazy)
        assert (unread(pipe.transformer) != []) is lazy
        with offload(pipe, sim.device) as handle:
            outputs += [run(pipe), run(pipe)]
            handle.ledger.audit()
            crossed.append(sum(one.bytes for one in handle.events if one.kind == "load"))
            facts = handle.report().facts
    assert sim.races == []
    assert all(torch.equal(one, outputs[0]) for one in outputs)
    assert crossed[0] == crossed[1]
    assert (facts.pageable_bytes, facts.mapped_bytes) == (0, 0)


def test_the_host_as_the_execution_device(folder):
    plain, pipe = ours(folder, lazy=False), ours(folder)
    with offload(pipe, "cpu"):
        assert torch.equal(run(pipe), run(plain))


def test_an_output_without_offload(folder):
    assert torch.equal(run(ours(folder)), run(ours(folder, lazy=False)))


@pytest.mark.parametrize("gone", ["deleted", "replaced"])
def test_a_file_that_is_gone_before_its_values_are_wanted(folder, sim, tmp_path, gone):
    """What was there when it was loaded is what is read."""
    place = Path(shutil.copytree(folder, tmp_path / "copy"))
    pipe = ours(place)
    for file in place.rglob("*.safetensors"):
        file.unlink()
        if gone == "replaced":
            save_file({"other": torch.zeros(3)}, file)
    with offload(pipe, sim.device):
        assert torch.equal(run(pipe), run(ours(folder, lazy=False)).to("cpu"))


# --- what fails -------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_read_any_more(folder, sim, monkeypatch):
    """I4: the error comes out of the call that wanted it; nothing is on the device; the next call reads it."""
    pipe = ours(folder)
    plain, calls = Plan.fill, []

    def fails(plan, target, told):
        calls.append(1)
        if len(calls) == 3:
            raise WeightsError(
                "text_encoder", "model.safetensors", "a.b", "cannot be read: Input/output error.", ""
            )
        plain(plan, target, told)

    monkeypatch.setattr(Plan, "fill", fails)
    with offload(pipe, sim.device) as handle:
        with pytest.raises(Exception, match="Input/output error"):
            run(pipe)
        handle.ledger.audit()
        assert handle.ledger.present == ()
        output = run(pipe)
    assert torch.equal(output, run(ours(folder, lazy=False)))


@pytest.mark.parametrize("after", [0, 1, 4])
def test_an_interrupt_between_two_tensors(folder, sim, monkeypatch, after):
    """I4, I7: the rest is read the next time, and what was written to in between is not read again."""
    pipe = ours(folder)
    plain, left = Plan.fill, [after]

    def interrupted(plan, target, told):
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt
        plain(plan, target, told)

    monkeypatch.setattr(Plan, "fill", interrupted)
    with offload(pipe, sim.device) as handle:
        with pytest.raises(KeyboardInterrupt):
            run(pipe)
        there = [one for one in pipe.text_encoder.parameters() if type(one) is not Unread]
        assert len(there) == after
        for one in there:
            one.data.mul_(2)
        written = [one.detach().clone() for one in there]
        run(pipe)
        with handle.scope("transformer"):
            assert all(torch.equal(one.cpu(), value) for one, value in zip(there, written, strict=True))
    assert unread(pipe.text_encoder) == []


def test_eight_threads_that_want_the_same_tensor():
    """Each sees all values, which are read once."""
    source, begun = Source(), threading.Barrier(8)
    fills = []

    def fill(target):
        fills.append(1)
        target.fill_(3.0)

    tensor = source.promise(torch.zeros(1000), torch.zeros(1000), fill)
    sums = []

    def look():
        begun.wait()
        sums.append(float(tensor.sum()))

    threads = [threading.Thread(target=look) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sums == [3000.0] * 8
    assert fills == [1]


# --- what may be done to one ------------------------------------------------------------------------------


def _promised(is_parameter: bool) -> torch.Tensor:
    like = torch.arange(6.0).view(2, 3)
    like = torch.nn.Parameter(like, requires_grad=False) if is_parameter else like
    return Source().promise(
        torch.zeros(2, 3), like, lambda target: target.copy_(torch.arange(6.0).view(2, 3))
    )


def _saved(tensor):
    file = io.BytesIO()
    torch.save({"a": tensor}, file)
    file.seek(0)
    return torch.load(file)["a"]


def _wrote(tensor):
    tensor.mul_(1.0)
    return tensor


def _in_a_module(tensor):
    module = torch.nn.Module()
    module.register_buffer("a", tensor)
    return module


WAYS = {
    "added": lambda one: one + 0,
    "detached": lambda one: one.detach(),
    "its data": lambda one: one.data,
    "viewed": lambda one: one.view(3, 2).view(2, 3),
    "a row": lambda one: torch.stack([one[0], one[1]]),
    "moved": lambda one: one.to("cpu", torch.float64).float(),
    "cloned": lambda one: one.clone(),
    "copied deeply": copy.deepcopy,
    "pickled": lambda one: pickle.loads(pickle.dumps(one)),
    "saved": _saved,
    "as numpy": lambda one: torch.from_numpy(one.detach().numpy()),
    "by dlpack": torch.from_dlpack,
    "its memory": lambda one: torch.empty(0).set_(one.untyped_storage(), 0, (2, 3), (3, 1)),
    "written to": _wrote,
    "multiplied": lambda one: torch.nn.functional.linear(torch.eye(3), one).T,
    "as a list": lambda one: torch.tensor(one.tolist()),
    "as text": lambda one: one if "5." in repr(one) else torch.empty(0),
    "among others": lambda one: torch.cat([torch.empty(0, 3), one]),
    "of a module's state": lambda one: _in_a_module(one).state_dict()["a"],
    "of a module that moves": lambda one: _in_a_module(one).double().a.float(),
    "compared": lambda one: torch.where(one == one, one, 0.0),
    "as target": lambda one: torch.empty(2, 3).copy_(one),
    "a weight under vmap": lambda one: torch.vmap(lambda row: row @ one)(torch.eye(2)),
}


@pytest.mark.parametrize("is_parameter", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_an_operation_that_sees_values_which_are_not_there(way, is_parameter):
    tensor = _promised(is_parameter)
    if way == "of a module's state" and is_parameter:
        tensor = tensor.detach()
    found = WAYS[way](tensor)
    assert torch.equal(found, torch.arange(6.0).view(2, 3))
    assert type(found) in (torch.Tensor, torch.nn.Parameter)
    assert type(tensor) is not Unread


QUESTIONS = {
    "shape": lambda one: one.shape == (2, 3),
    "size": lambda one: one.size(0) == 2,
    "type": lambda one: one.dtype is torch.float32,
    "device": lambda one: one.device.type == "cpu",
    "is on meta": lambda one: not one.is_meta,
    "count": lambda one: one.numel() == 6,
    "dimensions": lambda one: one.dim() == one.ndim == 2,
    "gradient": lambda one: not one.requires_grad and one.grad is None,
    "floating": torch.is_floating_point,
    "hash": lambda one: one in {one},
    "length": lambda one: len(one) == 2,
    "kind": lambda one: isinstance(one, torch.nn.Parameter),
    "contiguous": lambda one: one.is_contiguous(),
    "frozen": lambda one: one.requires_grad_(False) is one,
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_that_needs_no_values_and_reads_them(question):
    tensor = _promised(True)
    assert QUESTIONS[question](tensor)
    assert type(tensor) is Unread


def test_a_parameter_that_becomes_another_object():
    """Optimizers, hooks and tied weights know it by its identity; notes on it stay."""
    tensor = _promised(True)
    tensor.note = "kept"
    before = id(tensor), tensor.storage_offset()
    tensor.sum()
    assert type(tensor) is torch.nn.Parameter
    assert (id(tensor), tensor.storage_offset()) == before
    assert vars(tensor) == {"note": "kept"}


@pytest.mark.parametrize("maker", [omni.qwen3_omni, omni.janus], ids=["qwen3-omni", "janus"])
def test_a_model_whose_recipe_names_its_parts_is_read_as_a_whole(maker, sim, tmp_path):
    """Each part has slabs of its own, which are its master; the weights that another part reads are resident."""
    maker().save_pretrained(tmp_path)
    model = load_components(tmp_path, dtype=torch.bfloat16, lazy=True)
    with offload(model, sim.device) as handle:
        parts = [one.name for one in handle.components if one.role == "dit"]
        assert len(parts) > 1
        for used in range(len(parts)):
            for name in parts[used:]:
                part = model.get_submodule(name)
                assert len(unread(part)) > len(list(part.parameters())) / 2  # what others read is resident
            with handle.scope(parts[used]):
                assert unread(model.get_submodule(parts[used])) == []
        handle.ledger.audit()
    assert sim.races == []
