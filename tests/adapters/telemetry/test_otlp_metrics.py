import asyncio
import contextlib
import threading

import pytest
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpExporter
from opentelemetry.sdk.metrics.export import MetricExportResult
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from extproc.adapters.telemetry.otlp_metrics import OtlpMetrics, metrics_data
from extproc.adapters.telemetry.recorder import Telemetry
from tests.adapters.telemetry.values import decision, released
from tests.support.otlp import OtlpCollector
from tests.support.waiting import until

RESOURCE = Resource({"service.name": "warmroute"})


def converted(registry):
    data = metrics_data(registry.collect(), RESOURCE, 1, 2)
    return {metric.name: metric for metric in data.resource_metrics[0].scope_metrics[0].metrics}


def test_each_kind_becomes_its_otlp_form():
    registry = CollectorRegistry()
    Counter("warmroute_requests", "R.", ["pool"], registry=registry).labels("a").inc(3)
    Gauge("warmroute_leases", "L.", registry=registry).set(4)
    histogram = Histogram("warmroute_ttft_seconds", "T.", ["pool"], registry=registry, buckets=(1.0, 2.0))
    for value in (0.5, 1.5, 1.6, 9.0):
        histogram.labels("a").observe(value)
    found = converted(registry)
    counter = found["warmroute_requests"]
    assert (counter.unit, counter.data.is_monotonic) == ("{request}", True)
    assert [(p.value, p.attributes) for p in counter.data.data_points] == [(3.0, {"pool": "a"})]
    assert found["warmroute_leases"].data.data_points[0].value == 4
    [point] = found["warmroute_ttft_seconds"].data.data_points
    assert (point.explicit_bounds, point.bucket_counts) == ([1.0, 2.0], [1, 2, 1])
    assert (point.count, point.sum, point.attributes) == (4, pytest.approx(12.6), {"pool": "a"})
    assert (point.start_time_unix_nano, point.time_unix_nano) == (1, 2)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_collector_gets_the_same_figures_as_prometheus(protocol):
    telemetry = Telemetry()
    telemetry.metrics.finished(released(decision(tokens=100), cached_tokens=96))
    async with OtlpCollector() as collector:
        exporter = (
            GrpcExporter(endpoint=collector.grpc)
            if protocol == "grpc"
            else HttpExporter(endpoint=f"{collector.http}/v1/metrics")
        )
        exporting = OtlpMetrics(telemetry.registry, exporter, RESOURCE, 0.01)
        exporting.start()
        await until(lambda: collector.metric_exports >= 2)
        telemetry.metrics.finished(released(decision(tokens=100), cached_tokens=96))
        await exporting.close()  # what happened since the last export is not lost
    labels = {"pool": "default", "prompt_class": "document", "warmth": "warm", "mode": "enforce"}
    [point] = collector.metrics["warmroute_ttft_seconds"].histogram.data_points
    assert {pair.key: pair.value.string_value for pair in point.attributes} == labels
    assert point.count == telemetry.registry.get_sample_value("warmroute_ttft_seconds_count", labels) == 2
    assert not point.HasField("min")
    tokens = collector.metrics["warmroute_input_tokens"]
    assert (tokens.unit, sum(p.as_double for p in tokens.sum.data_points)) == ("{token}", 200)


class Failing:
    def __init__(self):
        self.calls = 0

    def export(self, _data):
        self.calls += 1
        if self.calls == 1:
            raise OSError("no route")
        return MetricExportResult.SUCCESS

    def shutdown(self):
        pass


async def test_an_export_that_fails_is_followed_by_the_next():
    exporter = Failing()
    exporting = OtlpMetrics(CollectorRegistry(), exporter, RESOURCE, 0.001)
    exporting.start()
    await until(lambda: exporter.calls > 2)
    with contextlib.suppress(asyncio.CancelledError):
        await exporting.close()


class Stuck:
    """Does not come back before it is told to shut down."""

    def __init__(self):
        self.exporting, self.ended = threading.Event(), threading.Event()

    def export(self, _data):
        self.exporting.set()
        self.ended.wait()

    def shutdown(self):
        self.ended.set()


@pytest.mark.parametrize("in_the_middle", [False, True])
async def test_the_end_does_not_wait_for_a_collector(in_the_middle, monkeypatch):
    monkeypatch.setattr("extproc.adapters.telemetry.last_words.LAST_S", 0.05)
    exporter = Stuck()
    exporting = OtlpMetrics(CollectorRegistry(), exporter, RESOURCE, 0.001 if in_the_middle else 600.0)
    exporting.start()
    if in_the_middle:
        await until(exporter.exporting.is_set)
    async with asyncio.timeout(10.0):
        await exporting.close()
    assert exporter.ended.is_set()
