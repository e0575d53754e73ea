import asyncio
import socket
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
import zmq

from extproc.adapters.kv_stream import KvSource
from extproc.adapters.kv_subscriber import KvSubscriber
from extproc.core.types import BlockStored, KvEvent, WorkerId
from extproc.protocol.kv_sequence_types import (
    SequenceLimits,
)
from tests.support.kv_listener import Listener, W, publish
from tests.support.kv_publisher import VllmPublisher, stored
from tests.support.ports import free_port
from tests.support.waiting import until


@pytest.fixture
async def publisher() -> AsyncIterator[VllmPublisher]:
    async with VllmPublisher() as publisher:
        yield publisher


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    listener = Listener()
    yield listener
    await listener.subscriber.close()


async def test_engine_that_comes_later_is_connected_to(publisher: VllmPublisher, listener: Listener) -> None:
    await publisher.stop()
    listener.follow(publisher)
    publisher.start()
    publish(publisher, 3)
    await listener.holds(3)


async def test_what_is_no_kv_message_is_counted(publisher: VllmPublisher, listener: Listener) -> None:
    publish(publisher)
    listener.follow(publisher)
    await listener.holds(1)
    publisher._pub.send_multipart([b"just", b"chatting"])
    publisher._pub.send_multipart([b"just", b"chat", b"along"])
    publish(publisher)
    await listener.holds(2)
    assert listener.subscriber.unreadable == 2


async def test_engines_that_connect_share_a_socket_and_are_told_apart_by_topic(listener: Listener) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as probe:
        probe.bind("tcp://127.0.0.1:0")
        ours = probe.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
    a, b = WorkerId("10.0.0.1:8000"), WorkerId("10.0.0.2:8000")
    async with (
        VllmPublisher(topic=f"kv@{a}@tiny", connect=ours) as first,
        VllmPublisher(topic=f"kv@{b}@tiny", connect=ours) as second,
        VllmPublisher(topic="kv@10.0.0.9:8000@tiny", connect=ours) as stranger,
    ):
        publish(first, 2)
        listener.subscriber.set_sources(
            [
                KvSource(a, ours, first.replay_endpoint, bind=True),
                KvSource(b, ours, second.replay_endpoint, bind=True),
            ]
        )
        await until(lambda: listener.held.get(a) == [0, 1])

        def unknown() -> int:
            publish(stranger)
            return listener.subscriber.unreadable

        await until(unknown)
        publish(first)
        publish(second, 4)
        await listener.holds(3, a)
        await listener.holds(4, b)
        assert set(listener.held) == {a, b}


async def test_an_address_in_use_can_be_tried_again(listener: Listener) -> None:
    with socket.socket() as older:
        older.bind(("127.0.0.1", free_port()))
        older.listen()
        ours = f"tcp://127.0.0.1:{older.getsockname()[1]}"
        async with VllmPublisher(connect=ours) as publisher:
            publish(publisher, 2)
            with pytest.raises(OSError, match=f"{ours}: Address already in use"):
                listener.subscriber.set_sources([KvSource(W, ours, publisher.replay_endpoint, bind=True)])
            assert listener.subscriber.retry() == []
            assert listener.subscriber.refused == {ours: "Address already in use"}
            older.close()
            await until(lambda: listener.subscriber.retry() == [ours])
            assert listener.subscriber.refused == {}
            publish(publisher)
            await listener.holds(3)


async def test_an_address_that_is_wanted_no_more_is_not_tried_again(listener: Listener) -> None:
    with socket.socket() as older:
        older.bind(("127.0.0.1", free_port()))
        older.listen()
        ours = f"tcp://127.0.0.1:{older.getsockname()[1]}"
        with pytest.raises(OSError, match="in use"):
            listener.subscriber.set_sources([KvSource(W, ours, None, bind=True)])
        listener.subscriber.set_sources([])
        assert listener.subscriber.refused == {}
    assert listener.subscriber.retry() == []
    assert listener.subscriber.streams() == {}


async def test_sources_come_and_go(listener: Listener) -> None:
    async with VllmPublisher() as first, VllmPublisher() as second:
        publish(first, 1)
        publish(second, 2)
        v = WorkerId("v")
        one, two = (
            KvSource(W, first.endpoint, first.replay_endpoint),
            KvSource(v, second.endpoint, second.replay_endpoint),
        )
        listener.subscriber.set_sources([one])
        await listener.holds(1)
        listener.subscriber.set_sources([one, two])
        await listener.holds(2, v)
        asked = len(first.asked)
        listener.subscriber.set_sources([two])
        publish(first)
        publish(second)
        await listener.holds(3, v)
        assert listener.held[W] == []  # whoever follows it next is told all of it again
        listener.subscriber.set_sources([one, two])
        await until(lambda: len(first.asked) > asked and first.asked[asked] == 0)
        await listener.holds(2)


