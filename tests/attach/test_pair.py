"""The enable/disable pair with vLLM-Omni's keywords: given by the mixin, or brought by the target. Design section 8."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from omni_components import (
    DeclarationError,
    Offload,
    OmniOffloadMixin,
    PolicyError,
    SplitModel,
    SupportsOmniOffload,
    offload,
)
from tests.helpers.pipelines import (
    InterleavedPair,
    ModulePair,
    PlainPair,
    SplitPair,
    build,
    footprint,
    frozen,
)


class Driven(OmniOffloadMixin, ModulePair):
    """A module pipeline with the mixin."""


class DrivenPlain(OmniOffloadMixin, PlainPair):
    """A plain pipeline with the mixin."""


DRIVEN = [Driven, DrivenPlain, SplitPair, InterleavedPair]


@pytest.mark.parametrize("kind", DRIVEN)
def test_the_mixins_pair_enables_and_disables(sim, kind):
    """A split model has it, too; disable is idempotent; enabling twice is one offload."""
    target = frozen(kind())
    assert isinstance(target, SupportsOmniOffload)
    before = footprint(target)
    handle = target.enable_omni_model_cpu_offload(device=sim.device)
    assert isinstance(handle, Offload)
    assert (
        target.enable_omni_model_cpu_offload(device=str(sim.device), pin_memory=True, use_hsdp=False)
        is handle
    )
    assert offload(target, sim.device) is handle
    target.use("A", torch.randn(2, 16, device=sim.device))
    handle.ledger.audit()
    for _ in range(2):
        target.disable_omni_model_cpu_offload()
        assert footprint(target) == before
        assert not handle.enabled


def test_the_pairs_keywords_are_those_of_vllm_omnis_protocol():
    """Keyword-only, with the same names and defaults, so that its backend can drive it unchanged."""
    parameters = dict(
        list(inspect.signature(OmniOffloadMixin.enable_omni_model_cpu_offload).parameters.items())[1:]
    )
    assert {name: one.default for name, one in parameters.items()} == {
        "device": inspect.Parameter.empty,
        "pin_memory": True,
        "use_hsdp": False,
        "offload_components": None,
    }
    assert {one.kind for one in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert list(inspect.signature(OmniOffloadMixin.disable_omni_model_cpu_offload).parameters) == ["self"]


@pytest.mark.parametrize("pin_memory", [True, False])
def test_pin_memory_is_passed_on(sim, pin_memory):
    target = frozen(Driven())
    target.enable_omni_model_cpu_offload(device=sim.device, pin_memory=pin_memory)
    assert (sim.stats().pinned > 0) is pin_memory
    target.disable_omni_model_cpu_offload()
    assert sim.stats().pinned == 0


def test_offload_components_takes_vllm_omnis_words(sim):
    """``text_encoder`` and ``transformer`` there are ``encoder`` and ``dit`` here."""
    target = frozen(Driven())
    handle = target.enable_omni_model_cpu_offload(
        device=sim.device, offload_components={"text_encoder", "transformer"}
    )
    assert {one.name: one.resident for one in handle.components} == {"A": False, "B": False}
    target.disable_omni_model_cpu_offload()


@pytest.mark.parametrize(
    "wrong", [{"use_hsdp": True}, {"offload_components": {"vae"}}, {"device": "nowhere"}]
)
def test_what_is_not_possible_is_refused_before_anything_is_touched(sim, wrong):
    target = frozen(Driven())
    before = footprint(target)
    with pytest.raises(PolicyError):
        target.enable_omni_model_cpu_offload(**{"device": sim.device, **wrong})
    assert footprint(target) == before


# --- a target that brings its own pair ------------------------------------------------------------------------


class OwnPair:
    """A pipeline that does it all by itself."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def enable_omni_model_cpu_offload(
        self, *, device: Any, pin_memory: bool = True, use_hsdp: bool = False, offload_components: Any = None
    ) -> None:
        given = {
            "device": device,
            "pin_memory": pin_memory,
            "use_hsdp": use_hsdp,
            "offload_components": offload_components,
        }
        self.calls.append(("enable", given))

    def disable_omni_model_cpu_offload(self) -> None:
        self.calls.append(("disable", {}))


