"""Counters and histograms while they count. Not thread-safe: one event loop owns them.

`prometheus_client` writes them out, but does not hold them: its own take a lock for every update, so that the
twenty or so updates of a request took several times as long as here, where they are an addition in a map.
"""

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from extproc.adapters.telemetry.metric import Kind, Metric

Labels = tuple[str, ...]


class _Histogram:
    """One series: how many values fell into each bucket, and an example of each where there was one."""

    __slots__ = ("counts", "examples", "total")

    def __init__(self, bounds: int) -> None:
        self.counts = [0] * (bounds + 1)
        self.total = 0.0
        self.examples: dict[int, Exemplar] = {}


class Tally(Collector):
    """All series of some metrics; a collector of a `CollectorRegistry`."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = tuple(metrics)
        self._counters: dict[str, dict[Labels, float]] = {}
        self._histograms: dict[str, dict[Labels, _Histogram]] = {}
        for metric in self._metrics:
            if metric.kind is Kind.COUNTER:
                self._counters[metric.name] = {}
            else:
                self._histograms[metric.name] = {}

    def add(self, metric: Metric, amount: float, *labels: str) -> None:
        """Count, with label values in the catalogue's order.

        Raises:
            KeyError: not one of these metrics, or no counter.
        """
        series = self._counters[metric.name]
        series[labels] = series.get(labels, 0.0) + amount

    def observe(
        self, metric: Metric, value: float, *labels: str, exemplar: dict[str, str] | None = None
    ) -> None:
        """Put a value into a histogram; `exemplar` names an example of it. Negative values count as 0.

        Raises:
            KeyError: not one of these metrics, or no histogram.
        """
        series = self._histograms[metric.name]
        cell = series.get(labels)
        if cell is None:
            cell = series[labels] = _Histogram(len(metric.buckets))
        value = max(value, 0.0)
        bucket = bisect_left(metric.buckets, value)
        cell.counts[bucket] += 1
        cell.total += value
        if exemplar is not None:
            cell.examples[bucket] = Exemplar(exemplar, value, time.time())

    def collect(self) -> Iterator[Family]:
        """All families, those without series included."""
        for metric in self._metrics:
            if metric.kind is Kind.COUNTER:
                yield self._counter(metric)
            else:
                yield self._histogram(metric)

    def _counter(self, metric: Metric) -> Family:
        family = CounterMetricFamily(metric.name, metric.meaning, labels=metric.labels)
        for labels, value in self._counters[metric.name].items():
            family.add_metric(labels, value)
        return family

    def _histogram(self, metric: Metric) -> Family:
        family = HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
        bounds = [*map(str, metric.buckets), "+Inf"]
        for labels, cell in self._histograms[metric.name].items():
            below = 0
            buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
            for at, bound in enumerate(bounds):
                below += cell.counts[at]
                example = cell.examples.get(at)
                buckets.append((bound, below) if example is None else (bound, below, example))
            family.add_metric(labels, buckets, cell.total)
        return family
