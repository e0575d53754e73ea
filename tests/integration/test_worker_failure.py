"""Workers die, hang, refuse and come back, under load, behind the whole product."""

import asyncio
import json
import random
import time
from collections import Counter
from contextlib import asynccontextmanager

import aiohttp
import pytest

from extproc.demo.workload import prose
from extproc.sim.time_model import TimeModel
from tests.support.full_stack import DEADLINE_S, FullStack, Worker
from tests.support.sim_engine import SimEngine

pytestmark = pytest.mark.envoy

BRIEF_SCRAPES = {"interval_s": 0.1, "timeout_s": 1.0, "failure_limit": 3, "stale_after_s": 1.0}


@asynccontextmanager
async def fleet(tmp_path, count=3, *, time=None, **settings):
    options = {} if time is None else {"time": time}
    async with SimEngine(**options) as one, SimEngine(**options) as two, SimEngine(**options) as three:
        engines = [one, two, three][:count]
        workers = [Worker(e.endpoint, e.kv_events, e.kv_replay) for e in engines]
        settings = {"scrape": BRIEF_SCRAPES, **settings}
        async with FullStack(tmp_path, workers, settings=settings) as stack:
            await stack.until_subscribed(count)
            yield stack, engines


def says(stack, engine, what):
    """Whether the last that the router said of this worker's readiness is `what`."""
    about = f"worker {engine.endpoint} is "

    def said():
        lines = [line for line in stack.router_log().splitlines() if about in line]
        return bool(lines) and lines[-1].split(about)[1].startswith(what)

    return said


async def decisions(stack, replies):
    return [await stack.decision(reply.request_id) for reply in replies]


async def spread(stack, requests=12):
    """Where so many unrelated requests went, by the log: choice and server."""
    replies = await asyncio.gather(*(stack.chat(f"Unrelated {n}: {n * 7919}") for n in range(requests)))
    assert {reply.status for reply in replies} == {200}
    entries = await decisions(stack, replies)
    assert all(entry["outcome"] == "finished" for entry in entries)
    return {entry["selected_worker"] for entry in entries}, {entry["served_by"] for entry in entries}


async def until_open(stack, requests):
    """So many requests have been routed and have not ended."""
    end = time.monotonic() + DEADLINE_S
    while (found := json.loads(await stack.page("/state"))["open_requests"]) != requests:
        assert time.monotonic() < end, f"{found} of {requests} are open"
        await asyncio.sleep(0.01)


async def until_used(stack, engine):
    for n in range(300):
        entry = (await decisions(stack, [await stack.chat(f"Back? {n}")]))[0]
        if entry["selected_worker"] == entry["served_by"] == engine.endpoint:
            return
    raise AssertionError("never used again")


async def test_a_worker_killed_under_load(tmp_path):
    slow = TimeModel(base_ms=20.0, prefill_ms_per_token=0.001)
    async with fleet(tmp_path, time=slow) as (stack, engines):

        async def stream(number):
            """(status, complete): a cut answer is a failure only this client can see."""
            body = {
                "model": "tiny",
                "messages": [{"role": "user", "content": f"Client {number} {'word ' * (number % 7)}"}],
                "max_tokens": 300,  # none ends before the last has begun
                "ignore_eos": True,
                "stream": True,
            }
            headers = {"x-request-id": f"stream-{number}"}
            got = b""
            try:
                async with stack.session.post("/v1/chat/completions", json=body, headers=headers) as reply:
                    async for piece in reply.content.iter_any():
                        got += piece
                    return reply.status, got.endswith(b"data: [DONE]\n\n"), got
            except aiohttp.ClientError:
                return None, False, got

        early = [asyncio.create_task(stream(n)) for n in range(30)]
        await stack.until(lambda: sum(e.model.running for e in engines) == 30)
        victim = max(engines, key=lambda e: e.model.running)
        on_victim = victim.model.running
        # Those that come now wait at the victim's door: it takes them, but answers nothing.
        victim.faults.hang = True
        late = [asyncio.create_task(stream(n)) for n in range(30, 60)]
        await until_open(stack, 60)
        await victim.kill()

        for number, task in enumerate(early + late):
            status, complete, got = await task
            if not complete:  # it had begun at the victim, and nobody can take that back
                assert number < 30
                assert got
            else:
                assert status == 200
        cut = sum(not task.result()[1] for task in early)
        assert cut == on_victim

        await stack.until(says(stack, victim, "not ready"))
        entries = {f"stream-{n}": await stack.decision(f"stream-{n}") for n in range(60)}
        lines = [json.loads(line)["request_id"] for line in stack.decisions.read_text().splitlines()]
        assert len(lines) == len(set(lines))  # every request accounted for, and once
        outcomes = Counter(entry["outcome"] for entry in entries.values())
        assert outcomes == {"failed": cut, "finished": 60 - cut}
        elsewhere = [e for e in entries.values() if e["selected_worker"] == victim.endpoint != e["served_by"]]
        assert all(entry["outcome"] == "finished" and entry["attempts"] == 2 for entry in elsewhere)
        chosen, served = await spread(stack)
        assert victim.endpoint not in chosen | served
        await stack.until_idle()

        victim.faults.hang = False
        await victim.restart()
        await stack.until(says(stack, victim, "ready again"))
        await until_used(stack, victim)
        await stack.until_idle()


