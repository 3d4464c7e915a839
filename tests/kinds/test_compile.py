"""``torch.compile`` put on before, after or between: right results, a true ledger, no recompilation per switch. C29."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

from omni_components import SplitModel, offload
from tests.helpers.pipelines import WIDTH, Stack, frozen
from tests.kinds.quantised import int8, wrap


class Encoder(Stack):
    """Has an entry point besides ``forward``."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) + 1


class Called(nn.Module):
    """A pipeline whose components are called."""

    _dit_modules: ClassVar[list[str]] = ["B"]
    _encoder_modules: ClassVar[list[str]] = ["A"]
    _vae_modules: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        self.A, self.B = Encoder(), Stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.A(x)
        for _ in range(2):
            x = self.B(x)
        return x


class Entered(Called):
    """A pipeline that calls its encoder through an entry point."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.B(self.A.encode(x))


class Phased(SplitModel):
    """A split model that opens its phases in ``forward``."""

    _offload_components: ClassVar[dict[str, list[str]]] = {"A": ["A"], "B": ["B"]}

    def __init__(self) -> None:
        super().__init__()
        self.A, self.B = Encoder(), Stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self._offload_context("A"):
            x = self.A(x)
        with self._offload_context("B"):
            return self.B(x)


Call = Callable[[torch.Tensor], torch.Tensor]


def whole(model: nn.Module) -> Call:
    return torch.compile(model, backend="eager")


def whole_in_place(model: nn.Module) -> Call:
    model.compile(backend="eager")
    return model


def components(model: Any) -> Call:
    model.A, model.B = torch.compile(model.A, backend="eager"), torch.compile(model.B, backend="eager")
    return model


def components_in_place(model: Any) -> Call:
    model.A.compile(backend="eager")
    model.B.compile(backend="eager")
    return model


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def loads(handle: Any) -> dict[str, int]:
    return {row.name: row.loads for row in handle.report().rows if row.name in ("A", "B")}


def resident(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The result with everything on the input's device; the model ends on the host."""
    result = model.to(x.device)(x)
    model.to("cpu")
    return result


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (Called, whole),
        (Called, components),
        (Called, components_in_place),
        (Entered, whole_in_place),
        (Phased, whole),
        (Phased, whole_in_place),
        (Phased, components),
    ],
)
@pytest.mark.parametrize("when", ["before", "before_called", "after"])
def test_c29_compiled_code_that_misses_a_switch(sim, when, kind, how):
    """I2, I4, I5: each phase loads its component, through compiled code too, and again after disable and enable."""
    model, x = frozen(kind()), torch.randn(3, WIDTH, device=sim.device)
    with torch.no_grad():
        expected = resident(model, x)
        call: Call = how(model) if when != "after" else model
        if when == "before_called":
            model.to(sim.device)
            assert torch.equal(call(x), expected)
            model.to("cpu")
            call(x.cpu())
        handle = offload(model, sim.device)
        if when == "after":
            call = how(model)
        assert torch.equal(call(x), expected)
        compiled = graphs()
        assert compiled > 0
        for count in (2, 3):
            assert torch.equal(call(x), expected)
            handle.ledger.audit()
            assert loads(handle) == {"A": count, "B": count}
        assert graphs() == compiled
        handle.disable()
        assert torch.equal(call(x.cpu()), expected.cpu())
        with offload(model, sim.device) as handle:
            assert torch.equal(call(x), expected)
            assert loads(handle) == {"A": 1, "B": 1}


@pytest.mark.parametrize(
    ("kind", "how"), [(Called, whole), (Called, components_in_place), (Phased, whole_in_place)]
)
def test_c29_compiled_phases_without_an_accelerator_that_go_unrecorded(how, kind):
    """I2, I5: a declaration can be developed anywhere, compiled or not."""
    model, x = frozen(kind()), torch.randn(3, WIDTH)
    expected = model(x)
    call = how(model)
    call(x)  # the code made here knows of no hook
    with offload(model, "cpu") as handle:
        for count in (1, 2, 3):
            assert torch.equal(call(x), expected)
            assert loads(handle) == {"A": count, "B": count}
            handle.ledger.audit()


