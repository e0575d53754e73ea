"""What the standard `OTEL_*` environment variables ask for.

Nothing is exported unless one of them asks: an endpoint (`OTEL_EXPORTER_OTLP_ENDPOINT`, or that of one
signal, `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, `…_METRICS_ENDPOINT`), or an exporter by name
(`OTEL_TRACES_EXPORTER=otlp`). `OTEL_TRACES_EXPORTER=none` and `OTEL_METRICS_EXPORTER=none` switch one
signal off, `OTEL_SDK_DISABLED=true` both. `OTEL_EXPORTER_OTLP_PROTOCOL` is `grpc` (the default of
OpenTelemetry's Python) or `http/protobuf`. Everything else (headers, certificates, compression, time
limits, `OTEL_TRACES_SAMPLER`, batch sizes, resource attributes) is read by OpenTelemetry's SDK itself,
which is imported only when there is something to export.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from prometheus_client import CollectorRegistry

from extproc.core.errors import WarmrouteError

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

    from extproc.adapters.telemetry.otlp_metrics import OtlpMetrics

Signal = Literal["traces", "metrics"]
Protocol = Literal["grpc", "http/protobuf"]

_SERVICE = "warmroute"
_UNNAMED = "unknown_service"
_INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
_DEFAULT_INTERVAL_MS = "60000"


class TelemetryError(WarmrouteError):
    """An `OTEL_*` variable asks for what there is not; the message names it."""


@dataclass(frozen=True, slots=True)
class OtlpChoice:
    """How each signal is exported; None: it is not."""

    traces: Protocol | None
    metrics: Protocol | None
    metrics_interval_s: float = 60.0


def choose(environment: Mapping[str, str]) -> OtlpChoice:
    """What the environment asks for.

    Raises:
        TelemetryError: an exporter or protocol that there is not, or an interval that is no number.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return OtlpChoice(None, None)
    interval = environment.get(_INTERVAL, "").strip() or _DEFAULT_INTERVAL_MS
    if not interval.isdigit() or int(interval) == 0:
        raise TelemetryError(f"{_INTERVAL}={interval}: must be a positive number of milliseconds")
    return OtlpChoice(
        _protocol("traces", environment), _protocol("metrics", environment), int(interval) / 1000.0
    )


def _protocol(signal: Signal, environment: Mapping[str, str]) -> Protocol | None:
    name = f"OTEL_{signal.upper()}_EXPORTER"
    exporter = environment.get(name, "").strip().lower()
    if exporter not in ("", "otlp", "none"):
        raise TelemetryError(
            f"{name}={exporter}: only `otlp` and `none` are supported (Prometheus is always on)"
        )
    specific = f"OTEL_EXPORTER_OTLP_{signal.upper()}"
    asked = exporter == "otlp" or any(
        environment.get(key, "").strip() for key in (f"{specific}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    )
    if exporter == "none" or not asked:
        return None
    protocol = "grpc"
    for key in (f"{specific}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        value = environment.get(key, "").strip().lower()
        if value:
            protocol, name = value, key
            break
    if protocol == "grpc":
        return "grpc"
    if protocol == "http/protobuf":
        return "http/protobuf"
    raise TelemetryError(f"{name}={protocol}: only `grpc` and `http/protobuf` are supported")


def resource(version: str) -> "Resource":
    """Who we are to collectors: what the environment says, else `warmroute`."""
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource

    found = Resource.create()
    ours = {SERVICE_VERSION: version}
    if str(found.attributes.get(SERVICE_NAME, _UNNAMED)).startswith(_UNNAMED):
        ours[SERVICE_NAME] = _SERVICE
    return Resource({**ours, **{k: v for k, v in found.attributes.items() if k not in ours}})


def tracer_provider(protocol: Protocol, version: str) -> "tuple[TracerProvider, SpanExporter]":
    """Samples and exports spans as the environment says, in batches, in a thread of its own."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter: SpanExporter
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        exporter = GrpcExporter()
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        exporter = HttpExporter()
    provider = TracerProvider(resource=resource(version), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider, exporter


def otlp_metrics(
    protocol: Protocol, registry: CollectorRegistry, version: str, interval_s: float
) -> "OtlpMetrics":
    """Exports a registry every `interval_s` seconds, once it is started."""
    from opentelemetry.sdk.metrics.export import MetricExporter

    from extproc.adapters.telemetry.otlp_metrics import OtlpMetrics

    exporter: MetricExporter
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter

        exporter = GrpcExporter()
    else:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpExporter

        exporter = HttpExporter()
    return OtlpMetrics(registry, exporter, resource(version), interval_s)