async def test_requests_are_refused_by_the_dead_and_taken_by_the_next(tmp_path):
    """Before any scrape can tell: the first refusal does."""
    async with fleet(tmp_path, scrape={"interval_s": 60.0}) as (stack, engines):
        victim = engines[0]
        await victim.kill()
        for number in range(100):
            (entry,) = await decisions(stack, [await stack.chat(f"Anybody? {number}")])
            assert (entry["status"], entry["outcome"]) == (200, "finished")
            if entry["selected_worker"] == victim.endpoint:
                break
        assert entry["selected_worker"] == victim.endpoint != entry["served_by"]
        assert entry["attempts"] == 2
        # What the log predicts is about the worker that served it.
        assert entry["predicted_cached_tokens"] == entry["actual_cached_tokens"]
        chosen, _ = await spread(stack)
        assert victim.endpoint not in chosen


async def test_pitfall_47_a_worker_that_restarts_empty_is_not_believed_warm(tmp_path):
    async with fleet(tmp_path, 1) as (stack, (victim,)):
        text = prose(random.Random(2), 300)
        await stack.until_warm(text)
        await victim.kill()
        await stack.until(says(stack, victim, "not ready"))
        await victim.restart()
        await stack.until(says(stack, victim, "ready again"))
        # It says nothing of its own accord. While it is asked, less may be claimed than there is; never more.
        for _ in range(4):
            for entry in await decisions(stack, [await stack.chat(text)]):
                assert entry["predicted_cached_tokens"] <= entry["actual_cached_tokens"]
        await stack.until(lambda: stack.router_log().count(f"{victim.endpoint}: complete (") >= 2)
        entry = await stack.until_warm(text)
        assert entry["predicted_cached_tokens"] == entry["actual_cached_tokens"]


async def test_a_worker_that_answers_503_is_left_for_the_next(tmp_path):
    async with fleet(tmp_path, 2) as (stack, engines):
        engines[0].faults.status = 503
        _, served = await spread(stack)
        assert served == {engines[1].endpoint}
        await stack.until_idle()
        engines[0].faults.status = None
        await until_used(stack, engines[0])


async def test_pitfall_58_a_worker_that_hangs_holds_only_what_it_took(tmp_path):
    async with fleet(tmp_path, 2) as (stack, engines):
        hanging = engines[0]
        hanging.faults.hang = True
        stuck = [asyncio.create_task(stack.chat(f"Stuck? {n}")) for n in range(20)]
        await stack.until(lambda: sum(task.done() for task in stuck) > 0)
        (entry,) = await decisions(stack, [next(task for task in stuck if task.done()).result()])
        assert entry["served_by"] == engines[1].endpoint
        # Clients that lose patience free what they held.
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        hanging.faults.hang = False
        await stack.until(lambda: len(stack.log_entries()) == 20)
        outcomes = Counter(entry["outcome"] for entry in stack.log_entries().values())
        assert outcomes["cancelled"] > 0
        assert set(outcomes) <= {"cancelled", "finished"}
        await stack.until_idle()


