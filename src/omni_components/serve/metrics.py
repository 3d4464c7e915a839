"""Prometheus metrics: a registry per app, so that several apps in one process do not mix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..residency.events import Totals

if TYPE_CHECKING:
    from ..residency.ledger import ResidencyLedger
    from .jobs import JobQueue
    from .worker import Worker

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_PREFIX = "omni_components_"
_OF_COMPONENT = ("component", "replica")


class Metrics:
    """What the service counts itself, and what it reads from the ledger, the queue and the worker.

    Args:
        replica: Value of the label ``replica``; an empty one is as none to Prometheus.
    """

    def __init__(self, replica: str) -> None:
        self.registry = CollectorRegistry()
        self._replica = replica
        self._requests = Counter(
            f"{_PREFIX}requests",
            "Answers to requests for pictures, refused ones too, by HTTP status; 499 where the client had gone.",
            ("status", "replica"),
            registry=self.registry,
        )
        self._seconds = Histogram(
            f"{_PREFIX}request_seconds",
            "From a request for pictures to its answer, the wait in the queue included; not of 4xx.",
            ("replica",),
            buckets=_SECONDS,
            registry=self.registry,
        ).labels(replica)

    def answered(self, status: int, seconds: float) -> None:
        """Count an answer."""
        self._requests.labels(str(status), self._replica).inc()
        if not 400 <= status < 500:  # a refusal is quick, and would hide what the others have to wait
            self._seconds.observe(seconds)

    def watch(self, ledger: ResidencyLedger | None, queue: JobQueue, worker: Worker) -> None:
        """Read these at each scrape."""
        self._gauge("queue_length", "Requests that wait.", lambda: len(queue))
        self._gauge("queue_limit", "Requests that may wait.", lambda: queue.limit)
        self._gauge("requests_running", "Requests that are being drawn.", lambda: worker.tally.running)
        self.registry.register(_Drawn(worker, self._replica))
        if ledger is not None:
            self.registry.register(_Ledger(ledger, self._replica))

    def text(self) -> bytes:
        """What Prometheus reads."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, says: str, value: object) -> None:
        gauge = Gauge(f"{_PREFIX}{name}", says, ("replica",), registry=self.registry)
        gauge.labels(self._replica).set_function(value)  # type: ignore[arg-type]


class _Drawn:
    """What the worker has done."""

    def __init__(self, worker: Worker, replica: str) -> None:
        self._worker, self._replica = worker, replica

    def collect(self) -> Iterator[Metric]:
        tally = self._worker.tally
        for name, says, value in (
            ("pictures", "Pictures drawn.", tally.pictures),
            ("batches", "Runs of the pipeline.", tally.batches),
        ):
            family = CounterMetricFamily(f"{_PREFIX}{name}", says, labels=("replica",))
            family.add_metric((self._replica,), value)
            yield family


class _Ledger:
    """What the ledger has on record; reading it costs a few additions, however long the history."""

    def __init__(self, ledger: ResidencyLedger, replica: str) -> None:
        self._ledger, self._replica = ledger, replica

    def collect(self) -> Iterator[Metric]:
        yield from self._costs()
        yield from self._places()

    def _costs(self) -> Iterator[Metric]:
        totals = dict(self._ledger.history.totals)
        for name, says, field in (
            ("loads", "Loads onto the device.", "loads"),
            ("evictions", "Evictions from the device.", "evictions"),
            ("bytes_to_device", "Bytes over the link towards the device.", "bytes_in"),
            ("bytes_to_host", "Bytes over the link towards the host.", "bytes_out"),
            ("move_seconds", "Host time of loads, evictions and roll-backs.", "seconds"),
            ("wait_seconds", "Time that threads waited for a component's turn.", "waited"),
        ):
            family = CounterMetricFamily(f"{_PREFIX}{name}", says, labels=_OF_COMPONENT)
            for one in self._ledger.components:
                family.add_metric((one.name, self._replica), getattr(totals.get(one.name, Totals()), field))
            yield family

    def _places(self) -> Iterator[Metric]:
        ledger = self._ledger
        present = ledger.present
        there = GaugeMetricFamily(f"{_PREFIX}present", "1 if it is on the device.", labels=_OF_COMPONENT)
        for one in ledger.components:
            there.add_metric((one.name, self._replica), float(one.name in present))
        yield there
        for name, says, value in (
            ("device_bytes", "Bytes of residents and loaded components.", ledger.device_bytes),
            ("device_bytes_peak", "Most device bytes so far.", ledger.history.peak),
            ("device_bytes_predicted_peak", "Most that the declarations allow.", ledger.predicted_peak),
        ):
            gauge = GaugeMetricFamily(f"{_PREFIX}{name}", says, labels=("replica",))
            gauge.add_metric((self._replica,), value)
            yield gauge
