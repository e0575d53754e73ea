"""Our gRPC server on a loopback port, a routing service that records, and a client that plays Envoy."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

import grpc

from extproc.adapters.access_log_server import AccessLogService
from extproc.adapters.eds_server import EdsService
from extproc.adapters.ext_proc_server import ExtProcService, ExtProcSettings
from extproc.adapters.grpc_server import GrpcServer, start_grpc_server
from extproc.adapters.health_server import HealthService
from extproc.adapters.routing import HttpRequest
from extproc.adapters.server_tls import TlsFiles
from extproc.core.types import Completion
from extproc.pb import access_log_pb2, discovery_pb2, ext_proc_pb2, health_pb2
from extproc.protocol.ext_proc_messages import Answer, Route

ROUTE = Route(("10.0.0.1:8000", "10.0.0.2:8000"), "lease-1")


@dataclass
class RecordingRouting:
    """Answers with `answer` (a value, an exception to raise, or a function of the request)."""

    answer: object = ROUTE
    gate: asyncio.Event | None = None
    requests: list[HttpRequest] = field(default_factory=list)
    signals: list[tuple] = field(default_factory=list)
    completions: list[tuple[str, Completion]] = field(default_factory=list)
    cancelled_routes: int = 0
    log_streams: int = 0

    async def route(self, request: HttpRequest) -> Answer:
        self.requests.append(request)
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled_routes += 1
            raise
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer(request) if callable(self.answer) else self.answer

    def first_body(self, lease_id: str) -> None:
        self.signals.append(("first_body", lease_id))

    def served(self, lease_id: str, endpoint: str) -> None:
        self.signals.append(("served", lease_id, endpoint))

    def stream_ended(self, lease_id: str, *, cancelled: bool) -> None:
        self.signals.append(("stream_ended", lease_id, cancelled))

    def completed(self, lease_id: str, completion: Completion) -> None:
        self.signals.append(("completed", lease_id, completion.outcome.value))
        self.completions.append((lease_id, completion))

    def left_early(self, request_id: str, completion: Completion) -> bool:
        self.signals.append(("left_early", request_id, completion.outcome.value))
        return False

    def access_log_streams(self, open_streams: int) -> None:
        self.log_streams = open_streams


@dataclass
class Host:
    """A running server and a channel to it."""

    server: GrpcServer
    ext_proc: ExtProcService
    access_log: AccessLogService
    health: HealthService
    eds: EdsService
    reports: list[str]
    channel: grpc.aio.Channel

    def stream(self, metadata: dict[str, str] | None = None) -> grpc.aio.StreamStreamCall:
        """One ext_proc stream."""
        return self.channel.stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            ext_proc_pb2.ProcessingRequest.SerializeToString,
            ext_proc_pb2.ProcessingResponse.FromString,
        )(metadata=tuple((metadata or {}).items()))

    async def exchange(
        self, *messages: ext_proc_pb2.ProcessingRequest, metadata: dict[str, str] | None = None
    ) -> list[ext_proc_pb2.ProcessingResponse]:
        """Send all messages, half-close, and return every reply."""
        call = self.stream(metadata)
        for message in messages:
            await call.write(message)
        await call.done_writing()
        return [reply async for reply in call]

    def endpoints(self) -> grpc.aio.StreamStreamCall:
        """One endpoint discovery stream, state of the world."""
        return self.channel.stream_stream(
            "/envoy.service.endpoint.v3.EndpointDiscoveryService/StreamEndpoints",
            discovery_pb2.DiscoveryRequest.SerializeToString,
            discovery_pb2.DiscoveryResponse.FromString,
        )()

    def delta_endpoints(self) -> grpc.aio.StreamStreamCall:
        """One endpoint discovery stream, incremental."""
        return self.channel.stream_stream(
            "/envoy.service.endpoint.v3.EndpointDiscoveryService/DeltaEndpoints",
            discovery_pb2.DeltaDiscoveryRequest.SerializeToString,
            discovery_pb2.DeltaDiscoveryResponse.FromString,
        )()

    def log(self) -> grpc.aio.StreamUnaryCall:
        """One access-log stream."""
        return self.channel.stream_unary(
            "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs",
            access_log_pb2.StreamAccessLogsMessage.SerializeToString,
            access_log_pb2.StreamAccessLogsResponse.FromString,
        )()

    async def check(self, service: str) -> int:
        """One health check."""
        call = self.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )
        return (await call(health_pb2.HealthCheckRequest(service=service))).status

    def watch(self, service: str) -> grpc.aio.UnaryStreamCall:
        """One health watch."""
        return self.channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )(health_pb2.HealthCheckRequest(service=service))


@contextlib.asynccontextmanager
async def running(
    routing: RecordingRouting,
    *,
    settings: ExtProcSettings | None = None,
    receive_limit: int | None = None,
    address: str = "127.0.0.1:0",
    tls: TlsFiles | None = None,
    max_streams: int = 10_000,
) -> AsyncIterator[Host]:
    """A host; `receive_limit` is the client's, in bytes per message."""
    settings = settings or ExtProcSettings(max_body_bytes=8 << 20)
    ext_proc, access_log, health = (
        ExtProcService(routing, settings),
        AccessLogService(routing),
        HealthService(),
    )
    reports: list[str] = []
    eds = EdsService(reports.append)
    server = await start_grpc_server(
        address,
        ext_proc=ext_proc,
        access_log=access_log,
        health=health,
        eds=eds,
        max_body_bytes=settings.max_body_bytes,
        max_streams=max_streams,
        tls=tls,
    )
    options = [("grpc.max_receive_message_length", receive_limit)] if receive_limit else []
    channel = grpc.aio.insecure_channel(server.address, options=options)
    try:
        yield Host(server, ext_proc, access_log, health, eds, reports, channel)
    finally:
        await channel.close()
        await server.stop(0)


