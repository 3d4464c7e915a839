"""Scopes over the real mover on the simulated accelerator: failures by the device, bytes that stay whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import nn

import omni_components
from omni_components import OffloadPolicy, TransferError
from omni_components.testing import every_fault
from omni_components.testing.modules import TinyModule
from omni_components.testing.movers import Fault
from omni_components.testing.plugin import require_simulated_accelerator
from omni_components.testing.strategies import ComponentSet
from tests.residency.arena import WIDTH, ArenaSubject, half
from tests.residency.interrupts import Interrupter
from tests.residency.rigs import component

pytestmark = pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")

TRAITS = ("tied", "view", "transposed", "half", "counter")


def subject(names: str, edges: str, *, keep: bool = True, large: str = "", **policy: Any) -> ArenaSubject:
    def make(name: str) -> nn.Module:
        depth = 4 if name in large else 2
        return TinyModule(WIDTH, depth, TRAITS, torch.Generator().manual_seed(names.index(name)))

    pairs = frozenset(frozenset(pair) for pair in edges.split())
    declared = ComponentSet(tuple(component(name) for name in names), pairs)
    return ArenaSubject(declared, make, policy=OffloadPolicy(**policy), keep=keep, pinned=None, order="lazy")


@pytest.fixture(autouse=True)
def _needs_the_accelerator() -> None:
    require_simulated_accelerator()


@pytest.fixture(params=[True, False], ids=["keep", "fit"])
def three(request: pytest.FixtureRequest) -> Iterator[ArenaSubject]:
    """Three rivals, each with tied weights, views, two dtypes, odd strides."""
    subject_ = subject("abc", "ab bc ac", keep=request.param)
    yield subject_
    subject_.close()


def whole(one: ArenaSubject) -> None:
    """I1, I3, I5, I6, I7, I8, and no race."""
    one.ledger.audit()
    for name in one.modules:
        one.read(name)
    assert one.violations() == []


def usable(one: ArenaSubject) -> None:
    """The next request is right."""
    for name in one.modules:
        with one.ledger.scope(name, timeout=0):
            one.compute(name)
    one.ledger.release()
    whole(one)
    assert one.ledger.present == ()


# --- out of memory --------------------------------------------------------------------------------------------


def test_a_load_without_room_flushes_once_and_says_what_it_wanted(three: ArenaSubject) -> None:
    """I6, C07."""
    three.sim.capacity = 1024
    flushes = three.sim.stats().flushes
    with pytest.raises(TransferError) as caught, three.ledger.scope("a"):
        pass
    assert three.sim.stats().flushes == flushes + 1
    error = caught.value
    assert (error.component, error.wanted) == ("a", three.ledger.size("a"))
    assert isinstance(error.__cause__, torch.OutOfMemoryError)
    text = str(error)
    assert text.startswith("'a' could not be loaded: ")
    assert " wanted, " in text
    assert " free on the device; cause: " in text
    assert "Free device memory (smaller batch or resolution) and call again." in text
    assert three.ledger.present == ()
    whole(three)
    three.sim.capacity = None
    usable(three)


def test_a_load_that_fits_after_the_flush_succeeds(three: ArenaSubject) -> None:
    """The allocator's cache held what was missing: tried once more, and it is no error."""
    three.sim.fail(allocation=0)
    with three.ledger.scope("a"):
        three.compute("a")
    assert three.sim.stats().flushes == 1
    whole(three)


def test_healthy_switches_flush_nothing(three: ArenaSubject) -> None:
    """C07."""
    for name in "abcabcabc":
        with three.ledger.scope(name):
            three.compute(name)
    assert three.sim.stats().flushes == 0
    whole(three)


def test_a_nested_load_without_room_puts_the_suspended_outer_component_back() -> None:
    """I2, I6: the outer body goes on computing."""
    one = subject("ab", "ab", keep=False)
    with one.ledger.scope("a"):
        one.compute("a")
        one.sim.fail(allocation=1)  # the first one of b's load finds no room, nor does it after the flush
        one.sim.fail(copy=0)
        with pytest.raises(TransferError) as caught, one.ledger.scope("b"):
            pytest.fail("the body must not run")
        one.sim.heal()
        assert caught.value.component == "b"
        assert one.ledger.present == ("a",)
        one.compute("a")
        whole(one)
    usable(one)
    one.close()


def test_what_a_failed_load_had_taken_is_free_for_the_way_back() -> None:
    """I2, I8: the error that is on its way holds frames, and these must not hold the device bytes."""
    one = subject("ab", "ab", keep=False)
    with one.ledger.scope("a"):
        one.sim.capacity = one.sim.stats().allocated + 512
        one.sim.fail(copy=0)
        with pytest.raises(TransferError), one.ledger.scope("b"):
            pytest.fail("the body must not run")
        assert one.ledger.present == ("a",)
        one.sim.fail(copy=0, error=KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt), one.ledger.scope("b"):
            pytest.fail("the body must not run")
        assert one.ledger.present == ("a",)
        one.sim.fail(copy=0)
        with pytest.raises(TransferError) as caught:
            one.ledger.scope("b").__enter__()
        with one.ledger.scope("b"):  # again, while the error is still at hand
            pass
        assert caught.value.component == "b"
        assert one.ledger.present == ("a",)
        whole(one)
    one.sim.capacity = None
    usable(one)
    one.close()


