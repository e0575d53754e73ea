"""A KV event publisher that speaks vLLM's wire over real sockets, and can misbehave."""

import asyncio
from collections import deque
from typing import Self

import msgspec
import zmq
import zmq.asyncio

END = (-1).to_bytes(8, "big", signed=True)


def stored(handle: int, parent: int | None, tokens: list[int]) -> dict[str, object]:
    """One stored block, as vLLM 0.32 spells it."""
    return {
        "type": "BlockStored",
        "block_hashes": [handle],
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": len(tokens),
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


class VllmPublisher:
    """PUB and ROUTER as in vLLM: a number per message, a bounded buffer, an end marker.

    Attributes:
        mute: do not publish live what is published (it is kept for replay).
        no_end: forget the end marker, so many times.
        cut: send at most so many messages of an answer.
        hidden: numbers never replayed.
        old_replay: no topic frame in answers (before vLLM 0.28).
        asked: first number of each question.
    """

    def __init__(
        self, *, topic: str = "kv@w@tiny", rank: int = 0, keep: int = 10_000, connect: str = ""
    ) -> None:
        self.topic, self.rank = topic.encode(), rank
        self.connect = connect
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=keep)
        self.next = 0
        self.mute = self.old_replay = False
        self.no_end = 0
        self.cut: int | None = None
        self.hidden: set[int] = set()
        self.asked: list[int] = []
        self.endpoint = self.replay_endpoint = "tcp://127.0.0.1:0"
        self._epoch = 0.0

    async def __aenter__(self) -> Self:
        self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._task.done():
            await self._close()

    def _open(self) -> None:
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        if self.connect:
            self._pub.connect(self.connect)
        else:
            self._pub.bind(self.endpoint)
            self.endpoint = self._pub.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(self.replay_endpoint)
        self.replay_endpoint = self._router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._task = asyncio.create_task(self._serve())

    async def _close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._pub.close(0)
        self._router.close(0)
        self._context.term()  # only now the addresses are free again

    async def stop(self) -> None:
        """The process dies; nothing of it is left."""
        await self._close()
        self.buffer.clear()
        self.next = 0
        self._epoch += 1000

    def start(self) -> None:
        """A new process: the same addresses, numbers from 0."""
        self._open()

    async def restart(self) -> None:
        """Stop and start."""
        await self.stop()
        self.start()

    def publish(self, *events: object, raw: bytes | None = None, lose: bool = False) -> int:
        """One message; its number."""
        seq, self.next = self.next, self.next + 1
        payload = raw or msgspec.msgpack.encode([self._epoch + seq, list(events), self.rank])
        if not (lose or self.mute):
            self._pub.send_multipart([self.topic, seq.to_bytes(8, "big"), payload])
        self.buffer.append((seq, payload))
        return seq

    async def _serve(self) -> None:
        while True:
            client, empty, start = await self._router.recv_multipart()
            assert empty == b""
            first = int.from_bytes(start, "big")
            self.asked.append(first)
            answer = [message for message in self.buffer if message[0] >= first][: self.cut]
            head = [client, b""] if self.old_replay else [client, b"", self.topic]
            for seq, payload in answer:
                if seq not in self.hidden:
                    await self._router.send_multipart([*head, seq.to_bytes(8, "big"), payload])
            if self.no_end:
                self.no_end -= 1
            else:
                end = [client, b""] if self.old_replay else [client, b"", b""]
                await self._router.send_multipart([*end, END, b""])
