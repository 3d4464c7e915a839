"""Walks every place at which a run can fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from omni_components.testing.simulated.accelerator import SimulatedAccelerator

FaultPoint = Literal["copy", "allocation", "pin", "step"]


class FaultTrial:
    """One run with one fault in it: a context manager around the run.

    An exception that leaves the run because of the fault, by itself or as the cause of another one, ends the
    ``with`` block quietly and is kept in `error`. Any other exception goes on.

    Attributes:
        point: what fails.
        number: how many of them succeed first.
        fired: whether the run came as far as the fault.
        error: what left the run because of it; None if the run got over it.
    """

    def __init__(
        self,
        accelerator: SimulatedAccelerator,
        point: FaultPoint,
        number: int,
        raises: type[BaseException] | None,
    ) -> None:
        self.point = point
        self.number = number
        self.fired = False
        self.error: BaseException | None = None
        self._accelerator = accelerator
        self._raises = raises
        self._entered = False

    def __enter__(self) -> FaultTrial:
        self._entered = True
        self._accelerator.fail_at(self.point, self.number, error=self._raises)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self.fired = self._accelerator.fired(self.point)
        self._accelerator.heal()
        if error is None or not self.fired or not self._comes_from_fault(error):
            return False
        self.error = error
        return True

    def _comes_from_fault(self, error: BaseException) -> bool:
        seen: set[int] = set()
        link: BaseException | None = error
        while link is not None and id(link) not in seen:
            if "simulated accelerator" in str(link) and "injected" in str(link):
                return True
            seen.add(id(link))
            link = link.__cause__ or link.__context__
        return False

    def __str__(self) -> str:
        return f"fault at {self.point} {self.number}"


def every_fault(
    accelerator: SimulatedAccelerator,
    point: FaultPoint = "step",
    *,
    error: type[BaseException] | None = None,
    limit: int = 100_000,
) -> Iterator[FaultTrial]:
    """Yields one trial for each place where a run can fail, until a run gets through without meeting its fault.

    ::

        for trial in every_fault(sim, "copy", error=KeyboardInterrupt):
            with trial:
                ledger.load("generator")
            ledger.check()

    Args:
        accelerator: the device, with its block open.
        point: what fails; ``"step"`` stands for all that a program asks of the device.
        error: the exception type to raise instead of the point's usual one.
        limit: so many trials and no more.

    Raises:
        RuntimeError: a trial was not entered, or the limit was reached.
    """
    for number in range(limit):
        trial = FaultTrial(accelerator, point, number, error)
        yield trial
        if not trial._entered:
            raise RuntimeError(f"{trial}: enter it with `with trial:` around the run")
        if not trial.fired:
            return
    raise RuntimeError(f"after {limit} trials every run still met its fault")
