import asyncio
import dataclasses
import json
import socket
from types import SimpleNamespace

import aiohttp
import pytest
import yaml

from extproc.adapters.index_memory import IndexMemory
from extproc.core.types import Completion, EngineMetrics, Outcome, WorkerId
from extproc.prompt.tiny import tiny_model_path
from extproc.protocol.endpoint_discovery import Health
from extproc.protocol.ext_proc_messages import Route
from extproc.sim.time_model import TimeModel
from tests.support.ports import free_port
from tests.support.sim_engine import SimEngine
from tests.support.waiting import until, until_told
from tests.test_app import TEXT, Running, settings

LIMITED = {"scrape": {"interval_s": 0.05, "failure_limit": 3}}
# Once per test this is waited for three times: long enough for a page from a process that has little to do.
IMPATIENT = {"scrape": {"interval_s": 0.05, "timeout_s": 0.3, "failure_limit": 3}}


async def test_pitfall_74_an_engine_whose_metrics_fail_is_out_only_after_some_in_a_row(tmp_path):
    async with (
        SimEngine() as engine,
        SimEngine() as other,
        Running(settings(tmp_path, engine, other, **LIMITED)) as app,
    ):
        states = state, _ = app.router.table.all()
        await until(lambda: all(one.metrics_at is not None for one in states))
        failures = []
        original = app.router.on_page_failure

        def fails(endpoint, began, *, slow):
            failures.append(original(endpoint, began, slow=slow))
            if failures == [False]:
                engine.faults.metrics_status = None  # one only
            return failures[-1]

        app.router.on_page_failure = fails
        engine.faults.metrics_status = 500
        await until(lambda: failures)
        await until(lambda: state.scrape_failures == 0)
        assert not app.says("not ready")()

        engine.faults.metrics_status = 500
        await until(app.says("not ready", "500"))
        assert failures[-3:] == [False, False, True]
        assert (await app.ask()).endpoints == (other.endpoint,)
        engine.faults.metrics_status = None
        await until(app.says("ready again"))
        assert set((await app.ask()).endpoints) == {engine.endpoint, other.endpoint}


async def test_engines_that_refuse_connections_get_no_requests_though_nobody_else_is_there(tmp_path):
    async with SimEngine() as engine, Running(settings(tmp_path, engine, **LIMITED)) as app:
        await until(lambda: app.router.table.all()[0].metrics_at is not None)
        await engine.kill()
        await until(app.says("not ready"))
        assert not app.health.ready
        assert (await app.ask()).status == 503
        await engine.restart()
        await until(app.says("ready again"))
        assert app.health.ready
        assert isinstance(await app.ask(), Route)


def told_to_envoy(app):
    return {one.endpoint: one.health for one in app.eds._snapshot.assignments["workers"].workers}


@pytest.mark.parametrize("fault", ["hang", "500"])
async def test_where_no_metrics_page_can_be_read_requests_go_to_the_engines_all_the_same(tmp_path, fault):
    async with (
        SimEngine() as one,
        SimEngine() as two,
        Running(settings(tmp_path, one, two, **IMPATIENT)) as app,
    ):
        await until(lambda: all(state.metrics_at is not None for state in app.router.table.all()))
        for engine in (one, two):
            engine.faults.metrics_hang = fault == "hang"
            engine.faults.metrics_status = 500 if fault == "500" else None
        await until(app.says("pool default", "page can be read", "2 that were reached"))
        assert [app.says(f"worker {engine.endpoint} is not ready")() for engine in (one, two)] == [True, True]
        assert app.health.ready
        assert set((await app.ask()).endpoints) == {one.endpoint, two.endpoint}
        assert told_to_envoy(app) == {one.endpoint: Health.HEALTHY, two.endpoint: Health.HEALTHY}
        one.faults.metrics_hang, one.faults.metrics_status = False, None
        await until(app.says(f"worker {one.endpoint} is ready again"))
        await until(app.says("pool default", "workers are ready again"))
        assert (await app.ask()).endpoints == (one.endpoint,)
        assert told_to_envoy(app) == {one.endpoint: Health.HEALTHY, two.endpoint: Health.DEGRADED}
        await two.kill()
        down = {one.endpoint: Health.HEALTHY, two.endpoint: Health.UNHEALTHY}
        await until(lambda: told_to_envoy(app) == down)


