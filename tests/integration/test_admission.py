"""Requests held on a real Envoy: overload drains without a failure, clients leave, deadlines, tenants."""

import asyncio
import contextlib
import re
from collections import Counter

import pytest

from extproc.sim.time_model import TimeModel
from tests.support.full_stack import FullStack, Worker
from tests.support.http import Upstream
from tests.support.sim_engine import SimEngine
from tests.support.waiting import until_told

pytestmark = pytest.mark.envoy

STEPS = TimeModel(2.0, 0.0, 0.0, 0.0, 0.0)
SHORT_S = 3.0  # less than requests are held, and still enough on a loaded machine
ADMIN = {"listen": "127.0.0.1:0"}
PATIENT = {
    "interval_s": 0.3,
    "failure_limit": 1_000_000,
}  # a paused engine does not answer, and is still there


@contextlib.asynccontextmanager
async def overloaded(
    tmp_path,
    engines=1,
    *,
    steps=None,
    body_mode="BUFFERED",
    tenants=None,
    change_envoy=lambda bootstrap: None,
    message_timeout_s=10.0,
    **admission,
):
    """A stack whose workers take one request at a time each, unless `admission` says otherwise."""
    settings = {
        "admission": {"enabled": True, "max_worker_requests": 1, "max_wait_s": 60, **admission},
        "envoy": {"message_timeout_s": message_timeout_s, "body_mode": body_mode},
        "admin": ADMIN,
        "scrape": PATIENT,
        **({} if tenants is None else {"tenants": tenants}),
    }
    options = {} if steps is None else {"time": steps}
    async with contextlib.AsyncExitStack() as stack:
        fleet = [await stack.enter_async_context(SimEngine(**options)) for _ in range(engines)]
        workers = [Worker(engine.endpoint, engine.kv_events, engine.kv_replay) for engine in fleet]
        whole = await stack.enter_async_context(
            FullStack(tmp_path, workers, settings=settings, change_envoy=change_envoy)
        )
        # A worker's first request waits for nothing, so all are there before the test begins.
        await whole.until(lambda: whole.router_log().count(" joined") >= engines)
        yield whole, fleet


async def metric(stack, name):
    """All series of a metric, by labels."""
    found = re.findall(rf"^{name}(?:{{(.*?)}})? (\S+)$", await stack.page("/metrics"), re.MULTILINE)
    return {labels: float(value) for labels, value in found}


async def until_held(stack, count):
    await until_told(
        lambda: metric(stack, "warmroute_held_requests"), lambda held: sum(held.values()) == count
    )


async def outcomes(stack, count):
    """How so many requests came to go, or not; the page may be a moment old."""

    async def told():
        ended = Counter()
        for labels, number in (await metric(stack, "warmroute_admissions_total")).items():
            ended[re.search('outcome="(.*?)"', labels)[1]] += int(number)
        return ended

    return await until_told(told, lambda ended: ended.total() == count)


def ask(stack, n, *, headers=None, max_tokens=4, words=4):
    prompt = " ".join(f"{n}:{word}" for word in range(words))
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return asyncio.create_task(stack.post("/v1/completions", body, headers))


