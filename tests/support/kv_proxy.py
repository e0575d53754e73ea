"""Between an engine's KV events and their reader: a wire that loses, reorders, repeats, corrupts and lies.

async with KvProxy(engine.kv_events, engine.kv_replay) as wire:
    wire.kv_events, wire.kv_replay              # what the reader is told
    wire.live = lose(0.2, rng)                  # what becomes of live messages
    wire.replay = lambda messages: messages[:3] # what becomes of the answer to a replay request
    wire.end_marker = False                     # answers break off
    await wire.cut(); await wire.open()         # connections die, and can be made again
"""

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, Self

import zmq
import zmq.asyncio

from tests.support.ports import free_ports

_END = (-1).to_bytes(8, "big", signed=True)
_ANSWER_S = 5.0
_BIND_ATTEMPTS = 500


class Message(NamedTuple):
    """As on the wire: `seq` has 8 bytes."""

    topic: bytes
    seq: bytes
    payload: bytes

    @property
    def number(self) -> int:
        return int.from_bytes(self.seq, "big", signed=True)


Live = Callable[[Message], Sequence[Message]]
Replay = Callable[[list[Message]], list[Message]]


def honest(message: Message) -> Sequence[Message]:
    return (message,)


def whole(messages: list[Message]) -> list[Message]:
    return messages


class KvProxy:
    """See the module's docstring. `asked` counts questions, `changed` live messages tampered with."""

    def __init__(self, kv_events: str, kv_replay: str) -> None:
        self._engine_events, self._engine_replay = kv_events, kv_replay
        events, replay = free_ports(2)
        self.kv_events, self.kv_replay = f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}"
        self.asked = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.honest()

    def honest(self) -> None:
        """No more faults."""
        self.changed = 0
        self.live: Live = honest
        self.replay: Replay = whole
        self.end_marker = True

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._events = self._context.socket(zmq.SUB)
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.subscribe(b"")
        self._events.connect(self._engine_events)
        await self.open()
        self._forwarding = asyncio.create_task(self._forward())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forwarding.cancel()
        await asyncio.gather(self._forwarding, return_exceptions=True)
        await self.cut()
        self._events.close()
        self._context.term()

    async def open(self) -> None:
        pub = self._context.socket(zmq.PUB)
        pub.setsockopt(zmq.SNDHWM, 0)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.SNDHWM, 0)
        await _bind(pub, self.kv_events)
        await _bind(self._router, self.kv_replay)
        self._pub: zmq.asyncio.Socket | None = pub
        self._tasks = [asyncio.create_task(self._answer())]

    async def cut(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._pub is not None:
            self._pub.close()
            self._router.close()
            self._pub = None

    async def _forward(self) -> None:
        while True:
            message = Message(*await self._events.recv_multipart())
            shown = self.live(message)
            self.changed += list(shown) != [message]
            for one in shown:
                if self._pub is not None:
                    await self._pub.send_multipart(one)

    async def _answer(self) -> None:
        while True:
            client, empty, first = await self._router.recv_multipart()
            self.asked += 1
            self._tasks.append(asyncio.create_task(self._answer_one(client, empty, first)))

    async def _answer_one(self, client: bytes, empty: bytes, first: bytes) -> None:
        engine = self._context.socket(zmq.DEALER)
        try:
            engine.setsockopt(zmq.RCVHWM, 0)
            engine.connect(self._engine_replay)
            await engine.send_multipart((empty, first))
            messages = await _whole_answer(engine)
            for message in self.replay(messages):
                await self._router.send_multipart((client, b"", *message))
            if self.end_marker:
                await self._router.send_multipart((client, b"", b"", _END, b""))
        finally:
            engine.close()


async def _whole_answer(engine: zmq.asyncio.Socket) -> list[Message]:
    """Thousands of messages come at once, and the reader is waiting: take all there are, then look again."""
    messages: list[Message] = []
    there = zmq.Socket.shadow(engine.underlying)
    while await engine.poll(_ANSWER_S * 1000):
        with contextlib.suppress(zmq.Again):
            while True:
                message = Message(*there.recv_multipart(zmq.NOBLOCK)[-3:])
                if message.number < 0:
                    return messages
                messages.append(message)
    return messages


async def _bind(socket: zmq.asyncio.Socket, endpoint: str) -> None:
    """ZMQ frees an address some time after its socket was closed."""
    for _ in range(_BIND_ATTEMPTS):
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
            await asyncio.sleep(0.01)
        else:
            return
    raise OSError(f"{endpoint} stays in use")


# --- what can become of live messages -------------------------------------------------------------------


def lose(share: float, rng: random.Random) -> Live:
    return lambda message: () if rng.random() < share else (message,)


def repeat(share: float, rng: random.Random) -> Live:
    """Some come twice, and some again much later."""
    kept: list[Message] = []

    def live(message: Message) -> Sequence[Message]:
        kept.append(message)
        if rng.random() >= share:
            return (message,)
        return (message, message if rng.random() < 0.5 else kept[rng.randrange(len(kept))])

    return live


def reorder(at_once: int, rng: random.Random) -> Live:
    """So many are held and given out in another order."""
    held: list[Message] = []

    def live(message: Message) -> Sequence[Message]:
        held.append(message)
        if len(held) < at_once:
            return ()
        shown = held[:]
        held.clear()
        rng.shuffle(shown)
        return shown

    return live


def corrupt(share: float, rng: random.Random) -> Live:
    """Some have bytes that are others, or an end that is missing, or are noise altogether."""

    def live(message: Message) -> Sequence[Message]:
        if rng.random() >= share:
            return (message,)
        payload = bytearray(message.payload)
        match rng.randrange(3):
            case 0:
                for _ in range(3):
                    payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
            case 1:
                del payload[rng.randrange(len(payload)) :]
            case _:
                payload = bytearray(rng.randbytes(200))
        return (message._replace(payload=bytes(payload)),)

    return live
