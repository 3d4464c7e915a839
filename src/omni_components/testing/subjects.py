"""What the machine runs: a ledger, and what must be known to drive it and to check it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..components.component import Component
from ..policy import OffloadPolicy
from ..protocols import Moved
from ..residency.ledger import ResidencyLedger
from .movers import Fault, FaultPlan, RecordingMover, Verb
from .strategies import ComponentSet

if TYPE_CHECKING:
    import torch

    from ..components.tensors import Slot
    from .simulated import SimulatedAccelerator


class Subject(Protocol):
    """What the machine runs: a ledger, and what must be known to drive and to check it.

    Attributes:
        ledger: The ledger under test.
        components: All that may ever be declared; those declared at first are the ledger's.
    """

    ledger: ResidencyLedger
    components: Sequence[Component]

    def conflict(self, one: str, other: str) -> bool:
        """Whether two components must never both be on the device: the author's truth, not the ledger's."""
        ...

    def admit(self, names: Sequence[str]) -> None:
        """Declare components."""
        ...

    def retire(self, names: Sequence[str]) -> None:
        """Strike components out."""
        ...

    def arm(self, fault: Fault) -> None:
        """Let a move fail."""
        ...

    def disarm(self) -> None:
        """Forget the faults."""
        ...

    def write(self, name: str, value: int) -> None:
        """Write a value into the weights, on whichever side they are now."""
        ...

    def read(self, name: str) -> int:
        """The value in the weights; raises if anything else about them is wrong."""
        ...

    def compute(self, name: str) -> None:
        """Compute with a present component; raises if the result is not that of the resident run."""
        ...

    def violations(self) -> Sequence[str]:
        """What other observers found."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


class RecordingSubject:
    """A ledger over a :class:`RecordingMover`; nothing needs torch.

    Args:
        declared: Components and conflicts.
        policy: The ledger's.
    """

    def __init__(self, declared: ComponentSet, policy: OffloadPolicy) -> None:
        self._declared = declared
        self.components: Sequence[Component] = declared.components
        self.mover = RecordingMover({}, declared.conflict)
        self.ledger = ResidencyLedger(self.mover, policy)
        self.admit(declared.names)

    def conflict(self, one: str, other: str) -> bool:
        """As declared."""
        return self._declared.conflict(one, other)

    def admit(self, names: Sequence[str]) -> None:
        """Register and admit."""
        components = [self._declared.of(name) for name in names]
        taken = {one.name for one in self.ledger.components}
        for one in components:
            if one.name not in taken:
                self.mover.register(one.name, one.bytes)
        self.ledger.admit(components, lambda one, other: self._declared.conflict(one.name, other.name))

    def retire(self, names: Sequence[str]) -> None:
        """Retire and forget."""
        self.ledger.retire(names)
        for name in names:
            self.mover.forget(name)

    def arm(self, fault: Fault) -> None:
        """The mover does it."""
        self.mover.faults.arm(fault)

    def disarm(self) -> None:
        """The mover does it."""
        self.mover.faults.clear()

    def write(self, name: str, value: int) -> None:
        """One number stands for the weights."""
        self.mover.write(name, value)

    def read(self, name: str) -> int:
        """One number stands for the weights."""
        return self.mover.read(name)

    def compute(self, name: str) -> None:
        """It must be there."""
        assert self.mover.present(name), f"{name!r} is not on the device in its own scope"

    def violations(self) -> Sequence[str]:
        """The mover's own oracle."""
        return self.mover.violations

    def close(self) -> None:
        """Nothing to do."""


class PipelineSubject:
    """A pipeline, offloaded; its own tensors are the truth that nothing may be lost of.

    Args:
        pipeline: Anything that ``offload()`` takes.
        device: Where it computes.
        fields: Of the policy.
        simulated: The open accelerator behind ``device``, if it is a simulated one; closed with the subject.
    """

    def __init__(
        self,
        pipeline: Any,
        device: torch.device | str,
        fields: Mapping[str, Any],
        simulated: SimulatedAccelerator | None = None,
    ) -> None:
        from ..attach.pipeline import offload

        self.handle = offload(pipeline, device, **fields)
        self.ledger = self.handle.ledger
        self.components: Sequence[Component] = self.ledger.components
        self._simulated = simulated
        self._faults = FaultPlan()
        self._wanted = {one.name: self._weights(one.name) for one in self.components}
        self._values = dict.fromkeys(self._wanted, 0)
        self._declared = {one.name: self.ledger.rivals(one.name) for one in self.components}
        mover: Any = self.ledger.mover
        mover.load = self._failing("load", mover.load)
        mover.evict = self._failing("evict", mover.evict)

    def conflict(self, one: str, other: str) -> bool:
        """As it was when the pipeline was enabled."""
        return other in self._declared[one]

    def admit(self, names: Sequence[str]) -> None:
        """Declared once; a name that is taken is refused."""
        taken = [one for one in self.components if one.name in names]
        self.ledger.admit(taken, lambda one, other: False)

    def retire(self, names: Sequence[str]) -> None:
        """Not drawn: see ``can_change``."""
        raise NotImplementedError

    def arm(self, fault: Fault) -> None:
        """The mover is told to fail before or after a move."""
        self._faults.arm(fault)

    def disarm(self) -> None:
        """No more faults."""
        self._faults.clear()

    def write(self, name: str, value: int) -> None:
        """In place, into the first element of the first weight."""
        import torch

        tensor = next((one.tensor for one in self._slots(name) if _writable(one.tensor)), None)
        if tensor is not None:
            with torch.no_grad():
                tensor[(0,) * tensor.dim()].fill_(value / 100)
        self._wanted[name] = self._weights(name)
        self._values[name] = value

    def read(self, name: str) -> int:
        """Every tensor has the bits that it should have, wherever it is."""
        import torch

        for path, tensor in self._weights(name).items():
            wanted = self._wanted[name][path]
            same = (
                torch.equal(tensor.view(torch.uint8), wanted.view(torch.uint8))
                if tensor.dim()
                else tensor == wanted
            )
            assert same, f"{path} is not what was written last"
        return self._values[name]

    def compute(self, name: str) -> None:
        """All of its tensors are where the pipeline computes."""
        for slot in self._slots(name):
            device = None if slot.tensor is None else slot.tensor.device
            assert device in (None, self.handle.execution_device), f"{slot.path} is on {device}"

    def violations(self) -> Sequence[str]:
        """Races, on a simulated accelerator."""
        return [] if self._simulated is None else [str(race) for race in self._simulated.races]

    def close(self) -> None:
        """Take the offload off."""
        self.disarm()
        try:
            self.handle.disable()
        finally:
            if self._simulated is not None:
                self._simulated.__exit__(None, None, None)

    def _slots(self, name: str) -> Iterator[Slot]:
        fleet: Any = self.ledger.attachment
        yield from fleet.attached[name].found.area.slots()

    def _weights(self, name: str) -> dict[str, torch.Tensor]:
        held = {one.path: one.tensor for one in self._slots(name)}
        return {path: one.detach().cpu().clone() for path, one in held.items() if one is not None}

    def _failing(self, verb: Verb, move: Callable[[str], Moved]) -> Callable[[str], Moved]:
        def act(name: str) -> Moved:
            fault = self._faults.strike(verb, name)
            if fault is None:
                return move(name)
            if fault.when == "after":
                move(name)
            raise fault.make(name)

        return act


def _writable(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.numel() > 0 and tensor.is_floating_point()
