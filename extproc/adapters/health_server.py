"""grpc.health.v1: liveness is that we answer; readiness is what the application says.

Names (Endpoint Picker Protocol): `liveness`; `readiness`, the external processor's service name and the
empty name follow readiness.
"""

import asyncio

import grpc

from extproc.pb import health_pb2 as pb
from extproc.protocol.endpoint_picker import EXTERNAL_PROCESSOR_SERVICE

LIVENESS = "liveness"
READINESS = "readiness"
_READY_NAMES = frozenset({"", READINESS, EXTERNAL_PROCESSOR_SERVICE})

Context = grpc.aio.ServicerContext[pb.HealthCheckRequest, pb.HealthCheckResponse]
Status = pb.HealthCheckResponse.ServingStatus


class HealthService:
    """The servicer. Not ready until `set_ready(True)`."""

    def __init__(self) -> None:
        self._ready = False
        self._closing = False
        self._watchers: set[asyncio.Event] = set()

    @property
    def ready(self) -> bool:
        """What `set_ready` said last."""
        return self._ready

    def set_ready(self, ready: bool) -> None:
        """Change readiness, unless closed; watchers hear of it. Call it on the event loop's thread."""
        self._ready = ready and not self._closing
        self._wake()

    def close(self) -> None:
        """Never ready any more, and end all watches, so that they do not hold up a shutdown."""
        self._ready, self._closing = False, True
        self._wake()

    async def check(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        """`Health/Check`."""
        status = self._status(request.service)
        if status == pb.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service!r}")
        return pb.HealthCheckResponse(status=status)

    async def watch(self, request: pb.HealthCheckRequest, context: Context) -> None:
        """`Health/Watch`: the status now, and after each change."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        told: Status.ValueType | None = None
        try:
            while True:
                changed.clear()
                status, closing = self._status(request.service), self._closing
                if status != told:
                    await context.write(pb.HealthCheckResponse(status=status))
                    told = status
                if closing:
                    return
                await changed.wait()
        finally:
            self._watchers.discard(changed)

    def _wake(self) -> None:
        for watcher in self._watchers:
            watcher.set()

    def _status(self, service: str) -> Status.ValueType:
        if service == LIVENESS:
            return pb.HealthCheckResponse.SERVING
        if service not in _READY_NAMES:
            return pb.HealthCheckResponse.SERVICE_UNKNOWN
        return pb.HealthCheckResponse.SERVING if self._ready else pb.HealthCheckResponse.NOT_SERVING
