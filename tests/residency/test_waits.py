"""Take any single wait out of the transfer code, and one of these fails: by a race report, or by wrong numbers.

The waits are found in the source (see ``waits.py``): a new one is tried without a change here. If nothing notices
that it is missing, it is needless, or it needs a scenario.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from safetensors.torch import load_file, save_file
from torch import nn

from omni_components import InvariantError, TransferError
from omni_components.testing.plugin import require_simulated_accelerator
from omni_components.transfer.device import registrar_for
from omni_components.transfer.hostmemory import FileMappings
from omni_components.transfer.masters import PinBudget
from omni_components.transfer.staging import Staging
from tests.residency.arena import ArenaMachine, ArenaSubject
from tests.residency.rigs import Actor
from tests.residency.test_arena import subject, usable, whole
from tests.residency.waits import Wait, waits

pytestmark = pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")

Scenario = Callable[[ArenaSubject], None]
SCENARIOS: list[Scenario] = []


def scenario(act: Scenario) -> Scenario:
    SCENARIOS.append(act)
    return act


@contextmanager
def on_the_side(one: ArenaSubject) -> Iterator[torch.Stream]:
    """The caller's work goes to a stream of its own; nobody waits for it here."""
    side = torch.Stream(device=one.sim.device)
    with side:
        yield side


@scenario
def rivals_one_after_the_other(one: ArenaSubject) -> None:
    """The host runs ahead of the device: a copy into the arena waits for the compute that last used it."""
    for name in "abcabc":
        with one.ledger.scope(name):
            one.compute(name)


@scenario
def computing_right_after_a_load(one: ArenaSubject) -> None:
    """As residents are used, which have no scopes: the loading stream waits for the copies."""
    one.ledger.load("a")
    one.compute("a")


@scenario
def another_stream_enters_what_is_present(one: ArenaSubject) -> None:
    """The copies were made for the stream that loaded; this one must wait for them as well."""
    one.ledger.load("a")
    with on_the_side(one) as side, one.ledger.scope("a"):
        one.compute("a")
    side.synchronize()


@scenario
def a_rival_after_work_on_another_stream(one: ArenaSubject) -> None:
    """The memory goes to a rival, or back to the allocator, while that stream may still read it."""
    one.ledger.load("a")
    with on_the_side(one) as side, one.ledger.scope("a"):
        one.compute("a")
    with one.ledger.scope("b"):
        one.compute("b")
    side.synchronize()


@scenario
def loaded_used_and_evicted_on_three_streams(one: ArenaSubject) -> None:
    """Found by eight threads: the bytes went back to the stream they came from, which knew nothing of the others."""
    with on_the_side(one) as first, one.ledger.scope("a"):
        one.compute("a")
    with one.ledger.scope("a"):
        one.compute("a")
    with on_the_side(one) as second, one.ledger.scope("b"):
        one.compute("b")
    first.synchronize()
    second.synchronize()


@scenario
def the_outer_body_goes_on_on_its_own_stream(one: ArenaSubject) -> None:
    """Its component comes back on the stream of the inner scope, and must have arrived for its own."""
    with one.ledger.scope("a"):
        with on_the_side(one) as side, one.ledger.scope("b"):
            one.compute("b")
        one.compute("a")
    side.synchronize()


@scenario
def a_stranger_brings_the_outer_component_back(one: ArenaSubject) -> None:
    """Found by eight threads: it was there already, so the outer body went on without waiting for the copies."""
    restore = one.ledger._restore

    def too_late(stack: Any, cause: Any) -> None:
        def stranger() -> None:
            with on_the_side(one), one.ledger.scope("a"):
                pass

        Actor("stranger").begin(stranger).end()
        restore(stack, cause)

    one.ledger._restore = too_late  # type: ignore[method-assign]
    with one.ledger.scope("a"):
        with one.ledger.scope("b"):
            one.compute("b")
        one.compute("a")
    del one.ledger._restore


@scenario
def written_on_another_stream(one: ArenaSubject) -> None:
    """What that stream wrote is copied home when it is done."""
    with on_the_side(one) as side, one.ledger.scope("a"):
        one.write("a", 1)
    one.ledger.release()
    side.synchronize()


