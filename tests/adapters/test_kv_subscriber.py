import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq

from extproc.adapters.kv_subscriber import KvSource, KvSubscriber, resolve_kv_endpoint
from extproc.core.types import AllBlocksCleared, BlockStored, KvEvent, WorkerId
from extproc.protocol.kv_sequence import SequenceLimits
from tests.support.kv_publisher import VllmPublisher, stored
from tests.support.waiting import until

W = WorkerId("w")
LIMITS = SequenceLimits(reply_timeout_s=0.2, check_interval_s=0.3)
CLEARED = {"type": "AllBlocksCleared"}


class Listener:
    """What the router would know."""

    def __init__(self, limits: SequenceLimits = LIMITS) -> None:
        self.held: dict[WorkerId, list[int | bytes]] = {}
        self.trust: dict[WorkerId, tuple[bool, str]] = {}
        self.resets: list[WorkerId] = []
        self.subscriber = KvSubscriber(self.events, self.reset, self.trusted, time.monotonic, limits)

    def events(self, worker: WorkerId, events: "tuple[KvEvent, ...]") -> None:
        held = self.held.setdefault(worker, [])
        for event in events:
            if isinstance(event, BlockStored):
                held += event.block_hashes
            elif isinstance(event, AllBlocksCleared):
                held.clear()

    def reset(self, worker: WorkerId) -> None:
        self.held[worker] = []
        self.resets.append(worker)

    def trusted(self, worker: WorkerId, trusted: bool, cause: str) -> None:
        self.trust[worker] = (trusted, cause)

    def follow(self, *publishers: VllmPublisher, replay: bool = True, worker: WorkerId = W) -> None:
        self.subscriber.set_sources(
            [KvSource(worker, each.endpoint, each.replay_endpoint if replay else None) for each in publishers]
        )

    async def holds(self, count: int, worker: WorkerId = W, *, trusted: bool = True) -> None:
        """Exactly blocks 0 to count - 1 of the engine, in order, and the trust that goes with it."""
        await until(
            lambda: self.held.get(worker) == list(range(count)) and self.trust[worker][0] == trusted,
            what=f"{count} blocks, trusted={trusted}",
        )


@pytest.fixture
async def publisher() -> AsyncIterator[VllmPublisher]:
    async with VllmPublisher() as publisher:
        yield publisher


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    listener = Listener()
    yield listener
    await listener.subscriber.close()


def publish(publisher: VllmPublisher, count: int = 1, *, lose: bool = False) -> None:
    for _ in range(count):
        at = publisher.next
        publisher.publish(stored(at, at - 1 if at else None, [at, at]), lose=lose)


@pytest.mark.parametrize("old_replay", [False, True])
async def test_connect_replay_live(publisher: VllmPublisher, listener: Listener, old_replay: bool) -> None:
    publisher.old_replay = old_replay
    publish(publisher, 20)
    listener.follow(publisher)
    await listener.holds(20)
    publish(publisher, 5)
    await listener.holds(25)
    assert publisher.asked[0] == 0
    assert not listener.resets


async def test_d46_lost_messages_are_asked_for(publisher: VllmPublisher, listener: Listener) -> None:
    publish(publisher, 3)
    listener.follow(publisher)
    await listener.holds(3)
    publish(publisher, 4, lose=True)
    publish(publisher)
    await listener.holds(8)


async def test_how_a_stream_is_doing_is_told(publisher: VllmPublisher, listener: Listener) -> None:
    publish(publisher, 3)
    listener.follow(publisher)
    await listener.holds(3)
    before = listener.subscriber.streams()[W]
    assert (before.messages, before.gaps, before.resets, before.lag_s) == (3, 0, 0, None)
    asked = before.replays
    assert asked >= 1
    publish(publisher, lose=True)
    publish(publisher)
    await listener.holds(5)
    after = listener.subscriber.streams()[W]
    assert (after.messages, after.gaps) == (5, 1)
    assert after.replays > asked
    # Engines write their clock into every message; here it is what it was a while ago.
    made = [time.time() - 500.0, [stored(5, 4, [5, 5])], None]
    publisher.publish(raw=msgspec.msgpack.encode(made))
    await listener.holds(6)
    assert listener.subscriber.streams()[W].lag_s == pytest.approx(500.0, abs=60.0)
    listener.subscriber.set_sources([])
    assert listener.subscriber.streams() == {}


async def test_d46_hole_that_cannot_be_filled_leaves_the_worker_doubtful(
    publisher: VllmPublisher, listener: Listener
) -> None:
    publish(publisher, 3)
    listener.follow(publisher)
    await listener.holds(3)
    publisher.hidden = {3}
    publish(publisher, lose=True)
    publish(publisher)
    await until(lambda: listener.held[W] == [0, 1, 2, 4])
    assert not listener.trust[W][0]
    publisher.publish(CLEARED)
    await until(lambda: listener.trust[W][0])
    assert listener.held[W] == []


async def test_message_lost_before_a_silence_is_found(publisher: VllmPublisher, listener: Listener) -> None:
    publish(publisher, 3)
    listener.follow(publisher)
    await listener.holds(3)
    publish(publisher, lose=True)
    await listener.holds(4)