# --- each fault of the device ---------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [None, KeyboardInterrupt], ids=["usual", "interrupt"])
@pytest.mark.parametrize("point", ["copy", "allocation", "step"])
def test_every_fault_of_a_nested_switch_with_written_and_new_weights(
    three: ArenaSubject, point: Any, error: type[BaseException] | None
) -> None:
    """I1 to I8 for each n: the n-th copy, allocation or step of any kind fails; everything is whole afterwards."""
    trials = 0
    for trial in every_fault(three.sim, point, error=error):
        for name in "ab":
            with three.ledger.scope(name):
                three.write(name, 3 * trial.number % 90 + 1)  # in place
                three.write(name, 3 * trial.number % 90)  # a new parameter
        with trial, three.ledger.scope("a"):
            with three.ledger.scope("b"):
                pass
            three.ledger.load("a")
        whole(three)
        usable(three)
        trials += 1
    assert trials > {"copy": 8, "allocation": 0 if three.mover.arena.keep else 3, "step": 30}[point]


# --- adoption and failure -------------------------------------------------------------------------------------


def put_in_a_host_tensor(one: ArenaSubject) -> None:
    """An adapter put in while the component is on the device has no bytes there yet."""
    one.ledger.load("a")
    one.write("a", 1)
    for model in (one.modules["a"], one.twins["a"]):
        model.layers[0].bias = nn.Parameter(torch.full((WIDTH,), 0.25))  # type: ignore[union-attr]


@pytest.mark.parametrize("fails", ["the copy home", "the wait for copies", "an interrupt in that wait"])
def test_an_eviction_that_fails_with_a_host_tensor_in_a_slot_leaves_it_on_the_device(
    three: ArenaSubject, fails: str
) -> None:
    """I6, I7."""
    put_in_a_host_tensor(three)
    if fails == "the copy home":
        three.sim.fail(copy=0)
    else:
        kind = KeyboardInterrupt if "interrupt" in fails else TransferError
        three.arm(Fault(verb="evict", name="a", when="inside", error=kind))
    with pytest.raises((TransferError, KeyboardInterrupt)):
        three.ledger.release()
    three.sim.heal()
    three.ledger.audit()
    assert three.ledger.present == ("a",)
    three.read("a")
    three.ledger.release()
    usable(three)


