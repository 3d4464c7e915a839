"""Histories made by a real ledger over a mover without bytes, and reports of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from omni_components import Component, OffloadPolicy, ResidencyLedger, Role
from omni_components.protocols import Moved, MoverFacts
from omni_components.report.report import ResidencyReport


class Paper:
    """A mover that moves nothing and says it did; ``broken`` are the components whose next load fails."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self.here: set[str] = set()
        self.broken: set[str] = set()
        self.written: dict[str, int] = {}

    def load(self, name: str) -> Moved:
        if name in self.broken:
            self.broken.remove(name)
            raise RuntimeError("the link is down")
        self.here.add(name)
        return Moved(bytes=self.sizes[name])

    def evict(self, name: str) -> Moved:
        self.here.discard(name)
        return Moved(written_back=self.written.pop(name, 0))

    def present(self, name: str) -> bool:
        return name in self.here

    def touch(self, name: str, stream: object = None) -> None:
        pass

    def release_arena(self) -> int:
        return 0

    def audit(self, present: Mapping[str, bool]) -> list[str]:
        return [name for name, here in present.items() if here != self.present(name)]


def ledger_of(
    sizes: Mapping[str, int],
    *,
    residents: Iterable[str] = (),
    friends: Iterable[frozenset[str]] = (),
    history: int = 100_000,
) -> ResidencyLedger:
    """A ledger in which all exclude each other, but for ``residents`` (loaded) and pairs of ``friends``."""
    residents, friends = list(residents), set(friends)
    mover = Paper(sizes)
    ledger = ResidencyLedger(mover, OffloadPolicy(history=history))
    components = [
        Component(
            name=name,
            role=Role.VAE if name in residents else Role.DIT,
            bytes=size,
            resident=name in residents,
        )
        for name, size in sizes.items()
    ]

    def conflict(one: Component, other: Component) -> bool:
        return not (one.resident or other.resident or frozenset((one.name, other.name)) in friends)

    ledger.admit(components, conflict)
    for name in residents:
        ledger.load(name)
    return ledger


def use(ledger: ResidencyLedger, *names: str) -> None:
    """One phase after the other."""
    for name in names:
        with ledger.scope(name):
            pass


def report_of(
    ledger: ResidencyLedger, device: str = "sim:0", facts: MoverFacts | None = None
) -> ResidencyReport:
    return ResidencyReport.of(ledger, facts or MoverFacts(), device)