@scenario
def a_master_written_as_soon_as_it_is_home(one: ArenaSubject) -> None:
    """Nobody has used what the copies bring; they may still read the master."""
    one.ledger.load("a")
    one.ledger.release()
    one.write("a", 1)


@scenario
def a_master_written_after_a_load_that_failed(one: ArenaSubject) -> None:
    """The copies before the one that failed are on their way."""
    one.sim.fail(copy=1)
    with pytest.raises(TransferError):
        one.ledger.load("a")
    one.write("a", 1)


@scenario
def all_weights_replaced_while_their_copies_travel(one: ArenaSubject) -> None:
    """The slab that the copies read is given up."""
    one.ledger.load("a")
    for model in (one.modules["a"], one.twins["a"]):
        for layer in model.modules():
            fresh = {
                name: nn.Parameter(torch.ones(each.shape, dtype=each.dtype), requires_grad=False)
                for name, each in layer.named_parameters(recurse=False)
            }
            for name, parameter in fresh.items():
                setattr(layer, name, parameter)
            for name, buffer in list(layer.named_buffers(recurse=False)):
                setattr(layer, name, torch.zeros_like(buffer, device="cpu"))
    one.ledger.release()


@scenario
def more_pages_of_a_file_than_the_staging_slabs_hold(one: ArenaSubject) -> None:
    """Two slabs carry them in turn: the host must not fill one that the device still reads."""
    one.ledger.load("a")  # there is other work before it, so that asking alone does not bring it about
    backend = one.mover.backend
    with TemporaryDirectory() as folder:
        file = Path(folder) / "weights.safetensors"
        wanted = (torch.arange(4096) // 16).to(torch.uint8)  # no two slabs alike
        save_file({"weight": wanted}, file)
        mapped = load_file(file)["weight"]
        staging = Staging(backend, PinBudget(1 << 20, registrar_for(one.sim.device)), FileMappings(), 1024)
        block = torch.empty(4096, dtype=torch.uint8, device=one.sim.device)
        with backend.copies():
            staging.send([(block, mapped)])
        backend.done().synchronize()
        assert torch.equal(block.cpu(), wanted)
        staging.close()
    assert not one.sim.races, one.sim.races[0]


def play(act: Scenario, *, keep: bool) -> None:
    """I7, I8: the weights are what they should be, what was computed is right, and no two operations raced."""
    one = subject("abc", "ab bc ac", keep=keep)
    try:
        act(one)
        whole(one)
        usable(one)
    finally:
        one.close()


@pytest.mark.parametrize("keep", [True, False], ids=["keep", "fit"])
@pytest.mark.parametrize("act", SCENARIOS, ids=lambda one: one.__name__)
def test_with_all_its_waits_the_transfer_code_passes(act: Scenario, keep: bool) -> None:
    require_simulated_accelerator()
    play(act, keep=keep)


WAITS = waits()
CAUGHT = (AssertionError, InvariantError)


@pytest.mark.parametrize("wait", WAITS, ids=str)
def test_without_any_single_wait_something_fails(wait: Wait, monkeypatch: pytest.MonkeyPatch) -> None:
    """I7: each wait is there for a reason."""
    require_simulated_accelerator()
    wait.remove(monkeypatch)
    for act in SCENARIOS:
        for keep in (True, False):
            try:
                play(act, keep=keep)
            except CAUGHT as error:
                print(f"{act.__name__}: {error}")
                return
    with pytest.raises(CAUGHT):  # the last resort: random phases
        run_state_machine_as_test(ArenaMachine, settings=HUNT)
    print("random phases")


HUNT = settings(
    max_examples=200,
    stateful_step_count=50,
    phases=[Phase.generate],
    derandomize=True,
    database=None,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


def test_the_waits_are_found() -> None:
    """Sixteen when this was written; there may be more, and each is tried, but none may get lost unseen."""
    assert len({str(one) for one in WAITS}) == len(WAITS) >= 16
