"""Our end of the connection to one other replica: what it tells, and what we tell it of its requests.

The link comes back by itself after any failure, with pauses that grow to `_MAX_PAUSE_S`. Signals wait in a
queue of `MAX_WAITING`, the oldest leave first when it is full; each is sent until it is taken, or too old.
One that cannot be told costs only itself.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

import grpc

from extproc.adapters.peer_codec import Signal, decode_news, encode_signal
from extproc.adapters.peer_security import PeerSecurity
from extproc.adapters.peer_server import MAX_MESSAGE_BYTES, SERVICE
from extproc.core.errors import ProtocolError, WarmrouteError
from extproc.core.peer_loads import PeerNews
from extproc.pb import peer_exchange_pb2 as pb

_log = logging.getLogger("warmroute.peers")

MAX_WAITING = 10_000
_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 2.0
_SILENCE_S = 5.0  # a replica tells something every half second
_DELIVERY_S = 2.0
_SIGNAL_LIFE_S = 30.0
_CANCEL_S = 0.5
# Of one message: well below what is received, and reading it must not hold up the other's event loop.
_DELIVERY_BYTES = 1 << 20
_DELIVERY_SIGNALS = 100
_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(slots=True)
class LinkCounters:
    """What happened since the start; all only grow."""

    updates: int = 0
    connects: int = 0
    dropped: int = 0  # signals that could not be delivered
    refused: int = 0  # messages that were not plausible

    def add(self, other: "LinkCounters") -> None:
        """Count what `other` has counted, too."""
        self.updates += other.updates
        self.connects += other.connects
        self.dropped += other.dropped
        self.refused += other.refused


class PeerLink:
    """The link to one address. `run` it as a task.

    Args:
        address: `host:port`, or `unix:path`.
        name: ours.
        security: what we show.
        take: takes what the other tells.
        clock: seconds, monotonic.

    Attributes:
        replica: its name, once it has told.
        owner: how all its tickets begin, likewise.
        access_log_open: whether Envoy's access log reaches it; False while it is not heard.
        connected: whether it is being heard.
        error: why not, last.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str,
        security: PeerSecurity,
        take: Callable[["PeerLink", PeerNews], None],
        clock: Callable[[], float],
    ) -> None:
        self.address = address
        self.replica = self.owner = ""
        self.access_log_open = self.connected = False
        self.error: str | None = None
        self.counters = LinkCounters()
        self._name = name
        self._security = security
        self._take = take
        self._clock = clock
        self._waiting: deque[tuple[float, Signal]] = deque()
        self._news = asyncio.Event()

    def send(self, signal: Signal) -> None:
        """Tell the other replica about one of its requests, soon."""
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            self.counters.dropped += 1
        self._waiting.append((self._clock(), signal))
        self._news.set()

    @property
    def waiting(self) -> int:
        """Signals that are not delivered yet."""
        return len(self._waiting)

    async def run(self) -> None:
        """Listen and deliver until cancelled."""
        pause = _FIRST_PAUSE_S
        while True:
            heard = self.counters.updates
            try:
                async with self._security.channel(self.address, _OPTIONS) as channel:
                    await self._both(channel)
            except (grpc.aio.AioRpcError, OSError, WarmrouteError) as error:
                self.error = _words(error)
            except Exception as error:
                self.error = str(error)
                _log.exception("the link to %s failed", self.address)
            self.connected = self.access_log_open = False
            pause = _FIRST_PAUSE_S if self.counters.updates > heard else min(_MAX_PAUSE_S, 2 * pause)
            await asyncio.sleep(pause)

    async def _both(self, channel: grpc.aio.Channel) -> None:
        both = [asyncio.create_task(run(channel)) for run in (self._listen, self._deliver)]
        try:
            ended, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for one in ended:
                one.result()
        finally:
            await cancelled(both)
            for one in both:
                if not one.cancelled():
                    one.exception()  # the first was raised; nobody has to hear of the other

    async def _listen(self, channel: grpc.aio.Channel) -> None:
        watch = channel.unary_stream(
            f"/{SERVICE}/Watch", pb.WatchRequest.SerializeToString, pb.Update.FromString
        )
        call = watch(pb.WatchRequest(replica=self._name), metadata=self._security.metadata())
        try:
            while True:
                async with asyncio.timeout(_SILENCE_S):
                    update = await call.read()
                if not isinstance(update, pb.Update):
                    raise WarmrouteError(f"{self.address} ended the exchange")
                self._took(update)
        except TimeoutError:
            raise WarmrouteError(f"{self.address} was silent for {_SILENCE_S:g} s") from None
        finally:
            call.cancel()

    def _took(self, update: pb.Update) -> None:
        try:
            news = decode_news(update)
        except ProtocolError as error:
            self.counters.refused += 1
            raise WarmrouteError(f"{self.address}: {error}") from error
        self.counters.updates += 1
        if not self.connected:
            self.counters.connects += 1
            self.connected, self.error = True, None
        self.replica, self.owner = news.replica, update.owner
        self.access_log_open = update.access_log_open
        self._take(self, news)

    async def _deliver(self, channel: grpc.aio.Channel) -> None:
        deliver = channel.unary_unary(
            f"/{SERVICE}/Deliver", pb.Delivery.SerializeToString, pb.DeliveryReply.FromString
        )
        while True:
            self._drop_old()
            if not self._waiting:
                self._news.clear()
                await self._news.wait()
            batch, message = self._next_batch()
            if not batch:
                continue
            try:
                await deliver(message, timeout=_DELIVERY_S, metadata=self._security.metadata())
                batch.clear()
                if self.connected:
                    self.error = None
            except grpc.aio.AioRpcError as error:
                self.error = _words(error)
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    self.counters.dropped += len(batch)
                    batch.clear()
            finally:
                # A request ends once, however often that is told: what may have arrived is told again.
                self._waiting.extendleft(reversed(batch))
            if batch:
                await asyncio.sleep(_FIRST_PAUSE_S)

    def _next_batch(self) -> tuple[list[tuple[float, Signal]], pb.Delivery]:
        """The oldest signals that wait, and the message that tells them; they wait no longer."""
        batch: list[tuple[float, Signal]] = []
        message, size = pb.Delivery(replica=self._name), 0
        while self._waiting and len(batch) < _DELIVERY_SIGNALS and size < _DELIVERY_BYTES:
            entry = self._waiting.popleft()
            try:
                signal = encode_signal(entry[1])
            except ProtocolError as error:
                self.counters.dropped += 1
                _log.warning("%s: %s", self.address, error)
                continue
            batch.append(entry)
            message.signals.append(signal)
            size += signal.ByteSize()
        return batch, message

    def _drop_old(self) -> None:
        oldest = self._clock() - _SIGNAL_LIFE_S
        while self._waiting and self._waiting[0][0] < oldest:
            self._waiting.popleft()
            self.counters.dropped += 1


async def cancelled(tasks: Iterable["asyncio.Task[None]"]) -> None:
    """Cancel tasks until they have ended: gRPC may swallow a cancellation that comes at its own end."""
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(
            left, timeout=_CANCEL_S
        )  # unlike awaiting them: our own end gets through


async def fetch_index(
    address: str, name: str, security: PeerSecurity, timeout_s: float
) -> AsyncIterator[bytes]:
    """Pieces of what the replica at `address` knows of the engines' caches.

    Raises:
        WarmrouteError: it does not tell, or not in time.
    """
    try:
        async with security.channel(address, _OPTIONS) as channel:
            index = channel.unary_stream(
                f"/{SERVICE}/Index", pb.IndexRequest.SerializeToString, pb.IndexPart.FromString
            )
            request = pb.IndexRequest(replica=name)
            async for part in index(request, timeout=timeout_s, metadata=security.metadata()):
                yield part.content
    except grpc.aio.AioRpcError as error:
        raise WarmrouteError(f"{address}: {_words(error)}") from error


def _words(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name.lower().replace('_', ' ')}: {error.details()}"
    return str(error)
