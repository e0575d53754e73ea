import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from extproc.adapters.kv_publisher import KvPublisher, encode_batch
from extproc.core.errors import WarmrouteError
from extproc.core.types import AllBlocksCleared, BlockRemoved, BlockStored, Tier

END = -1


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
async def publisher() -> AsyncIterator[KvPublisher]:
    publisher = KvPublisher("127.0.0.1", topic="kv@tiny", dp_rank=3, buffer_batches=5)
    await publisher.start()
    yield publisher
    await publisher.close()


async def receive(socket: zmq.asyncio.Socket) -> list[bytes]:
    return await asyncio.wait_for(socket.recv_multipart(), 10)


@asynccontextmanager
async def subscription(
    context: zmq.asyncio.Context, publisher: KvPublisher
) -> AsyncIterator[zmq.asyncio.Socket]:
    with context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(publisher.events_endpoint)
        await until_subscribed(socket, publisher)
        yield socket


async def until_subscribed(socket: zmq.asyncio.Socket, publisher: KvPublisher) -> None:
    """A subscription takes effect some time after connect: publish until one batch arrives."""
    async with asyncio.timeout(10):
        while not await socket.poll(20):
            publisher.publish((AllBlocksCleared(),), 0.0)
        while int.from_bytes((await socket.recv_multipart())[1], "big") != publisher.next_sequence - 1:
            pass


async def replay(context: zmq.asyncio.Context, publisher: KvPublisher, start: int) -> list[list[bytes]]:
    with context.socket(zmq.DEALER) as socket:
        socket.connect(publisher.replay_endpoint)
        await socket.send_multipart([b"", start.to_bytes(8, "big")])
        messages = [await receive(socket)]
        while int.from_bytes(messages[-1][-2], "big", signed=True) != END:
            messages.append(await receive(socket))
    return messages


def stored(**options: Any) -> BlockStored:
    defaults: dict[str, Any] = {
        "block_hashes": (7, 2**63 + 1),
        "parent": None,
        "token_ids": array("I", [1, 2, 3, 4]),
        "block_size": 2,
        "extra_keys": (("salt",), None),
        "spec_kind": "full_attention",
    }
    return BlockStored(**{**defaults, **options})


def test_a_batch_is_spelt_as_the_engine_spells_it() -> None:
    timestamp, events, rank = msgspec.msgpack.decode(encode_batch((stored(),), 12.5, 1))
    assert (timestamp, rank) == (12.5, 1)
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": [7, 2**63 + 1],
            "parent_block_hash": None,
            "token_ids": [1, 2, 3, 4],
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [["salt"], None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
    ]
    assert list(events[0])[:4] == ["type", "block_hashes", "parent_block_hash", "token_ids"]


def test_defaults_are_left_out_and_adapters_have_numbers() -> None:
    event = stored(extra_keys=None, spec_kind=None, lora_name="a", parent=b"\x01", tier=Tier.CPU)
    removed = BlockRemoved((9,), group=1)
    _, events, _ = msgspec.msgpack.decode(
        encode_batch((event, removed, AllBlocksCleared()), 0.0, adapter_ids={"a": 4})
    )
    assert "extra_keys" not in events[0]
    assert "kv_cache_spec_kind" not in events[0]
    assert (events[0]["lora_id"], events[0]["medium"], events[0]["parent_block_hash"]) == (4, "CPU", b"\x01")
    assert events[1] == {"type": "BlockRemoved", "block_hashes": [9], "medium": "GPU", "group_idx": 1}
    assert events[2] == {"type": "AllBlocksCleared"}


async def test_subscribers_get_topic_sequence_and_payload(
    context: zmq.asyncio.Context, publisher: KvPublisher
) -> None:
    async with subscription(context, publisher) as socket:
        expected = publisher.next_sequence
        publisher.publish((stored(),), 1.0)
        publisher.publish((BlockRemoved((7,)),), 2.0)
        for index in range(2):
            topic, sequence, payload = await receive(socket)
            assert topic == b"kv@tiny"
            assert sequence == (expected + index).to_bytes(8, "big")
            assert msgspec.msgpack.decode(payload)[0] == 1.0 + index
            assert msgspec.msgpack.decode(payload)[2] == 3


async def test_a_replay_gives_the_buffer_from_the_asked_sequence_and_an_end_marker(
    context: zmq.asyncio.Context, publisher: KvPublisher
) -> None:
    for index in range(8):
        publisher.publish((AllBlocksCleared(),), float(index))
    *batches, end = await replay(context, publisher, 0)
    # The buffer holds the last five.
    assert [int.from_bytes(frames[-2], "big") for frames in batches] == [3, 4, 5, 6, 7]
    assert all(len(frames) == 4 and frames[:2] == [b"", b"kv@tiny"] for frames in batches)
    assert end == [b"", b"", b"\xff" * 8, b""]
    *batches, end = await replay(context, publisher, 6)
    assert [msgspec.msgpack.decode(frames[-1])[0] for frames in batches] == [6.0, 7.0]


async def test_a_malformed_replay_request_does_not_stop_the_next_one(
    context: zmq.asyncio.Context, publisher: KvPublisher
) -> None:
    with context.socket(zmq.DEALER) as socket:
        socket.connect(publisher.replay_endpoint)
        await socket.send_multipart([b"what"])
        assert len(await replay(context, publisher, 0)) == 1


async def test_a_lost_batch_can_be_replayed_but_was_not_sent(
    context: zmq.asyncio.Context, publisher: KvPublisher
) -> None:
    async with subscription(context, publisher) as socket:
        lost = publisher.next_sequence
        publisher.publish((stored(),), 1.0, lose=True)
        publisher.publish((AllBlocksCleared(),), 2.0)
        _, sequence, _ = await receive(socket)
    assert int.from_bytes(sequence, "big") == lost + 1
    assert int.from_bytes((await replay(context, publisher, lost))[0][-2], "big") == lost


async def test_a_forgetful_publisher_counts_from_zero_again(
    context: zmq.asyncio.Context, publisher: KvPublisher
) -> None:
    publisher.publish((AllBlocksCleared(),), 1.0)
    publisher.forget()
    assert len(await replay(context, publisher, 0)) == 1
    publisher.publish((AllBlocksCleared(),), 2.0)
    assert int.from_bytes((await replay(context, publisher, 0))[0][-2], "big") == 0


async def test_an_engine_can_dial_in(context: zmq.asyncio.Context) -> None:
    with context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        publisher = KvPublisher("127.0.0.1", connect=f"tcp://127.0.0.1:{port}")
        await publisher.start()
        try:
            await until_subscribed(socket, publisher)
            publisher.publish((AllBlocksCleared(),), 9.0)
            _, _, payload = await receive(socket)
            assert msgspec.msgpack.decode(payload)[0] == 9.0
        finally:
            await publisher.close()


async def test_a_name_can_be_bound() -> None:
    publisher = KvPublisher("localhost")
    assert publisher.events_endpoint.startswith("tcp://127.0.0.1:")
    await publisher.close()


async def test_a_port_that_is_taken_is_an_error(publisher: KvPublisher) -> None:
    port = int(publisher.events_endpoint.rpartition(":")[2])
    with pytest.raises(WarmrouteError, match="Address already in use"):
        KvPublisher("127.0.0.1", events_port=port)
