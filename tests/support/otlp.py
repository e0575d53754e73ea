"""A collector of OpenTelemetry data on real sockets: OTLP over gRPC and over HTTP, kept in memory.

async with OtlpCollector() as collector:
    collector.grpc, collector.http     # "http://127.0.0.1:PORT", what OTEL_EXPORTER_OTLP_ENDPOINT takes
    collector.grpc_address             # "127.0.0.1:PORT"
    collector.spans                    # every span so far, oldest first
    await collector.until_spans(lambda spans: ...)
"""

import gzip
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
from aiohttp import web
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.metrics.v1 import metrics_pb2

from tests.support.waiting import until

_TRACES = "opentelemetry.proto.collector.trace.v1.TraceService"
_METRICS = "opentelemetry.proto.collector.metrics.v1.MetricsService"


@dataclass(frozen=True, slots=True)
class Span:
    """One span as it arrived. Ids are hex; `parent` is empty at the root; times are unix nanoseconds."""

    service: str
    name: str
    kind: int
    trace: str
    id: str
    parent: str
    start: int
    end: int
    status: int
    attributes: dict[str, Any]

    def holds(self, other: "Span") -> bool:
        """Whether `other` lies within this span's time."""
        return self.start <= other.start and other.end <= self.end


class OtlpCollector:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.metrics: dict[str, metrics_pb2.Metric] = {}
        self.metric_exports = 0
        self._server: grpc.aio.Server
        self._runner: web.AppRunner

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        for service, request, answer, take in (
            (_TRACES, trace_service_pb2.ExportTraceServiceRequest, self._spans_answer, self._take_spans),
            (
                _METRICS,
                metrics_service_pb2.ExportMetricsServiceRequest,
                self._metrics_answer,
                self._take_metrics,
            ),
        ):
            self._server.add_generic_rpc_handlers((_handler(service, request.FromString, take, answer),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.grpc_address = f"127.0.0.1:{port}"
        self.grpc = f"http://{self.grpc_address}"
        app = web.Application()
        app.router.add_post("/v1/traces", self._http_traces)
        app.router.add_post("/v1/metrics", self._http_metrics)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.http = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop(None)
        await self._runner.cleanup()

    async def until_spans(
        self, enough: Callable[[list[Span]], Any], what: str, deadline_s: float = 30.0
    ) -> None:
        await until(lambda: enough(self.spans), deadline_s, what)

    def named(self, name: str) -> list[Span]:
        """Spans of this name."""
        return [span for span in self.spans if span.name == name]

    @staticmethod
    def _spans_answer() -> bytes:
        return trace_service_pb2.ExportTraceServiceResponse().SerializeToString()

    @staticmethod
    def _metrics_answer() -> bytes:
        return metrics_service_pb2.ExportMetricsServiceResponse().SerializeToString()

    def _take_spans(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            service = _plain(resource.resource.attributes).get("service.name", "")
            for scope in resource.scope_spans:
                self.spans += [
                    Span(
                        service=service,
                        name=span.name,
                        kind=span.kind,
                        trace=span.trace_id.hex(),
                        id=span.span_id.hex(),
                        parent=span.parent_span_id.hex(),
                        start=span.start_time_unix_nano,
                        end=span.end_time_unix_nano,
                        status=span.status.code,
                        attributes=_plain(span.attributes),
                    )
                    for span in scope.spans
                ]

    def _take_metrics(self, request: metrics_service_pb2.ExportMetricsServiceRequest) -> None:
        self.metric_exports += 1
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                self.metrics.update((metric.name, metric) for metric in scope.metrics)

    async def _http_traces(self, request: web.Request) -> web.Response:
        self._take_spans(trace_service_pb2.ExportTraceServiceRequest.FromString(await _body(request)))
        return web.Response(body=self._spans_answer(), content_type="application/x-protobuf")

    async def _http_metrics(self, request: web.Request) -> web.Response:
        self._take_metrics(metrics_service_pb2.ExportMetricsServiceRequest.FromString(await _body(request)))
        return web.Response(body=self._metrics_answer(), content_type="application/x-protobuf")


def _handler(
    service: str, parse: Callable[[bytes], Any], take: Callable[[Any], None], answer: Callable[[], bytes]
) -> Any:
    async def export(request: Any, _context: Any) -> bytes:
        take(request)
        return answer()

    method = grpc.unary_unary_rpc_method_handler(export, parse, lambda reply: reply)
    return grpc.method_handlers_generic_handler(service, {"Export": method})


async def _body(request: web.Request) -> bytes:
    # The exporter's own header, not a transport encoding aiohttp has undone.
    body = await request.read()
    return gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body


def _plain(attributes: Iterable[common_pb2.KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return None if kind is None else getattr(value, kind)
