"""Clients that leave at any moment, that read slowly, and very many of them at once."""

import asyncio
import json
import random
import resource
import socket
from collections import Counter

import pytest

from tests.chaos.load import PATH, question, scaled
from tests.chaos.stack import ChaosStack

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="package")]

AT_ONCE = 40
FILES = 100  # a router's open files depend on engines and Envoys, not on requests


def request(body, headers=b""):
    data = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    return head.encode() + b"\r\n" + headers + b"\r\n" + data


async def leave_early(stack, rng):
    """One request, given up at a random point: while it is sent, while it waits, or while it is answered."""
    host, port = stack.envoy.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        whole = request(question(rng.choice(stack.documents), rng, stream=rng.random() < 0.5, max_tokens=25))
        sent = len(whole) if rng.random() < 0.8 else rng.randrange(len(whole))
        writer.write(whole[:sent])
        await writer.drain()
        patience = rng.choice((0.0, rng.uniform(0.0, 0.02), rng.uniform(0.0, 0.4)))
        try:
            async with asyncio.timeout(patience):
                left = rng.randrange(2000)
                while left > 0 and (piece := await reader.read(1 + rng.randrange(500))):
                    left -= len(piece)
        except TimeoutError:
            pass
        if rng.random() < 0.5:
            writer.transport.abort()  # a reset; otherwise a plain end
    finally:
        writer.close()


async def test_requests_are_cancelled_at_random_points(stack):
    """10,000 of them, beside others that are not. Their ends are told, not merely found out in time."""
    rng = random.Random(9)
    before = stack.log_entries().keys()
    places = asyncio.Semaphore(AT_ONCE)

    async def one():
        async with places:
            await leave_early(stack, rng)

    async with stack.load() as load:
        await load.more(10)
        await asyncio.gather(*(one() for _ in range(scaled(10_000))))
        await load.more(10)
    await stack.expect_unharmed(load)
    assert stack.router_files() < FILES
    logged = stack.log_entries()
    outcomes = Counter(logged[one]["outcome"] for one in logged.keys() - before)
    assert outcomes["cancelled"] > 10 * outcomes["lost"], outcomes


async def read_slowly(stack, number, release):
    """An answer whose reader does not read until it may; all of it, then."""
    host, port = stack.envoy.address.split(":")
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    raw.setblocking(False)  # noqa: FBT003 - the socket's own signature
    await asyncio.get_running_loop().sock_connect(raw, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=raw, limit=1024)
    rng = random.Random(number)
    writer.write(request(question("", rng, stream=True, max_tokens=600), b"connection: close\r\n"))
    await release.wait()
    answer = await reader.read(-1)
    writer.close()
    return answer


async def test_slow_readers_hold_up_nobody(stack):
    release = asyncio.Event()
    async with stack.load() as load:
        slow = [asyncio.create_task(read_slowly(stack, number, release)) for number in range(scaled(200))]
        await load.more(60)
        release.set()
        answers = await asyncio.gather(*slow)
        await load.more(10)
    assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
    assert all(b"data: [DONE]" in answer for answer in answers)
    await stack.expect_unharmed(load)


async def test_very_many_streams_at_once(tmp_path):
    """2,000 of them run at the same time, and the router needs no file for any."""
    count = scaled(2000)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 4 * count + 500  # of Envoy; every stream has a client and an engine
    if hard < needed:
        pytest.skip(f"{count} streams need {needed} open files, and the hard limit is {hard}: ulimit -Hn")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    engine = ("--step-ms", "150", "--max-num-seqs", "4000", "--num-gpu-blocks", "20000")
    patient = {"envoy": {"message_timeout_s": 30}}  # all of them are routed, however long that takes
    async with ChaosStack(tmp_path, engine=engine, settings=patient) as stack:
        await stack.begin()
        asked = [
            asyncio.create_task(stack.chat(f"Client {n}", stream=True, max_tokens=100, ignore_eos=True))
            for n in range(count)
        ]
        await stack.until_state(
            lambda state: state["open_requests"] == count, "all of them run at once", deadline_s=120.0
        )
        assert stack.router_files() < FILES
        replies = await asyncio.gather(*asked)
        assert {reply.status for reply in replies} == {200}
        assert {reply.usage["completion_tokens"] for reply in replies} == {100}
        assert all(reply.body.endswith(b"data: [DONE]\n\n") for reply in replies)
        await stack.expect_no_leases()
        assert stack.router.running
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
