"""Every place at which a request of a three-component pipeline can fail, one at a time.

After each fault the state is whole (``check``, ``audit``), every master has its bits, and the next request is right.
The number of places is asserted: a walk that finds fewer of them than there are proves less than it says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

import omni_components
from omni_components import TransferError, offload
from omni_components.components.roster import Side
from omni_components.components.tensors import Member
from omni_components.testing import SimulatedAccelerator, every_fault
from omni_components.testing.plugin import require_simulated_accelerator
from tests.residency.generation import PROMPTS, Pipeline, Studio
from tests.residency.interrupts import Interrupter

PACKAGE = Path(omni_components.__file__).parent
PLACES = tuple(str(PACKAGE / part) for part in ("residency", "transfer", "components", "attach"))
SHAPES: dict[str, dict[str, Any]] = {
    "resident VAE, arena kept": {"vae": "resident", "arena": "keep"},
    "exclusive VAE, arena fitted": {"vae": "exclusive", "arena": "fit"},
}
each_error = pytest.mark.parametrize("error", [None, KeyboardInterrupt], ids=["usual", "interrupt"])


@pytest.fixture
def sim() -> Iterator[SimulatedAccelerator]:
    require_simulated_accelerator()
    with SimulatedAccelerator() as accelerator:
        yield accelerator


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def studio(request: pytest.FixtureRequest, sim: SimulatedAccelerator) -> Studio:
    """In the midst of its life: the last request's components are on the device."""
    studio = Studio(sim, lambda pipe: offload(pipe, sim.device, **request.param))
    studio.usable()
    return studio


def look(studio: Studio, where: object) -> None:
    try:
        studio.whole()
        studio.usable()
    except BaseException as error:
        raise AssertionError(f"after a {where}") from error


# --- what the device can refuse -------------------------------------------------------------------------------

# Measured for the smaller of the two shapes: 13, 38 and 99. What the pipeline itself asks of the device counts too.
DEVICE_POINTS = {"copy": 12, "allocation": 35, "step": 90}


@each_error
@pytest.mark.parametrize("point", DEVICE_POINTS)
def test_whatever_the_device_refuses_in_a_request_the_next_one_is_right(
    studio: Studio, point: Any, error: type[BaseException] | None
) -> None:
    """I1 to I8 for each n: the n-th copy, allocation, or step of any kind, fails or is interrupted."""
    trials = 0
    for trial in every_fault(studio.sim, point, error=error):
        with trial:
            studio.pipe(PROMPTS[0]).cpu()
        look(studio, trial)
        trials += 1
    print(f"{trials} trials")
    assert trials >= DEVICE_POINTS[point]


def test_whenever_the_memory_runs_out_in_a_request_the_next_one_is_right(studio: Studio) -> None:
    """I1 to I8 for each n: from the n-th allocation on there is no room, not even after the flush."""
    at, fired = 0, True
    while fired:
        studio.sim.fail_at("allocation", at, persistent=True)
        with suppress(
            torch.OutOfMemoryError, TransferError
        ):  # from the pipeline's own kernels, or from a switch
            studio.pipe(PROMPTS[0]).cpu()
        fired = studio.sim.fired("allocation")
        studio.sim.heal()
        look(studio, f"full device, allocation {at}")
        at += 1
    print(f"{at} trials")
    assert at >= DEVICE_POINTS["allocation"]


# --- binding --------------------------------------------------------------------------------------------------


class BindFault:
    """Fails the n-th time that a tensor, or all of a component's at once, is bound to one side."""

    def __init__(self, at: int, error: type[BaseException], when: str) -> None:
        self.left, self.error, self.when = at, error, when
        self.fired = False

    @contextmanager
    def planted(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        with patch.context() as inside:
            for cls, name in ((Member, "bind_host"), (Member, "bind_device"), (Side, "bind")):
                inside.setattr(cls, name, self._failing(getattr(cls, name)))
            yield

    def _failing(self, bind: Callable[[Any], None]) -> Callable[[Any], None]:
        def act(bound: Any) -> None:
            due = self.left == 0
            self.left -= 1
            if due and self.when == "before":
                self._strike()
            bind(bound)
            if due and self.when == "after":
                self._strike()

        return act

    def _strike(self) -> None:
        self.fired = True
        raise self.error("injected into a binding")

    def __str__(self) -> str:
        return f"fault {self.when} a binding, {self.left} before the end"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_whichever_binding_of_a_request_fails_the_next_one_is_right(
    studio: Studio, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], when: str
) -> None:
    """I5, I6: tensor by tensor in a fitted arena, a component's at once in one that is kept."""
    trials, fired = 0, True
    while fired:
        fault = BindFault(trials, error, when)
        with suppress(error, TransferError), fault.planted(monkeypatch):
            studio.pipe(PROMPTS[0])
        look(studio, fault)
        fired = fault.fired
        trials += 1
    print(f"{trials} trials")
    assert trials >= 6


# --- pinning --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the host memory could not be pinned")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@each_error
def test_whichever_pin_is_refused_the_requests_are_right(
    sim: SimulatedAccelerator, shape: dict[str, Any], error: type[BaseException] | None
) -> None:
    """I6, I7: a refused slab is pageable, an interrupt undoes the enabling; either way it serves."""
    trials = 0
    for trial in every_fault(sim, "pin", error=error):
        pipe = Pipeline()
        with trial:
            offload(pipe, sim.device, **shape)
        assert (trial.error is not None) == (trial.fired and error is not None)
        studio = Studio(sim, lambda pipe: offload(pipe, sim.device, **shape), pipe)
        look(studio, trial)
        studio.handle.disable()
        assert (sim.stats().pinned, sim.stats().allocated) == (0, 0)
        trials += 1
    print(f"{trials} trials")
    assert trials > 3


# --- an interrupt in our own code -----------------------------------------------------------------------------


def test_an_interrupt_anywhere_in_a_request_leaves_everything_whole(studio: Studio) -> None:
    """I1 to I8: at each place of hooks, scopes, ledger, mover and binding; by default at some, at night at all."""
    stride = max(1, 400 // settings().max_examples)
    at, trials = 0, 0
    while True:
        interrupter = Interrupter(at, *PLACES)
        try:
            with interrupter:
                studio.pipe(PROMPTS[0])
        except KeyboardInterrupt:
            assert interrupter.place
        look(studio, f"interrupt at {interrupter.place}")
        if not interrupter.place:
            break
        at += stride
        trials += 1
    print(f"{trials} of about {at} places")
    assert at > 700
