"""More faults made on purpose: in hooks, entry points, discovery, masters, arena and scopes.

Each names the test that meets it, by its address: these tests lie all over the suite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from omni_components.attach import fleet, hooks
from omni_components.attach.fleet import Fleet
from omni_components.attach.hooks import CallHook
from omni_components.attach.methods import Advised, EntryPoint, WrappedMethod
from omni_components.components import discovery, patterns
from omni_components.components.component import Role
from omni_components.components.tensors import own_storage
from omni_components.residency.events import Cause
from omni_components.residency.ledger import ResidencyLedger
from omni_components.residency.scope import OffloadScope
from omni_components.residency.switch import Switch
from omni_components.transfer import home
from omni_components.transfer.cargo import Cargo
from omni_components.transfer.masters import PinBudget, Slab
from omni_components.transfer.mover import ArenaMover
from tests.residency.mutants import Mutant, fault

HOOKS: list[Mutant] = []
DISCOVERY: list[Mutant] = []
MEMORY: list[Mutant] = []
SCOPES: list[Mutant] = []

ATTACH, CASES, COMPONENTS, RESIDENCY = (
    "tests/attach/",
    "tests/cases/",
    "tests/components/",
    "tests/residency/",
)


def nothing(*_: Any, **__: Any) -> None:
    """In the place of whatever is left out."""


# --- hooks and entry points -----------------------------------------------------------------------------------


@fault(
    HOOKS,
    "I2",
    ATTACH + "test_hooks.py::test_a_component_called_inside_another_ones_call_switches_there_and_back",
)
def closes_no_scope_after_a_call(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CallHook, "_after", nothing)


@fault(
    HOOKS,
    "I2",
    RESIDENCY + "test_orphans.py::test_the_caller_of_a_forward_that_raises_has_its_component_back",
)
def closes_no_scope_when_forward_raises(patch: pytest.MonkeyPatch) -> None:
    def attach(self: CallHook, module: Any) -> None:
        before = module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        self._handles = [before, module.register_forward_hook(self._after)]

    patch.setattr(CallHook, "attach", attach)


@fault(HOOKS, "inputs", CASES + "test_calls.py::test_c28_host_inputs_work_the_same_however_they_are_passed")
def moves_no_inputs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hooks, "moved", lambda value, device: value)


@fault(HOOKS, "inputs", CASES + "test_calls.py::test_c28_host_inputs_work_the_same_however_they_are_passed")
def looks_at_positional_inputs_only(patch: pytest.MonkeyPatch) -> None:
    looks = hooks._all_on
    patch.setattr(
        hooks, "_all_on", lambda device, values: not isinstance(values, tuple) or looks(device, values)
    )


@fault(HOOKS, "detach", CASES + "test_lifecycle.py::test_c23_three_times_enable_run_disable_leaves_nothing")
def leaves_its_hooks_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CallHook, "detach", nothing)


@fault(HOOKS, "detach", CASES + "test_calls.py::test_c17_the_original_methods_are_back_after_disable")
def leaves_its_methods_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WrappedMethod, "detach", nothing)


@fault(HOOKS, "I2", CASES + "test_calls.py::test_c17_a_first_call_through_an_entry_point_finds_its_component")
def wraps_no_entry_point(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fleet, "entry_points", lambda module, declared, component: [])


@fault(HOOKS, "I2", CASES + "test_calls.py::test_c17_a_first_call_through_an_entry_point_finds_its_component")
def opens_no_scope_in_an_entry_point(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EntryPoint, "__call__", WrappedMethod.__call__)


@fault(HOOKS, "inputs", CASES + "test_calls.py::test_c28_an_entry_point_takes_host_inputs_as_a_call_does")
def moves_no_inputs_of_an_entry_point(patch: pytest.MonkeyPatch) -> None:
    def call(self: EntryPoint, *args: Any, **kwargs: Any) -> Any:
        if self._ledger is None:
            return self._original(*args, **kwargs)
        with self._ledger.scope(self._component, cause=Cause.ENTRY_POINT):
            return self._original(*args, **kwargs)

    patch.setattr(EntryPoint, "__call__", call)


@fault(
    HOOKS,
    "advice",
    CASES
    + "test_calls.py::test_c18_an_undeclared_method_called_while_away_names_the_component_and_the_two_ways_out",
)
def gives_no_advice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Advised, "__call__", WrappedMethod.__call__)


@fault(
    HOOKS,
    "execution device",
    ATTACH + "test_hooks.py::test_every_called_module_tells_its_execution_device_in_every_state",
)
def tells_the_host_for_the_execution_device(patch: pytest.MonkeyPatch) -> None:
    announce = fleet.announce
    patch.setattr(fleet, "announce", lambda module, device: announce(module, torch.device("cpu")))


@fault(HOOKS, "I2", COMPONENTS + "test_parts.py::test_interleaved_parts_run_as_the_design_shows")
def ties_no_split_model_to_its_ledger(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fleet, "bind", nothing)


# --- discovery: paths, parts, conflicts -----------------------------------------------------------------------


@fault(
    DISCOVERY,
    "I3",
    COMPONENTS + "test_parts.py::test_a_tensor_in_two_parts_is_an_error_that_names_it_and_both",
)
def lets_a_tensor_be_in_two_parts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(patterns, "_claim", nothing)


@fault(DISCOVERY, "I2", ATTACH + "test_split_pipeline.py::test_what_is_in_no_part_is_resident_beside_the_vae")
def forgets_what_is_in_no_part(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(discovery, "rest_of", lambda model, areas, prefix: [])


@fault(
    DISCOVERY,
    "the words",
    COMPONENTS + "test_parts.py::test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_name",
)
def takes_a_pattern_that_matches_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(patterns, "_found", lambda model, pattern, owner: patterns.matches(model, pattern))


@fault(
    DISCOVERY,
    "partition",
    COMPONENTS
    + "test_parts.py::test_a_pattern_names_modules_parameters_or_buffers_and_a_star_is_one_segment",
)
def takes_a_star_for_the_first_name_only(patch: pytest.MonkeyPatch) -> None:
    children = patterns._children
    patch.setattr(patterns, "_children", lambda module: list(children(module))[:1])


@fault(
    DISCOVERY,
    "I3",
    CASES + "test_declaring.py::test_c13_a_component_inside_another_is_refused_with_both_paths",
)
def lets_components_lie_inside_each_other(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(discovery, "refuse_nested", nothing)


@fault(
    DISCOVERY,
    "I3",
    CASES + "test_declaring.py::test_c32_a_component_claimed_by_two_ledgers_is_refused_with_both_owners",
)
def lets_two_ledgers_have_one_tensor(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fleet, "_refuse_held", nothing)
    patch.setattr(fleet, "_CLAIMS", {})


def _conflicts(patch: pytest.MonkeyPatch, spared: Callable[[Role, Role], bool]) -> None:
    known = fleet.conflict
    patch.setattr(
        fleet,
        "conflict",
        lambda one, other, **options: not spared(one.role, other.role) and known(one, other, **options),
    )


CONFLICTS = COMPONENTS + "test_conflicts.py::test_the_conflict_graph_follows_from_the_roles_and_the_policy"


@fault(
    DISCOVERY,
    "I1",
    COMPONENTS
    + "test_conflicts.py::test_a_part_conflicts_with_the_parts_of_its_model_and_inherits_its_dits_conflicts",
)
def lets_the_parts_of_a_model_be_together(patch: pytest.MonkeyPatch) -> None:
    _conflicts(patch, lambda one, other: one is other is Role.PART)


@fault(DISCOVERY, "I1", CONFLICTS)
def lets_an_encoder_be_with_its_dit(patch: pytest.MonkeyPatch) -> None:
    _conflicts(patch, lambda one, other: {one, other} == {Role.ENCODER, Role.DIT})


@fault(DISCOVERY, "I1", CONFLICTS)
def lets_two_dits_be_together(patch: pytest.MonkeyPatch) -> None:
    _conflicts(patch, lambda one, other: one is other is Role.DIT)


@fault(
    DISCOVERY,
    "the words",
    COMPONENTS + "test_declaring.py::test_nothing_to_swap_is_an_error_that_says_what_was_found",
)
def has_nothing_to_swap_and_says_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fleet, "_refuse_nothing_to_swap", nothing)


# --- masters and arena ----------------------------------------------------------------------------------------


@fault(
    MEMORY,
    "I8",
    ATTACH + "test_enable.py::test_an_offload_that_is_dropped_without_disable_leaves_no_memory_behind",
)
def keeps_its_pins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Slab, "unpin", nothing)


@fault(MEMORY, "I8", CASES + "test_host_memory.py::test_c10_a_policy_may_set_a_lower_limit")
def pins_beyond_its_limit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PinBudget, "_refused", lambda self, nbytes: False)


@fault(MEMORY, "I8", "tests/testing/test_stress_cycles.py")
def once_wrapped_a_storage_each_time_it_was_enabled(patch: pytest.MonkeyPatch) -> None:
    """Found by two thousand cycles: two tensors more for each resident weight, each time."""
    own_memory = home.own_memory

    def wrap(group: Any) -> int:
        if group.source.device.type != "cpu":
            return own_memory(group)
        group.rehome(own_storage(group.source))
        return 0

    patch.setattr(home, "own_memory", wrap)


@fault(MEMORY, "traffic", CASES + "test_traffic.py::test_c01_padding_does_not_travel_whatever_the_sizes")
def sends_the_padding_along(patch: pytest.MonkeyPatch) -> None:
    def everything(self: Slab) -> Iterator[tuple[int, Any]]:
        yield self.base, self.tensor

    patch.setattr(Slab, "copies", everything)


@fault(
    MEMORY,
    "traffic",
    CASES + "test_traffic.py::test_c01_alternation_sends_nothing_home_and_each_component_once",
)
def copies_everything_home(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cargo, "written", lambda self: self.groups)


STREAMS = RESIDENCY + "test_waits.py::test_with_all_its_waits_the_transfer_code_passes"


@fault(MEMORY, "I7", f"{STREAMS}[loaded_used_and_evicted_on_three_streams-fit]")
def once_took_bytes_on_whichever_stream(patch: pytest.MonkeyPatch) -> None:
    """Found by eight threads: the allocator gave them to a stream that knew nothing of their last users."""
    patch.setattr(ArenaMover, "_taking", lambda self: nullcontext())


# --- scopes ---------------------------------------------------------------------------------------------------


@fault(SCOPES, "I2", f"{STREAMS}[a_stranger_brings_the_outer_component_back-keep]")
def once_resumed_an_outer_body_without_a_wait(patch: pytest.MonkeyPatch) -> None:
    """Found by eight threads: another one had brought its component back, by its own stream."""

    def restore(self: ResidencyLedger, stack: Any, cause: Cause) -> None:
        stack.lost = True
        for entry in self._book.needed(stack):
            bring = partial(Switch.bring, self._switch, entry, cause)
            self._gate.in_turn(bring, entry, first=True, cause=cause)
        stack.lost = False

    patch.setattr(ResidencyLedger, "_restore", restore)


@fault(
    SCOPES,
    "the user's error",
    RESIDENCY + "test_scopes.py::test_a_body_that_raises_releases_its_pin_and_evicts_nothing",
)
def swallows_what_the_body_raises(patch: pytest.MonkeyPatch) -> None:
    leave = OffloadScope.__exit__

    def swallow(self: OffloadScope, kind: Any, error: Any, trace: Any) -> bool:
        leave(self, kind, error, trace)
        return True

    patch.setattr(OffloadScope, "__exit__", swallow)


@fault(
    SCOPES,
    "I4",
    RESIDENCY + "test_interrupts.py::test_a_scope_whose_exit_was_interrupted_is_closed_all_the_same",
)
def gives_up_when_its_exit_is_interrupted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OffloadScope, "__exit__", lambda self, kind, error, trace: self.owner.leave(self))


@fault(SCOPES, "I4", RESIDENCY + "test_orphans.py::test_an_interrupted_call_leaves_no_pin_behind")
def reaps_no_scope_that_nobody_can_leave(patch: pytest.MonkeyPatch) -> None:
    from omni_components.residency.threads import ThreadStack

    patch.setattr(ThreadStack, "dead", lambda self: [])
