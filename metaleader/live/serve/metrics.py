"""The metrics of a service, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

# Seconds; finer between 1 and 100 ms than the default.
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

# The keys of a status, as gauges.
_GAUGES = {
    "tasks": "Tasks with data.",
    "datapoints": "Datapoints in memory.",
    "memory_bytes": "Bytes of the datapoints in memory.",
    "updates_due": "Updates that are due.",
    "behind": "Staleness: observations that no update of the parameters has used.",
    "staleness": "Staleness: the age of the oldest observation that the parameters do not include, in seconds.",
    "journal_lag": "Calls that are not written to the journal yet.",
    "record": "The last record of the journal.",
    "checkpoint": "The last record that the parameters on disk include.",
    "bytes": "Bytes of the folder on disk.",
    "age": "Seconds since a replica has last read the journal.",
}
_NAMES = {
    "behind": "staleness_observations",
    "staleness": "staleness_seconds",
    "bytes": "disk_bytes",
    "age": "replica_age_seconds",
}


class _Status(Protocol):
    def read_status(self) -> dict[str, Any]:
        """The state of a session or replica."""
        ...


class Metrics(Collector):
    """Counters of a service, and gauges of its state.

    Args:
        service: whose state is read at each collection.
    """

    def __init__(self, service: _Status) -> None:
        self._service, self._registry = service, CollectorRegistry()
        registry = self._registry
        labels = ("call", "status")
        self._requests = Counter("metaleader_requests", "Requests, by call and status.", labels, registry=registry)
        self._seconds = Histogram(
            "metaleader_request_seconds", "Time of a request.", ("call",), registry=registry, buckets=_SECONDS
        )
        self.batch = Histogram(
            "metaleader_batch_requests", "Requests that were predicted together.", registry=registry, buckets=_SIZES
        )
        self._losses = Counter(
            "metaleader_prequential_loss", "Sum of the losses of datapoints before they were stored.", registry=registry
        )
        self._unadapted = Counter(
            "metaleader_prequential_loss_unadapted", "The same without adaptation.", registry=registry
        )
        self._measured = Counter(
            "metaleader_prequential_datapoints", "Datapoints whose losses were added.", registry=registry
        )
        registry.register(self)
        ProcessCollector(registry=registry)

    def count_request(self, call: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(call, str(status)).inc()
        self._seconds.labels(call).observe(seconds)

    def count_losses(self, rows: int, loss: float, unadapted: float) -> None:
        """Add the mean losses of some datapoints; those that are not finite, or negative, are left out."""
        if 0 <= loss < float("inf") and 0 <= unadapted < float("inf"):
            self._losses.inc(rows * loss)
            self._unadapted.inc(rows * unadapted)
            self._measured.inc(rows)

    def collect(self) -> Iterator[Metric]:
        """The gauges, from the state of the service."""
        status = self._service.read_status()
        for key, text in _GAUGES.items():
            if key in status:
                yield GaugeMetricFamily(f"metaleader_{_NAMES.get(key, key)}", text, value=status[key] or 0)
        yield GaugeMetricFamily("metaleader_tasks_set_aside", "Tasks not drawn.", value=len(status["set_aside"]))
        yield CounterMetricFamily("metaleader_updates", "Updates made, of all time.", value=status["step"])

    def describe(self) -> Iterator[Metric]:
        """None: nothing is read when the collector is registered."""
        return iter(())

    def text(self) -> bytes:
        """All metrics."""
        return generate_latest(self._registry)
