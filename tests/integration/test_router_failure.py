"""The router dies, stalls and comes back, while real traffic of simulated engines goes through Envoy."""

import asyncio
import os
import random
import signal
from contextlib import asynccontextmanager

import pytest

from extproc.demo.workload import prose
from extproc.sim.time_model import TimeModel
from tests.support.full_stack import FullStack, Worker
from tests.support.sim_engine import SimEngine

pytestmark = pytest.mark.envoy

STREAMS = 50
TOKENS = 60
SLOW = TimeModel(base_ms=20.0, prefill_ms_per_token=0.001)  # some 1.2 s per answer of 60 tokens


@asynccontextmanager
async def fleet(tmp_path, **settings):
    async with SimEngine(time=SLOW) as one, SimEngine(time=SLOW) as two:
        workers = [Worker(e.endpoint, e.kv_events, e.kv_replay) for e in (one, two)]
        async with FullStack(tmp_path, workers, settings=settings) as stack:
            await stack.until_subscribed(2)
            yield stack, (one, two)


async def until_all_run(stack, engines, count):
    """So many requests are begun, none of them far: until all are there, no step ends."""
    for engine in engines:
        engine.pause()
    await stack.until(lambda: sum(e.model.running + e.model.waiting for e in engines) == count)
    for engine in engines:
        engine.resume()
    await stack.until(lambda: sum(e.model.running for e in engines) == count)


async def until_routed(stack):
    """Wait until the router takes part again: Envoy reconnects in its own time, and requests do not wait."""
    sent, before = 0, stack.log_entries().keys()

    def routed():
        return stack.log_entries().keys() - before

    while not routed():
        sent += 1
        assert sent < 300, "the new router never took part in a request"
        assert (await stack.chat(f"Probe {sent}.", max_tokens=1)).status == 200


async def test_the_router_is_killed_under_fifty_streams_and_finds_prefixes_again(tmp_path):
    rng = random.Random(1)
    document, long = prose(rng, 600), {"max_tokens": TOKENS, "ignore_eos": True}
    async with fleet(tmp_path) as (stack, engines):
        warm_at = (await stack.until_warm(document))["served_by"]

        streams = [
            asyncio.create_task(stack.chat(prose(rng, 20), stream=True, **long)) for _ in range(STREAMS)
        ]
        await until_all_run(stack, engines, STREAMS)
        await stack.router.kill()
        assert not any(stream.done() for stream in streams)

        meanwhile = await asyncio.gather(*(stack.chat(f"Down? {n}", stream=n % 2 == 0) for n in range(8)))
        assert [reply.status for reply in meanwhile] == [200] * 8
        for reply in await asyncio.gather(*streams):
            assert (reply.status, reply.usage["completion_tokens"]) == (200, TOKENS)
            assert reply.body.endswith(b"data: [DONE]\n\n")

        await stack.start_router()
        await stack.until_complete(2)
        await until_routed(stack)
        again = await stack.decision((await stack.chat(document)).request_id)
        assert again["selected_worker"] == again["served_by"] == warm_at
        assert again["predicted_cached_tokens"] == again["actual_cached_tokens"] > 500


async def test_a_stalled_router_delays_requests_and_fails_none(tmp_path):
    async with fleet(tmp_path, envoy={"message_timeout_s": 0.3}) as (stack, _):
        pid = stack.router.pid
        assert (await stack.chat("Hello.")).status == 200
        os.kill(pid, signal.SIGSTOP)
        try:
            replies = await asyncio.gather(*(stack.chat(f"Stalled? {n}") for n in range(10)))
        finally:
            os.kill(pid, signal.SIGCONT)
        assert [reply.status for reply in replies] == [200] * 10
        # Back to work: and nothing the stall left behind is taken for load.
        await until_routed(stack)
        await stack.until_idle()


async def test_a_router_that_is_asked_to_stop_cuts_no_stream_and_has_a_line_of_each(tmp_path):
    async with fleet(tmp_path) as (stack, engines):
        streams = [
            asyncio.create_task(stack.chat(f"{n}", stream=True, max_tokens=TOKENS, ignore_eos=True))
            for n in range(10)
        ]
        await until_all_run(stack, engines, 10)
        for engine in engines:
            engine.pause()
        assert await stack.router.stop(grace=20) == 0
        for engine in engines:
            engine.resume()
        for reply in await asyncio.gather(*streams):
            assert (reply.status, reply.usage["completion_tokens"]) == (200, TOKENS)
            entry = stack.log_entries()[reply.request_id]
            assert (entry["outcome"], entry["details"]) == ("lost", "the router stopped")
