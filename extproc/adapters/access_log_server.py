"""Envoy's gRPC access log: how each request ended, told to the routing service.

Envoy keeps one stream per worker thread open for ever and never waits for an answer. Entries that are sent
while no stream is open are lost without a sound; `access_log_streams` lets the application know.
"""

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

import grpc
from google.protobuf.duration_pb2 import Duration

from extproc.adapters.deferred import Deferred
from extproc.adapters.ext_proc_codec import plain
from extproc.adapters.routing import RoutingService
from extproc.pb import access_log_pb2 as pb
from extproc.pb import envoy_common_pb2 as common
from extproc.protocol.access_log import USAGE_NAMESPACE, AccessLogEntry, Progress, left_early, read_entry
from extproc.protocol.endpoint_picker import TICKET_KEY, TICKET_NAMESPACE

_log = logging.getLogger("warmroute.access_log")

Context = grpc.aio.ServicerContext[pb.StreamAccessLogsMessage, pb.StreamAccessLogsResponse]


@dataclass(slots=True)
class AccessLogCounters:
    """What happened since the start. All but `open_streams` only grow."""

    open_streams: int = 0
    entries: int = 0
    foreign: int = 0  # entries without a ticket: about requests we did not place, or that left before it
    errors: int = 0


class AccessLogService:
    """The servicer. One event loop; `counters` may be read at any time.

    Args:
        routing: is told.
        later: puts that off, so that many ends at once do not hold up a decision; None: it is told at once.
    """

    def __init__(self, routing: RoutingService, later: Deferred | None = None) -> None:
        self._routing = routing
        self._later = later
        self.counters = AccessLogCounters()

    async def stream_access_logs(
        self, requests: AsyncIterator[pb.StreamAccessLogsMessage], _context: Context
    ) -> pb.StreamAccessLogsResponse:
        """`AccessLogService/StreamAccessLogs`: one call per Envoy worker thread."""
        self._opened(1)
        try:
            async for message in requests:
                for entry in message.http_logs.log_entry:
                    if self._later is None:
                        self._take(entry)
                    else:
                        self._later.add(partial(self._take, entry))
        finally:
            self._opened(-1)
        return pb.StreamAccessLogsResponse()

    def _opened(self, change: int) -> None:
        self.counters.open_streams += change
        self._routing.access_log_streams(self.counters.open_streams)

    def _take(self, entry: pb.HTTPAccessLogEntry) -> None:
        self.counters.entries += 1
        try:
            seen = view(entry)
            found = read_entry(seen)
            if found is None:
                self.counters.foreign += 1
                left = left_early(seen)
                if left is not None:
                    self._routing.left_early(*left)
                return
            lease_id, news = found
            if not isinstance(news, Progress):
                self._routing.completed(lease_id, news)
            elif news.first_body_ms is not None or news.response_bytes > 0:
                self._routing.first_body(lease_id)
        except Exception:
            self.counters.errors += 1
            _log.exception("an access log entry was not taken")


_NO_FLAGS: frozenset[str] = frozenset()


def view(entry: pb.HTTPAccessLogEntry) -> AccessLogEntry:
    """An entry as plain values."""
    properties, response = entry.common_properties, entry.response
    metadata = properties.metadata.filter_metadata
    ticket = (
        metadata[TICKET_NAMESPACE].fields[TICKET_KEY].string_value if TICKET_NAMESPACE in metadata else ""
    )
    flags = properties.response_flags.ListFields()
    return AccessLogEntry(
        ticket=ticket or None,
        log_type=properties.access_log_type,
        intermediate=properties.intermediate_log_entry,
        flags=frozenset([flag.name for flag, _ in flags]) if flags else _NO_FLAGS,
        status=response.response_code.value if response.HasField("response_code") else None,
        details=response.response_code_details,
        upstream=address_text(properties.upstream_remote_address),
        attempts=properties.upstream_request_attempt_count or None,
        duration_ms=_milliseconds(properties.duration) if properties.HasField("duration") else None,
        response_bytes=response.response_body_bytes,
        tags=dict(properties.custom_tags),
        usage=plain(metadata[USAGE_NAMESPACE]) if USAGE_NAMESPACE in metadata else {},
        request_id=entry.request.request_id,
    )


def address_text(address: common.Address) -> str | None:
    """`ip:port`, or None if there is no such address."""
    if address.WhichOneof("address") != "socket_address":
        return None
    socket = address.socket_address
    if not socket.address or not socket.port_value:
        return None
    host = f"[{socket.address}]" if ":" in socket.address else socket.address
    return f"{host}:{socket.port_value}"


def _milliseconds(duration: Duration) -> float:
    return duration.seconds * 1000 + duration.nanos / 1e6