async def test_metrics_that_hang_take_a_worker_out_until_they_come_back(tmp_path):
    async with fleet(tmp_path, 2) as (stack, engines):
        engines[0].faults.metrics_hang = True
        await stack.until(says(stack, engines[0], "not ready"))
        chosen, _ = await spread(stack)
        assert chosen == {engines[1].endpoint}
        engines[0].faults.metrics_hang = False
        await stack.until(says(stack, engines[0], "ready again"))
        await until_used(stack, engines[0])


async def health_in_envoy(stack):
    """What Envoy has been told of each worker."""
    async with (
        aiohttp.ClientSession() as client,
        client.get(f"http://{stack.envoy.admin}/clusters?format=json") as reply,
    ):
        clusters = (await reply.json(content_type=None))["cluster_statuses"]
    (workers,) = (one for one in clusters if one["name"] == "workers")
    return sorted(one["health_status"]["eds_health_status"] for one in workers["host_statuses"])


async def until_in_envoy(stack, *health):
    end = time.monotonic() + DEADLINE_S
    while (found := await health_in_envoy(stack)) != sorted(health):
        assert time.monotonic() < end, found
        await asyncio.sleep(0.02)


async def test_with_every_metrics_page_too_slow_requests_are_placed_and_served_all_the_same(tmp_path):
    async with fleet(tmp_path, 2, envoy={"eds": "always"}) as (stack, engines):
        engines[0].faults.metrics_hang = True
        await stack.until(says(stack, engines[0], "not ready"))
        await until_in_envoy(stack, "HEALTHY", "DEGRADED")
        engines[1].faults.metrics_hang = True
        await stack.until(says(stack, engines[1], "not ready"))
        await until_in_envoy(stack, "HEALTHY", "HEALTHY")
        state = json.loads(await stack.page("/state"))
        assert [(one["ready"], one["last_resort"]) for one in state["workers"]] == [(True, True)] * 2
        chosen, served = await spread(stack)
        assert chosen == served == {engine.endpoint for engine in engines}
        # What they served has shown that nothing is wrong with them but their pages.
        for engine in engines:
            await stack.until(says(stack, engine, "ready again"))
        # Without requests nothing shows it. Who refuses connections is no last resort.
        for engine in engines:
            await stack.until(says(stack, engine, "not ready"))
        await engines[1].kill()
        await until_in_envoy(stack, "HEALTHY", "UNHEALTHY")
        chosen, _ = await spread(stack)
        assert chosen == {engines[0].endpoint}


async def test_a_worker_whose_metrics_page_is_broken_serves_whom_no_other_may_serve(tmp_path):
    async with SimEngine() as own, SimEngine() as other:
        settings = {
            "scrape": BRIEF_SCRAPES,
            "envoy": {"eds": "always"},
            "tenants": {
                "identity": [{"header": "x-tenant"}],
                "policies": {"pinned": {"workers": [own.endpoint]}},
                "unknown": {},
            },
        }
        workers = [Worker(e.endpoint, e.kv_events, e.kv_replay) for e in (own, other)]
        async with FullStack(tmp_path, workers, settings=settings) as stack:

            async def served(tenant):
                body = {"model": "tiny", "messages": [{"role": "user", "content": "Anybody?"}]}
                reply = await stack.post("/v1/chat/completions", body, {"x-tenant": tenant})
                if reply.status != 200:
                    return reply.status
                return (await stack.decision(reply.request_id))["served_by"]

            own.faults.metrics_status = 500
            await stack.until(says(stack, own, "not ready"))
            await until_in_envoy(stack, "DEGRADED", "HEALTHY")
            for _ in range(5):
                assert await served("pinned") == own.endpoint
                assert await served("anybody") == other.endpoint
            await own.kill()
            await until_in_envoy(stack, "HEALTHY", "UNHEALTHY")
            assert await served("pinned") == 503
            assert await served("anybody") == other.endpoint


async def test_with_every_worker_out_the_answer_is_a_clean_503_that_ends(tmp_path):
    async with fleet(tmp_path, 2) as (stack, engines):
        for engine in engines:
            await engine.kill()
        for engine in engines:
            await stack.until(says(stack, engine, "not ready"))
        reply = await stack.chat("Anybody?")
        assert reply.status == 503
        assert b'"code":"service_unavailable"' in reply.body
        for engine in engines:
            await engine.restart()
        for engine in engines:
            await stack.until(says(stack, engine, "ready again"))
        assert (await stack.chat("Back?")).status == 200
