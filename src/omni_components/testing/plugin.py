"""The pytest plugin of ``omni_components.testing``: two fixtures, a marker, and the timeline of a failure.

pytest loads this file in every project that has the package installed, so it imports no torch.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from ..attach.pipeline import Offload
    from ..report.report import ResidencyReport
    from ..residency.events import History
    from .simulated import SimulatedAccelerator

_STARTED = pytest.StashKey[float]()
_WITNESS = pytest.StashKey["Witness"]()
_SECTION = "residency timeline"
_EVENTS_MODULE = "omni_components.residency.events"
_LEDGERS, _EVENTS = 4, 40  # shown of each failure; the last ones led there


def pytest_configure(config: pytest.Config) -> None:
    """Declares the markers."""
    config.addinivalue_line(
        "markers", "max_device_memory(size): the capacity of `simulated_accelerator`, such as '64MiB'"
    )
    config.stash[_WITNESS] = Witness()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stops looking."""
    config.stash[_WITNESS].stop()


@pytest.fixture
def simulated_accelerator(request: pytest.FixtureRequest) -> Iterator[SimulatedAccelerator]:
    """A fresh `SimulatedAccelerator`; the test fails if it leaves a race unexplained.

    It has no limits unless the test is marked ``@pytest.mark.max_device_memory("64MiB")`` or assigns
    ``simulated_accelerator.capacity``. Races that a test causes on purpose it takes with
    ``sim.expect_races()``. Where no C++ compiler is, the test is skipped, or fails under ``CI``.
    """
    require_simulated_accelerator()
    from omni_components.testing.simulated import SimulatedAccelerator

    marker = request.node.get_closest_marker("max_device_memory")
    with SimulatedAccelerator(marker.args[0] if marker else None) as accelerator:
        yield accelerator
    if accelerator.races:
        pytest.fail("\n".join(f"race: {race}" for race in accelerator.races), pytrace=False)


class OffloadReports:
    """The offloads that a test enabled; the fixture ``offload_report``.

    Attributes:
        handles: In the order in which they were enabled.
    """

    def __init__(self) -> None:
        self.handles: list[Offload] = []

    def __call__(self, index: int = -1) -> ResidencyReport:
        """The report of one of them, by default the last; once it is disabled, as it was at the end.

        Raises:
            LookupError: The test has enabled none so far.
        """
        if not self.handles:
            raise LookupError("this test has not called offload() yet, so that there is nothing to report")
        return self.handles[index].report()


@pytest.fixture
def offload_report(monkeypatch: pytest.MonkeyPatch) -> OffloadReports:
    """Called after an ``offload()``, gives its `ResidencyReport`; also when a helper has kept the handle."""
    from omni_components.attach.pipeline import Offload

    reports = OffloadReports()
    original = Offload.__init__

    def noted(handle: Offload, *args: Any, **kwargs: Any) -> None:
        original(handle, *args, **kwargs)
        reports.handles.append(handle)

    monkeypatch.setattr(Offload, "__init__", noted)
    return reports


def require_simulated_accelerator() -> None:
    """Skips the running test where the simulated accelerator cannot be built; under ``CI`` fails it."""
    from omni_components.testing.simulated.build import unavailable_reason

    reason = unavailable_reason()
    if reason is None:
        return
    text = f"the simulated accelerator is not available: {reason}"
    if os.environ.get("CI"):
        pytest.fail(f"{text} (a CI run may not skip it)", pytrace=False)
    pytest.skip(text)


# --- the timeline of a failure --------------------------------------------------------------------------


class Witness:
    """Knows the events of every ledger that lived in a test, also of one that is gone by its end.

    Only events are kept, so that no ledger, and no weight, lives longer for it.
    """

    def __init__(self) -> None:
        self._began: list[Any] = []
        self._stop: Callable[[], None] | None = None

    def begin(self) -> None:
        """A test begins; from now on its ledgers are noted."""
        self._began.clear()
        events: Any = sys.modules.get(_EVENTS_MODULE)
        if events is None or self._stop is not None:
            return  # nobody has used the package yet, or it is done already
        history, original, began = events.History, events.History.__init__, self._began

        def noted(one: History, *args: Any, **kwargs: Any) -> None:
            original(one, *args, **kwargs)
            began.append(one._events)

        def stop() -> None:
            history.__init__ = original

        history.__init__ = noted
        self._stop = stop

    def stop(self) -> None:
        """Note no more. Idempotent."""
        if self._stop is not None:
            self._stop()
            self._stop = None

    def events(self, since: float) -> list[list[Any]]:
        """Per ledger, the events since a moment; ledgers that are older than the test are asked as well."""
        module: Any = sys.modules.get(_EVENTS_MODULE)
        if module is None:
            return []
        living = [one._events for one in gc.get_objects() if type(one) is module.History]
        every = {id(one): one for one in [*self._began, *living]}.values()
        found = [[event for event in one if event.at >= since] for one in every]
        return sorted((one for one in found if one), key=lambda one: one[-1].at)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Remembers when the test began: a ledger's events carry the time."""
    item.stash[_STARTED] = time.perf_counter()
    item.config.stash[_WITNESS].begin()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds what the ledgers of a failed test recorded; a missing compiler becomes one clear reason to skip."""
    _skip_without_compiler(call)
    report = yield
    if report.failed:
        text = timeline(item.config.stash[_WITNESS], item.stash.get(_STARTED, 0.0))
        if text:
            report.sections.append((_SECTION, text))
    return report


def _skip_without_compiler(call: pytest.CallInfo[None]) -> None:
    """`check_offload` and a block of `SimulatedAccelerator` raise where the fixture would have skipped."""
    errors: Any = sys.modules.get("omni_components.testing.simulated.errors")
    if call.excinfo is None or errors is None:
        return
    if isinstance(call.excinfo.value, errors.SimulatedAcceleratorUnavailable):
        try:
            require_simulated_accelerator()
        except (pytest.skip.Exception, pytest.fail.Exception):
            call.excinfo = pytest.ExceptionInfo.from_current()


def timeline(witness: Witness, since: float) -> str:
    """What every ledger recorded since a moment, as text; empty if there is nothing."""
    ledgers = witness.events(since)[-_LEDGERS:]
    return "\n".join(line for events in ledgers for line in _lines(events, since))


def _lines(events: list[Any], since: float) -> Iterator[str]:
    from omni_components.errors import format_bytes

    yield f"ledger of {', '.join(dict.fromkeys(one.component for one in events))}"
    if len(events) > _EVENTS:
        yield f"  ... {len(events) - _EVENTS} events before"
    width = max(len(one.component) for one in events)
    for one in events[-_EVENTS:]:
        moved = f"{format_bytes(one.bytes)} over the link, " if one.bytes else ""
        yield (
            f"  {one.at - since:9.4f} s  {one.kind!s:<10} {one.component:<{width}}  ({one.cause!s}) "
            f"{moved}{format_bytes(one.device_bytes)} on the device"
        )
