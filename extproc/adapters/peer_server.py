"""What a replica answers to the others: `PeerExchange` of `proto/peer_exchange.proto`.

Each listener is served from the state as it is, never from a queue: a slow one hears less often, and one that
reads nothing costs one message. Connections that are dead are found by pings.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc

from extproc.adapters.grpc_ports import bind_all
from extproc.adapters.peer_codec import Signal, decode_signals, encode_news
from extproc.adapters.peer_security import PeerSecurity
from extproc.core.errors import ProtocolError, WarmrouteError
from extproc.core.peer_teller import LoadTeller
from extproc.pb import peer_exchange_pb2 as pb

SERVICE = "warmroute.peers.v1.PeerExchange"
MAX_LISTENERS = 256
MAX_INDEX_READERS = 32
MAX_MESSAGE_BYTES = 4 << 20
_PING_MS = 5_000
_HEARTBEAT_S = 0.5
_SNAPSHOT_S = 1.0

WatchContext = grpc.aio.ServicerContext[pb.WatchRequest, pb.Update]
DeliverContext = grpc.aio.ServicerContext[pb.Delivery, pb.DeliveryReply]
IndexContext = grpc.aio.ServicerContext[pb.IndexRequest, pb.IndexPart]


@dataclass(slots=True)
class PeerServerCounters:
    """What happened since the start. All but `listeners` only grow."""

    listeners: int = 0  # now
    indexes: int = 0  # that were told
    refused: int = 0  # calls: without the token, one too many, or of no form
    implausible: int = 0  # signals that were left out


class PeerService:
    """The servicer. One event loop.

    Args:
        tell: looks at our loads and says what there is to tell.
        owner: begins all our tickets.
        access_log_open: whether Envoy's access log reaches us.
        take: takes what others deliver about requests of ours.
        index: pieces of what we know of the engines' caches.
        security: who may speak to us.
        interval_s: how often listeners are told.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        tell: Callable[[], LoadTeller],
        *,
        owner: str,
        access_log_open: Callable[[], bool],
        take: Callable[[Iterable[Signal]], None],
        index: Callable[[], AsyncGenerator[bytes, None]],
        security: PeerSecurity,
        interval_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._tell = tell
        self._owner = owner
        self._access_log_open = access_log_open
        self._take = take
        self._index = index
        self._security = security
        self._interval_s = interval_s
        self._clock = clock
        self._looked_at = float("-inf")
        self._teller: LoadTeller | None = None
        self._readers = 0
        self._closing = asyncio.Event()
        self.counters = PeerServerCounters()

    def close(self) -> None:
        """End all listening, so that it does not hold up a shutdown."""
        self._closing.set()

    async def watch(self, _request: pb.WatchRequest, context: WatchContext) -> None:
        """`PeerExchange/Watch`."""
        await self._admit(context)
        if self.counters.listeners >= MAX_LISTENERS:
            await self._refuse(
                context, grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_LISTENERS} replicas listen already"
            )
        self.counters.listeners += 1
        try:
            await self._serve(context)
        finally:
            self.counters.listeners -= 1

    async def deliver(self, delivery: pb.Delivery, context: DeliverContext) -> pb.DeliveryReply:
        """`PeerExchange/Deliver`."""
        await self._admit(context)
        try:
            signals, implausible = decode_signals(delivery)
        except ProtocolError as error:
            await self._refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        self.counters.implausible += implausible
        self._take(signals)
        return pb.DeliveryReply(taken=len(signals))

    async def index(self, _request: pb.IndexRequest, context: IndexContext) -> None:
        """`PeerExchange/Index`."""
        await self._admit(context)
        if self._readers >= MAX_INDEX_READERS:
            await self._refuse(
                context,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{MAX_INDEX_READERS} replicas read the index already",
            )
        self._readers += 1
        self.counters.indexes += 1
        try:
            async with contextlib.aclosing(self._index()) as pieces:
                async for content in pieces:
                    await context.write(pb.IndexPart(content=content))
        finally:
            self._readers -= 1

    async def _serve(self, context: WatchContext) -> None:
        heard, whole_at, told_at, told_open = 0, float("-inf"), float("-inf"), False
        while not self._closing.is_set():
            now = self._clock()
            teller, is_open = self._look(now), self._access_log_open()
            whole = now - whole_at >= _SNAPSHOT_S
            delta = None if heard == 0 else teller.since(heard)
            if delta is not None and (
                delta.loads or delta.sent or is_open != told_open or now - told_at >= _HEARTBEAT_S
            ):
                await context.write(encode_news(delta, self._owner, access_log_open=is_open))
                told_at, told_open = now, is_open
            heard = teller.number
            if whole:
                snapshot = encode_news(teller.snapshot(), self._owner, access_log_open=is_open)
                await context.write(snapshot)
                whole_at = told_at = now
                told_open = is_open
            await self._pause()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self._interval_s):
                await self._closing.wait()
        except TimeoutError:
            return

    def _look(self, now: float) -> LoadTeller:
        """One look serves all listeners of one interval."""
        if self._teller is None or now - self._looked_at >= self._interval_s / 2:
            self._teller, self._looked_at = self._tell(), now
        return self._teller

    async def _admit(self, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        if not self._security.admits(context.invocation_metadata()):
            await self._refuse(
                context, grpc.StatusCode.UNAUTHENTICATED, "the token of the peers is another one"
            )

    async def _refuse(
        self, context: "grpc.aio.ServicerContext[Any, Any]", code: grpc.StatusCode, why: str
    ) -> NoReturn:
        self.counters.refused += 1
        await context.abort(code, why)


@dataclass(frozen=True, slots=True)
class PeerServer:
    """A running server; `addresses` is where it listens."""

    server: grpc.aio.Server
    service: PeerService
    addresses: tuple[str, ...]

    async def stop(self) -> None:
        """Stop at once: nobody waits for us."""
        self.service.close()
        await self.server.stop(0.2)


async def start_peer_server(
    addresses: Iterable[str], service: PeerService, security: PeerSecurity
) -> PeerServer:
    """Listen on all `addresses` (`host:port`, or `unix:path`), or on none.

    Raises:
        TlsError: the files of the configuration cannot be used.
        WarmrouteError: an address cannot be had.
    """
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_concurrent_streams", 1024),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", _PING_MS),
            ("grpc.keepalive_timeout_ms", _PING_MS),
        ]
    )
    server.add_generic_rpc_handlers((_handler(service),))

    def bind(address: str) -> int:
        try:
            return security.listen(server, address)
        except RuntimeError as error:
            raise WarmrouteError(f"peers: cannot listen on {address}: is it in use, or not ours?") from error

    wanted = tuple(addresses)
    ports = await bind_all(server, wanted, bind)
    await server.start()
    bound = (
        address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
        for address, port in zip(wanted, ports, strict=True)
    )
    return PeerServer(server, service, tuple(bound))


def _handler(service: PeerService) -> "grpc.GenericRpcHandler[Any, Any]":
    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "Watch": grpc.unary_stream_rpc_method_handler(
                service.watch, pb.WatchRequest.FromString, pb.Update.SerializeToString
            ),
            "Deliver": grpc.unary_unary_rpc_method_handler(
                service.deliver, pb.Delivery.FromString, pb.DeliveryReply.SerializeToString
            ),
            "Index": grpc.unary_stream_rpc_method_handler(
                service.index, pb.IndexRequest.FromString, pb.IndexPart.SerializeToString
            ),
        },
    )
