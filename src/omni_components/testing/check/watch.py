"""Watch: looks at every operation of a request, and notes each that uses a tensor which is not where it should be."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...components.wrappers import leaves
from ..simulated.accelerator import SimulatedAccelerator
from ..simulated.records import RaceReport
from .lines import by_mover, function_of, line_of, user_frame
from .owners import Owners
from .records import CheckFinding, FindingKind
from .search import Owned

# To read a weight on the host, or to copy it to where it is needed, is right in every residency state.
_READS = {
    "copy_",
    "_to_copy",
    "clone",
    "_local_scalar_dense",
    "equal",
    "is_same_size",
    "detach",
    "lift_fresh",
}
_KINDS: dict[str, FindingKind] = {"module": "undeclared", "attribute": "unowned", "closure": "unowned"}


@dataclass(slots=True)
class Noted:
    """What was noted in one request; findings of one line and component become one.

    Attributes:
        sure: Wrong whatever came of it.
        mixed: Operations that raised, or would have, by mixing devices; wrong if the request failed.
        advice: Not wrong by itself.
    """

    sure: list[CheckFinding] = field(default_factory=list)
    mixed: list[CheckFinding] = field(default_factory=list)
    advice: list[CheckFinding] = field(default_factory=list)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own has no types
    """A mode around one request.

    Args:
        owners: Who owns what.
        sim: The device.
        heal: Move an argument that is on the wrong side, and go on: so one request shows all such places.
        step: For the findings.
    """

    def __init__(self, owners: Owners, sim: SimulatedAccelerator, *, heal: bool, step: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noted = Noted()
        self._owners = owners
        self._sim = sim
        self._heal = heal
        self._step = step
        self._seen = len(sim.races)
        self._copies: dict[int, tuple[int, str]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        try:
            result = func(*args, **given)
        except RuntimeError:
            frame = sys._getframe()
            if not self._mixes(func, args, given, frame) or not self._heal or func._schema.is_mutable:
                raise
            args, given = self._moved(args), self._moved(given)
            result = func(*args, **given)
        self._look(func, args, given, result)
        return result

    # --- after an operation -------------------------------------------------------------------------------

    def _look(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func._schema.name.partition("::")[2]
        if name in ("copy_", "_to_copy"):
            self._note_copy(result)
        made = isinstance(result, torch.Tensor) and result.device.type == "cpu" and not _is_view(func)
        if made and all(one.device.type != "cpu" for one in _tensors(args, kwargs)):
            self._owners.note_made(result, line_of(user_frame(sys._getframe())))
        if len(self._sim.races) > self._seen:
            self._note_races(args, kwargs, result)
        if self._owners.handle is not None and name not in _READS and not _is_view(func):
            self._note_host_use(args, kwargs)

    def _note_copy(self, result: torch.Tensor) -> None:
        if result.device == self._sim.device and result.numel():
            self._copies[result.data_ptr()] = result.nbytes, line_of(user_frame(sys._getframe()))

    def _note_races(self, args: Any, kwargs: Any, result: Any) -> None:
        races = self._sim.races
        fresh, self._seen = races[self._seen :], len(races)
        frame = user_frame(sys._getframe())
        for race in fresh:
            owned = self._named(race, [*_tensors(args, kwargs), *_tensors((result,), {})], frame)
            self.noted.sure.append(
                CheckFinding(
                    kind="old_reference" if race.first == "revoke" else "race",
                    component=owned.component,
                    part=self._owners.is_part(owned.component),
                    tensors=(owned.path,),
                    where=line_of(frame),
                    other=self._copied_at(race),
                    function=function_of(frame),
                    present=self._owners.present,
                    step=self._step,
                    detail=race_words(race),
                    bytes=race.bytes,
                )
            )

    def _named(self, race: RaceReport, among: list[torch.Tensor], frame: FrameType | None) -> Owned:
        for tensor in among:
            if tensor.device == self._sim.device and tensor.numel():
                first = tensor.untyped_storage().data_ptr()
                if first <= race.address < first + tensor.untyped_storage().nbytes():
                    return self._owners.name(tensor, frame)
        return Owned("unknown", race.label.partition(": ")[2] or race.label, race.label.partition(": ")[0])

    def _copied_at(self, race: RaceReport) -> str:
        for address, (size, line) in self._copies.items():
            if address <= race.address < address + size and "copy" in race.first:
                return line
        return ""

    def _note_host_use(self, args: Any, kwargs: Any) -> None:
        for tensor in _tensors(args, kwargs):
            if tensor.device.type != "cpu":
                continue
            owned = self._owners.of_component(tensor)
            if owned is None or not self._owners.is_away(owned.component) or by_mover(sys._getframe()):
                continue
            part = self._owners.is_part(owned.component)
            # A pipeline may read a vector of a VAE's, on whichever side it is. A matrix is there to compute with.
            wrong = owned.dim > 1 or (part and owned.dim > 0)
            finding = self._finding("host_compute", owned, user_frame(sys._getframe()))
            (self.noted.sure if wrong else self.noted.advice).append(finding)

    # --- operations that mix devices ----------------------------------------------------------------------

    def _mixes(self, func: Any, args: Any, kwargs: Any, frame: FrameType) -> bool:
        found = list(_tensors(args, kwargs))
        if not any(one.device == self._sim.device for one in found) or by_mover(frame):
            return False
        strays = [
            one for one in found if one.device.type == "cpu" and (one.dim() > 0 or func._schema.is_mutable)
        ]
        line = user_frame(frame)
        for stray in strays:
            owned = self._owners.name(stray, line)
            kind = _KINDS.get(owned.kind, "mixed")
            if owned.kind == "component":
                kind = "outside_scope" if self._owners.is_away(owned.component) else "old_reference"
            finding = self._finding(kind, owned, line, other=self._owners.made_at(stray))
            self.noted.mixed.append(finding)
        return bool(strays)

    def _finding(
        self, kind: FindingKind, owned: Owned, frame: FrameType | None, other: str = ""
    ) -> CheckFinding:
        return CheckFinding(
            kind=kind,
            component=owned.component,
            part=self._owners.is_part(owned.component),
            tensors=(owned.path,),
            where=line_of(frame),
            other=other,
            function=function_of(frame),
            present=self._owners.present,
            step=self._step,
        )

    def _moved(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self._sim.device) if value.device.type == "cpu" and value.dim() else value
        if isinstance(value, dict):
            return {key: self._moved(one) for key, one in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self._moved(one) for one in value)
        return value


def race_words(race: RaceReport) -> str:
    """What a race report says, without addresses."""
    if race.first == "revoke":
        return f"{race.second} through a reference taken before its component left"
    return f"{race.kind}: {race.second} does not wait for the {race.first}; {race.missing_wait}"


def merged(findings: list[CheckFinding]) -> list[CheckFinding]:
    """Findings of one kind, component and line as one, with all its tensors; in the order in which they came."""
    found: dict[tuple[Any, ...], CheckFinding] = {}
    raced: set[tuple[str, tuple[str, ...]]] = set()
    for one in findings:
        if one.kind == "race" and (one.where, one.tensors) in raced:
            continue  # the same race, in a run in which the tensor has an owner
        raced.add((one.where, one.tensors))
        key = one.kind, one.component, one.where, one.detail if not one.where else ""
        old = found.get(key)
        names = tuple(dict.fromkeys([*(old.tensors if old else ()), *one.tensors]))
        found[key] = replace(old or one, tensors=names)
    return list(found.values())


def _tensors(args: Any, kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield from (leaf for _, leaf in leaves(value))
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value, {})


_VIEWS: dict[Any, bool] = {}


def _is_view(func: Any) -> bool:
    """Whether an operator only makes a view, so that it reads no bytes."""
    if func not in _VIEWS:
        returns = func._schema.returns
        _VIEWS[func] = any(one.alias_info is not None and not one.alias_info.is_write for one in returns)
    return _VIEWS[func]
