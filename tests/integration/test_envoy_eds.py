"""Workers named to Warmroute only: Envoy learns of them from it, by endpoint discovery on its own port."""

import asyncio
import time

import aiohttp
import pytest
import yaml

from extproc.adapters.envoy_bootstrap import EdsServiceWorkers, EnvoySettings, bootstrap
from extproc.protocol.endpoint_discovery import Health, KnownWorker, snapshot
from extproc.protocol.ext_proc_messages import PassThrough, Route
from extproc.sim.time_model import TimeModel
from tests.support.envoy import on_loopback
from tests.support.full_stack import FullStack
from tests.support.grpc_host import RecordingRouting, running
from tests.support.http import Upstream
from tests.support.kubernetes_api import KubernetesApi, endpoint
from tests.support.mesh import CHAT
from tests.support.sim_engine import SimEngine
from tests.support.waiting import until_told

pytestmark = pytest.mark.envoy

SLOW = TimeModel(base_ms=10.0, prefill_ms_per_token=0.001)
UP, DEGRADED, DOWN = Health


def known(*workers, complete=True, usable=False):
    return snapshot({"default": workers}, complete=complete, usable=usable)


def answered(engine):
    return sum(engine.model.stats.finished.values())


async def served_by(client, envoy):
    async with client.post(envoy.url + CHAT, data=b"{}") as reply:
        return (await reply.json())["served_by"] if reply.status == 200 else reply.status


async def until_served_by(client, envoy, expected, deadline_s=30.0):
    end = time.monotonic() + deadline_s
    while (last := await served_by(client, envoy)) != expected:
        assert time.monotonic() < end, f"still {last}, not {expected}"


async def workers_in(envoy):
    """(endpoint, health as told) of each worker that Envoy knows, sorted."""
    url = f"http://{envoy.admin}/clusters?format=json"
    async with aiohttp.ClientSession() as client, client.get(url) as reply:
        clusters = (await reply.json(content_type=None))["cluster_statuses"]
    (workers,) = (one for one in clusters if one["name"] == "workers")
    found = []
    for host in workers.get("host_statuses", ()):
        where = host["address"]["socket_address"]
        health = host["health_status"]["eds_health_status"]
        found.append((f"{where['address']}:{where['port_value']}", health))
    return sorted(found)


async def until_known(envoy, *endpoints, deadline_s=30.0):
    """Envoy has heard that these are the workers, and no others: it learns it after the router."""
    end = time.monotonic() + deadline_s
    while (known := [endpoint for endpoint, _ in await workers_in(envoy)]) != sorted(endpoints):
        assert time.monotonic() < end, f"still {known}"


async def until_health(envoy, *health, deadline_s=30.0):
    """Envoy has heard that its workers are so, in any order."""
    end = time.monotonic() + deadline_s
    while (told := sorted(one for _, one in await workers_in(envoy))) != sorted(health):
        assert time.monotonic() < end, f"still {told}"


async def test_a_worker_comes_and_goes_under_load_without_a_failed_request(tmp_path):
    members = tmp_path / "members.yaml"

    def write(*engines):
        entries = [
            {"endpoint": e.endpoint, "kv_events": e.kv_events, "kv_replay": e.kv_replay} for e in engines
        ]
        temporary = members.with_suffix(".new")
        temporary.write_text(yaml.safe_dump(entries))
        temporary.replace(members)

    async with SimEngine(time=SLOW) as one, SimEngine(time=SLOW) as two, SimEngine(time=SLOW) as new:
        write(one, two)
        pool = {"discovery": {"file": str(members)}}
        stack = FullStack(tmp_path, [], pool=pool)
        stack.settings["envoy"]["eds"] = "always"
        async with stack:
            replies, stop = [], asyncio.Event()

            async def client(number):
                turn = 0
                while not stop.is_set():
                    turn += 1
                    replies.append(await stack.chat(f"Client {number} asks {turn}", stream=turn % 2 == 0))

            clients = [asyncio.create_task(client(number)) for number in range(8)]
            await stack.until(lambda: len(replies) >= 40)

            write(one, two, new)
            await stack.until(lambda: answered(new) > 5)

            # A long answer is under way where it will not be allowed any longer.
            long = [
                asyncio.create_task(
                    stack.chat(f"Long {number}", stream=True, max_tokens=250, ignore_eos=True)
                )
                for number in range(12)
            ]
            await stack.until(lambda: one.model.running >= 3)
            write(two, new)
            await stack.until(lambda: f"worker {one.endpoint} left" in stack.router_log())
            in_flight = one.model.running
            assert in_flight > 0
            await stack.until(lambda: one.model.running == 0 and one.model.waiting == 0)
            finished = answered(one)
            served = len(replies)
            await stack.until(lambda: len(replies) >= served + 60)
            assert answered(one) == finished  # nothing came any more
            await one.kill()
            served = len(replies)
            await stack.until(lambda: len(replies) >= served + 20)
            stop.set()
            await asyncio.gather(*clients)
            replies += await asyncio.gather(*long)
            entries = [await stack.decision(reply.request_id) for reply in replies]

        assert {reply.status for reply in replies} == {200}
        assert all(b"[DONE]" in reply.body for reply in replies if reply.body.startswith(b"data:"))
        # A worker that left is no load any more, and what it still answered is accounted for all the same.
        assert {entry["outcome"] for entry in entries} == {"finished"}


