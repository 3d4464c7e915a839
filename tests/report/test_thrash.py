"""Faults of telling thrash from a plain course. Case C36."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, randn

from omni_components import SplitModel, offload
from omni_components.report.thrash import find_thrash
from tests.helpers.pipelines import Stack, frozen, payload

from .histories import ledger_of, use

SIZES = {"A": 100, "B": 30, "C": 7, "D": 1}


def thrash_of(*phases: str, **how):
    ledger = ledger_of(SIZES, **how)
    for phase in phases:
        if phase == "release":
            ledger.release()
        else:
            use(ledger, phase)
    return {one.pair: (one.reloads, one.bytes) for one in find_thrash(ledger.history)}


def test_a_b_a_b_is_named_with_the_bytes_of_its_reloads():
    assert thrash_of("A", "B", "A", "B") == {("A", "B"): (2, 130)}


def test_ten_steps_of_two_phases_count_every_load_but_the_first_two():
    assert thrash_of(*"AB" * 10) == {("A", "B"): (18, 9 * 130)}


def test_one_trip_out_and_back_is_no_thrash():
    assert thrash_of("A", "B", "A") == {}


def test_phases_in_order_are_no_thrash_however_many_requests_follow():
    assert thrash_of(*"ABC" * 20) == {}


def test_a_component_used_many_times_in_a_row_is_no_thrash():
    assert thrash_of(*"AAAA", *"BBBB") == {}


def test_a_release_between_two_requests_ends_the_count():
    assert thrash_of(*["A", "B", "release"] * 20) == {}


def test_thrash_within_each_request_adds_up_over_requests():
    assert thrash_of(*["A", "B", "A", "B", "release"] * 3) == {("A", "B"): (6, 3 * 130)}


def test_two_that_may_be_there_together_thrash_with_the_third_as_one_phase():
    """Two encoders that do not exclude each other, and a DiT that excludes both."""
    friends = [frozenset("AB")]
    assert thrash_of(*"ABC" * 3, friends=friends) == {("A", "C"): (4, 214), ("B", "C"): (2, 60)}


def test_a_bystander_does_not_hide_a_pair_that_thrashes():
    friends = [frozenset(pair) for pair in ("AC", "BC")]
    assert thrash_of(*"ACB" * 2, friends=friends) == {("A", "B"): (2, 130)}


def test_two_pairs_are_both_named_the_costliest_first():
    friends = [frozenset(pair) for pair in ("AC", "AD", "BC", "BD")]
    ledger = ledger_of(SIZES, friends=friends)
    use(ledger, *"CDABCDABAB")
    assert [(one.pair, one.reloads) for one in find_thrash(ledger.history)] == [
        (("A", "B"), 4),
        (("C", "D"), 2),
    ]


def test_a_nested_rival_in_a_loop_is_thrash():
    """The outer component is brought back each time: the price that the nesting warning speaks of."""
    ledger = ledger_of(SIZES)
    with pytest.warns(UserWarning, match="two more switches"), ledger.scope("A"):
        use(ledger, "B", "B", "B")
    assert [(one.pair, one.reloads) for one in find_thrash(ledger.history)] == [(("A", "B"), 5)]


def test_a_failed_load_displaces_nobody():
    ledger = ledger_of(SIZES)
    for _ in range(3):
        use(ledger, "A")
        ledger.mover.broken.add("B")
        with pytest.raises(RuntimeError, match="link is down"):
            use(ledger, "B")
    assert find_thrash(ledger.history) == ()


def test_a_component_that_was_disabled_starts_afresh():
    ledger = ledger_of(SIZES)
    use(ledger, "A", "B", "A")
    gone = [one for one in ledger.components if one.name == "B"]
    ledger.retire(["B"])
    ledger.admit(gone, lambda one, other: True)
    use(ledger, "B")
    assert find_thrash(ledger.history) == ()


def test_a_history_that_begins_in_the_middle_counts_what_it_still_knows():
    ledger = ledger_of(SIZES, history=8)
    use(ledger, *"AB" * 10)
    (found,) = find_thrash(ledger.history)
    assert (found.pair, found.reloads) == (("A", "B"), 3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["A", "B", "C", "D", "release"]), max_size=40))
def test_no_history_charges_more_than_was_loaded(phases):
    """I8: a reload is a load, so reloads and their bytes are bounded by what travelled."""
    ledger = ledger_of(SIZES)
    for phase in phases:
        ledger.release() if phase == "release" else use(ledger, phase)
    found = find_thrash(ledger.history, repeats=1)
    loads = [one for one in ledger.history if str(one.kind) == "load"]
    assert sum(one.reloads for one in found) <= max(0, len(loads) - len({one.component for one in loads}))
    assert sum(one.bytes for one in found) <= sum(one.bytes for one in loads)
    assert all(one.pair[0] < one.pair[1] and one.reloads > 0 for one in found)


class Guided(SplitModel):
    """Reads its prompt again at every step, as a pipeline with guidance in the wrong order does."""

    _offload_components = {"reasoner": ["reader"], "generator": ["denoiser"]}  # noqa: RUF012 - as users write it

    def __init__(self) -> None:
        super().__init__()
        self.reader: nn.Module = Stack()
        self.denoiser: nn.Module = Stack(depth=3)

    def forward(self, x, steps):
        for _ in range(steps):
            with self._offload_context("reasoner"):
                memory = self.reader(x)
            with self._offload_context("generator"):
                x = x + self.denoiser(memory)
        return x


def test_c36_a_model_that_reads_its_prompt_at_every_step_is_named_with_its_real_bytes(sim):
    """I8: the report's bytes are the simulated device's."""
    model = frozen(Guided())
    x = randn(2, 16, device=sim.device)
    with offload(model, sim.device) as handle:
        model(x, 1)
        sim.reset()
        model(x, 9)
        travelled = sim.stats().h2d_bytes
        report = handle.report()
    (found,) = report.thrash
    assert (found.pair, found.reloads, found.bytes) == (("generator", "reasoner"), 18, travelled)
    assert travelled == 9 * (payload(model.reader) + payload(model.denoiser))
    assert "thrash: generator and reasoner" in str(report)
    assert "18 reloads" in str(report)
    assert report.to_dict()["thrash"] == [
        {"pair": ["generator", "reasoner"], "reloads": 18, "bytes": travelled}
    ]
