"""Very many answers at once, through the whole product."""

import asyncio

import pytest

from extproc.sim.time_model import TimeModel
from tests.support.full_stack import FullStack, Worker
from tests.support.sim_engine import SimEngine

pytestmark = [pytest.mark.envoy, pytest.mark.timeout(300)]

STREAMS = 1000
ENGINES = 2


async def test_pitfall_68_a_thousand_slow_streams_at_once_are_all_answered(tmp_path):
    step = TimeModel(base_ms=100.0, prefill_ms_per_token=0.0)
    options = {"time": step, "max_num_seqs": STREAMS, "max_num_batched_tokens": 8192}
    async with SimEngine(**options) as one, SimEngine(**options) as two:
        engines = [one, two]
        workers = [Worker(engine.endpoint, engine.kv_events, engine.kv_replay) for engine in engines]
        async with FullStack(tmp_path, workers, settings={"scrape": {"timeout_s": 30.0}}) as stack:
            await stack.until_subscribed(ENGINES)
            for engine in engines:
                engine.pause()  # until all are there, so that they really run at once
            asked = [
                asyncio.create_task(stack.chat(f"Client {n}", stream=True, max_tokens=12, ignore_eos=True))
                for n in range(STREAMS)
            ]
            await stack.until(
                lambda: sum(engine.model.running + engine.model.waiting for engine in engines) == STREAMS,
                deadline_s=120.0,
            )
            there = [engine.model.running + engine.model.waiting for engine in engines]
            for engine in engines:
                engine.resume()
            replies = await asyncio.gather(*asked)
            assert {reply.status for reply in replies} == {200}
            assert all(reply.body.endswith(b"data: [DONE]\n\n") for reply in replies)
            assert {reply.usage["completion_tokens"] for reply in replies} == {12}
            assert min(there) > STREAMS / ENGINES / 2
            await stack.until(lambda: len(stack.log_entries()) == STREAMS, deadline_s=60.0)
            entries = stack.log_entries().values()
            assert {(entry["outcome"], entry["attempts"]) for entry in entries} == {("finished", 1)}
            assert stack.router.running
            await stack.until_idle()