async def test_pods_of_a_kubernetes_service_reach_envoy(tmp_path):
    def slice_of(engine, **conditions):
        host, _, port = engine.endpoint.rpartition(":")
        ports = [{"name": "http", "port": int(port), "protocol": "TCP"}]
        return (f"vllm-{port}", [endpoint(host, **(conditions or {"ready": True}))]), {"ports": ports}

    async def put(api, engine, **conditions):
        (name, endpoints), fields = slice_of(engine, **conditions)
        await api.put(name, endpoints, **fields)

    async with SimEngine() as one, SimEngine() as two, KubernetesApi() as api:
        await put(api, one)
        kubernetes = {"service": "vllm", "port": "http", "kubeconfig": str(api.kubeconfig(tmp_path))}
        pool = {"discovery": {"kubernetes": kubernetes}, "kv_events": {"enabled": False}}
        async with FullStack(tmp_path, [], pool=pool) as stack:
            assert (await stack.chat("Anybody?")).status == 200
            assert answered(one) == 1
            # One more pod is ready, then the first shuts down.
            await put(api, two)
            await stack.until(lambda: f"worker {two.endpoint} joined" in stack.router_log())
            await put(api, one, ready=False, serving=True, terminating=True)
            await stack.until(lambda: f"worker {one.endpoint} left" in stack.router_log())
            await until_known(stack.envoy, two.endpoint)
            before = answered(one)
            for number in range(5):
                assert (await stack.chat(f"And now? {number}")).status == 200
            assert (answered(one), answered(two)) == (before, 5)
            # The API server is away: nothing changes.
            api.refuse = 500
            await api.disconnect()
            await stack.until(lambda: "the last good list stays" in stack.router_log())
            assert (await stack.chat("Still there?")).status == 200


async def test_envoy_keeps_its_list_while_no_router_is_there_and_takes_no_incomplete_one(start_envoy):
    async with Upstream() as one, Upstream() as two, aiohttp.ClientSession() as client:
        a, b = KnownWorker(one.endpoint), KnownWorker(two.endpoint)
        async with running(RecordingRouting(PassThrough())) as host:
            host.eds.set(known(a))
            envoy = await start_envoy(
                EnvoySettings(workers=EdsServiceWorkers(), routers=(host.server.address,))
            )
            assert await served_by(client, envoy) == one.endpoint
            address = host.server.address
        # Gone: the list stays, and so does service.
        assert await served_by(client, envoy) == one.endpoint
        async with running(RecordingRouting(PassThrough()), address=address) as host:
            # The new process does not know everything yet.
            host.eds.set(known(b, complete=False, usable=True))
            await stream_open(host)
            assert await served_by(client, envoy) == one.endpoint
            host.eds.set(known(b))
            await until_served_by(client, envoy, two.endpoint)


