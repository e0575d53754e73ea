"""The engine's side of the KV event wire (vLLM 0.32): PUB with a bounded replay buffer behind a ROUTER.

Published frames: `[topic, sequence (8 bytes big-endian), payload]`; the payload is msgpack
`[timestamp, [events], dp_rank]`, each event a map tagged `type` from which fields at their default are left
out. A replay request is `[b"", first sequence wanted]`; the answer is every buffered batch from there on as
`[b"", topic, sequence, payload]`, then `[b"", b"", -1 (signed), b""]`. As in the engine, nothing paces the
answer: a reader that does not keep up loses its tail, end marker included.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from socket import gethostbyname
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from extproc.core.errors import WarmrouteError
from extproc.core.types import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, Tier

_MEDIUM = {Tier.GPU: "GPU", Tier.CPU: "CPU", Tier.DISK: "STORAGE"}
_END = (-1).to_bytes(8, "big", signed=True)
_HIGH_WATER_MARK = 100_000  # messages, the engine's default


class _Event(msgspec.Struct, omit_defaults=True, tag_field="type", gc=False):
    pass


class _BlockStored(_Event, tag="BlockStored", gc=False):
    # Field order and which fields have defaults are the engine's: that decides what is left out.
    block_hashes: Sequence[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: Sequence[Sequence[object] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _BlockRemoved(_Event, tag="BlockRemoved", gc=False):
    block_hashes: Sequence[int | bytes]
    medium: str | None
    group_idx: int | None = None


class _AllBlocksCleared(_Event, tag="AllBlocksCleared", gc=False):
    pass


def encode_batch(
    events: Sequence[KvEvent], timestamp: float, dp_rank: int = 0, adapter_ids: dict[str, int] | None = None
) -> bytes:
    """One batch as the engine writes it. `timestamp` is wall time in seconds."""
    ids = adapter_ids or {}
    return _encoder.encode((timestamp, [_wire(event, ids) for event in events], dp_rank))


_encoder = msgspec.msgpack.Encoder()


def _wire(event: KvEvent, adapter_ids: dict[str, int]) -> _Event:
    match event:
        case BlockStored():
            return _BlockStored(
                block_hashes=event.block_hashes,
                parent_block_hash=event.parent,
                token_ids=tuple(event.token_ids),
                block_size=event.block_size,
                lora_id=None if event.lora_name is None else adapter_ids.get(event.lora_name),
                medium=_MEDIUM[event.tier],
                lora_name=event.lora_name,
                extra_keys=event.extra_keys,
                group_idx=event.group,
                kv_cache_spec_kind=event.spec_kind,
            )
        case BlockRemoved():
            return _BlockRemoved(event.block_hashes, _MEDIUM[event.tier], event.group)
        case AllBlocksCleared():
            return _AllBlocksCleared()


def _bind(socket: zmq.Socket[Any], host: str, port: int) -> str:
    """Bind and return the endpoint that was bound. ZMQ wants addresses, not names."""
    if ":" in host:
        socket.setsockopt(zmq.IPV6, 1)
        socket.bind(f"tcp://[{host}]:{port}")
    else:
        socket.bind(f"tcp://{gethostbyname(host)}:{port}")
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))


class KvPublisher:
    """Publishes one engine core's KV events.

    Args:
        host: Address or name to bind, e.g. `127.0.0.1`.
        events_port: Port of the PUB socket; 0 takes a free one.
        replay_port: Port of the ROUTER socket; 0 takes a free one.
        connect: Connect the PUB socket to this address instead of binding it (engines that dial in).
        topic: First frame of every message.
        dp_rank: Data-parallel rank, the last field of every batch.
        buffer_batches: How many past batches a replay can reach.
        adapter_ids: The number that goes with each adapter name.

    Raises:
        WarmrouteError: a port is taken, the address is not ours, or `connect` is no ZMQ endpoint.
    """

    def __init__(
        self,
        host: str,
        *,
        events_port: int = 0,
        replay_port: int = 0,
        connect: str | None = None,
        topic: str = "",
        dp_rank: int = 0,
        buffer_batches: int = 10_000,
        adapter_ids: dict[str, int] | None = None,
    ) -> None:
        self._topic = topic.encode()
        self._dp_rank = dp_rank
        self._adapter_ids = adapter_ids or {}
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_batches)
        self._sequence = 0
        self._task: asyncio.Task[None] | None = None
        self._context = zmq.Context()
        self._replies = zmq.asyncio.Context.shadow(self._context)
        # PUB never blocks: it drops for readers that are too slow.
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(_HIGH_WATER_MARK)
        self._router = self._replies.socket(zmq.ROUTER)
        try:
            if connect is None:
                self.events_endpoint = _bind(self._pub, host, events_port)
            else:
                self._pub.connect(connect)
                self.events_endpoint = connect
            self.replay_endpoint = _bind(self._router, host, replay_port)
        except (zmq.ZMQError, OSError) as error:
            self._close_sockets()
            raise WarmrouteError(f"cannot publish KV events: {error}") from error

    @property
    def next_sequence(self) -> int:
        """Sequence number that the next batch gets: batches published so far."""
        return self._sequence

    async def start(self) -> None:
        """Begin to answer replay requests."""
        self._task = asyncio.create_task(self._serve_replay(), name="kv-replay")

    def publish(self, events: Sequence[KvEvent], timestamp: float, *, lose: bool = False) -> None:
        """Send one batch. With `lose` it only goes into the replay buffer, as if the network dropped it."""
        payload = encode_batch(events, timestamp, self._dp_rank, self._adapter_ids)
        sequence = self._sequence
        self._sequence += 1
        self._buffer.append((sequence, payload))
        if not lose:
            self._pub.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload))

    def forget(self) -> None:
        """Start over like a restarted engine: sequence 0, empty buffer, same sockets."""
        self._sequence = 0
        self._buffer.clear()

    async def close(self) -> None:
        """Stop answering and close the sockets."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._router.close(linger=0)
        self._pub.close(linger=0)
        self._context.term()

    async def _serve_replay(self) -> None:
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) != 3:
                continue  # not a replay request: the engine ignores it too
            client, _, first = frames
            start = int.from_bytes(first, "big")
            for sequence, payload in tuple(self._buffer):
                if sequence >= start:
                    number = sequence.to_bytes(8, "big")
                    await self._router.send_multipart((client, b"", self._topic, number, payload))
            await self._router.send_multipart((client, b"", b"", _END, b""))
