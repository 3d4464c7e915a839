"""``masters="auto"``: weights stay in their files' pages until they come a second time, then they are pinned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from omni_components import ResidencyWarning, load_components, offload
from omni_components.transfer import home as home_module
from tests.diffusers import tiny

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="mapped files are recognised on Linux only"
)
ASKED = {"height": 16, "width": 16, "num_frames": 5, "num_inference_steps": 2, "output_type": "pt"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("wan")
    tiny.wan().save_pretrained(made)
    return str(made)


def run(pipe):
    return pipe("a", **ASKED, generator=tiny.seeded()).frames.cpu()


def payload(*modules):
    return sum(one.numel() * one.element_size() for module in modules for one in module.parameters())


def loaded(handle):
    return sum(one.bytes for one in handle.events if one.kind == "load")


def test_memory_that_is_taken_before_it_is_worth_it(folder, sim):
    """I5, I8: after one use nothing is pinned but what copies pass through; after the second everything is,
    the values and the number of bytes that cross stay."""
    pipe = tiny.quiet(load_components(folder))
    with offload(pipe, sim.device) as handle:
        pictures, crossed, facts = [], [], []
        for _ in range(3):
            before = loaded(handle)
            pictures.append(run(pipe))
            handle.ledger.audit()
            crossed.append(loaded(handle) - before)
            facts.append(handle.report().facts)
    assert sim.races == []
    assert torch.equal(pictures[0], pictures[1])
    assert torch.equal(pictures[0], pictures[2])
    assert crossed[1] == crossed[2] > 0
    weights = payload(pipe.text_encoder, pipe.transformer, pipe.transformer_2, pipe.vae)
    assert [one.mapped_bytes > 0 for one in facts] == [True, False, False]
    assert facts[0].pageable_bytes == 0
    assert facts[0].mapped_bytes == weights
    assert facts[1].pinned_bytes == facts[2].pinned_bytes >= weights


def test_an_address_that_changes_when_the_master_does(folder, sim):
    """I6: compiled code counts on it; a kept arena gives each weight the place that it had."""
    pipe = tiny.quiet(load_components(folder))
    with offload(pipe, sim.device, arena="keep") as handle:
        seen = []
        for _ in range(2):
            with handle.scope("transformer"):
                seen.append([one.data_ptr() for one in pipe.transformer.parameters()])
            with handle.scope("text_encoder"):
                pass
        assert handle.report().facts.mapped_bytes == payload(pipe.vae, pipe.transformer_2)
    assert seen[0] == seen[1]


def test_a_write_that_is_lost_with_the_pages(folder, sim):
    """I7: what was written on the host before, and on the device after it, is in the slabs."""
    pipe = tiny.quiet(load_components(folder))
    bias = pipe.transformer.proj_out.bias
    with torch.no_grad(), offload(pipe, sim.device) as handle:
        bias.fill_(3.0)
        for value in (3.0, 4.0, 5.0):
            with handle.scope("transformer"):
                assert pipe.transformer.proj_out.bias.cpu().eq(value).all()
                pipe.transformer.proj_out.bias.add_(1.0)
            with handle.scope("text_encoder"):
                pass
    assert pipe.transformer.proj_out.bias.eq(6.0).all()


def test_no_host_memory_for_the_slabs(folder, sim, monkeypatch):
    """I4: said once; the component stays mapped and computes what it did."""

    def none(*_):
        raise MemoryError("no slab of this size")

    pipe = tiny.quiet(load_components(folder))
    with offload(pipe, sim.device) as handle:
        first = run(pipe)
        monkeypatch.setattr(home_module, "repack", none)
        with pytest.warns(ResidencyWarning, match="stay in their files' pages.*no slab of this size"):
            second = run(pipe)
        third = run(pipe)  # warnings are errors: it is not said again
        handle.ledger.audit()
        assert handle.report().facts.mapped_bytes > 0
    assert torch.equal(first, second)
    assert torch.equal(first, third)


@pytest.mark.parametrize("after", [0, 1, 5, 40])
def test_an_interrupt_between_two_steps(folder, sim, monkeypatch, after):
    """I4: every weight has its bytes, and the next load does it again."""
    pipe = tiny.quiet(load_components(folder))
    with offload(pipe, sim.device) as handle:
        first = run(pipe)
        left = after
        rehome = home_module.Group.rehome

        def interrupted(group, source):
            nonlocal left
            left -= 1
            if left == -1:
                raise KeyboardInterrupt
            rehome(group, source)

        monkeypatch.setattr(home_module.Group, "rehome", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(pipe)
        handle.ledger.audit()
        assert torch.equal(run(pipe), first)
        assert torch.equal(run(pipe), first)
        assert handle.report().facts.mapped_bytes == 0
    assert sim.races == []
