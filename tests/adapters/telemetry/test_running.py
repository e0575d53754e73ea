import asyncio
import socket
import time

import pytest

from extproc.adapters.deferred import Deferred
from extproc.adapters.telemetry.running import running_telemetry
from extproc.adapters.telemetry.setup import TelemetryError
from tests.adapters.telemetry.values import decision, http, released
from tests.support.otlp import OtlpCollector


def started(environment, report, later=None):
    return running_telemetry(
        environment,
        version="1",
        clock=time.monotonic,
        is_base_model=lambda _name: True,
        report=report,
        later=later,
    )


@pytest.mark.parametrize("put_off", [False, True])
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_what_is_left_is_exported_at_the_end(protocol, put_off, monkeypatch):
    said = []
    async with OtlpCollector() as collector:
        endpoint = collector.grpc if protocol == "grpc" else collector.http
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)  # the SDK reads the process's own
        async with started(environment, said.append, Deferred() if put_off else None) as telemetry:
            stages = telemetry.begin()
            stages.mark("decide")
            telemetry.decided(http(), decision(), stages)
            telemetry.finished(released(decision()))
    names = {span.name for span in collector.spans}
    assert names == {"warmroute.decision", "warmroute.decide", "warmroute.completion"}
    assert {span.service for span in collector.spans} == {"warmroute"}
    assert "warmroute_ttft_seconds" in collector.metrics
    assert said == [f"traces: OTLP over {protocol}", f"metrics: OTLP over {protocol}, every 60 s"]


async def test_nothing_is_exported_unless_asked_for():
    said = []
    async with started({}, said.append) as telemetry:
        assert telemetry.decided(http(), decision(), telemetry.begin()) == {}
    assert said == []


async def test_a_collector_that_is_not_there_holds_nothing_up(monkeypatch):
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_METRICS_EXPORTER": "none"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    async with started(environment, lambda _text: None) as telemetry:
        telemetry.decided(http(), decision(), telemetry.begin())
        telemetry.finished(released(decision()))
    assert telemetry.faults == 0


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_a_collector_that_does_not_answer_does_not_hold_up_the_end(protocol, monkeypatch):
    monkeypatch.setattr("extproc.adapters.telemetry.last_words.LAST_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_EXPORTER_OTLP_TIMEOUT": "3600",
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        async with asyncio.timeout(20.0), started(environment, lambda _text: None) as telemetry:
            telemetry.decided(http(), decision(), telemetry.begin())


async def test_a_wrong_variable_stops_the_start():
    with pytest.raises(TelemetryError, match="OTEL_TRACES_EXPORTER"):
        async with started({"OTEL_TRACES_EXPORTER": "zipkin"}, print):
            pass
