"""Pinning in place on CUDA and ROCm, against a runtime that answers as torch's binding does: no such card is needed.

What the stand-in does is what the sources and the reports of others say: the binding's enum knows no name but
``success`` (pytorch/pytorch, torch/csrc/cuda/shared/cudart.cpp), a refused call's status waits for the next check of
the same thread (xcena-dev/maru #65, vllm-project/vllm #50070), pins are of whole pages, and memory that went back to
the system with its pin in force makes the next pin there fail (MoonshotAI/checkpoint-engine #67).
"""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from omni_components import ResidencyWarning
from omni_components.errors import format_bytes
from omni_components.transfer import device as device_module
from omni_components.transfer.device import Registrar, registrar_for
from omni_components.transfer.masters import PinBudget, Slab, anonymous

INVALID, NO_MEMORY, UNLOADING, CONTEXT_GONE, REGISTERED, NOT_REGISTERED = 1, 2, 4, 709, 712, 713
TEXTS = {
    INVALID: "invalid argument",
    NO_MEMORY: "out of memory",
    UNLOADING: "driver shutting down",
    CONTEXT_GONE: "context is destroyed",
    REGISTERED: "part or all of the requested memory range is already mapped",
    NOT_REGISTERED: "pointer does not correspond to a registered memory region",
}
PORTABLE = 1


