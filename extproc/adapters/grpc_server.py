"""The one gRPC server: ext_proc, access log, endpoint discovery, health; Envoy's names, one port."""

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc

from extproc.adapters.access_log_server import AccessLogService
from extproc.adapters.eds_server import EdsService
from extproc.adapters.ext_proc_server import ExtProcService
from extproc.adapters.grpc_ports import bind_all, cannot_listen
from extproc.adapters.health_server import HealthService
from extproc.adapters.server_tls import TlsFiles, server_credentials
from extproc.pb import access_log_pb2, discovery_pb2, ext_proc_pb2, health_pb2
from extproc.protocol.addresses import parse_address
from extproc.protocol.endpoint_discovery import EDS_SERVICE
from extproc.protocol.endpoint_picker import (
    ACCESS_LOG_SERVICE,
    EXTERNAL_PROCESSOR_SERVICE,
    HEALTH_SERVICE,
)

_LEAVING_S = 1.0  # two health checks, as `warmroute envoy-config` sets them


@dataclass(frozen=True, slots=True)
class GrpcServer:
    """A running server. `address` is where it listens, `port` the port it really got."""

    server: grpc.aio.Server
    health: HealthService
    eds: EdsService
    address: str
    port: int

    async def stop(self, grace_s: float) -> None:
        """Say that we go, then refuse new streams and let open ones end, then cancel them; all in `grace_s`.

        Before streams are refused, there is a second (or half of the time, if that is shorter) for those who
        check our health to turn to others: who has only just come back may not be known to Envoy yet.
        """
        leaving_s = min(_LEAVING_S, grace_s / 2)
        self.health.close()
        await asyncio.sleep(leaving_s)
        self.eds.close()
        await self.server.stop(grace_s - leaving_s)

    async def wait(self) -> None:
        """Until it has stopped."""
        await self.server.wait_for_termination()


async def start_grpc_server(
    address: str,
    *,
    ext_proc: ExtProcService,
    access_log: AccessLogService,
    health: HealthService,
    eds: EdsService,
    max_body_bytes: int,
    max_streams: int = 10_000,
    tls: TlsFiles | None = None,
    shared: str | None = None,
) -> GrpcServer:
    """Listen on `address` (`host:port`; port 0 takes a free one) and serve, in plain text unless `tls` says.

    One connection may have `max_streams` streams. Messages may be twice as long as a body: one over the
    limit, but not absurdly, then gets a clean 413 from us instead of a gRPC error. `shared`: another address
    to listen on, which other processes of ours listen on too.

    Raises:
        AddressError: `address` is not `host:port`. (gRPC itself would take a default port.)
        TlsError: the files of `tls` cannot be used.
        WarmrouteError: the address cannot be bound.
    """
    parse_address(address, lowest_port=0)
    credentials = None if tls is None else server_credentials(tls)
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", min(2 * max_body_bytes + (1 << 20), (1 << 31) - 1)),
            # A second server on the same port is a mistake, not a way to share load.
            ("grpc.so_reuseport", 0 if shared is None else 1),
            ("grpc.max_concurrent_streams", max_streams),
            # Envoy's keepalive pings on idle connections must not end in GOAWAY, which cuts all streams. More
            # than ten a second are no keepalive.
            ("grpc.http2.min_ping_interval_without_data_ms", 100),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_ping_strikes", 20),
        ]
    )
    server.add_generic_rpc_handlers(_handlers(ext_proc, access_log, health, eds))

    def bind(where: str) -> int:
        try:
            if credentials is None:
                return server.add_insecure_port(where)
            return server.add_secure_port(where, credentials)
        except RuntimeError as error:
            raise cannot_listen(where) from error

    *_, port = await bind_all(server, (address,) if shared is None else (shared, address), bind)
    await server.start()
    return GrpcServer(server, health, eds, f"{address.rpartition(':')[0]}:{port}", port)


def _handlers(
    ext_proc: ExtProcService, access_log: AccessLogService, health: HealthService, eds: EdsService
) -> "tuple[grpc.GenericRpcHandler[Any, Any], ...]":
    named = grpc.method_handlers_generic_handler
    return (
        named(
            EXTERNAL_PROCESSOR_SERVICE,
            {
                "Process": grpc.stream_stream_rpc_method_handler(
                    ext_proc.process,
                    ext_proc_pb2.ProcessingRequest.FromString,
                    None,  # it writes bytes
                )
            },
        ),
        named(
            ACCESS_LOG_SERVICE,
            {
                "StreamAccessLogs": grpc.stream_unary_rpc_method_handler(
                    access_log.stream_access_logs,
                    access_log_pb2.StreamAccessLogsMessage.FromString,
                    access_log_pb2.StreamAccessLogsResponse.SerializeToString,
                )
            },
        ),
        named(
            EDS_SERVICE,
            {
                "StreamEndpoints": grpc.stream_stream_rpc_method_handler(
                    eds.stream_endpoints,
                    discovery_pb2.DiscoveryRequest.FromString,
                    discovery_pb2.DiscoveryResponse.SerializeToString,
                ),
                "DeltaEndpoints": grpc.stream_stream_rpc_method_handler(
                    eds.delta_endpoints,
                    discovery_pb2.DeltaDiscoveryRequest.FromString,
                    discovery_pb2.DeltaDiscoveryResponse.SerializeToString,
                ),
            },
        ),
        named(
            HEALTH_SERVICE,
            {
                "Check": grpc.unary_unary_rpc_method_handler(
                    health.check,
                    health_pb2.HealthCheckRequest.FromString,
                    health_pb2.HealthCheckResponse.SerializeToString,
                ),
                "Watch": grpc.unary_stream_rpc_method_handler(
                    health.watch,
                    health_pb2.HealthCheckRequest.FromString,
                    health_pb2.HealthCheckResponse.SerializeToString,
                ),
            },
        ),
    )
