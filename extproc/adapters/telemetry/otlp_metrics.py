"""The same metrics to an OpenTelemetry collector.

The registry is the only place where anything is counted; every interval its families become OTLP data points
and go out with OpenTelemetry's own exporter, in a thread. Sums are cumulative. A collector that cannot be
reached costs points of the graph, and nothing else.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import cast

from opentelemetry.sdk.metrics import export as otel
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Sample

from extproc.adapters.telemetry.catalogue import METRICS
from extproc.adapters.telemetry.last_words import beside, in_time

_log = logging.getLogger("warmroute.telemetry")

_UNITS: Mapping[str, str] = {metric.name: metric.unit for metric in METRICS} | {
    "process_cpu_seconds": "s",
    "process_resident_memory_bytes": "By",
    "process_virtual_memory_bytes": "By",
    "process_start_time_seconds": "s",
}
_CUMULATIVE = otel.AggregationTemporality.CUMULATIVE


class OtlpMetrics:
    """Exports a registry until it is closed.

    Args:
        registry: what to export; read on the event loop.
        exporter: where to.
        resource: who we are.
        interval_s: seconds between exports.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        exporter: otel.MetricExporter,
        resource: Resource,
        interval_s: float,
    ) -> None:
        self._registry = registry
        self._exporter = exporter
        self._resource = resource
        self._interval_s = interval_s
        self._started_ns = time.time_ns()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; needs a running event loop."""
        self._task = asyncio.create_task(self._run(), name="otlp-metrics")

    async def close(self) -> None:
        """Export a last time, if that is possible soon, and stop."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            await in_time(self._export(), self._exporter.shutdown)
        await in_time(self._exporter.shutdown, lambda: None)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await beside(self._export())

    def _export(self) -> Callable[[], object]:
        """What exports the figures of now."""
        try:
            data = metrics_data(self._registry.collect(), self._resource, self._started_ns, time.time_ns())
        except Exception:
            _log.exception("metrics could not be exported; the next interval tries again")
            return lambda: None
        return lambda: self._exporter.export(data)


def metrics_data(
    families: Iterable[Family], resource: Resource, started_ns: int, now_ns: int
) -> otel.MetricsData:
    """Prometheus families as OTLP data."""
    metrics = [
        otel.Metric(
            name=family.name,
            description=family.documentation,
            unit=_UNITS.get(family.name, ""),
            data=_data(family, started_ns, now_ns),
        )
        for family in families
        if family.samples
    ]
    scope = otel.ScopeMetrics(InstrumentationScope("warmroute"), metrics, "")
    return otel.MetricsData([otel.ResourceMetrics(resource, [scope], "")])


def _data(family: Family, started_ns: int, now_ns: int) -> otel.Sum | otel.Gauge | otel.Histogram:
    if family.type == "histogram":
        return otel.Histogram(_histograms(family, started_ns, now_ns), _CUMULATIVE)

    def point(sample: Sample) -> otel.NumberDataPoint:
        return otel.NumberDataPoint(dict(sample.labels), started_ns, now_ns, sample.value)

    points = [point(sample) for sample in family.samples if not sample.name.endswith("_created")]
    if family.type == "counter":
        return otel.Sum(points, _CUMULATIVE, is_monotonic=True)
    return otel.Gauge(points)


def _histograms(family: Family, started_ns: int, now_ns: int) -> list[otel.HistogramDataPoint]:
    """One point per set of labels; buckets, cumulative in Prometheus, by themselves."""
    found: dict[tuple[tuple[str, str], ...], dict[str, list[Sample]]] = {}
    for sample in family.samples:
        key = tuple(pair for pair in sample.labels.items() if pair[0] != "le")
        found.setdefault(key, {}).setdefault(sample.name.removeprefix(family.name), []).append(sample)
    points = []
    for key, parts in found.items():
        bounds = [float(sample.labels["le"]) for sample in parts["_bucket"]]
        running = [0, *(int(sample.value) for sample in parts["_bucket"])]
        points.append(
            otel.HistogramDataPoint(
                attributes=dict(key),
                start_time_unix_nano=started_ns,
                time_unix_nano=now_ns,
                count=running[-1],
                sum=parts["_sum"][0].value,
                bucket_counts=[after - before for before, after in pairwise(running)],
                explicit_bounds=bounds[:-1],
                # Prometheus keeps neither; the encoder leaves out what is None.
                min=cast("float", None),
                max=cast("float", None),
            )
        )
    return points
