"""check_offload: a right target passes, with its numbers; each kind of wrong one is named, with tensor and line."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from omni_components import SplitModel
from omni_components.demo import DemoPipeline
from omni_components.testing import CheckFinding, CheckReport, OffloadCheckError, check_offload
from omni_components.transfer.mover import ArenaMover
from tests.helpers.pipelines import KINDS, WIDTH, Stack, build

pytestmark = pytest.mark.usefixtures("one_thread", "compiler")
X = (torch.ones(2, WIDTH),)


@pytest.fixture
def compiler(simulated_accelerator: Any) -> None:
    """Skips, or fails in CI, where the device cannot be built."""


def use(target: Any, x: torch.Tensor) -> torch.Tensor:
    return target.use("B", target.use("A", x))


def wrong(factory: Callable[[], Any], inputs: Any = X, **options: Any) -> tuple[CheckFinding, ...]:
    """The findings of a target that must not pass."""
    with pytest.raises(OffloadCheckError) as caught:
        check_offload(factory, inputs, **{"orders": 4, "faults": 4, **options})
    assert caught.value.findings == caught.value.report.findings
    assert all(str(one) in str(caught.value) for one in caught.value.findings)
    return caught.value.findings


def line_of(function: Callable[..., Any], text: str) -> str:
    """``file:line`` of the line of a function that contains a text."""
    lines, start = inspect.getsourcelines(function)
    index = next(index for index, line in enumerate(lines) if text in line)
    return f"{inspect.getsourcefile(function)}:{start + index}"


# --- right targets --------------------------------------------------------------------------------------


def test_the_demo_passes_with_its_numbers() -> None:
    """I1 to I8: one request's traffic is the formula's, at a capacity that the resident run does not have."""
    report = check_offload(
        DemoPipeline.from_pretrained, {"prompt": "three", "steps": 1}, capacity="3MiB", faults=20, orders=6
    )
    assert {one.name: one.loads for one in report.components if not one.resident} == {
        "text_encoder": 1,
        "reasoner": 1,
        "generator": 1,
    }
    assert report.bytes_in == report.expected_bytes > 2**20
    assert report.bytes_out == 0
    assert report.weight_peak == report.predicted_peak < report.peak_bytes < 3 * 2**20 < report.resident_peak
    assert report.count("faults") == 20
    assert report.count("phase orders") > 6
    assert all(one.calls for one in report.components)


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_target_of_each_kind_passes_whole(kind: str) -> None:
    """I1 to I8, every fault of every switch."""
    report = check_offload(lambda: build(kind), X, call=use, orders=8)
    assert report.findings == ()
    assert report.count("faults") > 20
    assert report.count("pinning faults") >= 2
    assert str(report).startswith(f"check_offload({KINDS[kind].__name__}): passed")
    assert pickle.loads(pickle.dumps(report)) == report


class Counting(SplitModel):
    """Changes from request to request by itself, and gives nested outputs, of which some are NaN."""

    _offload_components: ClassVar[dict[str, list[str]]] = {"A": ["A", "calls"], "B": ["B"]}

    def __init__(self) -> None:
        super().__init__()
        self.A, self.B = Stack(), Stack()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, noise: torch.Generator) -> dict[str, Any]:
        with self._offload_context("A"):
            self.calls += 1
            hidden = self.A(x) * self.calls
        noise = torch.randn(x.shape, generator=noise).to(x.device)
        with self._offload_context("B"):
            result = self.B(hidden + noise)
        return {"result": (result, [result.cpu().numpy()]), "nothing": result.log() * 0, "name": "it"}


def test_a_target_that_changes_by_itself_and_gives_nan_passes() -> None:
    """Each request is compared with its like; the generator starts from the same state each time."""
    noise = torch.Generator().manual_seed(1)
    report = check_offload(Counting, {"x": X[0], "noise": noise}, orders=4, faults=6)
    assert any("NaN" in note and "nothing" in note for note in report.notes)
    assert any("requests differ from each other" in note for note in report.notes)
    assert any("'A' sent 4 B home" in note for note in report.notes)
    assert torch.equal(noise.get_state(), torch.Generator().manual_seed(1).get_state())


class Streaming:
    """No module, generate() instead of a call, streams, and reads a vector of a component that is away."""

    _dit_modules: ClassVar[list[str]] = ["dit"]
    _encoder_modules: ClassVar[list[str]] = ["encoder"]
    _vae_modules: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.encoder, self.dit = Stack(), Stack()
        self.encoder.register_buffer("mean", torch.rand(WIDTH))

    def generate(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        hidden = self.encoder(x)
        for _ in range(2):
            hidden = self.dit(hidden)
            # As diffusers' Flux 2 does with its VAE: right on whichever side it is.
            yield hidden + torch.sqrt(self.encoder.mean).to(hidden.device)


def test_an_object_with_generate_that_streams_passes() -> None:
    report = check_offload(Streaming, X, orders=4, faults=6)
    assert any("'encoder.mean' of the component 'encoder'" in note for note in report.notes)


def test_the_users_random_numbers_are_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    check_offload(lambda: build("split"), X, call=use, orders=1, faults=False)
    assert torch.equal(torch.rand(3), expected)


# --- wrong declarations ---------------------------------------------------------------------------------


class Base(SplitModel):
    """What the wrong ones differ from."""

    _offload_components: ClassVar[dict[str, list[str]]] = {"A": ["A"], "B": ["B"]}

    def __init__(self) -> None:
        super().__init__()
        self.A, self.B, self.tail = Stack(), Stack(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self._offload_context("A"):
            x = self.A(x)
        with self._offload_context("B"):
            x = self.B(x)
        return self.tail(x)


class Outside(Base):
    """Two uses outside of their scopes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self._offload_context("A"):
            x = self.A.layers[0](x)
        with self._offload_context("B"):
            x = self.A.layers[1](x)
            x = self.B(x)
        with self._offload_context("A"):
            x = self.A(x)
        return x @ self.B.layers[0].weight


