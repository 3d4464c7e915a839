"""``device="cpu"``: phases without bytes for weights in memory, private memory for mapped ones. Section 7."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_components import ScopeError, offload
from tests.helpers.pipelines import KINDS, build, footprint, kinds_of, same_values, tensors, values


@pytest.mark.parametrize("kind", KINDS)
def test_weights_in_memory_cost_no_bytes_and_phases_are_recorded_all_the_same(kind):
    """I1, I2, I4: a declaration can be developed anywhere."""
    target = build(kind)
    clean, before, objects = footprint(target), values(target), list(tensors(target))
    addresses = [one.data_ptr() for one in objects]
    x = torch.randn(2, 16)
    expected = {which: target.use(which, x) for which in "AB"}
    a, b = target.names["A"], target.names["B"]
    with offload(target, "cpu") as handle:
        start = len(handle.events)
        for which in "ABA":
            assert torch.equal(target.use(which, x), expected[which])
            assert (target.names[which] in handle.ledger.present) is True
            handle.ledger.audit()
        assert kinds_of(handle.events[start:], "load", "evict") == [
            ("load", a),
            ("evict", a),
            ("load", b),
            ("evict", b),
            ("load", a),
        ]
        assert sum(one.bytes for one in handle.events) == 0
        assert [one.data_ptr() for one in tensors(target)] == addresses
        assert all(one is other for one, other in zip(tensors(target), objects, strict=True))
        facts = handle.report().facts
        assert (facts.pinned_bytes, facts.mapped_bytes, facts.arena_bytes) == (0, 0, 0)
        assert handle.execution_device == torch.device("cpu")
    assert footprint(target) == clean
    assert same_values(target, before)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rules_of_scopes_hold_without_a_device(kind):
    """I4: a rival inside an open scope is refused with ``nesting="error"``, and disable waits for scopes."""
    target = build(kind)
    with offload(target, "cpu", nesting="error") as handle:
        with handle.scope(target.names["A"]):
            with pytest.raises(ScopeError), handle.scope(target.names["B"]):
                pass
            with pytest.raises(ScopeError):
                handle.disable()
        handle.ledger.audit()


def test_without_an_accelerator_none_is_needed():
    """``device=None`` takes the CPU; nothing is pinned and nothing warned about."""
    target = build("pipeline")
    with offload(target) as handle:
        assert handle.execution_device == torch.device("cpu")
        target.use("A", torch.randn(2, 16))


def test_edits_in_memory_need_nothing_and_are_kept(tmp_path):
    """I7: what is written is what is there; adapters and replaced weights, too."""
    target = build("pipeline")
    with offload(target, "cpu") as handle:
        with handle.scope("A"):
            target.A.layers[0].weight.fill_(2.0)
        target.A.layers[1].weight = torch.nn.Parameter(torch.full((16, 16), 3.0), requires_grad=False)
        with handle.editing("A"):
            target.A.layers[0].bias.data.fill_(4.0)
        target.use("B", torch.randn(2, 16))
        target.use("A", torch.randn(2, 16))
        handle.ledger.audit()
    assert bool((target.A.layers[0].weight == 2.0).all())
    assert bool((target.A.layers[1].weight == 3.0).all())
    assert bool((target.A.layers[0].bias == 4.0).all())


# --- mapped masters -----------------------------------------------------------------------------------------


def mapped(kind: str, folder: Path):
    """A target whose weights are mapped from a safetensors file, and the values they have."""
    target = build(kind)
    state = {name: one.clone() for name, one in target.state_dict().items()}
    save_file(state, folder / "weights.safetensors")
    target.load_state_dict(load_file(folder / "weights.safetensors"), assign=True)
    for one in target.parameters():
        one.requires_grad_(False)
    return target, state


MODULES = ["pipeline", "nested", "split", "interleaved"]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="mapped files are recognised on Linux only")
@pytest.mark.parametrize("kind", MODULES)
def test_mapped_weights_are_copied_into_private_memory_while_loaded(tmp_path, kind):
    """I5, I7, I8: events tell the bytes; the objects stay the same, the file is the master."""
    target, state = mapped(kind, tmp_path)
    objects, x = list(tensors(target)), torch.randn(2, 16)
    at_rest = {name: one.data_ptr() for name, one in target.named_parameters()}
    expected = {which: target.use(which, x) for which in "AB"}
    with offload(target, "cpu") as handle:
        assert handle.report().facts.mapped_bytes > 0
        start = len(handle.events)
        for which in "ABAB":
            assert torch.equal(target.use(which, x), expected[which])
            handle.ledger.audit()
        loads = [one for one in handle.events[start:] if str(one.kind) == "load"]
        assert [one.component for one in loads] == [target.names[which] for which in "ABAB"]
        for one, which in zip(loads, "ABAB", strict=True):
            assert one.bytes == sum(tensor.nbytes for tensor in target.module(which).parameters())
        with handle.scope(target.names["A"]):
            there = {id(one) for one in target.module("A").parameters()}
            moved = {name: one.data_ptr() != at_rest[name] for name, one in target.named_parameters()}
            assert all(moved[name] == (id(one) in there) for name, one in target.named_parameters())
        handle.release()
        assert {name: one.data_ptr() for name, one in target.named_parameters()} == at_rest
        assert all(one is other for one, other in zip(tensors(target), objects, strict=True))
        residents = sum(one.bytes for one in handle.components if one.resident)
        assert handle.report().facts.arena_bytes == residents
    assert all(torch.equal(one, state[name]) for name, one in target.state_dict().items())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="mapped files are recognised on Linux only")
@pytest.mark.parametrize("kind", MODULES)
def test_a_mapped_weight_written_while_loaded_keeps_its_value_and_the_file_its_bytes(tmp_path, kind):
    """I7: the master is the process's view of the file, private to it: the file itself never changes."""
    target, _ = mapped(kind, tmp_path)
    before = (tmp_path / "weights.safetensors").read_bytes()
    with offload(target, "cpu") as handle:
        with handle.scope(target.names["A"]):
            for one in target.module("A").parameters():
                one.fill_(2.0)
        target.use("B", torch.randn(2, 16))
        assert all(bool((one == 2.0).all()) for one in target.module("A").parameters())
        assert [one.component for one in handle.events if str(one.kind) == "write_back"] == [
            target.names["A"]
        ]
        target.use("A", torch.randn(2, 16))
        handle.ledger.audit()
    assert all(bool((one == 2.0).all()) for one in target.module("A").parameters())
    assert (tmp_path / "weights.safetensors").read_bytes() == before