async def test_an_engine_that_was_put_to_sleep_gets_requests_only_if_all_were(tmp_path):
    async with (
        SimEngine() as one,
        SimEngine() as two,
        Running(settings(tmp_path, one, two, **LIMITED)) as app,
    ):
        both = {one.endpoint, two.endpoint}
        assert set((await app.ask()).endpoints) == both
        one.faults.asleep = True
        await until(app.says(one.endpoint, "not ready", "asleep"))
        assert (await app.ask()).endpoints == (two.endpoint,)
        assert told_to_envoy(app) == {one.endpoint: Health.DEGRADED, two.endpoint: Health.HEALTHY}
        two.faults.asleep = True
        app.router.table.on_connect_failure(two.endpoint, app._clock())  # of which nothing was said
        await until(app.says(two.endpoint, "not ready", "asleep"))
        await until(app.says("no worker is awake"))
        assert set((await app.ask()).endpoints) == both
        assert app.health.ready
        state = app.router.table.at(one.endpoint)[0]
        heard = state.metrics_at
        await until(lambda: state.metrics_at > heard)
        one.faults.asleep = False
        await until(app.says(one.endpoint, "ready again"))
        assert (await app.ask()).endpoints == (one.endpoint,)
        assert sum("asleep" in line for line in app.said) == 2


async def test_an_engine_whose_page_is_slow_stays_ready_while_it_serves(tmp_path):
    async with (
        SimEngine() as slow,
        SimEngine() as other,
        Running(settings(tmp_path, slow, other, **IMPATIENT)) as app,
    ):
        state = app.router.table.get(WorkerId(slow.endpoint))
        await until(lambda: state.metrics_at is not None)
        slow.faults.metrics_hang = True
        failures = state.scrape_failures
        while failures < 6:
            await until(lambda before=failures: state.scrape_failures > before)
            failures = state.scrape_failures
            route = await app.ask()
            served = Completion(Outcome.FINISHED, served_by=slow.endpoint, status=200)
            app.service.completed(route.lease_id, served)
        assert app.router.table.is_ready(state, app._clock())
        assert not app.says("not ready")()
        await until(app.says(f"worker {slow.endpoint} is not ready"))  # it serves nothing more
        app.service.completed((await app.ask()).lease_id, served)
        await until(app.says(f"worker {slow.endpoint} is ready again", "it serves"))


async def test_pitfall_72_figures_that_stop_coming_are_not_taken_for_idleness(tmp_path):
    stale = {"scrape": {"interval_s": 0.05, "timeout_s": 60.0, "stale_after_s": 0.2}}
    async with (
        SimEngine(max_num_seqs=1, time=TimeModel(base_ms=20.0)) as busy,
        SimEngine() as silent,
        Running(settings(tmp_path, busy, silent, **stale)) as app,
    ):
        table = app.router.table
        quiet, loud = (table.get(WorkerId(e.endpoint)) for e in (silent, busy))
        await until(lambda: quiet.metrics_at is not None and loud.metrics_at is not None)
        silent.faults.metrics_hang = True
        await until(lambda: quiet.fresh_metrics(app._clock(), 0.2) is None)
        assert quiet.metrics.waiting == 0  # the last thing it said
        async with aiohttp.ClientSession(busy.base_url) as client:
            body = {"model": "tiny", "prompt": [7] * 400, "max_tokens": 1000, "ignore_eos": True}
            asks = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(200)]
            await until(lambda: (loud.metrics.waiting or 0) > 0)
            route = await app.ask("x " * 100)
            costs = {c.worker: c.cost for c in app.router.ledger.get(route.lease_id).decision.candidates}
            assert costs[quiet.id].queue_ms > 0
            for ask in asks:
                ask.cancel()
            await asyncio.gather(*asks, return_exceptions=True)