def test_every_use_outside_a_scope_is_named_not_only_the_first() -> None:
    """I2."""
    findings = [one for one in wrong(Outside, loads={"A": 2}) if one.kind == "outside_scope"]
    assert {(one.component, one.tensors, one.where) for one in findings} == {
        ("A", ("A.layers.1.bias", "A.layers.1.weight"), line_of(Outside.forward, "layers[1](x)")),
        ("B", ("B.layers.0.weight",), line_of(Outside.forward, "x @ self")),
    }
    assert [one.present for one in findings if one.component == "A"] == [("B",)]


class ByLuck(Base):
    """After the scope of B, B is still there, unless another request comes in between."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ self.B.layers[0].weight


def test_a_use_that_works_by_luck_is_named() -> None:
    """I2: presence is promised inside the scope only."""
    (one,) = wrong(ByLuck)
    assert (one.kind, one.component, one.tensors) == ("outside_scope", "B", ("B.layers.0.weight",))
    assert one.where == line_of(ByLuck.forward, "super().forward(x) @")


class OnTheHost(Base):
    """Computes with an evicted part on the host, in silence."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.A.layers[0](x.cpu()) if self._offload_binding else self.A.layers[0](x)
        return super().forward(hidden.to(x.device))

    _offload_binding: Any = None


def test_a_part_that_computes_on_the_host_is_named() -> None:
    findings = wrong(OnTheHost)
    assert {(one.kind, one.component) for one in findings} == {("host_compute", "A")}
    assert findings[0].where == line_of(OnTheHost.forward, "x.cpu()")


class Stale(Base):
    """Keeps a reference to a weight that has left."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self._offload_context("A"):
            kept = self.A.layers[0].weight
        return super().forward(x) @ kept


def test_an_old_reference_is_named() -> None:
    """I5: what it shows may be a rival's bytes."""
    one = next(one for one in wrong(Stale) if one.kind == "old_reference")
    assert (one.component, one.tensors) == ("A", ("A.layers.0.weight",))
    assert one.where == line_of(Stale.forward, "@ kept")


