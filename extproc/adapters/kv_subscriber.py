"""KV events over ZMQ: all subscriptions, and which publishers are heard on which (one each: `kv_stream`).

Direction: vLLM binds its PUB socket when its endpoint has a `*` (we connect), and connects otherwise (we
bind; several engines may then share one socket of ours, told apart by the topic `kv@<endpoint>@<model>`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from extproc.adapters.kv_stream import (
    NUMBER_BYTES,
    RECEIVE_LIMIT,
    SLICE_S,
    KvCallbacks,
    KvSource,
    KvStream,
    KvStreamStats,
    OnEvents,
    OnHeard,
    OnReset,
    OnSuspend,
    OnTrust,
    spawn,
)
from extproc.adapters.turns import Turns
from extproc.adapters.zmq_messages import ZmqMessages
from extproc.core.types import WorkerId
from extproc.protocol.kv_sequence_types import (
    SequenceLimits,
    SequenceMemory,
)

_DEFAULT_LIMITS = SequenceLimits()

Recall = Callable[[WorkerId], SequenceMemory | None]


class KvSubscriber:
    """All subscriptions. Callbacks run on the event loop and must not block.

    Args:
        on_events: events of a worker, in order.
        on_reset: forget what events have said about a worker.
        on_trust: whether the events of a worker are complete, and why that changed.
        clock: monotonic seconds.
        limits: timeouts and buffer sizes.
        on_suspend: whether what events have said about a worker counts for nothing at the moment.
        on_heard: a message has come that cannot be applied yet: what was missed before it is being asked for.
        recall: asked when a publisher that can replay is followed: where its events stood when what is known
            of it was taken over from another router; None: nothing is known.
    """

    def __init__(
        self,
        on_events: OnEvents,
        on_reset: OnReset,
        on_trust: OnTrust,
        clock: Callable[[], float],
        limits: SequenceLimits = _DEFAULT_LIMITS,
        on_suspend: OnSuspend = lambda _worker, _suspended: None,
        on_heard: OnHeard = lambda _worker: None,
        recall: Recall = lambda _worker: None,
    ) -> None:
        self._recall = recall
        self._callbacks = KvCallbacks(on_events, on_reset, on_trust, on_suspend, on_heard)
        self._clock = clock
        self._turns = Turns(clock, SLICE_S)
        self._limits = limits
        self._context = zmq.asyncio.Context()
        self._subscriptions: dict[KvSource | str, _Subscription] = {}
        self._refused: dict[KvSource | str, tuple[list[KvSource], str]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def unreadable(self) -> int:
        """Messages so far that are not KV messages, or whose topic fits none of several engines."""
        return sum(subscription.unreadable for subscription in self._subscriptions.values())

    @property
    def refused(self) -> dict[str, str]:
        """Addresses that sources are wanted at and that cannot be used, each with why."""
        return {group[0].endpoint: why for group, why in self._refused.values()}

    def streams(self) -> dict[WorkerId, KvStreamStats]:
        """How the stream of each worker that is followed is doing; ranks of one publisher share one."""
        return {
            worker: stats
            for subscription in self._subscriptions.values()
            for worker, stats in subscription.streams()
        }

    def set_sources(self, sources: Iterable[KvSource], anew: Collection[WorkerId] = ()) -> None:
        """Follow exactly these sources: new ones are started, missing ones stopped, the others kept.

        What those that are stopped have said is forgotten. Those of the workers in `anew` are stopped, and
        started again.

        Raises:
            OSError: an address is malformed or cannot be listened on (`refused`); the other sources are
                followed.
        """
        wanted: dict[KvSource | str, list[KvSource]] = {}
        for source in sources:
            wanted.setdefault(source.endpoint if source.bind else source, []).append(source)
        # A socket that engines connect to is kept: its address is free some time after it is closed.
        over = [
            key
            for key in self._subscriptions
            if key not in wanted or (isinstance(key, KvSource) and key.worker in anew)
        ]
        for key in over:
            ended = self._subscriptions.pop(key)
            ended.set_sources(())
            task = asyncio.create_task(ended.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self._refused.clear()
        for key, group in wanted.items():
            self._follow(key, group, anew)
        if self._refused:
            failed = "; ".join(f"{endpoint}: {why}" for endpoint, why in self.refused.items())
            raise OSError(f"KV event subscriptions failed: {failed}")

    def retry(self) -> list[str]:
        """Try the refused addresses again: whoever held one may be gone. Those that are used now."""
        before = self.refused
        for key, (group, _) in list(self._refused.items()):
            self._follow(key, group)
        return [endpoint for endpoint in before if endpoint not in self.refused]

    def _follow(self, key: KvSource | str, group: list[KvSource], anew: Collection[WorkerId] = ()) -> None:
        if key not in self._subscriptions:
            try:
                self._subscriptions[key] = _Subscription(
                    self._context,
                    group[0],
                    self._callbacks,
                    self._clock,
                    self._turns,
                    self._limits,
                    self._recall,
                )
            except zmq.ZMQError as error:
                self._refused[key] = group, zmq.strerror(error.errno or 0)
                return
        self._refused.pop(key, None)
        self._subscriptions[key].set_sources(group, anew)

    async def remember(self, take: Callable[[WorkerId, SequenceMemory], None]) -> AsyncIterator[None]:
        """Call `take` for each publisher that can replay, while all it sent up to there is applied.

        Yields after each. Publishers that speak for several ranks are left out.
        """
        for subscription in list(self._subscriptions.values()):
            for publisher in subscription.publishers():
                await publisher.remember(take)
                yield

    async def close(self) -> None:
        """Stop everything."""
        self._closing.update(asyncio.create_task(each.close()) for each in self._subscriptions.values())
        self._subscriptions.clear()
        self._refused.clear()
        await asyncio.gather(*self._closing)
        self._context.destroy(linger=0)


class _Subscription:
    """One SUB socket, and the publishers heard on it."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        source: KvSource,
        callbacks: KvCallbacks,
        clock: Callable[[], float],
        turns: Turns,
        limits: SequenceLimits,
        recall: Recall,
    ) -> None:
        self._turns = turns
        self._context = context
        self._recall = recall
        self._callbacks = callbacks
        self._clock = clock
        self._limits = limits
        self._bind = source.bind
        self._publishers: dict[WorkerId, KvStream] = {}
        self.unreadable = 0
        self._topics: set[str] = set()
        self._socket = context.socket(zmq.SUB)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVHWM, RECEIVE_LIMIT)
        self._socket.set(zmq.IPV6, 1)
        self._socket.set(zmq.TCP_KEEPALIVE, 1)
        watched = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor = self._socket.get_monitor_socket(watched)
        try:
            if source.bind:
                self._socket.bind(source.endpoint)
            else:
                self._socket.connect(source.endpoint)
        except zmq.ZMQError:
            self._close_sockets()
            raise
        self._messages = ZmqMessages(zmq.Socket.shadow(self._socket.underlying), clock, SLICE_S)
        self._tasks = [spawn(self._receive()), spawn(self._watch())]
        self._ending: list[asyncio.Task[None]] = []

    def set_sources(self, sources: Sequence[KvSource], anew: Collection[WorkerId] = ()) -> None:
        wanted = {source.worker: source for source in sources}
        for worker, publisher in list(self._publishers.items()):
            if worker in anew or wanted.get(worker) != publisher.source:
                del self._publishers[worker]
                self._ending = [task for task in self._ending if not task.done()] + publisher.stop()
                publisher.forget()
        topics = {source.topic for source in sources}
        for topic in topics - self._topics:
            self._socket.subscribe(topic)
        for topic in self._topics - topics:
            self._socket.unsubscribe(topic)
        self._topics = topics
        for worker, source in wanted.items():
            if worker not in self._publishers:
                memory = None if source.replay_endpoint is None else self._recall(worker)
                self._publishers[worker] = KvStream(
                    self._context,
                    source,
                    self._callbacks,
                    self._clock,
                    self._turns,
                    self._limits,
                    memory,
                )

    def publishers(self) -> list[KvStream]:
        return [one for one in self._publishers.values() if one.source.replay_endpoint is not None]

    def streams(self) -> Iterator[tuple[WorkerId, KvStreamStats]]:
        for publisher in self._publishers.values():
            for worker in publisher.workers:
                yield worker, publisher.stats

    async def close(self) -> None:
        tasks = self._tasks + self._ending
        for publisher in self._publishers.values():
            tasks += publisher.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._messages.close()
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    async def _receive(self) -> None:
        while True:
            frames = await self._messages.next()
            if len(frames) < 3 or len(frames[-2]) != NUMBER_BYTES:
                self.unreadable += 1
                continue
            publisher = self._publisher(frames[0])
            if publisher is None:
                self.unreadable += 1
                continue
            await publisher.live(frames[-2], frames[-1])

    def _publisher(self, topic: bytes) -> KvStream | None:
        if len(self._publishers) == 1:
            return next(iter(self._publishers.values()))
        name = topic.decode("utf-8", "replace")
        parts = name.split("@")
        for worker, publisher in self._publishers.items():
            if publisher.source.topic == name or (
                len(parts) > 1 and parts[1] in {worker.endpoint, str(worker)}
            ):
                return publisher
        return None

    async def _watch(self) -> None:
        """Connections made and lost. On a shared socket nobody knows whose: all are asked."""
        while True:
            event = await recv_monitor_message(self._monitor)
            for publisher in list(self._publishers.values()):
                if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    await publisher.connected()
                elif not self._bind:
                    await publisher.disconnected()