async def test_workers_come_and_go_with_their_file(tmp_path):
    members = tmp_path / "workers.yaml"
    async with SimEngine() as one, SimEngine() as two:
        members.write_text(yaml.safe_dump([one.endpoint]))
        pool = {"discovery": {"file": str(members)}, "kv_events": {"enabled": False}}
        async with Running(settings(tmp_path, pool=pool)) as app:
            await until(app.says(f"worker {one.endpoint} joined"))
            route = await app.ask()
            assert route.endpoints == (one.endpoint,)
            new = tmp_path / "new.yaml"
            new.write_text(yaml.safe_dump([two.endpoint]))
            new.replace(members)
            await until(app.says(f"worker {one.endpoint} left"))
            assert [state.id.endpoint for state in app.router.table.all()] == [two.endpoint]
            open_there = await app.ask()
            assert open_there.endpoints == (two.endpoint,)
            app.service.completed(route.lease_id, Completion(Outcome.FINISHED))  # it was drained
    entries = [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    assert [(entry["selected_worker"], entry["outcome"]) for entry in entries] == [
        (one.endpoint, "finished"),
        (two.endpoint, "lost"),
    ]


async def test_an_event_address_that_cannot_be_right_costs_one_worker_its_events_only(tmp_path):
    async with SimEngine() as good, SimEngine() as bad:
        config = settings(tmp_path, good, bad)
        wrong = config.pools[0].discovery.static[1].model_copy(update={"kv_events": "tcp://*:0"})
        static = [config.pools[0].discovery.static[0], wrong]
        discovery = config.pools[0].discovery.model_copy(update={"static": static})
        pool = config.pools[0].model_copy(update={"discovery": discovery})
        async with Running(config.model_copy(update={"pools": [pool]})) as app:
            assert app.says(bad.endpoint, "port 0", "kv_events")()
            await until(app.says(f"KV events of {good.endpoint}"))
            await until(lambda: all(state.metrics for state in app.router.table.all()))
            assert isinstance(await app.ask(), Route)


async def test_a_worker_whose_revision_changes_is_learned_anew_from_its_own_events(tmp_path):
    path = tmp_path / "workers.yaml"

    def say(revision):
        entry = {"endpoint": engine.endpoint, "kv_events": engine.kv_events, "kv_replay": engine.kv_replay}
        (tmp_path / "new").write_text(yaml.safe_dump([{**entry, "revision": revision}]))
        (tmp_path / "new").replace(path)

    async with SimEngine() as engine, aiohttp.ClientSession(engine.base_url) as client:
        body = {"model": "tiny", "prompt": TEXT, "max_tokens": 1}
        async with client.post("/v1/completions", json=body) as reply:
            assert reply.status == 200
        say("v1")
        pool = {"model": {"path": str(tiny_model_path()), "revision": "v1"}, "discovery": {"file": str(path)}}
        async with Running(settings(tmp_path, pool=pool)) as app:

            async def seen_as():
                route = await app.ask()
                decision = app.router.ledger.get(route.lease_id).decision
                app.service.completed(route.lease_id, Completion(Outcome.CANCELLED))
                return decision.request.namespace.model_revision, decision.chosen.cached_tokens > 0

            await until(lambda: app.says("complete")() or app.says("KV events of")())
            await until_told(seen_as, lambda seen: seen == ("v1", True))
            say("v2")
            await until(app.says("serves model revision 'v2'"))
            # What it computed is found again, in the namespace of what it serves now.
            await until_told(seen_as, lambda seen: seen == ("v2", True))


async def test_a_worker_whose_counters_fall_is_learned_anew_from_its_own_events(tmp_path):
    """It may be another process, of which its events have not told; or its page was wrong for once."""
    async with SimEngine() as engine, aiohttp.ClientSession(engine.base_url) as client:
        async with client.post("/v1/completions", json={"prompt": TEXT, "max_tokens": 1}) as reply:
            assert reply.status == 200
        async with Running(settings(tmp_path, engine)) as app:
            (state,) = app.router.table.all()
            await until(lambda: state.kv_trusted and state.metrics is not None)
            held = app.router.index.resident_blocks(state.id)
            seen = dataclasses.replace(state.metrics, prompt_tokens=1e12)
            app._watch._on_metrics(engine.endpoint, {0: seen})
            await until(lambda: state.metrics.prompt_tokens < 1e12)
            await until(lambda: state.kv_trusted and app.router.index.resident_blocks(state.id) == held > 0)


async def test_an_engine_that_connects_to_us_is_heard_though_its_revision_is_learned_late(tmp_path):
    """All it has said before is read anew, on the socket it is connected to."""
    ours = f"tcp://127.0.0.1:{free_port()}"
    async with SimEngine(kv_events_connect=ours) as engine, aiohttp.ClientSession(engine.base_url) as client:
        async with client.post("/v1/completions", json={"prompt": TEXT, "max_tokens": 1}) as reply:
            assert reply.status == 200
        pool = {
            "model": {"path": str(tiny_model_path()), "revision_from": "models"},
            "kv_events": {"endpoint": ours, "replay": engine.kv_replay, "bind": True},
            "discovery": {"static": [engine.endpoint]},
        }
        async with Running(settings(tmp_path, pool=pool)) as app:
            (state,) = app.router.table.all()
            await until(app.says("serves model revision"))
            await until(lambda: state.kv_trusted and app.router.index.resident_blocks(state.id) > 0)


async def test_an_address_for_engines_that_is_in_use_is_tried_again_and_both_are_said_once(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("extproc.fleet_watch._KV_RETRY_S", 0.0)
    with socket.socket() as older:
        older.bind(("127.0.0.1", free_port()))
        older.listen()
        ours = f"tcp://127.0.0.1:{older.getsockname()[1]}"
        async with SimEngine(kv_events_connect=ours) as engine:
            pool = {
                "kv_events": {"endpoint": ours, "replay": engine.kv_replay, "bind": True},
                "discovery": {"static": [engine.endpoint]},
            }
            async with Running(settings(tmp_path, pool=pool)) as app:
                assert app.says(ours, "Address already in use", "tried again")()
                tries = count_calls(app._watch.subscriber, "retry")
                await until(lambda: len(tries) > 1)
                app._watch._on_members()  # one more try
                older.close()
                await until(app.says(f"KV events: {ours} can be used now"))
                async with aiohttp.ClientSession(engine.base_url) as client:
                    body = {"model": "tiny", "prompt": TEXT, "max_tokens": 1}
                    async with client.post("/v1/completions", json=body) as reply:
                        assert reply.status == 200
                (state,) = app.router.table.all()
                await until(lambda: state.kv_trusted and app.router.index.resident_blocks(state.id) > 0)
                assert sum(ours in line for line in app.said) == 2


async def test_an_address_that_is_tried_again_is_left_a_few_seconds(tmp_path):
    with socket.socket() as older:
        older.bind(("127.0.0.1", free_port()))
        older.listen()
        endpoint = f"tcp://127.0.0.1:{older.getsockname()[1]}"
        pool = {
            "kv_events": {"endpoint": endpoint, "bind": True},
            "discovery": {"static": ["127.0.0.1:1"]},
        }
        async with Running(settings(tmp_path, pool=pool)) as app:
            watch = app._watch
            tries = count_calls(watch.subscriber, "retry")
            now = watch._clock()
            for passed in (0.0, 0.5, 2.5, 3.5, 4.0, 6.0, 7.0):
                watch._clock = lambda passed=passed: now + passed
                watch.follow_again()
            assert len(tries) == 2


def at_rank_0(engine, rank):
    """The engine, with the KV addresses that its configuration has: of rank 0."""

    def address(endpoint):
        host, _, port = endpoint.rpartition(":")
        return f"{host}:{int(port) - rank}"

    return SimpleNamespace(
        endpoint=engine.endpoint, kv_events=address(engine.kv_events), kv_replay=address(engine.kv_replay)
    )


async def test_an_engine_that_is_one_rank_of_a_deployment_is_heard(tmp_path, monkeypatch):
    """vLLM with an external load balancer: its page, its events and their ports have its number."""
    again = []
    monkeypatch.setattr(IndexMemory, "give_again", lambda _, worker: again.append(worker))
    async with SimEngine(dp_rank=3) as engine, aiohttp.ClientSession(engine.base_url) as client:
        async with client.post("/v1/completions", json={"prompt": TEXT, "max_tokens": 1}) as reply:
            assert reply.status == 200
        async with Running(settings(tmp_path, at_rank_0(engine, 3))) as app:
            (state,) = app.router.table.all()
            await until(lambda: state.metrics is not None)
            assert app.says(f"worker {engine.endpoint} is data-parallel rank 3")()
            assert again == [state.id]  # what was known of it before was taken for another stream
            await until(lambda: state.kv_trusted and app.router.index.resident_blocks(state.id) > 0)
            route = await app.ask()
            assert app.router.ledger.get(route.lease_id).decision.chosen.cached_tokens > 0
            assert app._watch.scrape_errors == {}


async def test_ranks_that_the_configuration_does_not_expect_are_told_of_once(tmp_path):
    async with SimEngine(dp_rank=3) as engine:
        pool = {"dp_size": 2, "kv_events": {"enabled": False}}
        async with Running(settings(tmp_path, engine, pool=pool)) as app:
            await until(app.says(engine.endpoint, "names data-parallel rank 3", "`dp_start_rank: 3`"))
            pages = count_calls(app.router, "on_metrics")
            await until(lambda: len(pages) > 2)
            assert sum("data-parallel" in line for line in app.said) == 1
            assert "expects ranks 0 to 1" in app._watch.scrape_errors[engine.endpoint]
            app._watch._on_metrics(engine.endpoint, dict.fromkeys((0, 1), EngineMetrics()))
            assert app._watch.scrape_errors == {}
            app._watch._on_metrics("10.0.0.1:1", {0: EngineMetrics()})  # it has just left


def count_calls(owner, name):
    calls, original = [], getattr(owner, name)

    def counted(*args):
        calls.append(args)
        return original(*args)

    setattr(owner, name, counted)
    return calls