@pytest.mark.parametrize("fresh", [False, True], ids=["as it was", "with a host tensor in a slot"])
def test_an_interrupt_between_two_tensors_that_are_bound_home_finishes_the_way_home(
    three: ArenaSubject, fresh: bool
) -> None:
    """I5, I6, I7."""
    three.ledger.load("a")
    if fresh:
        put_in_a_host_tensor(three)
    cargo = three.mover.cargo("a")
    interrupt = Fault(verb="evict", name="a", error=KeyboardInterrupt)
    cargo.bind_host = half(cargo, "bind_host", interrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        three.ledger.release()
    assert three.ledger.present == ()
    whole(three)
    usable(three)


def test_an_interrupt_between_two_tensors_that_are_bound_to_the_device_is_undone(three: ArenaSubject) -> None:
    """I5, I6: half of the tensors are there and half at home; all go home."""
    cargo = three.mover.cargo("a")
    interrupt = Fault(verb="load", name="a", error=KeyboardInterrupt)
    cargo.bind_device = half(cargo, "bind_device", interrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        three.ledger.load("a")
    assert three.ledger.present == ()
    for path, tensor in three.modules["a"].state_dict(keep_vars=True).items():
        assert tensor.device.type == "cpu", path
    whole(three)
    usable(three)


# --- an interrupt anywhere ------------------------------------------------------------------------------------

PACKAGE = Path(omni_components.__file__).parent
PLACES = tuple(str(PACKAGE / part) for part in ("residency", "transfer", "components"))


def test_an_interrupt_anywhere_in_a_nested_switch_leaves_everything_whole(three: ArenaSubject) -> None:
    """I1 to I8: at each place of ledger, mover, masters and binding in turn; by default at every 19th of them."""
    stride = max(1, 800 // settings().max_examples - 1)
    at = 0
    while True:
        interrupter = Interrupter(at, *PLACES)
        try:
            with interrupter, three.ledger.scope("a"):
                three.write("a", 4)
                three.write("a", 3)
                with three.ledger.scope("b"):
                    pass
        except KeyboardInterrupt:
            assert interrupter.place
        if not interrupter.place:
            break
        try:
            whole(three)
            usable(three)
        except BaseException as error:
            raise AssertionError(f"after an interrupt at {interrupter.place}") from error
        at += stride
    assert at > 500


# --- the arena's places ---------------------------------------------------------------------------------------


def test_components_admitted_while_one_is_present_do_not_take_its_bytes() -> None:
    """I3, I7: the arena is arranged anew while somebody is in it; the old place still holds."""
    one = subject("abcd", "ab cd", large="bd")  # at first, b and its rival a lie at the start, c and d behind
    one.retire(["b", "c"])
    with one.ledger.scope("a"):
        one.admit(["c"])  # now the start would be for d, the larger one, and for its rival c
        one.ledger.load("c")
        one.compute("a")
        one.compute("c")
        whole(one)
    one.admit(["b"])
    usable(one)
    one.close()


def test_a_component_that_comes_back_with_other_rivals_gets_a_place_that_is_free_of_them() -> None:
    """I3: under its old conflicts it lay where ``a`` is; now both may be present."""
    one = subject("abc", "ab")
    for name in "abc":
        one.ledger.load(name)
    one.ledger.load("a")
    one.retire(["b"])
    one._declared = ComponentSet(one._declared.components, frozenset())
    one.admit(["b"])
    one.sim.capacity = None
    with one.ledger.scope("a"), one.ledger.scope("b"), one.ledger.scope("c"):
        for name in "abc":
            one.compute(name)
        whole(one)
    usable(one)
    one.close()


def test_a_component_that_outgrows_its_place_gets_a_larger_arena_not_a_second_one() -> None:
    """I8: a new parameter lies beside its slab; one byte more than the arena must not cost an arena more."""
    one = subject("abc", "ab bc ac")
    for name in "abc":
        with one.ledger.scope(name):
            one.compute(name)
    for count in range(3):
        for name in "abc":
            one.ledger.load(name)
            one.write(name, 3 * count)
    for name in "abcabc":
        with one.ledger.scope(name):
            one.compute(name)
        whole(one)
    assert one.sim.stats().allocated <= one.ledger.predicted_peak + 1024
    assert one.mover.arena.held <= one.ledger.predicted_peak
    usable(one)
    one.close()


def test_a_new_arrangement_gives_the_old_buffer_back() -> None:
    """I8: once nobody is in it, the device holds one arena, not two."""
    one = subject("abcd", "ab cd ac ad bc bd")
    one.sim.capacity = None
    one.retire(["c", "d"])
    with one.ledger.scope("a"):
        one.admit(["c", "d"])
        with one.ledger.scope("a"):
            one.compute("a")
    for _ in range(2):
        for name in "abcd":
            with one.ledger.scope(name):
                one.compute(name)
    whole(one)
    largest = max(one.ledger.size(name) for name in "abcd")
    assert one.mover.arena.held <= largest
    assert one.sim.stats().allocated <= largest + 1024
    usable(one)
    one.close()


# --- order on the device --------------------------------------------------------------------------------------


def test_a_master_may_be_written_as_soon_as_its_component_is_home(three: ArenaSubject) -> None:
    """I7: no late copy reads it any more, though nobody has used what it brought."""
    three.ledger.load("a")
    three.ledger.release()
    three.write("a", 1)
    whole(three)
    usable(three)


def test_a_rival_does_not_overwrite_what_compute_still_reads(three: ArenaSubject) -> None:
    """I7: the host runs ahead of the device by three phases."""
    for name in "abc":
        with three.ledger.scope(name):
            three.compute(name)
    whole(three)


# --- load and release -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", ["lrlr", "llrr", "rrll", "lfrl", "flfl", "lllf"])
def test_load_and_release_in_any_order_move_only_what_has_to_be_moved(
    three: ArenaSubject, steps: str
) -> None:
    """C38, I7: ``l`` loads, ``r`` releases, ``f`` releases with the arena."""
    inputs = three.sim.stats().allocated
    three.ledger.load("a")
    three.write("a", 1)
    for step in steps:
        before, present = three.sim.stats().h2d_bytes, "a" in three.ledger.present
        if step == "l":
            three.ledger.load("a")
        else:
            three.ledger.release(free_arena=step == "f")
        sent = three.sim.stats().h2d_bytes - before
        assert (sent > 0) == (step == "l" and not present)
        assert three.ledger.present == (("a",) if step == "l" else ())
        if step == "f":
            assert three.sim.stats().allocated == inputs
        whole(three)
    usable(three)


def test_an_eviction_copies_nothing_home_unless_something_was_written(three: ArenaSubject) -> None:
    """I7, C01: and what was written is copied once."""
    for name in "abab":
        with three.ledger.scope(name):
            three.compute(name)
    whole(three)
    results = three.sim.stats().d2h_bytes  # looking brings the results home
    three.ledger.release()
    assert three.sim.stats().d2h_bytes == results
    three.ledger.load("a")
    three.write("a", 1)
    three.ledger.release()
    written = three.sim.stats().d2h_bytes - results
    assert 0 < written < three.ledger.size("a")
    three.ledger.load("a")
    three.ledger.release()
    assert three.sim.stats().d2h_bytes == results + written
    whole(three)