@pytest.mark.parametrize("body_mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
async def test_overload_is_held_and_drains_without_a_failure(tmp_path, body_mode):
    async with overloaded(tmp_path, 2, steps=STEPS, body_mode=body_mode, message_timeout_s=SHORT_S) as (
        stack,
        engines,
    ):
        for engine in engines:
            engine.pause()
        tasks = [ask(stack, n) for n in range(40)]
        await until_held(stack, 38)
        await asyncio.sleep(SHORT_S + 1.0)  # beyond what Envoy waits unless it is asked to
        assert sum((await metric(stack, "warmroute_held_requests")).values()) == 38
        assert all(engine.model.running + engine.model.waiting <= 1 for engine in engines)
        for engine in engines:
            engine.resume()
        replies = await asyncio.gather(*tasks)
        assert Counter(reply.status for reply in replies) == {200: 40}
        await until_held(stack, 0)
        entries = [await stack.decision(reply.request_id) for reply in replies]
        assert {entry["outcome"] for entry in entries} == {"finished"}
        held = sorted(entry["admission"]["held_ms"] for entry in entries)
        assert held[:2] == [0.0, 0.0]
        assert held[2] > 1000.0 * SHORT_S
        assert max(max(c["active"] for c in entry["candidate_workers"]) for entry in entries) == 0
        assert Counter(entry["selected_worker"] for entry in entries).keys() == {e.endpoint for e in engines}
        assert await outcomes(stack, 40) == {"passed": 2, "admitted": 38}
        assert await metric(stack, "warmroute_ext_proc_passed_through_total") == {"": 0.0}
        await stack.until_idle()


async def test_a_client_that_leaves_frees_its_place(tmp_path):
    async with overloaded(tmp_path, queue_requests=2) as (stack, (engine,)):
        engine.pause()
        first = ask(stack, 0)
        await stack.until(lambda: engine.model.running + engine.model.waiting == 1)
        leaves, stays = ask(stack, 1), ask(stack, 2)
        await until_held(stack, 2)
        leaves.cancel()
        await until_held(stack, 1)
        comes = ask(stack, 3)
        await until_held(stack, 2)
        engine.resume()
        assert [(await task).status for task in (first, stays, comes)] == [200, 200, 200]
        assert await outcomes(stack, 4) == {"passed": 1, "admitted": 2, "left": 1}
        await stack.until_idle()


async def test_who_cannot_be_served_in_time_is_told_when_to_come_back(tmp_path):
    async with overloaded(tmp_path, max_wait_s=2) as (stack, (engine,)):
        engine.pause()
        first = ask(stack, 0)
        await stack.until(lambda: engine.model.running + engine.model.waiting == 1)
        url, body = "/v1/completions", {"model": "tiny", "prompt": "Hello", "max_tokens": 1}
        async with stack.session.post(url, json=body, headers={"x-request-id": "patient"}) as reply:
            answer = await reply.json()
            assert (reply.status, reply.headers["retry-after"]) == (429, "2")
            assert answer["error"]["type"] == "rate_limit_error"
            assert answer["error"]["code"] == "rate_limit_exceeded"
        in_vain = {"x-request-timeout-ms": "300", "x-request-id": "hurried"}
        async with stack.session.post(url, json={**body, "stream": True}, headers=in_vain) as reply:
            assert reply.status == 429
        assert first.done() is False
        engine.resume()
        assert (await first).status == 200
        assert await outcomes(stack, 3) == {"passed": 1, "expired": 2}
        ((_, seconds),) = (await metric(stack, "warmroute_admission_wait_seconds_sum")).items()
        patient, hurried = [(await stack.decision(one))["admission"] for one in ("patient", "hurried")]
        assert patient["held_ms"] >= 2000.0
        assert hurried["held_ms"] < patient["held_ms"]  # for as long as its deadline allowed
        assert seconds == pytest.approx((patient["held_ms"] + hurried["held_ms"]) / 1000, abs=0.01)


async def test_a_flood_of_one_tenant_does_not_keep_another_waiting(tmp_path):
    tenants = {"identity": [{"header": "x-tenant"}], "policies": {"flood": {}, "light": {}}}
    async with overloaded(tmp_path, steps=STEPS, tenants=tenants) as (stack, (engine,)):
        engine.pause()
        flood = [ask(stack, n, headers={"x-tenant": "flood"}) for n in range(60)]
        await until_held(stack, 59)
        light = [ask(stack, 100 + n, headers={"x-tenant": "light"}) for n in range(5)]
        await until_held(stack, 64)
        engine.resume()
        replies = await asyncio.gather(*flood, *light)
        assert {reply.status for reply in replies} == {200}
        entries = [await stack.decision(reply.request_id) for reply in replies]
        order = [entry["tenant"] for entry in sorted(entries, key=lambda entry: entry["decided"])]
        # Equal work, equal weights: they take turns until the light one has nothing left.
        assert order[:20].count("light") == 5, order


async def test_priorities_go_first_and_everyone_goes(tmp_path):
    async with overloaded(tmp_path, steps=STEPS, ageing_s=60) as (stack, (engine,)):
        engine.pause()
        tasks = [ask(stack, n, headers={"x-warmroute-priority": str(n % 3)}) for n in range(30)]
        await until_held(stack, 29)
        engine.resume()
        replies = await asyncio.gather(*tasks)
        entries = [await stack.decision(reply.request_id) for reply in replies]
        waited = [entry for entry in entries if entry["admission"]["held_ms"]]
        order = [
            entry["admission"]["priority"] for entry in sorted(waited, key=lambda entry: entry["decided"])
        ]
        assert order == sorted(order, reverse=True)


async def test_who_stops_lets_go_what_it_holds(tmp_path):
    async with overloaded(tmp_path) as (stack, (engine,)):
        engine.pause()
        tasks = [ask(stack, n) for n in range(4)]
        await until_held(stack, 3)
        await stack.stop_router()
        engine.resume()
        assert [(await task).status for task in tasks] == [200] * 4


async def test_an_envoy_that_gives_no_more_time_sends_requests_on_unheld(tmp_path):
    """Without `max_message_timeout` Envoy does not wait: nothing fails, and nothing is left behind."""

    def no_more_time(bootstrap):
        for one in _objects(bootstrap):
            if one.get("name") == "envoy.filters.http.ext_proc":
                one["typed_config"].pop("max_message_timeout", None)

    async with overloaded(tmp_path, change_envoy=no_more_time, message_timeout_s=SHORT_S) as (
        stack,
        (engine,),
    ):
        engine.pause()
        tasks = [ask(stack, n) for n in range(3)]
        await stack.until(lambda: engine.model.running + engine.model.waiting == 3)
        await until_held(stack, 0)
        engine.resume()
        assert [(await task).status for task in tasks] == [200] * 3


async def test_the_timeout_of_a_route_does_not_count_while_a_request_is_held(tmp_path):
    def hurried(bootstrap):
        for one in _objects(bootstrap):
            if "timeout" in one and ("cluster" in one or "cluster_header" in one):
                one["timeout"] = "4s"

    slow = TimeModel(250.0, 0.0, 0.0, 0.0, 0.0)  # two seconds for eight tokens
    async with overloaded(tmp_path, steps=slow, change_envoy=hurried) as (stack, _):
        replies = await asyncio.gather(*(ask(stack, n, max_tokens=8) for n in range(4)))
        assert {reply.status for reply in replies} == {200}
        entries = [await stack.decision(reply.request_id) for reply in replies]
        assert max(entry["admission"]["held_ms"] for entry in entries) > 5000.0


def _objects(value):
    """Every mapping in a configuration."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _objects(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _objects(inner)


async def test_what_is_no_inference_is_never_held(tmp_path):
    async with overloaded(tmp_path) as (stack, (engine,)):
        engine.pause()
        first = ask(stack, 0)
        await stack.until(lambda: engine.model.running + engine.model.waiting == 1)
        async with stack.session.get("/v1/models") as reply:
            assert reply.status == 200
        engine.resume()
        assert (await first).status == 200


async def test_a_default_fleet_that_copes_holds_nothing(tmp_path):
    """The bounds that come with `enabled: true` are not reached by load that an engine serves at once."""
    async with contextlib.AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(Upstream())
        settings = {
            "admission": {"enabled": True},
            "admin": ADMIN,
            "scrape": {"interval_s": 30, "failure_limit": 1_000_000},
            "pools": [{"discovery": {"static": [upstream.endpoint]}, "kv_events": {"enabled": False}}],
        }
        whole = await stack.enter_async_context(FullStack(tmp_path, [], settings=settings))
        replies = await asyncio.gather(*(ask(whole, n) for n in range(50)))
        assert {reply.status for reply in replies} == {200}
        assert await outcomes(whole, 50) == {"passed": 50}
