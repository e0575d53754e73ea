import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from extproc.adapters.zmq_messages import ZmqMessages

Pair = tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]
_DEADLINE_S = 20.0


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Connected sockets: one to send on, one to receive on."""
    context = zmq.Context()
    out, into = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    port = into.bind_to_random_port("tcp://127.0.0.1")
    out.connect(f"tcp://127.0.0.1:{port}")
    yield out, into
    out.close(0)
    into.close(0)
    context.term()


@contextlib.contextmanager
def reading(socket: "zmq.Socket[bytes]", slice_s: float = 1.0) -> Iterator[ZmqMessages]:
    messages = ZmqMessages(socket, time.monotonic, slice_s)
    yield messages
    messages.close()


async def next_of(messages: ZmqMessages) -> list[bytes]:
    async with asyncio.timeout(_DEADLINE_S):
        return await messages.next()


async def test_messages_come_whole_and_in_order(pair: Pair) -> None:
    out, into = pair
    with reading(into) as messages:
        for number in range(100):
            out.send_multipart([b"topic", b"%d" % number, b""])
        assert [await next_of(messages) for _ in range(100)] == [
            [b"topic", b"%d" % number, b""] for number in range(100)
        ]


async def test_who_waits_gets_what_comes_later(pair: Pair) -> None:
    out, into = pair
    with reading(into) as messages:
        for number in range(20):
            waiting = asyncio.create_task(next_of(messages))
            await asyncio.sleep(0)
            assert not waiting.done()
            out.send_multipart([b"%d" % number])
            assert await waiting == [b"%d" % number]


async def test_what_comes_while_nobody_asks_is_there_afterwards(pair: Pair) -> None:
    out, into = pair
    with reading(into) as messages:
        out.send_multipart([b"first"])
        assert await next_of(messages) == [b"first"]
        for number in range(3):
            out.send_multipart([b"%d" % number])
        await _until(lambda: _ready(into))
        assert [await next_of(messages) for _ in range(3)] == [[b"0"], [b"1"], [b"2"]]
        waiting = asyncio.create_task(next_of(messages))
        await asyncio.sleep(0)
        out.send_multipart([b"last"])
        assert await waiting == [b"last"]


async def test_the_loop_does_not_spin_while_messages_lie_there_unread(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, into = pair
    looks = 0
    look = ZmqMessages._readable

    def counted(self: ZmqMessages) -> None:
        nonlocal looks
        looks += 1
        look(self)

    monkeypatch.setattr(ZmqMessages, "_readable", counted)
    with reading(into) as messages:
        waiting = asyncio.create_task(messages.next())
        await asyncio.sleep(0)
        waiting.cancel()
        out.send_multipart([b"unread"])
        await _until(lambda: looks > 0)
        looks = 0
        for _ in range(100):
            await asyncio.sleep(0)
        assert looks < 10
        assert await next_of(messages) == [b"unread"]


async def test_a_cancelled_wait_loses_no_message(pair: Pair) -> None:
    out, into = pair
    with reading(into) as messages:
        waiting = asyncio.create_task(messages.next())
        await asyncio.sleep(0)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        out.send_multipart([b"kept"])
        await _until(lambda: _ready(into))
        assert await next_of(messages) == [b"kept"]


async def test_the_loop_gets_its_turns_while_messages_are_there(pair: Pair) -> None:
    out, into = pair
    turns = 0
    asked = True

    async def others() -> None:
        nonlocal turns
        while asked:
            turns += 1
            await asyncio.sleep(0)

    with reading(into, slice_s=0.0) as messages:
        for number in range(50):
            out.send_multipart([b"%d" % number])
        await _until(lambda: _ready(into))
        task = asyncio.create_task(others())
        for _ in range(50):
            await next_of(messages)
        asked = False
        await task
    assert turns > 25


async def test_waiting_for_a_message_is_no_work_that_calls_for_a_pause(pair: Pair) -> None:
    out, into = pair
    seconds: list[float] = [0.0]

    def clock() -> float:
        return seconds[0]

    messages = ZmqMessages(into, clock, slice_s=1.0)
    waiting = asyncio.create_task(next_of(messages))
    await asyncio.sleep(0)
    seconds[0] = 10.0  # a long wait
    out.send_multipart([b"first"])
    out.send_multipart([b"second"])
    assert await waiting == [b"first"]
    await _until(lambda: _ready(into))
    asked: Any = messages.next()
    with pytest.raises(StopIteration) as found:  # at once, without giving way to others
        asked.send(None)
    assert found.value.value == [b"second"]
    messages.close()


def _ready(socket: "zmq.Socket[bytes]") -> bool:
    return bool(socket.poll(0))


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_DEADLINE_S):
        while not condition():  # noqa: ASYNC110  a socket and a count tell nobody
            await asyncio.sleep(0.001)
