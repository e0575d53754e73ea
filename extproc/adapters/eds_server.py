"""Serves Envoy its worker cluster: endpoint discovery over gRPC, so that workers are configured once.

`EdsService.set` is told what is known; every open stream gets what it is due at once. Which list that is, and
when none may be sent, is decided by `protocol.endpoint_discovery`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from extproc.pb import discovery_pb2 as pb
from extproc.protocol.addresses import parse_address
from extproc.protocol.endpoint_discovery import (
    ASSIGNMENT_TYPE,
    OVERPROVISIONING,
    Assignment,
    Delta,
    Health,
    Push,
    Snapshot,
    StateOfTheWorld,
)

_MOST_COMPLAINTS = 100  # names come from outside
_HEALTH = {
    Health.HEALTHY: pb.HealthStatus.HEALTHY,
    Health.DEGRADED: pb.HealthStatus.DEGRADED,
    Health.UNHEALTHY: pb.HealthStatus.UNHEALTHY,
}

Report = Callable[[str], None]
SotwContext = grpc.aio.ServicerContext[pb.DiscoveryRequest, pb.DiscoveryResponse]
DeltaContext = grpc.aio.ServicerContext[pb.DeltaDiscoveryRequest, pb.DeltaDiscoveryResponse]


@dataclass(slots=True)
class EdsCounters:
    """What happened since the start. All but `open_streams` only grow."""

    open_streams: int = 0
    pushes: int = 0
    refused: int = 0  # lists that an Envoy did not take


class _Subscription(Protocol):
    @property
    def names(self) -> tuple[str, ...]: ...

    def due(self, snapshot: Snapshot) -> Push | None: ...


class EdsService:
    """The servicer. One event loop.

    Args:
        report: told, in one line, of what an operator should know.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._snapshot = Snapshot()
        self._wakers: set[asyncio.Event] = set()
        self._closing = False
        self._told: dict[str, None] = {}  # complaints made, so that each is made once
        self.counters = EdsCounters()

    def set(self, snapshot: Snapshot) -> None:
        """Make this what is known; streams that are due a list get it. Call it on the event loop's thread."""
        if snapshot != self._snapshot:
            self._snapshot = snapshot
            self._wake()

    def close(self) -> None:
        """End all streams, so that they do not hold up a shutdown. Envoy keeps its list."""
        self._closing = True
        self._wake()

    async def stream_endpoints(
        self, requests: AsyncIterator[pb.DiscoveryRequest], context: SotwContext
    ) -> None:
        """`EndpointDiscoveryService/StreamEndpoints`: the state-of-the-world variant."""
        subscription = StateOfTheWorld()

        def take(request: pb.DiscoveryRequest) -> None:
            fresh = subscription.receive(request.resource_names, request.version_info, request.response_nonce)
            if fresh and request.HasField("error_detail"):
                self._refused(request.error_detail)

        await self._serve(requests, context, subscription, take, _whole)

    async def delta_endpoints(
        self, requests: AsyncIterator[pb.DeltaDiscoveryRequest], context: DeltaContext
    ) -> None:
        """`EndpointDiscoveryService/DeltaEndpoints`: the incremental variant."""
        subscription = Delta()

        def take(request: pb.DeltaDiscoveryRequest) -> None:
            subscription.receive(
                request.resource_names_subscribe,
                request.resource_names_unsubscribe,
                request.initial_resource_versions,
            )
            if request.HasField("error_detail"):
                self._refused(request.error_detail)

        await self._serve(requests, context, subscription, take, _changes)

    async def _serve(
        self,
        requests: AsyncIterator[Any],
        context: "grpc.aio.ServicerContext[Any, Any]",
        subscription: _Subscription,
        take: Callable[[Any], None],
        encode: Callable[[Push], Any],
    ) -> None:
        wake = asyncio.Event()

        async def read() -> None:
            try:
                async for request in requests:
                    take(request)
                    self._complain_of_names(subscription.names)
                    wake.set()
            finally:
                wake.set()

        reader = asyncio.create_task(read(), name="read endpoint discovery requests")
        self._wakers.add(wake)
        self.counters.open_streams += 1
        try:
            while not (self._closing or reader.done()):
                wake.clear()
                push = subscription.due(self._snapshot)
                if push is not None:
                    self.counters.pushes += 1
                    await context.write(encode(push))
                await wake.wait()
        finally:
            self.counters.open_streams -= 1
            self._wakers.discard(wake)
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await reader

    def _wake(self) -> None:
        for waker in self._wakers:
            waker.set()

    def _refused(self, error: pb.Status) -> None:
        self.counters.refused += 1
        self._say(f"Envoy refuses the list of workers: {error.message}; it keeps the list it has")

    def _complain_of_names(self, names: tuple[str, ...]) -> None:
        known = self._snapshot.assignments
        for name in names:
            if known and name not in known:
                self._say(
                    f"an Envoy asks for the workers of {name!r}, which there are none of: set the "
                    f"`service_name` of its cluster to one of {', '.join(known)}"
                )

    def _say(self, complaint: str) -> None:
        if complaint not in self._told and len(self._told) < _MOST_COMPLAINTS:
            self._told[complaint] = None
            self._report(complaint)


def _whole(push: Push) -> pb.DiscoveryResponse:
    response = pb.DiscoveryResponse(version_info=push.version, type_url=ASSIGNMENT_TYPE, nonce=push.nonce)
    for name, assignment in push.assignments.items():
        response.resources.add(type_url=ASSIGNMENT_TYPE, value=_encoded(name, assignment))
    return response


def _changes(push: Push) -> pb.DeltaDiscoveryResponse:
    response = pb.DeltaDiscoveryResponse(
        system_version_info=push.version,
        type_url=ASSIGNMENT_TYPE,
        nonce=push.nonce,
        removed_resources=push.removed,
    )
    for name, assignment in push.assignments.items():
        resource = response.resources.add(name=name, version=assignment.version)
        resource.resource.type_url = ASSIGNMENT_TYPE
        resource.resource.value = _encoded(name, assignment)
    return response


def _encoded(name: str, assignment: Assignment) -> bytes:
    message = pb.ClusterLoadAssignment(cluster_name=name)
    message.policy.overprovisioning_factor.value = OVERPROVISIONING
    if assignment.workers:
        locality = message.endpoints.add()
        for worker in assignment.workers:
            address = parse_address(worker.endpoint)
            entry = locality.lb_endpoints.add(health_status=_HEALTH[worker.health])
            entry.endpoint.address.socket_address.address = address.host
            entry.endpoint.address.socket_address.port_value = address.port
    return message.SerializeToString(deterministic=True)
