"""Random phases over every kind of mover and master, with prefetch and without, against a resident twin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, note, settings
from hypothesis import strategies as st
from torch import nn

from omni_components import InvariantError, Offload
from omni_components.testing import SimulatedAccelerator
from omni_components.testing.plugin import require_simulated_accelerator
from omni_components.transfer import masters
from omni_components.transfer.ahead import Ahead
from omni_components.transfer.arena import Arena
from omni_components.transfer.cargo import Cargo
from omni_components.transfer.device import AcceleratorBackend
from omni_components.transfer.hostmemory import FileMappings
from omni_components.transfer.mover import ArenaMover
from omni_components.transfer.staging import Staging
from tests.transfer.kinds import (
    INPUT,
    KINDS,
    PHASES,
    WIDTH,
    Kind,
    Pipeline,
    enable,
    masters_of,
    write_weights,
)

pytestmark = pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")

Patch = pytest.MonkeyPatch
PREFETCH: dict[str, Any] = {"off": False, "learned": True, "declared": PHASES}
CPU = torch.device("cpu")


# --- what is drawn ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What happens in one run.

    Attributes:
        steps: ``(verb, *arguments)`` each: the methods of :class:`Course`.
        vae: The policy's.
        exclusive_encoders: The policy's.
        order: Answers of a chooser of late copies; ``None``: they run when somebody waits for them.
    """

    steps: tuple[tuple[Any, ...], ...]
    vae: str = "resident"
    exclusive_encoders: bool = False
    order: tuple[int, ...] | None = None


