"""Hook scopes whose call has ended without its post-hook: torch runs none on a ``KeyboardInterrupt``."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from omni_components import ResidencyTimeoutError
from omni_components.attach.hooks import CallHook
from tests.residency.rigs import Actor, Rig, until, waiting


class Calls(nn.Module):
    """A module whose forward does what it is told."""

    def __init__(self, act: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.act(x)
        return x + 1


def hooked(rig: Rig, name: str, act: Callable[[torch.Tensor], None]) -> Calls:
    module = Calls(act)
    CallHook(rig.ledger, name, torch.device("cpu")).attach(module)
    return module


def interrupt(x: torch.Tensor) -> None:
    raise KeyboardInterrupt


def nothing(x: torch.Tensor) -> None:
    pass


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.ledger.check()


def test_an_interrupted_call_leaves_no_pin_behind(rig: Rig) -> None:
    """I4: in the very frame that caught it, where everything else looks as before."""
    module = hooked(rig, "a", interrupt)
    with pytest.raises(KeyboardInterrupt):
        module(torch.zeros(2))
    assert rig.ledger.pins("a") == 0
    rig.sound()
    with rig.ledger.scope("b", timeout=0):
        rig.sound(b=1)


def test_a_call_interrupted_in_a_call_leaves_no_pin_behind(rig: Rig) -> None:
    """I4: both post-hooks were skipped."""
    inner = hooked(rig, "a", interrupt)
    outer = hooked(rig, "a", lambda x: inner(x))
    with pytest.raises(KeyboardInterrupt):
        outer(torch.zeros(2))
    rig.sound()


def test_a_call_that_goes_on_after_an_interrupt_inside_it_keeps_its_own_pin(rig: Rig) -> None:
    """I2, I4: only the scope of the call that has ended is closed."""
    inner = hooked(rig, "a", interrupt)

    def catches(x: torch.Tensor) -> None:
        with pytest.raises(KeyboardInterrupt):
            inner(x)
        assert rig.ledger.pins("a") == 1
        rig.sound(a=1)

    hooked(rig, "a", catches)(torch.zeros(2))
    rig.sound()


@pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")
def test_the_component_that_an_interrupted_call_displaced_comes_back_with_the_next_scope(rig: Rig) -> None:
    """I2: nobody runs when the call ends, so the outer body is told by the interrupt, not by its component."""
    module = hooked(rig, "b", interrupt)
    with rig.ledger.scope("a"):
        with pytest.raises(KeyboardInterrupt):
            module(torch.zeros(2))
        rig.sound(a=1)  # true, though a is out: this body has got the interrupt
        with rig.ledger.scope("a", timeout=0):
            assert rig.present == {"a"}
        assert rig.present == {"a"}
        rig.sound(a=1)
    rig.sound()


def test_who_waits_for_an_interrupted_call_goes_on_soon(rig: Rig) -> None:
    """Nobody tells the waiter; it looks by itself, and in the meantime any question wakes it."""
    started, go_on = threading.Event(), threading.Event()

    def act(x: torch.Tensor) -> None:
        started.set()
        assert go_on.wait(10)
        raise KeyboardInterrupt

    module = hooked(rig, "a", act)
    caught, finish = threading.Event(), threading.Event()

    def call() -> None:
        try:
            module(torch.zeros(2))
        except KeyboardInterrupt:
            caught.set()
        assert finish.wait(10)  # the thread lives on

    caller = Actor("caller").begin(call)
    assert started.wait(10)

    def use() -> None:
        with rig.ledger.scope("b", timeout=10):
            pass

    waiter = Actor("waiter").begin(use)
    until(waiting(rig))
    go_on.set()
    assert caught.wait(10)
    waiter.end(5)
    finish.set()
    caller.end()


def test_a_running_call_of_another_thread_is_not_taken_for_an_orphan(rig: Rig) -> None:
    """I4: its frame is deep in another stack."""
    started, go_on = threading.Event(), threading.Event()

    def act(x: torch.Tensor) -> None:
        started.set()
        assert go_on.wait(10)

    module = hooked(rig, "a", act)
    caller = Actor("caller").begin(lambda: module(torch.zeros(2)))
    assert started.wait(10)
    assert rig.ledger.pins("a") == 1
    with pytest.raises(ResidencyTimeoutError), rig.ledger.scope("b", timeout=0):
        pass
    go_on.set()
    caller.end()
    rig.sound()


def test_a_forward_that_raises_closes_its_scope(rig: Rig) -> None:
    """I4: always-called post-hooks run for an Exception."""

    def fail(x: torch.Tensor) -> None:
        raise RuntimeError("mine")

    module = hooked(rig, "a", fail)
    with pytest.raises(RuntimeError, match="mine"):
        module(torch.zeros(2))
    rig.sound()


@pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")
def test_the_caller_of_a_forward_that_raises_has_its_component_back(rig: Rig) -> None:
    """I2: at once, before it goes on; nobody asks the ledger for anything in between."""

    def fail(x: torch.Tensor) -> None:
        raise RuntimeError("mine")

    inner = hooked(rig, "b", fail)

    def outer(x: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match="mine"):
            inner(x)
        assert rig.present == {"a"}

    hooked(rig, "a", outer)(torch.zeros(2))
    rig.sound()


def test_an_orphan_does_not_keep_the_arguments_of_its_call(rig: Rig) -> None:
    """A scope refers to the frame of its call, and that to everything in it."""
    module = hooked(rig, "a", interrupt)
    x = torch.zeros(2)
    gone = weakref.ref(x)
    try:
        module(x)
    except KeyboardInterrupt:
        pass
    del x
    rig.ledger.check()
    gc.collect()
    assert gone() is None


def test_a_call_after_an_interrupted_one_opens_and_closes_its_own_scope(rig: Rig) -> None:
    """I4."""
    acts = iter([interrupt, nothing])
    module = hooked(rig, "a", lambda x: next(acts)(x))
    with pytest.raises(KeyboardInterrupt):
        module(torch.zeros(2))
    assert torch.equal(module(torch.zeros(2)), torch.ones(2))
    rig.sound()
