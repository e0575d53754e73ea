"""KV events of one publisher, from its messages to the callbacks: the driver of `protocol.kv_sequence`.

The replay socket is always bound by the engine. Its answer is asked for on a fresh DEALER socket each time,
so that what is left of an older answer is thrown away with its socket.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import zmq
import zmq.asyncio

from extproc.adapters.turns import Turns
from extproc.core.errors import ProtocolError
from extproc.core.types import AllBlocksCleared, KvEvent, WorkerId
from extproc.protocol.kv_events import MAX_PAYLOAD_BYTES, decode
from extproc.protocol.kv_sequence import KvSequence
from extproc.protocol.kv_sequence_types import (
    Action,
    Apply,
    RequestReplay,
    Reset,
    Resume,
    SequenceLimits,
    SequenceMemory,
    Suspend,
    TrustChanged,
)
from extproc.protocol.kv_slices import portions

RECEIVE_LIMIT = 100_000  # messages queued by ZMQ; beyond, they are dropped, seen as a gap, and asked again
SLICE_S = 0.001  # work done at a stretch before the event loop may serve requests
NUMBER_BYTES = 8  # of a message number
_PORTION = 512  # blocks applied before the time is looked at again

OnEvents = Callable[[WorkerId, Sequence[KvEvent]], None]
OnReset = Callable[[WorkerId], None]
OnTrust = Callable[[WorkerId, bool, str], None]
OnSuspend = Callable[[WorkerId, bool], None]
OnHeard = Callable[[WorkerId], None]


class KvCallbacks(NamedTuple):
    """Who is told; see `KvSubscriber`."""

    events: OnEvents
    reset: OnReset
    trust: OnTrust
    suspend: OnSuspend
    heard: OnHeard


@dataclass(frozen=True, slots=True)
class KvSource:
    """Where one engine's events come from.

    Attributes:
        worker: who they are about; unless `alone`, a rank named in a message overrides its rank.
        endpoint: ZMQ address to connect to, or with `bind` to listen on.
        replay_endpoint: ZMQ address to ask for missed messages; None: cannot be asked.
        bind: the engine connects to us.
        topic: subscribe to topics that begin so; "" for all.
        alone: its server hosts no other rank, so whatever rank a message names is this one.
    """

    worker: WorkerId
    endpoint: str
    replay_endpoint: str | None = None
    bind: bool = False
    topic: str = ""
    alone: bool = False


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


class KvStream:
    """Carries out what the machine of one publisher asks for, one event after the other.

    Args:
        context: makes the sockets of questions.
        source: the publisher.
        callbacks: told of what has come; they run on the event loop and must not block.
        clock: monotonic seconds.
        turns: shared by all that apply events.
        limits: timeouts and buffer sizes.
        memory: where its events stood when what is known of it was taken over; None: nothing is known.

    Attributes:
        workers: all ranks that the publisher has spoken for.
        stats: how it is doing.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        source: KvSource,
        callbacks: KvCallbacks,
        clock: Callable[[], float],
        turns: Turns,
        limits: SequenceLimits,
        memory: SequenceMemory | None = None,
    ) -> None:
        self._turns = turns
        self.source = source
        self._context = context
        self._on_events, self._on_reset, self._on_trust, self._on_suspend, self._on_heard = callbacks
        self._clock = clock
        self._machine = KvSequence(
            replay=source.replay_endpoint is not None,
            limits=limits,
            memory=memory,
            rank=source.worker.dp_rank,
        )
        self._lock = asyncio.Lock()
        self.workers = [source.worker]
        self.stats = KvStreamStats()
        self._is_live = self._stopped = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._replay_number = 0
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = 0.0
        if source.bind:  # the engine may be connected already, or come at any time
            self._keep(spawn(self.connected()))

    def stop(self) -> list[asyncio.Task[None]]:
        """Stop; the tasks that are ending."""
        self._stopped = True
        if self._alarm is not None:
            self._alarm.cancel()
        for task in self._tasks:
            task.cancel()
        return list(self._tasks)

    def forget(self) -> None:
        """Who follows these workers next begins at the beginning, and would count twice what is known."""
        for worker in self.workers:
            self._on_reset(worker)

    async def remember(self, take: Callable[[WorkerId, SequenceMemory], None]) -> None:
        """Call `take`, while all it sent up to there is applied; not where it speaks for several ranks."""
        async with self._lock:
            memory = self._machine.memory()
            if memory.last >= 0 and len(self.workers) == 1:
                take(self.source.worker, memory)

    async def connected(self) -> None:
        """The subscription has a connection, perhaps to this publisher."""
        async with self._lock:
            await self._carry_out(self._machine.connected(self._clock()))

    async def disconnected(self) -> None:
        """The subscription has lost it."""
        async with self._lock:
            await self._carry_out(self._machine.disconnected(self._clock()))

    async def live(self, number: bytes, payload: bytes) -> None:
        """A message has been published; returns when all is done that it asks for."""
        seq = int.from_bytes(number, "big")
        async with self._lock:
            self._is_live = True
            try:
                await self._carry_out(self._machine.live(seq, payload, self._clock()))
            finally:
                self._is_live = False
                self.stats.gaps = self._machine.gaps
            if self._machine.holds_back:
                for worker in self.workers:
                    self._on_heard(worker)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if self._stopped:  # another may be following these workers by now
                return
            match action:
                case Apply(seq, payload):
                    await self._carry_out(await self._apply(seq, payload))
                case RequestReplay(from_seq):
                    self.stats.replays += 1
                    self._ask(from_seq)
                case _:
                    self.stats.resets += isinstance(action, Reset)
                    for worker in self.workers:
                        self._tell(worker, action)
        if not self._stopped:
            self._set_alarm()

    def _tell(self, worker: WorkerId, news: Reset | TrustChanged | Suspend | Resume) -> None:
        match news:
            case Reset():
                self._on_reset(worker)
            case TrustChanged():
                self._on_trust(worker, *self._machine.trust(worker.dp_rank))
            case Suspend() | Resume():
                self._on_suspend(worker, isinstance(news, Suspend))

    async def _apply(self, seq: int, payload: bytes) -> list[Action]:
        async with self._turns:
            if self._stopped:
                return []
            try:
                batch = decode(payload)
            except ProtocolError:
                return self._machine.unreadable(seq)
            first, *rest = portions(batch.events, _PORTION)
            self.stats.messages += 1
            if self._is_live:
                self.stats.lag_s = max(0.0, time.time() - batch.timestamp)
            worker = self._rank(batch.dp_rank)
            self._on_events(worker, first)
        for portion in rest:
            async with self._turns:
                if self._stopped:
                    return []
                self._on_events(worker, portion)
        if any(isinstance(event, AllBlocksCleared) for event in batch.events):
            return self._machine.cleared(seq, worker.dp_rank, [one.dp_rank for one in self.workers])
        return []

    def _rank(self, dp_rank: int | None) -> WorkerId:
        """The worker a message is about; of a rank not heard of before it is told how its stream stands."""
        worker = self.source.worker
        if self.source.alone or dp_rank is None or dp_rank == worker.dp_rank:
            return worker
        worker = WorkerId(worker.endpoint, dp_rank)
        if worker not in self.workers:
            self.workers.append(worker)
            self._on_trust(worker, *self._machine.trust(dp_rank))
        return worker

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
        self._keep(spawn(self._tick()))

    async def _tick(self) -> None:
        async with self._lock:
            await self._carry_out(self._machine.tick(self._clock()))

    def _ask(self, from_seq: int) -> None:
        self._replay_number += 1
        self._keep(spawn(self._replay(from_seq, self._replay_number)))

    async def _replay(self, from_seq: int, number: int) -> None:
        """Pass on one answer, as long as it is the latest one asked for."""
        endpoint = self.source.replay_endpoint
        if endpoint is None:
            return
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.RCVHWM, RECEIVE_LIMIT)
            # Who sends more is disconnected. On the other socket that would be for good: ZMQ stays away.
            socket.set(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
            socket.set(zmq.IPV6, 1)
            socket.connect(endpoint)
            await socket.send_multipart([b"", from_seq.to_bytes(NUMBER_BYTES, "big")])
            started = self._clock()
            while number == self._replay_number:
                frames: list[bytes] = await self._next_frames(socket, number)
                if not frames:
                    return
                if self._clock() - started > SLICE_S:
                    await asyncio.sleep(0)
                    started = self._clock()
                if len(frames) < 2 or len(frames[-2]) != NUMBER_BYTES:
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


def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task whose failure is not kept to itself."""
    task = asyncio.create_task(work)
    task.add_done_callback(_report_failure)
    return task


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        task.get_loop().call_exception_handler(
            {"message": "KV event subscription stopped", "exception": error, "task": task}
        )
