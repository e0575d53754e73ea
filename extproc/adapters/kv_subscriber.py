"""KV events over ZMQ: one subscription per engine, kept complete by `protocol.kv_sequence`.

Direction: vLLM binds its PUB socket when its endpoint has a `*` (we connect), and connects otherwise (we
bind; several engines may then share one socket of ours, told apart by the topic `kv@<endpoint>@<model>`).
The replay socket is always bound by the engine. Its answer is asked for on a fresh DEALER socket each time,
so that what is left of an older answer is thrown away with its socket.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from extproc.core.errors import ProtocolError
from extproc.core.types import AllBlocksCleared, KvEvent, WorkerId
from extproc.protocol.kv_events import decode
from extproc.protocol.kv_sequence import (
    Action,
    Apply,
    KvSequence,
    RequestReplay,
    Reset,
    Resume,
    SequenceLimits,
    Suspend,
    TrustChanged,
)

_RECEIVE_LIMIT = 100_000  # messages queued by ZMQ; beyond, they are dropped, seen as a gap, and asked again
_SLICE_S = 0.002  # work done at a stretch before the event loop may serve requests
_NUMBER = 8  # bytes of a message number
_DEFAULT_LIMITS = SequenceLimits()

OnEvents = Callable[[WorkerId, Sequence[KvEvent]], None]
OnReset = Callable[[WorkerId], None]
OnTrust = Callable[[WorkerId, bool, str], None]
OnSuspend = Callable[[WorkerId, bool], None]
_Callbacks = tuple[OnEvents, OnReset, OnTrust, OnSuspend]


@dataclass(frozen=True, slots=True)
class KvSource:
    """Where one engine's events come from.

    Attributes:
        worker: who they are about; a data-parallel rank named in a message overrides its rank.
        endpoint: ZMQ address to connect to, or with `bind` to listen on.
        replay_endpoint: ZMQ address to ask for missed messages; None: cannot be asked.
        bind: the engine connects to us.
        topic: subscribe to topics that begin so; "" for all.
    """

    worker: WorkerId
    endpoint: str
    replay_endpoint: str | None = None
    bind: bool = False
    topic: str = ""


@dataclass(slots=True)
class KvStreamStats:
    """How one engine's stream is doing. All but `lag_s` only grow.

    Attributes:
        messages: applied.
        gaps: holes found in the sequence.
        replays: questions to the replay endpoint.
        resets: times that all was forgotten and learned anew.
        lag_s: from making to applying of the last live message, by both machines' clocks; None: none yet.
    """

    messages: int = 0
    gaps: int = 0
    replays: int = 0
    resets: int = 0
    lag_s: float | None = None


def resolve_kv_endpoint(template: str, endpoint_host: str, dp_rank: int) -> str:
    """The ZMQ address of one rank, from the address in the engine's configuration.

    A wildcard host (`tcp://*:5557`) means the worker's own host (to listen, give "*" as host); rank r uses
    port + r, as in vLLM.

    Raises:
        ValueError: the address has no usable port, or its transport cannot have ranks.
    """
    scheme, _, rest = template.partition("://")
    if scheme == "inproc":
        return template if dp_rank == 0 else f"{template}_dp{dp_rank}"
    if scheme == "ipc":
        if dp_rank:
            raise ValueError(f"{template}: an ipc address cannot serve several ranks; use tcp://")
        return template
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not colon or not port.isdigit():
        raise ValueError(f"{template!r} is not a ZMQ address like tcp://*:5557")
    if int(port) == 0:
        raise ValueError(
            f"{template}: port 0 is chosen by the engine; give the real one (GET /kv_event_sources)"
        )
    if host in {"*", "0.0.0.0", "::", "[::]"}:
        host = endpoint_host
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"tcp://{host}:{int(port) + dp_rank}"


class KvSubscriber:
    """All subscriptions. Callbacks run on the event loop and must not block.

    Args:
        on_events: events of a worker, in order.
        on_reset: forget what events have said about a worker.
        on_trust: whether the events of a worker are complete, and why that changed.
        clock: monotonic seconds.
        limits: timeouts and buffer sizes.
        on_suspend: whether what events have said about a worker counts for nothing at the moment.
    """

    def __init__(
        self,
        on_events: OnEvents,
        on_reset: OnReset,
        on_trust: OnTrust,
        clock: Callable[[], float],
        limits: SequenceLimits = _DEFAULT_LIMITS,
        on_suspend: OnSuspend = lambda _worker, _suspended: None,
    ) -> None:
        self._callbacks = (on_events, on_reset, on_trust, on_suspend)
        self._clock = clock
        self._limits = limits
        self._context = zmq.asyncio.Context()
        self._subscriptions: dict[KvSource | str, _Subscription] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def unreadable(self) -> int:
        """Messages so far that are not KV messages, or whose topic fits none of several engines."""
        return sum(subscription.unreadable for subscription in self._subscriptions.values())

    def streams(self) -> dict[WorkerId, KvStreamStats]:
        """How the stream of each worker that is followed is doing; ranks of one publisher share one."""
        return {
            worker: stats
            for subscription in self._subscriptions.values()
            for worker, stats in subscription.streams()
        }

    def set_sources(self, sources: Iterable[KvSource]) -> None:
        """Follow exactly these sources: new ones are started, missing ones stopped, the others kept.

        Raises:
            OSError: an address is malformed or cannot be listened on; the other sources are followed.
        """
        wanted: dict[KvSource | str, list[KvSource]] = {}
        for source in sources:
            wanted.setdefault(source.endpoint if source.bind else source, []).append(source)
        for key in [key for key in self._subscriptions if key not in wanted]:
            task = asyncio.create_task(self._subscriptions.pop(key).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        failed: list[str] = []
        for key, group in wanted.items():
            if key not in self._subscriptions:
                try:
                    self._subscriptions[key] = _Subscription(
                        self._context, group[0], self._callbacks, self._clock, self._limits
                    )
                except zmq.ZMQError as error:
                    failed.append(f"{group[0].endpoint}: {error}")
                    continue
            self._subscriptions[key].set_sources(group)
        if failed:
            raise OSError(f"KV event subscriptions failed: {'; '.join(failed)}")

    async def close(self) -> None:
        """Stop everything."""
        self._closing.update(asyncio.create_task(each.close()) for each in self._subscriptions.values())
        self._subscriptions.clear()
        await asyncio.gather(*self._closing)
        self._context.destroy(linger=0)


class _Subscription:
    """One SUB socket, and the publishers heard on it."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        source: KvSource,
        callbacks: _Callbacks,
        clock: Callable[[], float],
        limits: SequenceLimits,
    ) -> None:
        self._context = context
        self._callbacks = callbacks
        self._clock = clock
        self._limits = limits
        self._bind = source.bind
        self._publishers: dict[WorkerId, _Publisher] = {}
        self.unreadable = 0
        self._topics: set[str] = set()
        self._socket = context.socket(zmq.SUB)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVHWM, _RECEIVE_LIMIT)
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
        self._tasks = [_spawn(self._receive()), _spawn(self._watch())]
        self._ending: list[asyncio.Task[None]] = []

    def set_sources(self, sources: Sequence[KvSource]) -> None:
        wanted = {source.worker: source for source in sources}
        for worker, publisher in list(self._publishers.items()):
            if wanted.get(worker) != publisher.source:
                del self._publishers[worker]
                self._ending = [task for task in self._ending if not task.done()] + publisher.stop()
        topics = {source.topic for source in sources}
        for topic in topics - self._topics:
            self._socket.subscribe(topic)
        for topic in self._topics - topics:
            self._socket.unsubscribe(topic)
        self._topics = topics
        for worker, source in wanted.items():
            if worker not in self._publishers:
                self._publishers[worker] = _Publisher(
                    self._context, source, self._callbacks, self._clock, self._limits
                )

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
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    async def _receive(self) -> None:
        clock = self._clock
        started = clock()
        while True:
            frames: list[bytes] = await self._socket.recv_multipart()
            # A message that is there already is returned without a pause: make one, or requests starve.
            if clock() - started > _SLICE_S:
                await asyncio.sleep(0)
                started = clock()
            if len(frames) < 3 or len(frames[-2]) != _NUMBER:
                self.unreadable += 1
                continue
            publisher = self._publisher(frames[0])
            if publisher is None:
                self.unreadable += 1
                continue
            await publisher.live(frames[-2], frames[-1])

    def _publisher(self, topic: bytes) -> "_Publisher | None":
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