async def test_envoys_own_balancing_avoids_workers_that_are_not_ready(start_envoy):
    async with (
        Upstream() as one,
        Upstream() as two,
        Upstream() as three,
        aiohttp.ClientSession() as client,
        running(RecordingRouting(PassThrough())) as host,
    ):

        def told(*health):
            endpoints = (one.endpoint, two.endpoint, three.endpoint)
            return known(*map(KnownWorker, endpoints, health))

        async def all_of(*upstreams):
            """These are chosen, and nobody else."""
            chosen, wanted = set(), {upstream.endpoint for upstream in upstreams}

            async def one_more():
                chosen.add(await served_by(client, envoy))
                return chosen

            await until_told(one_more, lambda chosen: len(chosen) == len(wanted))
            chosen |= {await served_by(client, envoy) for _ in range(20)}
            assert chosen == wanted

        host.eds.set(told(DOWN, UP, UP))
        envoy = await start_envoy(EnvoySettings(workers=EdsServiceWorkers(), routers=(host.server.address,)))
        await all_of(two, three)
        host.eds.set(told(DEGRADED, UP, UP))
        await until_health(envoy, "DEGRADED", "HEALTHY", "HEALTHY")
        await all_of(two, three)
        host.eds.set(told(DEGRADED, UP))
        await until_health(envoy, "DEGRADED", "HEALTHY")
        await all_of(two)
        # Few are healthy: those that are reached help them, and who is down does not.
        host.eds.set(told(DEGRADED, UP, DOWN))
        await until_health(envoy, "DEGRADED", "HEALTHY", "UNHEALTHY")
        await all_of(one, two)
        # All down: better a worker that may be alive than none.
        host.eds.set(told(DOWN, DOWN))
        await until_health(envoy, "UNHEALTHY", "UNHEALTHY")
        await all_of(one, two)


async def test_a_worker_that_is_named_is_taken_however_it_is(start_envoy):
    """Requests that only it may serve are its, whatever keeps it out of Envoy's own balancing."""
    routing = RecordingRouting()
    async with (
        Upstream() as one,
        Upstream() as two,
        aiohttp.ClientSession() as client,
        running(routing) as host,
    ):
        routing.answer = Route((one.endpoint,), "lease-1")
        host.eds.set(known(KnownWorker(one.endpoint, DEGRADED), KnownWorker(two.endpoint)))
        envoy = await start_envoy(EnvoySettings(workers=EdsServiceWorkers(), routers=(host.server.address,)))
        assert [await served_by(client, envoy) for _ in range(10)] == [one.endpoint] * 10
        host.eds.set(known(KnownWorker(one.endpoint, DOWN), KnownWorker(two.endpoint)))  # heard only now
        await until_health(envoy, "HEALTHY", "UNHEALTHY")
        assert [await served_by(client, envoy) for _ in range(10)] == [one.endpoint] * 10


async def test_a_cluster_may_have_the_workers_of_one_pool(start_envoy):
    async with (
        Upstream() as one,
        Upstream() as two,
        aiohttp.ClientSession() as client,
        running(RecordingRouting(PassThrough())) as host,
    ):
        host.eds.set(
            snapshot({"p": [KnownWorker(one.endpoint)], "q": [KnownWorker(two.endpoint)]}, complete=True)
        )
        envoy = await start_envoy(
            EnvoySettings(workers=EdsServiceWorkers("workers/q"), routers=(host.server.address,))
        )
        assert {await served_by(client, envoy) for _ in range(10)} == {two.endpoint}


async def test_the_incremental_variant_too(start_envoy):
    async with (
        Upstream() as one,
        Upstream() as two,
        aiohttp.ClientSession() as client,
        running(RecordingRouting(PassThrough())) as host,
    ):
        host.eds.set(known(KnownWorker(one.endpoint)))
        settings = EnvoySettings(workers=EdsServiceWorkers(), routers=(host.server.address,))
        config = bootstrap(on_loopback(settings))
        source = config["static_resources"]["clusters"][0]["eds_cluster_config"]["eds_config"]
        source["api_config_source"]["api_type"] = "DELTA_GRPC"
        envoy = await start_envoy(config)
        assert await served_by(client, envoy) == one.endpoint
        host.eds.set(known(KnownWorker(two.endpoint)))
        await until_served_by(client, envoy, two.endpoint)
        host.eds.set(known())
        await until_served_by(client, envoy, 503)
        assert host.reports == []


async def stream_open(host):
    end = time.monotonic() + 30
    while host.eds.counters.open_streams == 0:
        assert time.monotonic() < end, "Envoy did not come back"
        await asyncio.sleep(0.02)