class Status:
    """As pybind11 makes an enum: a number that only ``int()`` tells, equal to none, with a name for zero alone."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __int__(self) -> int:
        return self._number

    def __repr__(self) -> str:
        return "<cudaError.success: 0>" if self._number == 0 else f"<cudaError.???: {self._number}>"


class Runtime:
    """What ``torch.cuda.cudart()`` offers of pinning.

    Attributes:
        pins: Bytes by address.
        flags: Of every pin asked for.
        contexts: Devices that have one; a call makes the current device's.
        refusal: The status of the next call, if it is to fail.
        pending: The status that the next check of this thread would report.
    """

    def __init__(self) -> None:
        self.pins: dict[int, int] = {}
        self.flags: list[int] = []
        self.calls: list[tuple[str, int]] = []
        self.contexts: set[int] = set()
        self.refusal: int | None = None
        self._thread = threading.local()

    @property
    def current(self) -> int:
        return getattr(self._thread, "current", 0)

    @property
    def pending(self) -> int:
        return getattr(self._thread, "pending", 0)

    @contextmanager
    def device(self, chosen: torch.device) -> Iterator[None]:
        """``torch.cuda.device``."""
        before, self._thread.current = self.current, chosen.index
        try:
            yield
        finally:
            self._thread.current = before

    def small_kernel(self, device: torch.device) -> None:
        """What a kernel's check does: blame it for whatever is pending, and forget that."""
        status, self._thread.pending = self.pending, 0
        if status:
            raise RuntimeError(f"CUDA error: {TEXTS[status]}")

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> Status:
        assert (type(pointer), type(size), type(flags)) == (int, int, int)
        self.flags.append(flags)
        wanted = range(pointer // mmap.PAGESIZE, -(-(pointer + size) // mmap.PAGESIZE))
        taken = (range(at // mmap.PAGESIZE, -(-(at + n) // mmap.PAGESIZE)) for at, n in self.pins.items())
        shared = any(one.start < wanted.stop and wanted.start < one.stop for one in taken)
        status = self._answer("register", pointer, INVALID if size == 0 else REGISTERED if shared else 0)
        if int(status) == 0:
            self.pins[pointer] = size
        return status

    def cudaHostUnregister(self, pointer: int) -> Status:
        status = self._answer("unregister", pointer, 0 if pointer in self.pins else NOT_REGISTERED)
        if int(status) == 0:
            del self.pins[pointer]
        return status

    def cudaGetErrorString(self, status: Status) -> str:
        assert type(status) is Status  # a number is no argument for it
        return TEXTS[int(status)]

    def _answer(self, call: str, pointer: int, number: int) -> Status:
        self.calls.append((call, pointer))
        self.contexts.add(self.current)
        refusal, self.refusal = self.refusal, None
        self._thread.pending = number if refusal is None else refusal
        return Status(self._thread.pending)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "device", made.device)
    return made


@pytest.fixture
def registrar(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Registrar:
    """That of the second card."""
    plain = torch.empty

    def empty(*shape: Any, **options: Any) -> Any:
        """On the card that is not here, something that runs a kernel when it is filled."""
        if options.get("device") != torch.device("cuda", 1):
            return plain(*shape, **options)
        return Filled(runtime, options["device"])

    monkeypatch.setattr(device_module.torch, "empty", empty)
    made = registrar_for(torch.device("cuda", 1))
    assert made is not None
    return made


class Filled:
    def __init__(self, runtime: Runtime, device: torch.device) -> None:
        self._runtime, self._device = runtime, device

    def fill_(self, value: int) -> None:
        self._runtime.small_kernel(self._device)


# --- what is asked of the runtime ------------------------------------------------------------------------


def test_memory_is_registered_where_it_is_with_all_its_bytes(runtime: Runtime, registrar: Registrar) -> None:
    memory = anonymous(10_000)
    registrar.host_register(memory.data_ptr(), memory.numel())
    assert runtime.pins == {memory.data_ptr(): 10_000}
    registrar.host_unregister(memory.data_ptr())
    assert runtime.pins == {}


def test_a_pin_holds_for_every_card(runtime: Runtime, registrar: Registrar) -> None:
    registrar.host_register(anonymous(4096).data_ptr(), 4096)
    assert runtime.flags == [PORTABLE]


def test_a_thread_that_chose_no_card_pins_for_the_one_in_use_and_opens_no_other(
    runtime: Runtime, registrar: Registrar
) -> None:
    """A worker's current device is the first one: its context would take memory there that nobody counts (I8)."""
    memory = anonymous(4096)

    def work() -> None:
        registrar.host_register(memory.data_ptr(), 4096)
        assert runtime.current == 0
        registrar.host_unregister(memory.data_ptr())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [call for call, _ in runtime.calls] == ["register", "unregister"]
    assert runtime.contexts == {1}


def test_rocm_has_the_same_names_in_the_binding(
    runtime: Runtime, registrar: Registrar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch splits the names in its source, so that its translation to HIP leaves them; HIP's numbers are CUDA's."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.version, "cuda", None)
    on_rocm = registrar_for(torch.device("cuda", 0))
    assert type(on_rocm) is type(registrar)
    on_rocm.host_register(4096, 4096)
    assert (runtime.pins, runtime.contexts) == ({4096: 4096}, {0})


def test_slabs_of_odd_sizes_share_no_page(runtime: Runtime, registrar: Registrar) -> None:
    """The runtime pins whole pages and refuses one twice."""
    budget = PinBudget(1 << 30, registrar)
    slabs = [budget.slab(nbytes, 0) for nbytes in (1, 256, 4095, 4097, 10_000)]
    assert all(slab.pinned for slab in slabs)
    assert budget.taken == sum(-(-slab.tensor.numel() // mmap.PAGESIZE) * mmap.PAGESIZE for slab in slabs)
    assert len(runtime.pins) == len(slabs)


# --- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [INVALID, NO_MEMORY, REGISTERED])
def test_a_refusal_says_what_was_refused_and_why(runtime: Runtime, registrar: Registrar, status: int) -> None:
    runtime.refusal = status
    with pytest.raises(RuntimeError) as raised:
        registrar.host_register(4096, 64 << 20)
    assert str(raised.value) == f"pinning {format_bytes(64 << 20)} failed: {TEXTS[status]} (status {status})"


def test_memory_that_somebody_else_has_pinned_stays_theirs(runtime: Runtime, registrar: Registrar) -> None:
    """712: it is not ours to unregister, also when the slab goes."""
    memory = anonymous(8192)
    runtime.pins[memory.data_ptr() + 4096] = 100
    with pytest.warns(ResidencyWarning, match=r"already mapped \(status 712\)"):
        slab = PinBudget(1 << 30, registrar).pin(Slab(memory, 0))
    assert not slab.pinned
    slab.unpin()
    del slab
    assert runtime.pins == {memory.data_ptr() + 4096: 100}


def test_a_refused_pin_is_not_blamed_on_the_next_kernel(runtime: Runtime, registrar: Registrar) -> None:
    """The rest of the weights is pageable, and whatever computes next knows nothing of it."""
    budget = PinBudget(1 << 30, registrar)
    first = budget.slab(4096, 0)
    runtime.refusal = NO_MEMORY
    with pytest.warns(ResidencyWarning, match=r"out of memory \(status 2\)"):
        second = budget.slab(4096, 4096)
    assert (first.pinned, second.pinned, budget.taken) == (True, False, mmap.PAGESIZE)
    assert runtime.pending == 0
    runtime.small_kernel(torch.device("cuda", 1))


def test_memory_that_is_not_registered_cannot_be_unregistered(runtime: Runtime, registrar: Registrar) -> None:
    """That would be a mistake of ours, and is not passed over."""
    with pytest.raises(RuntimeError, match=r"^unpinning failed: pointer does not .* \(status 713\)$"):
        registrar.host_unregister(4096)
    assert runtime.pending == 0


# --- ends ------------------------------------------------------------------------------------------------


def test_a_slab_that_is_dropped_leaves_no_pin_behind(runtime: Runtime, registrar: Registrar) -> None:
    """Its addresses may be anybody's next, whose pin would be refused."""
    slab = PinBudget(1 << 30, registrar).slab(4096, 0)
    assert len(runtime.pins) == 1
    del slab
    gc.collect()
    assert runtime.pins == {}


def test_a_slab_is_unregistered_once(runtime: Runtime, registrar: Registrar) -> None:
    slab = PinBudget(1 << 30, registrar).slab(4096, 0)
    slab.unpin()
    slab.unpin()
    del slab
    assert [call for call, _ in runtime.calls] == ["register", "unregister"]


@pytest.mark.parametrize("status", [UNLOADING, CONTEXT_GONE])
def test_a_pin_whose_context_is_gone_is_gone_with_it(
    runtime: Runtime, registrar: Registrar, status: int
) -> None:
    """No kernel is started then, either."""
    slab = PinBudget(1 << 30, registrar).slab(4096, 0)
    runtime.refusal = status
    slab.unpin()
    assert not slab.pinned
    assert runtime.pending == status


def test_a_forked_child_leaves_the_pins_to_its_parent(
    runtime: Runtime, registrar: Registrar, monkeypatch: pytest.MonkeyPatch
) -> None:
    slab = PinBudget(1 << 30, registrar).slab(4096, 0)
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    slab.unpin()
    assert [call for call, _ in runtime.calls] == ["register"]


AN_ENDING_PROCESS = """
import atexit, gc, os, sys
from contextlib import nullcontext
import torch

class Runtime:
    answer, parent = 0, os.getpid()
    def cudaHostRegister(self, pointer, size, flags):
        return self.answer
    def cudaHostUnregister(self, pointer, pid=os.getpid, write=os.write):  # this module's names go first
        write(1, b"unregistered " if pid() == self.parent else b"forked ")
        return self.answer
    def cudaGetErrorString(self, status):
        return "driver shutting down"

runtime = Runtime()
plain, torch.cuda.cudart = torch.cuda.cudart, lambda: runtime
torch.cuda.device = nullcontext
from omni_components.transfer.device import registrar_for
from omni_components.transfer.masters import PinBudget

class Holder:  # in a cycle, as what a handle holds is
    def __init__(self, device):
        self.slab = PinBudget(1 << 20, registrar_for(device)).slab(4096, 0)
        self.me = self

early, next_one, late = (Holder(torch.device("cuda", 0)) for _ in range(3))
sys.kept = Holder(torch.device("cuda", 0)).slab  # goes when modules have gone
torch.cuda.cudart = plain  # torch stays to the very end, and so would what it refers to

@atexit.register
def end():
    global early, next_one
    runtime.answer = 3  # whatever it is that went wrong
    early = None
    gc.collect()
    runtime.answer = 4  # from here on the runtime is being unloaded
    next_one = None
    gc.collect()

child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_the_end_of_a_process_and_of_its_child_is_silent() -> None:
    """Nobody could do anything about what the runtime answers by then; the child does not even ask it."""
    ended = subprocess.run(
        [sys.executable, "-c", AN_ENDING_PROCESS], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.split()[:2] == ["unregistered"] * 2
    assert "forked" not in ended.stdout


# --- devices that pin in another way ---------------------------------------------------------------------


def test_a_host_without_an_accelerator_has_nothing_to_register_with() -> None:
    assert registrar_for(torch.device("cpu")) is None


def test_a_backend_without_registering_leaves_pinning_to_torchs_allocator() -> None:
    assert registrar_for(torch.device("mps")) is None


def test_nothing_is_pinned_beyond_the_limit(runtime: Runtime, registrar: Registrar) -> None:
    """The runtime is not even asked, and that is said once."""
    budget = PinBudget(4096, registrar)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        slabs = [budget.slab(4096, 0) for _ in range(3)]
    assert [slab.pinned for slab in slabs] == [True, False, False]
    assert len(runtime.calls) == 1
    assert len(said) == 1