class _Publisher:
    """Carries out what the machine of one publisher asks for, one event after the other."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        source: KvSource,
        callbacks: _Callbacks,
        clock: Callable[[], float],
        limits: SequenceLimits,
    ) -> None:
        self.source = source
        self._context = context
        self._on_events, self._on_reset, self._on_trust, self._on_suspend = callbacks
        self._clock = clock
        self._machine = KvSequence(replay=source.replay_endpoint is not None, limits=limits)
        self._lock = asyncio.Lock()
        self.workers = [source.worker]  # all ranks this publisher has spoken for
        self.stats = KvStreamStats()
        self._is_live = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._replay_number = 0
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = 0.0
        if source.bind:  # the engine may be connected already, or come at any time
            self._keep(_spawn(self.connected()))

    def stop(self) -> list[asyncio.Task[None]]:
        """Stop; the tasks that are ending."""
        if self._alarm is not None:
            self._alarm.cancel()
        for task in self._tasks:
            task.cancel()
        return list(self._tasks)

    async def connected(self) -> None:
        async with self._lock:
            await self._carry_out(self._machine.connected(self._clock()))

    async def disconnected(self) -> None:
        async with self._lock:
            await self._carry_out(self._machine.disconnected(self._clock()))

    async def live(self, number: bytes, payload: bytes) -> None:
        seq = int.from_bytes(number, "big")
        async with self._lock:
            self._is_live = True
            try:
                await self._carry_out(self._machine.live(seq, payload, self._clock()))
            finally:
                self._is_live = False
                self.stats.gaps = self._machine.gaps

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, actions: list[Action]) -> None:
        started = self._clock()
        for action in actions:
            match action:
                case Apply(seq, payload):
                    await self._carry_out(self._apply(seq, payload))
                    if self._clock() - started > _SLICE_S:
                        await asyncio.sleep(0)
                        started = self._clock()
                case RequestReplay(from_seq):
                    self.stats.replays += 1
                    self._ask(from_seq)
                case _:
                    self.stats.resets += isinstance(action, Reset)
                    for worker in self.workers:
                        self._tell(worker, action)
        self._set_alarm()

    def _tell(self, worker: WorkerId, news: Reset | TrustChanged | Suspend | Resume) -> None:
        match news:
            case Reset():
                self._on_reset(worker)
            case TrustChanged(trusted, cause):
                self._on_trust(worker, trusted, cause)
            case Suspend() | Resume():
                self._on_suspend(worker, isinstance(news, Suspend))

    def _apply(self, seq: int, payload: bytes) -> list[Action]:
        try:
            batch = decode(payload)
        except ProtocolError:
            return self._machine.unreadable(seq)
        self.stats.messages += 1
        if self._is_live:
            self.stats.lag_s = max(0.0, time.time() - batch.timestamp)
        worker = self.source.worker
        if batch.dp_rank is not None and batch.dp_rank != worker.dp_rank:
            worker = WorkerId(worker.endpoint, batch.dp_rank)
            if worker not in self.workers:
                self.workers.append(worker)
                self._on_trust(worker, self._machine.trusted, self._machine.cause)
        self._on_events(worker, batch.events)
        if any(isinstance(event, AllBlocksCleared) for event in batch.events):
            return self._machine.cleared(seq)
        return []

    def _set_alarm(self) -> None:
        """Call `tick` at the machine's deadline. One that has moved back is noticed when it goes off."""
        deadline = self._machine.next_deadline()
        if deadline is None or (self._alarm is not None and self._alarm_at <= deadline):
            return
        if self._alarm is not None:
            self._alarm.cancel()
        delay = max(0.0, deadline - self._clock())
        self._alarm_at = deadline
        self._alarm = asyncio.get_running_loop().call_later(delay, self._wake)

    def _wake(self) -> None:
        self._alarm = None
        self._keep(_spawn(self._tick()))

    async def _tick(self) -> None:
        async with self._lock:
            await self._carry_out(self._machine.tick(self._clock()))

    def _ask(self, from_seq: int) -> None:
        self._replay_number += 1
        self._keep(_spawn(self._replay(from_seq, self._replay_number)))

    async def _replay(self, from_seq: int, number: int) -> None:
        """Pass on one answer, as long as it is the latest one asked for."""
        endpoint = self.source.replay_endpoint
        if endpoint is None:
            return
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.RCVHWM, 0)
            socket.set(zmq.IPV6, 1)
            socket.connect(endpoint)
            await socket.send_multipart([b"", from_seq.to_bytes(_NUMBER, "big")])
            started = self._clock()
            while number == self._replay_number:
                frames: list[bytes] = await self._next_frames(socket, number)
                if not frames:
                    return
                if self._clock() - started > _SLICE_S:
                    await asyncio.sleep(0)
                    started = self._clock()
                if len(frames) < 2 or len(frames[-2]) != _NUMBER:
                    continue
                seq = int.from_bytes(frames[-2], "big", signed=True)
                async with self._lock:
                    if number != self._replay_number:
                        return
                    now = self._clock()
                    if seq < 0:
                        await self._carry_out(self._machine.replay_end(now))
                        return
                    await self._carry_out(self._machine.replayed(seq, frames[-1], now))
        except zmq.ZMQError:
            return  # as good as no answer: the machine's deadline sees to it
        finally:
            socket.close(0)

    async def _next_frames(self, socket: zmq.asyncio.Socket, number: int) -> list[bytes]:
        """The next message; empty once another question has been asked."""
        while not await socket.poll(200):
            if number != self._replay_number:
                return []
        return await socket.recv_multipart()


def _spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task whose failure is not kept to itself."""
    task = asyncio.create_task(work)
    task.add_done_callback(_report_failure)
    return task


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        task.get_loop().call_exception_handler(
            {"message": "KV event subscription stopped", "exception": error, "task": task}
        )