@pytest.mark.parametrize("arena", ["keep", "fit"])
@pytest.mark.parametrize("quantised", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("how", [components, components_in_place], ids=lambda one: one.__name__)
def test_c29_compiled_code_made_anew_since_the_weights_are_other_objects(sim, how, quantised, arena):
    """Whether memory stays or is taken anew, and whether weights are wrapped: the same graphs serve every switch."""
    model = frozen(Called())
    if quantised:
        wrap(model, int8)
    x = torch.randn(3, WIDTH, device=sim.device)
    expected = resident(model, x)
    with offload(model, sim.device, arena=arena) as handle, torch.no_grad():
        call = how(model)
        call(x)
        compiled = graphs()
        for _ in range(4):
            assert torch.equal(call(x), expected)
        assert graphs() == compiled
        handle.ledger.audit()


def test_c29_a_body_that_raises_in_compiled_code(sim):
    """I4, I6: pins are released and the next call is right."""

    class Failing(Stack):
        fail = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            if self.fail:
                raise ValueError("asked for")
            return x

    for kind in (Called, Phased):
        model = kind()
        model.B = Failing()
        frozen(model)
        x = torch.randn(3, WIDTH, device=sim.device)
        with offload(model, sim.device) as handle, torch.no_grad():
            call = torch.compile(model, backend="eager")
            model.B.fail = True
            for _ in range(2):
                with pytest.raises(ValueError, match="asked for"):
                    call(x)
                assert (handle.ledger.pins("A"), handle.ledger.pins("B")) == (0, 0)
                handle.ledger.audit()
            model.B.fail = False
            call(x)
            handle.ledger.audit()


def test_c29_a_whole_graph_asked_for_around_a_switch(sim):
    """``fullgraph=True``: a component compiled before enabling keeps its one graph; around a switch it is an error."""
    model, x = frozen(Called()), torch.randn(3, WIDTH, device=sim.device)
    expected = resident(model, x)
    model.B = torch.compile(model.B, backend="eager", fullgraph=True)
    with offload(model, sim.device) as handle, torch.no_grad():
        for count in (1, 2):
            assert torch.equal(model(x), expected)
            assert loads(handle) == {"A": count, "B": count}
        around = torch.compile(model, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported):
            around(x)
        assert torch.equal(model(x), expected)
        handle.ledger.audit()


LATE = """
import sys, torch
from omni_components import offload
from omni_components.testing import SimulatedAccelerator
from tests.helpers.pipelines import WIDTH, ModulePair, SplitPair, frozen

class Called(ModulePair):
    def forward(self, x):
        return self.B(self.A(x))

class Phased(SplitPair):
    def forward(self, x):
        return self.use("B", self.use("A", x))

with SimulatedAccelerator() as sim, torch.no_grad():
    x = torch.randn(3, WIDTH, device=sim.device)
    models = [frozen(kind()) for kind in (Called, Phased)]
    expected = [model.to(sim.device)(x) for model in models]
    handles = [offload(model.to("cpu"), sim.device) for model in models]
    assert "torch._dynamo" not in sys.modules
    for index, (model, handle, result) in enumerate(zip(models, handles, expected)):
        if index:
            model.compile(backend="eager")
            call = model
        else:
            call = torch.compile(model, backend="eager")
        for count in (1, 2, 3):
            assert torch.equal(call(x), result)
            loads = {row.name: row.loads for row in handle.report().rows}
            assert loads == {"A": count, "B": count}, loads
            handle.ledger.audit()
            if count == 1:
                graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0
    assert not sim.races
"""


def test_c29_a_compiler_that_is_imported_only_after_enabling():
    """Enabling does not import the compiler (a second and a half), and what it attached is kept out all the same."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(LATE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