class Loose(Base):
    """A table that is no buffer, and one in a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.B.table = torch.rand(WIDTH)
        self.act = closing_over(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(super().forward(x) + self.B.table)


def closing_over(scale: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * scale


def test_tensors_that_nobody_owns_are_named() -> None:
    """I3."""
    findings = wrong(Loose)
    assert {(one.kind, one.tensors[0].partition(" ")[0]) for one in findings} == {
        ("unowned", "B.table"),
        ("unowned", "scale"),
    }
    assert line_of(Loose.forward, "self.B.table") in {one.where for one in findings}
    assert line_of(closing_over, "x * scale") in {one.where for one in findings}


class MadeOnTheHost(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ramp = torch.arange(WIDTH)
        return super().forward(x) + ramp


def test_a_tensor_made_on_the_host_is_named_with_the_line_that_made_it() -> None:
    (one,) = wrong(MadeOnTheHost)
    assert (one.kind, one.where) == ("mixed", line_of(MadeOnTheHost.forward, "+ ramp"))
    assert one.other == line_of(MadeOnTheHost.forward, "torch.arange")


@dataclass
class TiedToNobody:
    """A duck-typed pipeline whose head, tied to its encoder, is on no list."""

    _dit_modules: ClassVar[list[str]] = ["dit"]
    _encoder_modules: ClassVar[list[str]] = ["encoder"]
    _vae_modules: ClassVar[list[str]] = []

    def __post_init__(self) -> None:
        self.encoder, self.dit, self.head = Stack(), Stack(), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.encoder.layers[0].weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dit(self.encoder(x)))


def test_a_tied_module_that_is_on_no_list_is_named() -> None:
    """I3."""
    (one,) = wrong(TiedToNobody)
    assert (one.kind, one.tensors) == ("undeclared", ("head.weight",))
    assert one.where == line_of(TiedToNobody.__call__, "self.head(")
    assert "_resident_modules" in str(one)


class Misspelt(Base):
    _offload_components: ClassVar[dict[str, list[str]]] = {"A": ["A.layrs"], "B": ["B"]}


class EncoderInDit(nn.Module):
    _dit_modules: ClassVar[list[str]] = ["dit"]
    _encoder_modules: ClassVar[list[str]] = ["dit.layers.0"]
    _vae_modules: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        self.dit = Stack()


class InTwoParts(Base):
    _offload_components: ClassVar[dict[str, list[str]]] = {"A": ["A", "tail"], "B": ["B", "tail.weight"]}


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (Misspelt, ("'A.layrs'", "Did you mean 'layers'")),
        (EncoderInDit, ("'dit.layers.0' lies inside 'dit'",)),
        (InTwoParts, ("'tail.weight' is in two parts",)),
        (Stack, ("declares no components",)),
    ],
)
def test_a_declaration_that_cannot_be_carried_out_is_told(factory: Any, words: tuple[str, ...]) -> None:
    (one,) = wrong(factory)
    assert one.kind == "declaration"
    assert all(word in str(one) for word in words)


# --- wrong behaviour ------------------------------------------------------------------------------------


class Thrashing(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = super().forward(x)
        return x


def test_thrash_is_named_with_its_bytes_unless_it_is_allowed() -> None:
    findings = wrong(Thrashing)
    assert {(one.kind, one.component) for one in findings} == {("thrash", "A"), ("thrash", "B")}
    payload = sum(one.nbytes for one in Base().A.parameters())
    assert [one.bytes for one in findings] == [2 * payload, 2 * payload]
    assert check_offload(Thrashing, X, loads={"A": 3, "B": 3}, orders=1, faults=1).bytes_in == 6 * payload


def test_too_little_capacity_is_told_with_the_numbers() -> None:
    peak = check_offload(Base, X, orders=0, faults=False).peak_bytes
    assert check_offload(Base, X, capacity=peak, orders=0, faults=False).capacity == peak
    (one,) = wrong(Base, capacity=peak - 1)
    assert (one.kind, one.bytes) == ("capacity", peak)


def test_a_factory_that_draws_other_weights_each_time_is_told() -> None:
    random = torch.Generator()

    def factory() -> Any:
        target = Base()
        nn.init.uniform_(target.tail.weight, generator=random)
        return target

    (one,) = wrong(factory)
    assert (one.kind, one.tensors) == ("factory", ("tail.weight",))


def test_a_factory_that_gives_the_same_target_again_is_told() -> None:
    target = Base()
    (one,) = wrong(lambda: target)
    assert one.kind == "factory"
    assert "the same module twice" in str(one)


def test_a_target_that_is_never_the_same_is_not_blamed_on_offload() -> None:
    drawn = torch.Generator()

    class Noisy(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.rand(1, generator=drawn).item())

    (one,) = wrong(Noisy)
    assert one.kind == "not_reproducible"


class KeepsScopeOpen(Base):
    """Opens a scope by hand and does not close it when something fails."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scope = self._offload_context("A")
        scope.__enter__()
        x = self.A(x)
        scope.__exit__(None, None, None)
        with self._offload_context("B"):
            return self.B(x)


def test_a_scope_that_stays_open_after_a_failure_is_told() -> None:
    """I4."""
    findings = wrong(KeepsScopeOpen, faults=True)
    assert any(one.kind == "state" and "scope of 'A' is still open" in str(one) for one in findings)


# --- broken movers: the package itself ------------------------------------------------------------------


def test_a_mover_that_loses_a_write_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """I7."""
    monkeypatch.setattr(ArenaMover, "_write_back", lambda self, cargo: 0)
    findings = wrong(Counting, {"x": X[0], "noise": torch.Generator().manual_seed(1)})
    assert any(one.kind == "outputs" for one in findings)


def test_a_mover_that_waits_for_no_copy_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """I2: the weights have arrived before anyone computes with them; the parameter and the line are named."""
    from omni_components.transfer.device import AcceleratorBackend

    monkeypatch.setattr(AcceleratorBackend, "wait", lambda self, stream, event: None)
    findings = wrong(Base)
    assert {"A", "B"} <= {one.component for one in findings if one.kind == "race"}
    race = next(one for one in findings if one.kind == "race" and one.component == "A")
    assert race.tensors[0].startswith("A.layers.")
    assert race.where == line_of(Stack.forward, "torch.tanh")


def test_a_mover_that_moves_other_bytes_than_there_are_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula is counted from the tensors, not from what the mover says."""
    load = ArenaMover.load

    def lying(self: ArenaMover, name: str, *args: Any) -> Any:
        return replace(load(self, name, *args), bytes=1)

    monkeypatch.setattr(ArenaMover, "load", lying)
    assert {(one.kind, one.component) for one in wrong(Base)} == {("traffic", "A"), ("traffic", "B")}


def test_a_report_has_plain_values() -> None:
    report = check_offload(Base, X, orders=0, faults=False)
    assert isinstance(report, CheckReport)
    assert report.to_dict()["components"][0]["name"] == "A"
    error = OffloadCheckError(report)
    assert isinstance(error, AssertionError)
    assert pickle.loads(pickle.dumps(error)).report == report