_phase = st.sampled_from(PHASES)
_value = st.integers(1, 100)
_using = (
    st.tuples(st.just("use"), _phase),
    st.tuples(st.just("nest"), _phase, _phase),
    st.tuples(st.just("load"), _phase),
    st.tuples(st.just("release"), st.booleans()),
    st.tuples(st.just("look")),
    st.tuples(st.just("again")),
)
_edits = st.sampled_from(("write", "edit", "replace"))
_editing = (
    st.tuples(_edits, _phase, _value).map(lambda edit: (edit,)),
    # Where a lone edit seldom finds its component: on the device, and on its way there.
    st.tuples(_edits, _phase, _value).map(lambda edit: (("use", edit[1]), edit)),
    st.builds(lambda phase, value: (("use", phase), ("write", "who arrives", value)), _phase, _value),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Runs of up to 16 stretches of steps; one run in three edits nothing."""
    using = st.one_of(*_using).map(lambda step: (step,))
    stretch = st.one_of(using, *_editing) if draw(st.integers(0, 2)) else using
    return Plan(
        steps=tuple(step for steps in draw(st.lists(stretch, max_size=16)) for step in steps),
        vae=draw(st.sampled_from(("resident", "exclusive"))),
        exclusive_encoders=draw(st.booleans()),
        order=draw(st.one_of(st.none(), st.lists(st.integers(0, 2), max_size=40).map(tuple))),
    )


# Of everything something, whatever else is drawn.
EVERYTHING = Plan(
    steps=(
        ("write", "generator", 7),  # on the host
        *(("use", phase) for phase in PHASES),
        ("write", "generator", 8),  # on the device
        ("use", "reasoner"),
        ("edit", "reasoner", 9),
        ("replace", "reasoner", 10),
        ("replace", "image", 11),
        ("use", "text"),
        ("nest", "generator", "text"),
        ("release", True),
        ("load", "image"),
        ("again",),
        ("look",),
    ),
    vae="exclusive",
)


# --- one run ----------------------------------------------------------------------------------------------------


class Course:
    """A pipeline of one kind, and its twin that is resident on the host: what the one computes, the other must.

    Args:
        kind: The kind of its mover and masters.
        prefetch: The policy's.
        plan: What is going to happen.
        file: The weights, for the kinds that take them from there.
        sim: The accelerator; ``None`` computes on the host.
        seen: Counts what has really happened.
    """

    def __init__(
        self,
        kind: Kind,
        prefetch: Any,
        plan: Plan,
        file: Path,
        sim: SimulatedAccelerator | None,
        seen: Counter[str],
    ) -> None:
        self.kind, self.sim, self.seen = kind, sim, seen
        self.device = CPU if sim is None else sim.device
        self.pipe, self.twin = kind.pipeline(file), Pipeline()
        self.x = INPUT.to(self.device)
        self._fields = {
            "prefetch": prefetch,
            "vae": plan.vae,
            "exclusive_encoders": plan.exclusive_encoders,
        }
        self._changed: set[str] = set()
        self._new_bytes = 0  # of tensors that were put in
        self._may_return = 0  # bytes that edits on the device may bring to the host
        self._looked = 0  # bytes of results that were read
        self._before = Counter[str]()  # totals of handles that are disabled
        self._results: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._empty = self._allocated()
        self.handle = self._enabled(self._changed)

    def _enabled(self, changed: Collection[str]) -> Offload:
        return enable(self.kind, self.pipe, self.device, changed, **self._fields)

    @property
    def mover(self) -> ArenaMover:
        """The mover in force."""
        mover = self.handle.ledger.mover
        assert isinstance(mover, ArenaMover)
        return mover

    # --- the steps ------------------------------------------------------------------------------------------

    def step(self, verb: str, *arguments: Any) -> None:
        """Do one thing, then look at everything but results, which would wait for the device."""
        getattr(self, verb)(*arguments)
        self.seen[verb] += 1
        self._check()

    def use(self, phase: str) -> None:
        """Enqueue one phase."""
        self._results.append((phase, self.pipe.use(phase, self.x), self.twin.use(phase, INPUT)))

    def nest(self, outer: str, inner: str) -> None:
        """A phase inside another one's scope, which goes on afterwards."""
        with self.handle.scope(outer):
            self.use(outer)
            self.use(inner)
            self.use(outer)

    def load(self, phase: str) -> None:
        """Ahead of its scope."""
        self.handle.load(phase)

    def release(self, free_arena: bool) -> None:
        """The end of a request."""
        self.handle.release(free_arena=free_arena)

    def look(self) -> None:
        """Read all results: each bit for bit the twin's."""
        for phase, result, expected in self._results:
            self._looked += result.nbytes if self.sim is not None else 0
            assert torch.equal(result.cpu(), expected), f"{phase} computed something else"
        self._results.clear()

    def again(self) -> None:
        """Disable, and enable again."""
        self.close()
        # Those that were loaded twice have left their file for good.
        self.handle = self._enabled(PHASES if self.kind.masters == "mapped_at_first" else self._changed)

    def write(self, phase: str, value: int) -> None:
        """In place, where the weights are now."""
        if phase == "who arrives":
            phase = self.handle.ledger.arriving or "generator"
        self._settle(phase)
        self._returns(phase, self.pipe.layer(phase).weight.nbytes)
        for one in (self.pipe, self.twin):
            one.layer(phase).weight[value % WIDTH].fill_(value / 100)

    def edit(self, phase: str, value: int) -> None:
        """An edit that leaves no trace."""
        with self.handle.editing(phase):
            self._returns(phase, sum(group.nbytes for group in self.mover.cargo(phase).groups))
            self.pipe.layer(phase).weight.data.mul_(value / 50 - 1)
        self.twin.layer(phase).weight.data.mul_(value / 50 - 1)

    def replace(self, phase: str, value: int) -> None:
        """A new parameter, where the weights are now."""
        bias = self.pipe.layer(phase).bias
        self._changed.add(phase)
        self._new_bytes += bias.nbytes
        self._returns(phase, bias.nbytes)
        for one in (self.pipe, self.twin):
            layer = one.layer(phase)
            layer.bias = nn.Parameter(torch.full_like(layer.bias, value / 100), requires_grad=False)

    def _settle(self, phase: str) -> None:
        """A master that is being read may not be written to, on any device."""
        ahead = self.mover._ahead.get(phase)
        if ahead is not None:
            ahead.arrived.synchronize()

    def _returns(self, phase: str, nbytes: int) -> None:
        self._may_return += nbytes if self.mover.present(phase) else 0

    # --- what must be true ------------------------------------------------------------------------------------

    def _check(self) -> None:
        self.handle.ledger.check()
        self.handle.ledger.audit()
        self._check_traffic()
        self._check_memory()

    def _check_traffic(self) -> None:
        """Nothing goes home that was not edited, and the link has carried what the events say."""
        moved = self._totals()
        assert moved["back"] <= self._may_return, f"{moved['back']} bytes went home"
        if self.sim is None:
            return
        stats = self.sim.stats()
        assert self.sim.races == []
        assert stats.d2h_bytes == moved["back"] + self._looked
        padding = stats.h2d_bytes - moved["there"] - self.x.nbytes
        assert padding >= 0 if self.kind.is_mapped else padding == 0

    def _check_memory(self) -> None:
        """Whoever is home holds nothing on the device, and mapped masters nothing on the host but the staging."""
        ledger, facts = self.handle.ledger, self.mover.facts()
        there = {*ledger.present, ledger.arriving}
        held = [name for name in PHASES if name not in there and self.mover.arena.holds(name) is not None]
        assert held == []
        if self.kind.mover == "fit":
            assert facts.arena_bytes == ledger.device_bytes
        if self.sim is not None:
            assert self.sim.stats().pinned == facts.pinned_bytes
        if self.kind.masters == "mapped" and self.sim is not None:
            slabs = () if self.mover.staging is None else self.mover.staging.slabs
            assert len(slabs) <= 2
            # A tensor that was put in belongs to no file: enabled again, its component has a slab for it.
            apart = facts.pinned_bytes - sum(slab.taken for slab in slabs)
            assert apart <= len(self._changed) * PAGESIZE
            residents = sum(ledger.size(one.name) for one in ledger.components if one.resident)
            assert facts.pageable_bytes <= residents + self._new_bytes

    def _totals(self) -> Counter[str]:
        found = Counter(self._before)
        for name, row in self.handle.ledger.history.totals.items():
            # What waits in a file's pages is not copied ahead; what was put in may be.
            assert not row.prefetched or self.kind.masters != "mapped" or name in self._changed
            found += Counter(
                there=row.bytes_in, back=row.bytes_out, loads=row.loads, prefetched=row.prefetched
            )
        return found

    def close(self) -> None:
        """Disable: everything is on the host, as the twin's is, and the device is empty."""
        self.look()
        self.handle.disable()
        self._before = self._totals()
        mine, theirs = self.pipe.state_dict(), self.twin.state_dict()
        assert list(mine) == list(theirs)
        for name, tensor in mine.items():
            assert tensor.device == CPU, name
            assert torch.equal(tensor, theirs[name]), name
        assert self._allocated() == self._empty

    def _check_kind_at_the_end(self) -> None:
        """Everything has been loaded twice: what was mapped for now is pinned."""
        if self.kind.masters == "mapped_at_first":
            names = [one.name for one in self.handle.components if not one.resident]
            assert masters_of(self.handle, set(names) - self._changed) in ("pinned", "none")

    def _allocated(self) -> int:
        return 0 if self.sim is None else self.sim.stats().allocated

    def end(self) -> None:
        """Two plain requests, then nothing is left."""
        for phase in PHASES * 2:
            self.step("use", phase)
            if phase == PHASES[-1]:
                self.step("release", False)
        self._check_kind_at_the_end()
        self.close()
        if self.sim is not None:
            assert self.sim.races == []
            # A block of torch's allocator is pinned for as long as it lives, and now it is the weights' memory.
            assert self.sim.stats().pinned == 0 or self.kind.masters == "pooled"
        self.seen += self._before


def play(kind: Kind, prefetch: str, plan: Plan, file: Path, seen: Counter[str]) -> None:
    """One run of a plan over a kind."""
    note(str(plan))  # inside pytest, Hypothesis shows the arguments of an inner function without their values
    with ExitStack() as stack:
        sim = None
        if kind.mover != "cpu":
            sim = stack.enter_context(SimulatedAccelerator("8MiB", copies=_order(plan.order)))
        stack.enter_context(kind.host(sim))
        course = Course(kind, PREFETCH[prefetch], plan, file, sim, seen)
        for step in plan.steps:
            course.step(*step)
        course.end()


def _order(drawn: tuple[int, ...] | None) -> Any:
    if drawn is None:
        return "lazy"
    left = iter(drawn)
    return lambda count: next(left, 0) % (count + 1)


# --- over every kind --------------------------------------------------------------------------------------------


def need(kind: Kind) -> None:
    """Skip what this machine cannot show."""
    if kind.mover != "cpu":
        require_simulated_accelerator()
    if kind.is_mapped and not Path("/proc/self/maps").exists():
        pytest.skip("mapped files are recognised on Linux only")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weights(tmp_path_factory.mktemp("kinds"))


@pytest.mark.parametrize("prefetch", PREFETCH)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_random_phases_over_a_kind_compute_what_the_resident_run_does(
    kind: Kind, prefetch: str, file: Path
) -> None:
    """I1 to I8, C33: late copies, no race; nothing goes home that was not edited; and it was this kind."""
    need(kind)
    seen: Counter[str] = Counter()

    @settings(max_examples=max(3, settings().max_examples // 12))  # for each of many kinds
    @example(EVERYTHING)
    @given(plans())
    def phases(plan: Plan) -> None:
        play(kind, prefetch, plan, file, seen)

    phases()
    verbs = {"use", "nest", "load", "release", "look", "again", "write", "edit", "replace"}
    assert verbs <= set(seen)
    assert seen["loads"] > 0
    assert (seen["there"] > 0) is (kind.masters != "in_place")
    assert (seen["back"] > 0) is (kind.masters != "in_place")
    if kind.masters != "mapped":  # there, only what was put in
        assert (seen["prefetched"] > 0) is (prefetch != "off" and kind.pins)


# --- faults made on purpose -------------------------------------------------------------------------------------


def overwrites_memory_that_computing_still_reads(patch: Patch) -> None:
    patch.setattr(AcceleratorBackend, "after", lambda self, streams: None)


def computes_before_the_copy_is_there(patch: Patch) -> None:
    patch.setattr(AcceleratorBackend, "wait", lambda self, stream, event: None)


def loses_what_was_written(patch: Patch) -> None:
    patch.setattr(Cargo, "written", lambda self: [])


def copies_everything_home(patch: Patch) -> None:
    patch.setattr(Cargo, "written", lambda self: list(self.groups))


def fills_a_staging_slab_that_is_still_read(patch: Patch) -> None:
    free = Staging._free_slab

    def at_once(self: Staging) -> Any:
        for slab in self._slabs:
            slab.reader = None
        return free(self)

    patch.setattr(Staging, "_free_slab", at_once)


def trusts_a_copy_ahead_whose_master_has_changed(patch: Patch) -> None:
    patch.setattr(Ahead, "up_to_date", lambda self: True)


def keeps_the_bytes_of_the_absent(patch: Patch) -> None:
    patch.setattr(Arena, "give", lambda self, name: None)


def forgets_what_was_put_in(patch: Patch) -> None:
    patch.setattr(Cargo, "disturbed", lambda self: False)


def pins_in_blocks_of_the_allocator(patch: Patch) -> None:
    patch.setattr("omni_components.attach.fleet.registrar_for", lambda device: None)


def copies_what_is_mapped(patch: Patch) -> None:
    patch.setattr("omni_components.attach.fleet.FileMappings", lambda: FileMappings(Path("/nowhere")))


def copies_what_a_loader_has_laid_out(patch: Patch) -> None:
    patch.setattr(masters, "laid_out", lambda groups: ([], groups))


def leaves_the_pins_behind(patch: Patch) -> None:
    patch.setattr(masters.Slab, "unpin", lambda self: None)


FAULTS: list[tuple[Callable[[Patch], None], str, str]] = [
    (overwrites_memory_that_computing_still_reads, "keep-pinned", "off"),
    (overwrites_memory_that_computing_still_reads, "keep-mapped", "off"),
    (computes_before_the_copy_is_there, "fit-pooled", "off"),
    (computes_before_the_copy_is_there, "keep-adopted", "learned"),
    (loses_what_was_written, "keep-pageable", "off"),
    (loses_what_was_written, "cpu-mapped", "off"),
    (copies_everything_home, "fit-limited", "declared"),
    (copies_everything_home, "fit-mapped", "off"),
    (fills_a_staging_slab_that_is_still_read, "fit-mapped", "off"),
    (trusts_a_copy_ahead_whose_master_has_changed, "keep-adopted", "declared"),
    (keeps_the_bytes_of_the_absent, "fit-refused", "off"),
    (forgets_what_was_put_in, "keep-limited", "off"),
    (pins_in_blocks_of_the_allocator, "fit-pinned", "off"),
    (copies_what_is_mapped, "keep-mapped", "off"),
    (copies_what_a_loader_has_laid_out, "fit-adopted", "off"),
    (leaves_the_pins_behind, "keep-refused", "off"),
]


@pytest.mark.parametrize(
    ("fault", "kind", "prefetch"), FAULTS, ids=lambda one: one if isinstance(one, str) else one.__name__
)
def test_a_fault_made_on_purpose_is_found(
    fault: Callable[[Patch], None], kind: str, prefetch: str, file: Path, monkeypatch: Patch
) -> None:
    """The same runs over the same kind pass above; with one fault they must not."""
    chosen = next(one for one in KINDS if str(one) == kind)
    need(chosen)
    fault(monkeypatch)

    @settings(
        max_examples=300, phases=[Phase.generate], derandomize=True, database=None, report_multiple_bugs=False
    )
    @given(plans())
    def phases(plan: Plan) -> None:
        play(chosen, prefetch, plan, file, Counter())

    with pytest.raises((AssertionError, InvariantError)):
        phases()