async def test_d47_restart_drops_what_the_engine_had(publisher: VllmPublisher, listener: Listener) -> None:
    publish(publisher, 9)
    listener.follow(publisher)
    await listener.holds(9)
    await publisher.restart()
    publish(publisher, 2)
    await listener.holds(2)
    assert listener.resets
    assert publisher.next == 2


async def test_d47_restart_that_passed_the_old_number(publisher: VllmPublisher, listener: Listener) -> None:
    publish(publisher, 4)
    listener.follow(publisher)
    await listener.holds(4)
    await publisher.restart()
    publish(publisher, 12)
    await listener.holds(12)
    assert listener.resets


async def test_engine_that_comes_later_is_connected_to(publisher: VllmPublisher, listener: Listener) -> None:
    await publisher.stop()
    listener.follow(publisher)
    publisher.start()
    publish(publisher, 3)
    await listener.holds(3)


async def test_answer_without_end_marker_is_not_the_end(publisher: VllmPublisher, listener: Listener) -> None:
    publish(publisher, 40)
    publisher.no_end, publisher.cut = 1, 30
    listener.follow(publisher)
    await until(lambda: len(publisher.asked) == 1)
    publisher.cut = None
    await listener.holds(40)
    assert publisher.asked[:2] == [0, 30 - LIMITS.overlap]


async def test_truncated_buffer_is_used_but_not_trusted(listener: Listener) -> None:
    async with VllmPublisher(keep=5) as publisher:
        publish(publisher, 50)
        listener.follow(publisher)
        await until(lambda: listener.held.get(W) == [45, 46, 47, 48, 49])
        assert not listener.trust[W][0]
        assert "gone" in listener.trust[W][1]


async def test_without_replay_endpoint_the_stream_is_still_used(listener: Listener) -> None:
    async with VllmPublisher() as publisher:
        listener.follow(publisher, replay=False)

        def heard() -> bool:
            publish(publisher)
            return bool(listener.held.get(W))

        await until(heard)
        whole = listener.held[W][0] == 0
        assert listener.trust[W][0] == whole
        assert publisher.asked == []
        publisher.publish(CLEARED)
        await until(lambda: listener.held[W] == [] and listener.trust[W][0])


async def test_unreadable_payload_costs_the_trust_and_nothing_else(
    publisher: VllmPublisher, listener: Listener
) -> None:
    publish(publisher, 2)
    listener.follow(publisher)
    await listener.holds(2)
    publisher.publish(raw=b"\xc1 what is this")
    publisher.publish(stored(2, 1, [2, 2]))
    await listener.holds(3, trusted=False)
    assert "message 2 could not be read" in listener.trust[W][1]


async def test_what_is_no_kv_message_is_counted(publisher: VllmPublisher, listener: Listener) -> None:
    publish(publisher)
    listener.follow(publisher)
    await listener.holds(1)
    publisher._pub.send_multipart([b"just", b"chatting"])
    publisher._pub.send_multipart([b"just", b"chat", b"along"])
    publish(publisher)
    await listener.holds(2)
    assert listener.subscriber.unreadable == 2


async def test_rank_in_the_message_decides(listener: Listener) -> None:
    async with VllmPublisher(rank=3) as publisher:
        publish(publisher, 2)
        listener.follow(publisher)
        third = WorkerId("w", 3)
        await listener.holds(2, third)
        assert not listener.held.get(W)
        await publisher.restart()
        publish(publisher)
        await listener.holds(1, third)
        assert third in listener.resets


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
        assert listener.held[W] == [0]
        listener.subscriber.set_sources([one, two])
        await until(lambda: len(first.asked) > asked and first.asked[asked] == 0)
        await until(lambda: listener.held[W][-1] == 1)


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


@pytest.mark.parametrize(
    ("template", "host", "rank", "expected"),
    [
        ("tcp://*:5557", "10.0.0.1", 0, "tcp://10.0.0.1:5557"),
        ("tcp://*:5557", "10.0.0.1", 3, "tcp://10.0.0.1:5560"),
        ("tcp://0.0.0.0:5557", "pod-1", 0, "tcp://pod-1:5557"),
        ("tcp://[::]:5557", "fd00::1", 1, "tcp://[fd00::1]:5558"),
        ("tcp://*:5557", "[fd00::1]", 0, "tcp://[fd00::1]:5557"),
        ("tcp://10.9.9.9:5557", "10.0.0.1", 2, "tcp://10.9.9.9:5559"),
        ("tcp://*:5557", "*", 1, "tcp://*:5558"),
        ("ipc:///tmp/kv", "x", 0, "ipc:///tmp/kv"),
        ("inproc://kv", "x", 0, "inproc://kv"),
        ("inproc://kv", "x", 2, "inproc://kv_dp2"),
    ],
)
def test_address_of_a_rank(template: str, host: str, rank: int, expected: str) -> None:
    assert resolve_kv_endpoint(template, host, rank) == expected


@pytest.mark.parametrize("template", ["tcp://*:0", "tcp://*", "http://x:1", "5557", "tcp://*:x"])
def test_address_without_a_port_is_an_error(template: str) -> None:
    with pytest.raises(ValueError, match=r"port|address"):
        resolve_kv_endpoint(template, "h", 0)


def test_ipc_address_cannot_have_ranks() -> None:
    with pytest.raises(ValueError, match="ranks"):
        resolve_kv_endpoint("ipc:///tmp/kv", "h", 1)
