"""Every exception of the package.

An error is a fact: the facts are fields, and ``__str__`` builds the text from them: what happened; the
numbers; what to do. All of them pickle, so they survive a process pool and a Ray actor.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

NESTING_ADVICE = (
    "Close the outer scope first, or keep the default policy nesting='switch', which brings the outer "
    "component back at the price of two more switches."
)
ORDER_ADVICE = (
    "Use scopes only in `with` statements: the innermost closes first, in the thread that opened it."
)
ABSENT_ADVICE = (
    "Call the module itself, or open `with handle.scope({name!r}):` around the call, or declare the method: "
    "OffloadPolicy(entry_points={{{name!r}: ({method!r},)}})."
)


def format_bytes(count: float) -> str:
    """A byte count for people, in binary units: ``15.9 GiB``, ``512 B``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def nearest(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """The known names that look most like ``name``, best first, three at most."""
    return tuple(difflib.get_close_matches(name, list(known), n=3, cutoff=0.5))


def _hint(name: str, known: Iterable[str]) -> str:
    close = nearest(name, known)
    return f" Did you mean {' or '.join(repr(one) for one in close)}?" if close else ""


def _rebuild(cls: type[OmniComponentsError], facts: dict[str, Any]) -> OmniComponentsError:
    error = cls.__new__(cls)
    error.__dict__.update(facts)
    return error


class OmniComponentsError(Exception):
    """Base of every error of this package; the facts of each are its attributes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), dict(self.__dict__))


# --- declaring ----------------------------------------------------------------------------------------


class DeclarationError(OmniComponentsError):
    """What a pipeline or split model declares cannot be carried out."""

    def __init__(self, owner: str, problem: str, advice: str = "") -> None:
        self.owner, self.problem, self.advice = owner, problem, advice

    def __str__(self) -> str:
        return f"{self.owner}: {self.problem}" + (f" {self.advice}" if self.advice else "")


class ComponentNotFoundError(DeclarationError):
    """A declared path names nothing; ``broke_at`` is the segment that is not there."""

    def __init__(self, owner: str, path: str, broke_at: str, known: Sequence[str]) -> None:
        self.path, self.broke_at, self.known = path, broke_at, tuple(known)
        super().__init__(
            owner, f"declares {path!r}, but there is no {broke_at!r}.", _hint(broke_at, known).strip()
        )

    def __str__(self) -> str:
        shown = ", ".join(self.known[:12]) + (", …" if len(self.known) > 12 else "")
        return f"{self.owner}: {self.problem} There is: {shown or 'nothing'}. {self.advice}".rstrip()


class PolicyError(OmniComponentsError, ValueError):
    """A policy field or an option has a value that cannot be used; nothing was touched."""

    def __init__(self, field: str, value: object, choices: str) -> None:
        self.field, self.value, self.choices = field, repr(value), choices

    def __str__(self) -> str:
        return f"{self.field}={self.value} is not possible; choose {self.choices}."


class ModelError(OmniComponentsError):
    """A model that is asked for by name is not here, cannot be read, or gives nothing that is known."""

    def __init__(self, model: str, problem: str, advice: str) -> None:
        self.model, self.problem, self.advice = model, problem, advice

    def __str__(self) -> str:
        return f"{self.model!r} {self.problem} {self.advice}"


class WeightsError(ModelError):
    """A component's weights cannot be read from its files; no memory was taken for it.

    Attributes:
        component: Whose weights.
        file: Where the fault is.
        tensor: The tensor it is about; ``None`` if it is about the whole file.
    """

    def __init__(self, component: str, file: str, tensor: str | None, problem: str, advice: str) -> None:
        self.component, self.file, self.tensor = component, file, tensor
        super().__init__(file, problem, advice)

    def __str__(self) -> str:
        what = "" if self.tensor is None else f", tensor {self.tensor!r}"
        return f"weights of {self.component!r}: {self.file!r}{what} {self.problem} {self.advice}"


class UnsupportedTensorError(OmniComponentsError):
    """A tensor that the mover cannot move; found at enable, nothing was touched."""

    def __init__(self, component: str, tensor: str, reason: str, advice: str) -> None:
        self.component, self.tensor, self.reason, self.advice = component, tensor, reason, advice

    def __str__(self) -> str:
        return f"{self.component!r} cannot be offloaded: {self.tensor} {self.reason}. {self.advice}"


class OwnershipError(OmniComponentsError):
    """A component is claimed twice: by two ledgers, or by two roles."""

    def __init__(self, component: str, owner: str, claimant: str, advice: str) -> None:
        self.component, self.owner, self.claimant, self.advice = component, owner, claimant, advice

    def __str__(self) -> str:
        return f"{self.component!r} belongs to {self.owner} and is claimed by {self.claimant}. {self.advice}"


# --- scopes -------------------------------------------------------------------------------------------


class UnknownComponentError(OmniComponentsError, LookupError):
    """A name that no component has."""

    def __init__(self, name: str, known: Sequence[str], owner: str = "this ledger") -> None:
        self.name, self.known, self.owner = name, tuple(known), owner

    def __str__(self) -> str:
        declared = ", ".join(self.known) or "nothing"
        return f"{self.name!r} is not declared by {self.owner}; declared: {declared}.{_hint(self.name, self.known)}"


class ScopeError(OmniComponentsError):
    """A scope was used against its rules; the state is unchanged."""

    def __init__(self, component: str, problem: str, advice: str = ORDER_ADVICE) -> None:
        self.component, self.problem, self.advice = component, problem, advice

    def __str__(self) -> str:
        return f"scope of {self.component!r}: {self.problem} {self.advice}"


class AbsentComponentError(OmniComponentsError):
    """A method of a component was called while the component was on the host."""

    def __init__(self, component: str, method: str, present: Sequence[str], device: str) -> None:
        self.component, self.method = component, method
        self.present, self.device = tuple(present), device

    def __str__(self) -> str:
        who = ", ".join(self.present) or "nobody"
        advice = ABSENT_ADVICE.format(name=self.component, method=self.method)
        return (
            f"{self.component!r} is on the host while its method {self.method!r} computes for {self.device}; "
            f"the device is held by: {who}. {advice}"
        )


class ResidencyTimeoutError(OmniComponentsError, TimeoutError):
    """The turn did not come in time; nothing moved."""

    def __init__(self, component: str, seconds: float, holders: Sequence[str]) -> None:
        self.component, self.seconds, self.holders = component, seconds, tuple(holders)

    def __str__(self) -> str:
        held = "; ".join(self.holders) or "earlier waiters"
        return (
            f"{self.component!r} did not get its turn within {self.seconds:g} s; held by {held}. "
            "Raise timeout=, or let the holders close their scopes."
        )


class ResidencyDeadlockError(OmniComponentsError):
    """Waiting would never end: the threads wait for each other in a ring."""

    def __init__(self, component: str, ring: Sequence[str]) -> None:
        self.component, self.ring = component, tuple(ring)

    def __str__(self) -> str:
        return (
            f"waiting for {self.component!r} would never end: {' -> '.join(self.ring)}. "
            "Open the scopes in the same order in every thread, or close the outer one first."
        )


# --- moving -------------------------------------------------------------------------------------------


class BudgetError(OmniComponentsError):
    """The declared device memory cannot hold the component; found before anything moves."""

    def __init__(
        self, component: str, wanted: int, capacity: int, residents: int, names: Sequence[str]
    ) -> None:
        self.component, self.wanted, self.capacity = component, wanted, capacity
        self.residents, self.names = residents, tuple(names)

    def __str__(self) -> str:
        free, held = self.capacity - self.residents, ", ".join(self.names) or "none"
        return (
            f"{self.component!r} needs {format_bytes(self.wanted)}; {format_bytes(free)} of "
            f"{format_bytes(self.capacity)} free, {format_bytes(self.residents)} held by residents ({held}). "
            "Split the component, or move residents to a role that is swapped (vae='exclusive')."
        )


class TransferError(OmniComponentsError):
    """Bytes could not be moved; every component is whole and the ledger true.

    Attributes:
        component: Which one.
        wanted: Bytes that were to move.
        free: Free bytes on the device, where it tells.
        cause: The device's own words.
        to_host: It was on its way home (a changed weight was copied back) and has stayed on the device.
    """

    def __init__(
        self, component: str, wanted: int, free: int | None, cause: str, *, to_host: bool = False
    ) -> None:
        self.component, self.wanted, self.free, self.cause = component, wanted, free, cause
        self.to_host = to_host

    def __str__(self) -> str:
        free = "" if self.free is None else f", {format_bytes(self.free)} free on the device"
        what = "sent home" if self.to_host else "loaded"
        rest = (
            "It is whole on the device; call again."
            if self.to_host
            else "It is whole on the host. Free device memory (smaller batch or resolution) and call again."
        )
        facts = f"{format_bytes(self.wanted)} wanted{free}; cause: {self.cause}"
        return f"{self.component!r} could not be {what}: {facts}. {rest}"


class InvariantError(OmniComponentsError):
    """``check()`` or ``audit()`` found the ledger untrue: a bug of this package, never of its user."""

    def __init__(self, invariant: str, problem: str) -> None:
        self.invariant, self.problem = invariant, problem

    def __str__(self) -> str:
        return f"{self.invariant} is broken: {self.problem}. Please report this with handle.report()."


class ResidencyWarning(UserWarning):
    """Something works, but not as well as it could: said once, with what to do."""