async def test_an_engine_that_connects_is_followed_anew_on_the_socket_it_has(listener: Listener) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as probe:
        probe.bind("tcp://127.0.0.1:0")
        ours = probe.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
    async with VllmPublisher(connect=ours) as publisher:
        publish(publisher, 2)
        source = KvSource(W, ours, publisher.replay_endpoint, bind=True)
        listener.subscriber.set_sources([source])
        await listener.holds(2)
        asked = len(publisher.asked)
        listener.subscriber.set_sources([source], anew=[W])
        assert listener.resets == [W]
        await until(lambda: 0 in publisher.asked[asked:])
        await listener.holds(2)
        publish(publisher)
        await listener.holds(3)


async def test_who_is_followed_anew_is_though_another_address_cannot_be_listened_on(
    listener: Listener, publisher: VllmPublisher
) -> None:
    publish(publisher, 2)
    good = KvSource(W, publisher.endpoint, publisher.replay_endpoint)
    bad = KvSource(WorkerId("x"), publisher.endpoint, bind=True)
    with pytest.raises(OSError, match=publisher.endpoint):
        listener.subscriber.set_sources([good, bad])
    await listener.holds(2)
    asked = len(publisher.asked)
    with pytest.raises(OSError, match=publisher.endpoint):
        listener.subscriber.set_sources([good, bad], anew=[W])
    await until(lambda: 0 in publisher.asked[asked:])
    await listener.holds(2)


async def test_address_in_use_is_an_error_that_names_it(listener: Listener, publisher: VllmPublisher) -> None:
    publish(publisher)
    taken = publisher.endpoint
    with pytest.raises(OSError, match=taken):
        listener.subscriber.set_sources(
            [
                KvSource(WorkerId("x"), taken, bind=True),
                KvSource(W, publisher.endpoint, publisher.replay_endpoint),
            ]
        )
    await listener.holds(1)


async def test_storm_does_not_starve_the_loop(publisher: VllmPublisher, listener: Listener) -> None:
    """While thousands of messages are replayed, other work on the loop goes on between them."""
    publish(publisher, 3000, lose=True)
    listener.follow(publisher)
    turns: list[int] = []

    async def other_work() -> None:
        while True:
            await asyncio.sleep(0)
            if turns[-1:] != [len(listener.held.get(W, ()))]:
                turns.append(len(listener.held.get(W, ())))

    task = asyncio.create_task(other_work())
    try:
        await until(lambda: len(listener.held.get(W, ())) == 3000, deadline_s=30)
    finally:
        task.cancel()
    assert len(turns) > 10


async def test_a_request_is_served_between_slices_of_a_storm_from_all_engines(
    publisher: VllmPublisher,
) -> None:
    log: list[int] = []  # blocks applied at a time; 0: a request was served
    ticks = 0

    def clock() -> float:
        nonlocal ticks
        ticks += 1
        return ticks * 0.003  # every portion takes longer than a slice

    def on_events(_worker: WorkerId, events: "tuple[KvEvent, ...]") -> None:
        log.append(sum(len(event.block_hashes) for event in events if isinstance(event, BlockStored)))

    async def requests() -> None:
        while True:
            log.append(0)
            await asyncio.sleep(0)

    async with VllmPublisher() as other:
        patient = SequenceLimits(reply_timeout_s=1e9, check_interval_s=1e9)
        subscriber = KvSubscriber(on_events, lambda _: None, lambda *_: None, clock, patient)
        for each in (publisher, other):
            for message in range(5):
                handles = list(range(message * 2000, message * 2000 + 2000))
                event = stored(0, None, [7] * 4000)
                event |= {"block_hashes": handles, "block_size": 2, "extra_keys": None}
                each.publish(event, lose=True)
        served = asyncio.create_task(requests())
        try:
            subscriber.set_sources(
                KvSource(WorkerId(name), each.endpoint, each.replay_endpoint)
                for name, each in (("a", publisher), ("b", other))
            )
            await until(lambda: sum(log) == 20_000, what="all blocks", deadline_s=30)
        finally:
            served.cancel()
            await subscriber.close()
    assert max(log) <= 512
    assert all(not (one and next_one) for one, next_one in pairwise(log)), "two portions at a stretch"
