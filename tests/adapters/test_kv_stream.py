import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq.asyncio

from extproc.adapters.kv_stream import SLICE_S, KvCallbacks, KvSource, KvStream
from extproc.adapters.turns import Turns
from extproc.core.types import WorkerId
from extproc.protocol.kv_events import MAX_PAYLOAD_BYTES
from extproc.protocol.kv_sequence_types import (
    SequenceLimits,
)
from tests.support.kv_listener import LIMITS, Listener, W, publish
from tests.support.kv_publisher import VllmPublisher, stored
from tests.support.waiting import until

CLEARED = {"type": "AllBlocksCleared"}


@pytest.fixture
async def publisher() -> AsyncIterator[VllmPublisher]:
    async with VllmPublisher() as publisher:
        yield publisher


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    listener = Listener()
    yield listener
    await listener.subscriber.close()


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


async def test_a_clear_of_one_rank_does_not_make_another_that_lost_something_complete(
    publisher: VllmPublisher, listener: Listener
) -> None:
    def say(rank: int, event: object, *, lose: bool = False) -> int:
        publisher.rank = rank
        return publisher.publish(event, lose=lose)

    other = WorkerId(W.endpoint, 1)
    say(0, stored(0, None, [0, 0]))
    say(1, stored(0, None, [0, 0]))
    listener.follow(publisher)
    await listener.holds(1)
    await listener.holds(1, other)
    publisher.hidden = {say(1, stored(1, 0, [1, 1]), lose=True)}
    say(1, stored(2, None, [2, 2]))
    await until(lambda: listener.held[other] == [0, 2])
    say(0, CLEARED)
    await until(lambda: listener.held[W] == [] and listener.trust[W][0])
    assert not listener.trust[other][0]
    say(1, CLEARED)
    await until(lambda: listener.held[other] == [] and listener.trust[other][0])
    assert listener.resets == []


async def test_a_first_message_that_cannot_be_read_is_not_complete(
    publisher: VllmPublisher, listener: Listener
) -> None:
    listener.follow(publisher)
    await until(lambda: listener.trust.get(W) == (False, "no message seen yet"))
    publisher.publish(raw=b"\xc1 what is this")
    publish(publisher)
    await until(lambda: listener.held.get(W) == [1])
    assert listener.trust[W] == (False, "message 0 could not be read")


async def test_messages_that_wait_for_an_answer_are_told_of(publisher: VllmPublisher) -> None:
    patient = Listener(SequenceLimits(reply_timeout_s=3600.0))
    try:
        publish(publisher, 3)
        patient.follow(publisher)
        await patient.holds(3)
        assert patient.heard == []
        publisher.no_end, publisher.cut = 1, 0
        publish(publisher, lose=True)
        publish(publisher, 2)
        await until(lambda: patient.heard == [W, W])
        assert patient.held[W] == [0, 1, 2]
    finally:
        await patient.subscriber.close()


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


async def test_a_message_longer_than_any_engine_s_costs_the_trust_and_nothing_else(
    publisher: VllmPublisher, listener: Listener
) -> None:
    publish(publisher, 2)
    listener.follow(publisher)
    await listener.holds(2)
    publisher.publish(raw=msgspec.msgpack.encode([1.0, [stored(2, 1, [2] * MAX_PAYLOAD_BYTES)]]))
    publisher.publish(stored(2, 1, [2, 2]))
    await listener.holds(3, trusted=False)


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


async def test_the_rank_in_a_message_is_the_only_one_that_its_server_has(listener: Listener) -> None:
    async with VllmPublisher(rank=3) as publisher:
        publish(publisher, 2)
        source = KvSource(W, publisher.endpoint, publisher.replay_endpoint, alone=True)
        listener.subscriber.set_sources([source])
        await listener.holds(2)
        assert set(listener.held) == {W}


async def test_a_stream_that_was_stopped_tells_and_asks_nothing_more(publisher: VllmPublisher) -> None:
    """Another one may be following its worker by now."""
    told: list[str] = []

    def stopped(_worker: WorkerId, _events: object) -> None:
        told.append("events")
        endings.extend(stream.stop())

    callbacks = KvCallbacks(
        events=stopped,
        reset=lambda _worker: told.append("reset"),
        trust=lambda _worker, _trusted, cause: told.append(cause),
        suspend=lambda _worker, _suspended: told.append("suspended"),
        heard=lambda _worker: told.append("heard"),
    )
    endings: list[asyncio.Task[None]] = []
    source = KvSource(W, publisher.endpoint, publisher.replay_endpoint)
    with zmq.asyncio.Context() as context:
        stream = KvStream(context, source, callbacks, time.monotonic, Turns(time.monotonic, SLICE_S), LIMITS)
        await stream.connected()
        await until(lambda: told[-1:] == ["no message seen yet"])
        said, asked = len(told), stream.stats.replays
        message = msgspec.msgpack.encode([0.0, [stored(0, None, [0, 0])], None])
        await stream.live(bytes(8), message)
        # Who watches the connection goes through all streams there were, and may come to it only now.
        await stream.connected()
        assert told[said:] == ["events"]
        assert stream.stats.replays == asked
        assert not stream.stop()
        await asyncio.gather(*endings, return_exceptions=True)
