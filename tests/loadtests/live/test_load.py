import asyncio
import contextlib
import json
import time
from random import Random

import pytest

from extproc.core.errors import WarmrouteError
from loadtests.live.load import closed_loop, find_wrk, open_loop, parse_wrk, request_bytes, wrk, wrk_script
from loadtests.live.schedule import LOADS, fill, templates
from tests.support.waiting import until

WRK = """Running 2s test @ http://127.0.0.1:1
  1 threads and 16 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency   101.44ms  306.95ms   1.45s    91.16%
  3000 requests in 2.00s, 1.00MB read
  Socket errors: connect 1, read 2, write 3, timeout 4
  Non-2xx or 3xx responses: 1000
Requests/sec:   1500.00
"""


class Server:
    """Answers 200, or 500 to every body with `refuse` in it; may stall."""

    async def __aenter__(self):
        self.bodies, self.gate, self.handlers = [], asyncio.Event(), set()
        self.gate.set()
        self.server = await asyncio.start_server(self.handle, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self.server.close()
        await asyncio.gather(*self.handlers)
        await self.server.wait_closed()

    async def handle(self, reader, writer):
        self.handlers.add(asyncio.current_task())
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
                body = await reader.readexactly(length)
                self.bodies.append(body)
                await self.gate.wait()
                status = b"500 No" if b"refuse" in body else b"200 OK"
                writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 2\r\n\r\n{}")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def test_open_loop_charges_a_stall_to_every_request_that_was_due_meanwhile():
    async with Server() as server:
        server.gate.clear()
        requests = [request_bytes(server.address, b"%d" % n) for n in range(10)]
        asking = asyncio.create_task(open_loop(server.address, requests, [n * 0.01 for n in range(10)]))
        # All are sent before the first answer: a client that waits for answers would have sent one.
        await until(lambda: len(server.bodies) == 10)
        server.gate.set()
        result = await asking
    assert len(result.times_ms) == 10
    assert result.failed == 0
    # The stall ended after the last was sent. Each is charged from when it was due, 10 ms after the other.
    assert min(result.times_ms) > 0
    assert max(result.times_ms) - min(result.times_ms) > 50


async def test_open_loop_charges_from_when_a_request_was_due_even_if_the_client_was_late():
    async with Server() as server:
        requests = [request_bytes(server.address, b"%d" % n) for n in range(5)]
        asyncio.get_running_loop().call_later(0.05, time.sleep, 0.3)  # nothing is sent meanwhile
        result = await open_loop(server.address, requests, [0.1, 0.11, 0.12, 0.13, 0.14])
    # Due at 0.1 at the earliest, sent at 0.35 at the earliest.
    assert min(result.times_ms) > 150


async def test_failures_are_counted_and_have_no_latency():
    async with Server() as server:
        requests = [request_bytes(server.address, body) for body in (b"ok", b"refuse", b"ok")]
        result = await open_loop(server.address, requests, [0.0, 0.001, 0.002])
        assert (len(result.times_ms), result.failed) == (2, 1)
        closed = await closed_loop(server.address, lambda _: requests[1], 2, 0.05)
        assert closed.per_second == 0
        assert closed.failed > 0


async def test_closed_loop_sends_different_requests():
    async with Server() as server:
        make = lambda n: request_bytes(server.address, b"%d" % n)  # noqa: E731
        result = await closed_loop(server.address, make, 4, 0.1)
        assert result.failed == 0
        assert result.per_second > 0
        assert len(server.bodies) == len(set(server.bodies))


def test_the_report_of_wrk_counts_only_good_answers():
    assert parse_wrk(WRK) == (1000.0, 1010)
    assert parse_wrk("  10 requests in 500.00ms, 1KB read\n") == (20.0, 0)
    with pytest.raises(WarmrouteError, match="unable to connect"):
        parse_wrk("unable to connect to 127.0.0.1:1 Connection refused")


def test_a_wrk_script_holds_the_templates_and_starts_where_it_is_told():
    made = templates(LOADS[1], 3, "tiny", Random(2))
    lines = wrk_script(made, 7_000_000).splitlines()
    pairs = [json.loads(f"[{line.strip().rstrip(',')[1:-1]}]") for line in lines if line.startswith('  {"')]
    assert [(before.encode(), after.encode()) for before, after in pairs] == made
    assert "local number = 7000000" in lines


@pytest.mark.parametrize("load", LOADS[:2], ids=lambda load: load.name)
async def test_wrk_sends_the_very_bodies_of_the_templates(tmp_path, load):
    if find_wrk() is None:  # an optional tool, and no Python package: not worth a skip, which fails CI
        return
    made = templates(load, 4, "tiny", Random(2))
    script = tmp_path / "load.lua"
    async with Server() as server:
        result = await wrk(find_wrk(), server.address, wrk_script(made, 1), script, 2, 1)
    assert result.failed == 0
    assert result.per_second > 0
    assert len(set(server.bodies)) == len(server.bodies)
    heads = {before for before, _ in made}
    for body in server.bodies[:50]:
        assert json.loads(body)["model"] == "tiny"
        assert any(body.startswith(head) for head in heads)
    assert fill(made[0], 1).startswith(made[0][0])