BIG = """
import gc, json, sys
from pathlib import Path
from typing import ClassVar
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from omni_components import SplitModel, offload

MIB = 1 << 20


class Block(nn.Module):
    def __init__(self, mib):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(mib * MIB // 4096, 1024), requires_grad=False)

    def forward(self, x):
        return x + self.weight.sum(0)


class Dit(SplitModel):
    _offload_components: ClassVar = {"reasoner": ["reader"], "generator": ["writer", "gain"]}

    def __init__(self):
        super().__init__()
        self.reader, self.writer = Block(96), Block(128)
        self.gain = nn.Parameter(torch.empty(1024), requires_grad=False)

    def forward(self, x):
        with self._offload_context("reasoner"):
            x = self.reader(x)
        with self._offload_context("generator"):
            return self.writer(x) * self.gain


class Pipe(nn.Module):
    _dit_modules: ClassVar = ["transformer"]
    _encoder_modules: ClassVar = ["text_encoder"]
    _vae_modules: ClassVar = []

    def __init__(self):
        super().__init__()
        self.text_encoder, self.transformer = Block(80), Dit()


def anonymous():
    for line in open("/proc/self/smaps_rollup"):
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("no Anonymous line")


torch.set_num_threads(1)
path = Path(sys.argv[1]) / "weights.safetensors"
with torch.device("meta"):
    pipe = Pipe()
state = {name: torch.empty(one.shape).uniform_(-1, 1) for name, one in pipe.named_parameters()}
save_file(state, path)
x = torch.zeros(1024)
expected = ((state["text_encoder.weight"].sum(0) + state["transformer.reader.weight"].sum(0)
             + state["transformer.writer.weight"].sum(0)) * state["transformer.gain"])
total = sum(one.nbytes for one in state.values()) / MIB
del state
gc.collect()

pipe.load_state_dict(load_file(path), assign=True)
pipe.requires_grad_(False)
pipe.transformer.reader(x)  # a first touch, so that what the run needs besides is there

floor = anonymous()
seen = {"total": total, "floor": floor}
handle = offload(pipe, "cpu")
seen["enabled"] = anonymous() - floor
result = pipe.text_encoder(x)
seen["text_encoder"] = anonymous() - floor
with handle.scope("reasoner"):
    seen["reasoner"] = anonymous() - floor
with handle.scope("generator"):
    seen["generator"] = anonymous() - floor
result = pipe.transformer(result)
seen["equal"] = bool(torch.allclose(result, expected, atol=1e-2))
seen["peak"] = handle.report().peak_bytes / MIB
handle.release()
seen["released"] = anonymous() - floor
handle.load("text_encoder")
handle.disable()
seen["disabled"] = anonymous() - floor
print(json.dumps(seen))
"""


@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="Linux tells a process's anonymous memory"
)
def test_evicted_components_hold_no_anonymous_memory_by_the_systems_own_figures(tmp_path):
    """I8: 304 MiB of random weights in their own process: loaded is in private memory, evicted is given back."""
    run = subprocess.run(
        [sys.executable, "-c", BIG, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout.splitlines()[-1])
    assert seen["total"] * 1.048576 >= 300
    assert seen["equal"]
    slack = 6  # MiB that the process itself takes and gives back
    assert seen["enabled"] <= slack
    for name, size in (("text_encoder", 80), ("reasoner", 96), ("generator", 128)):
        assert size - 1 <= seen[name] <= size + slack, (name, seen)
    assert seen["released"] <= slack
    assert seen["disabled"] <= slack
    assert seen["peak"] <= 128.1


def test_an_absent_mapped_component_computes_right_from_its_file(tmp_path):
    """On the CPU what is called past the hooks finds the master's values: there is nothing to explain."""
    target, state = mapped("pipeline", tmp_path)
    x = torch.randn(2, 16)
    right = torch.nn.functional.linear(x, state["A.layers.0.weight"], state["A.layers.0.bias"])
    with offload(target, "cpu"):
        target.use("B", x)
        assert torch.equal(target.A.layers[0](x), right)