# --- messages, as Envoy sends them ---------------------------------------------------------------------

MODES = ext_proc_pb2.ProcessingMode
BUFFERED, DUPLEX, NONE = MODES.BUFFERED, MODES.FULL_DUPLEX_STREAMED, MODES.NONE

POST = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json"}


def _fill(part: ext_proc_pb2.HttpHeaders, headers: Iterable[tuple[str, str]]) -> None:
    for name, value in headers:
        part.headers.headers.add(key=name, raw_value=value.encode())


def request_headers(
    headers: dict[str, str] | list[tuple[str, str]] | None = None,
    *,
    end: bool = False,
    mode: int = BUFFERED,
    response_mode: int = NONE,
    metadata: dict[str, dict] | None = None,
) -> ext_proc_pb2.ProcessingRequest:
    message = ext_proc_pb2.ProcessingRequest()
    headers = POST if headers is None else headers
    _fill(message.request_headers, headers.items() if isinstance(headers, dict) else headers)
    message.request_headers.end_of_stream = end
    message.protocol_config.request_body_mode = mode
    message.protocol_config.response_body_mode = response_mode
    return with_metadata(message, metadata)


def with_metadata(
    message: ext_proc_pb2.ProcessingRequest, metadata: dict[str, dict] | None
) -> ext_proc_pb2.ProcessingRequest:
    for namespace, values in (metadata or {}).items():
        message.metadata_context.filter_metadata[namespace].update(values)
    return message


def request_body(body: bytes, *, end: bool = False) -> ext_proc_pb2.ProcessingRequest:
    message = ext_proc_pb2.ProcessingRequest()
    message.request_body.body = body
    message.request_body.end_of_stream = end
    return message


def request_trailers() -> ext_proc_pb2.ProcessingRequest:
    message = ext_proc_pb2.ProcessingRequest()
    message.request_trailers.SetInParent()
    return message


def response_headers(
    headers: dict[str, str] | None = None, *, end: bool = False, metadata: dict[str, dict] | None = None
) -> ext_proc_pb2.ProcessingRequest:
    message = ext_proc_pb2.ProcessingRequest()
    _fill(message.response_headers, ({":status": "200"} | (headers or {})).items())
    message.response_headers.end_of_stream = end
    return with_metadata(message, metadata)


def response_body(body: bytes, *, end: bool = False) -> ext_proc_pb2.ProcessingRequest:
    message = ext_proc_pb2.ProcessingRequest()
    message.response_body.body = body
    message.response_body.end_of_stream = end
    return message


def response_trailers() -> ext_proc_pb2.ProcessingRequest:
    message = ext_proc_pb2.ProcessingRequest()
    message.response_trailers.SetInParent()
    return message