def test_a_target_with_its_own_pair_is_delegated_to(sim):
    """Its methods are called, with the keywords; it keeps no ledger of ours, and the handle says so."""
    target = OwnPair()
    with offload(target, sim.device, pin_memory=False, offload_components={"dit"}) as handle:
        assert [name for name, _ in target.calls] == ["enable"]
        given = target.calls[0][1]
        assert given["device"] == sim.device
        assert given["pin_memory"] is False
        assert set(given["offload_components"]) == {"dit"}
        assert given["use_hsdp"] is False
        assert offload(target, sim.device, pin_memory=False, offload_components={"dit"}) is handle
        assert handle.execution_device == sim.device
        assert (handle.components, handle.events) == ((), ())
        assert not handle.report().to_dict()["rows"]
        handle.release()
        with pytest.raises(DeclarationError, match="OwnPair"):
            _ = handle.ledger
        with pytest.raises(DeclarationError, match="OwnPair"):
            handle.scope("A")
    handle.disable()
    assert [name for name, _ in target.calls] == ["enable", "disable"]


def test_other_keywords_than_the_pairs_are_refused_for_it(sim):
    """They could not be passed on, and nothing is dropped in silence."""
    target = OwnPair()
    with pytest.raises(PolicyError, match="vae"):
        offload(target, sim.device, vae="exclusive")
    with offload(build("pipeline"), sim.device) as handle, pytest.raises(PolicyError, match="ledger"):
        offload(target, sim.device, ledger=handle.ledger)
    assert target.calls == []


def test_a_pair_that_raises_leaves_no_handle(sim):
    class Failing(OwnPair):
        def enable_omni_model_cpu_offload(self, **keywords: Any) -> None:
            raise RuntimeError("no room")

    target = Failing()
    with pytest.raises(RuntimeError, match="no room"):
        offload(target, sim.device)
    assert set(vars(target)) == {"calls"}


@pytest.mark.parametrize("base", [ModulePair, SplitPair])
def test_a_pair_that_calls_offload_itself_ends_in_one_handle(sim, base):
    """A pipeline may choose its own policy that way."""

    class Chooses(base):
        def enable_omni_model_cpu_offload(
            self, *, device: Any, pin_memory: bool = True, **keywords: Any
        ) -> Offload:
            return offload(self, device, pin_memory=pin_memory, nesting="error")

        def disable_omni_model_cpu_offload(self) -> None:
            handle = vars(self).get("_omni_offload_handle")
            if handle is not None:
                handle.disable()

    target = frozen(Chooses())
    before = footprint(target)
    handle = offload(target, sim.device)
    assert handle.policy.nesting == "error"
    assert handle.enabled
    target.use("A", torch.randn(2, 16, device=sim.device))
    handle.ledger.audit()
    target.disable_omni_model_cpu_offload()
    assert footprint(target) == before


def test_a_pair_that_extends_the_mixins_is_called_and_ends_in_one_handle(sim):
    """``super().enable_omni_model_cpu_offload(...)`` is the usual way to add a step."""

    class Extends(Driven):
        steps = 0

        def enable_omni_model_cpu_offload(self, **keywords: Any) -> Offload:
            self.steps += 1
            return super().enable_omni_model_cpu_offload(**keywords)

    target = frozen(Extends())
    handle = offload(target, sim.device)
    assert target.steps == 1
    assert {one.name for one in handle.components} == {"A", "B"}
    handle.disable()


def test_a_split_model_is_a_module_with_the_pair():
    assert issubclass(SplitModel, OmniOffloadMixin)
    assert issubclass(SplitModel, torch.nn.Module)
