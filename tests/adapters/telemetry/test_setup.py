import subprocess
import sys

import pytest
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetrics
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpMetrics

from extproc.adapters.telemetry.registry import new_registry
from extproc.adapters.telemetry.setup import (
    OtlpChoice,
    TelemetryError,
    choose,
    otlp_metrics,
    resource,
    tracer_provider,
)

ALL = "OTEL_EXPORTER_OTLP_ENDPOINT"
ENDPOINT = {ALL: "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, OtlpChoice(None, None)),
        ({ALL: " "}, OtlpChoice(None, None)),
        (ENDPOINT, OtlpChoice("grpc", "grpc")),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "TRUE"}, OtlpChoice(None, None)),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, OtlpChoice(None, "grpc")),
        ({**ENDPOINT, "OTEL_METRICS_EXPORTER": "none"}, OtlpChoice("grpc", None)),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, OtlpChoice("grpc", None)),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317"}, OtlpChoice("grpc", None)),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4317"}, OtlpChoice(None, "grpc")),
        (
            {**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            OtlpChoice("http/protobuf", "http/protobuf"),
        ),
        (
            {
                **ENDPOINT,
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
            },
            OtlpChoice("grpc", "http/protobuf"),
        ),
        ({"OTEL_METRIC_EXPORT_INTERVAL": "1500"}, OtlpChoice(None, None, 1.5)),
    ],
)
def test_what_the_variables_ask_for(environment, expected):
    assert choose(environment) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_METRICS_EXPORTER": "prometheus"},
        {**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
        {"OTEL_METRIC_EXPORT_INTERVAL": "often"},
        {"OTEL_METRIC_EXPORT_INTERVAL": "0"},
    ],
)
def test_what_there_is_not_is_refused_by_the_name_of_its_variable(wrong):
    with pytest.raises(TelemetryError) as caught:
        choose(wrong)
    name, value = list(wrong.items())[-1]
    assert f"{name}={value}" in str(caught.value)


def test_we_are_warmroute_unless_the_environment_says_otherwise(monkeypatch):
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    ours = resource("1.2.3").attributes
    assert (ours["service.name"], ours["service.version"]) == ("warmroute", "1.2.3")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "router-a")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    theirs = resource("1.2.3").attributes
    assert (theirs["service.name"], theirs["deployment.environment"]) == ("router-a", "test")


@pytest.mark.parametrize(("protocol", "kind"), [("grpc", GrpcMetrics), ("http/protobuf", HttpMetrics)])
async def test_the_protocol_chooses_the_exporter(protocol, kind, monkeypatch):
    monkeypatch.setenv(ALL, "http://127.0.0.1:1")
    exporting = otlp_metrics(protocol, new_registry(), "1", 60.0)
    assert isinstance(exporting._exporter, kind)
    await exporting.close()
    tracer_provider(protocol, "1")[0].shutdown()


def test_the_sampler_is_the_environments(monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.125")
    provider, _ = tracer_provider("grpc", "1")
    assert "0.125" in provider.sampler.get_description()
    provider.shutdown()


def test_the_sdk_is_not_even_imported_when_nothing_is_exported():
    program = (
        "import sys\nimport extproc.app\n"
        "prefixes = ('opentelemetry.sdk', 'opentelemetry.exporter')\n"
        "print(sorted(name for name in sys.modules if name.startswith(prefixes)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
