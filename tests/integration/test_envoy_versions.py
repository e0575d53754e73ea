"""What the configurations for older Envoys do on the real binaries of those versions."""

from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web

from extproc.adapters.envoy_bootstrap import EdsServiceWorkers, EnvoySettings, StaticWorkers, parse_version
from extproc.core.types import Outcome
from extproc.protocol.endpoint_discovery import Health, KnownWorker, snapshot
from extproc.protocol.ext_proc_messages import Route
from tests.adapters.test_envoy_samples import generate
from tests.support.envoy import OLDER_VERSIONS, older_envoy
from tests.support.grpc_host import RecordingRouting, running
from tests.support.http import Upstream
from tests.support.last_worker import LastWorker
from tests.support.mesh import CHAT
from tests.support.waiting import until

pytestmark = pytest.mark.envoy

USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}}


async def answer(request, _received):
    if request.headers.get("x-refuse"):
        return web.Response(status=503)
    return web.json_response({"usage": USAGE})


@pytest.mark.parametrize("version", OLDER_VERSIONS)
async def test_routing_fallback_usage_and_endpoint_discovery(version, start_envoy):
    binary = older_envoy(version)
    routing = RecordingRouting()
    async with (
        Upstream(answer) as one,
        Upstream(answer) as two,
        running(routing) as host,
        aiohttp.ClientSession() as client,
    ):
        routing.answer = Route((two.endpoint, one.endpoint), "lease-1")
        # One that is named is taken even where Envoy's own balancing would leave it out.
        workers = [KnownWorker(one.endpoint), KnownWorker(two.endpoint, Health.DEGRADED)]
        host.eds.set(snapshot({"p": workers}, complete=True))
        settings = EnvoySettings(
            workers=EdsServiceWorkers(),
            routers=(host.server.address,),
            envoy_version=parse_version(version),
        )
        envoy = await start_envoy(settings, binary=binary)
        for _ in range(5):
            async with client.post(envoy.url + CHAT, json={}) as reply:
                assert reply.status == 200
        assert len(two.requests) == 5
        await until(lambda: len(routing.completions) == 5, what="access log entries")
        completion = routing.completions[0][1]
        assert completion.outcome is Outcome.FINISHED
        assert completion.served_by == two.endpoint
        assert (completion.prompt_tokens, completion.cached_tokens) == (7, 5)
        # Both refuse: each attempt takes the next of the list.
        async with client.post(envoy.url + CHAT, json={}, headers={"x-refuse": "1"}) as reply:
            assert reply.status == 503
        assert len(one.requests) >= 1
        await two.stop()
        for _ in range(2):
            async with client.post(envoy.url + CHAT, json={}) as reply:
                assert reply.status == 200
        # Envoy's own balancing leaves it out now. Where it is named, it is taken as soon as it is back.
        async with client.get(f"http://{envoy.admin}/clusters") as reply:
            assert f"{two.endpoint}::health_flags::/failed_outlier_check" in await reply.text()
        await two.start(port=int(two.endpoint.rpartition(":")[2]))
        two.requests.clear()
        for _ in range(5):
            async with client.post(envoy.url + CHAT, json={}) as reply:
                assert reply.status == 200
        assert len(two.requests) == 5


@pytest.mark.parametrize("version", [*OLDER_VERSIONS, "current"])
async def test_without_a_router_a_retry_finds_the_one_worker_that_is_left(version, start_envoy):
    async with LastWorker() as last:
        envoy = await start_unrouted(version, start_envoy, StaticWorkers(last.endpoints))
        assert await last.statuses(envoy.url) == {200: 41}


@pytest.mark.parametrize("version", [*OLDER_VERSIONS, "current"])
async def test_without_a_router_workers_that_refuse_are_left_out(version, start_envoy):
    async with LastWorker(dead=1) as last:
        envoy = await start_unrouted(version, start_envoy, StaticWorkers(last.endpoints), retries=0)
        statuses = await last.statuses(envoy.url)
        # It was twice met; and again, where the machine has slept for longer than it is left out.
        assert statuses[503] <= 4, statuses


async def start_unrouted(version, start_envoy, workers, **settings):
    """An Envoy of this version, with a router that is not there."""
    settings = EnvoySettings(workers=workers, routers=("127.0.0.1:1",), **settings)
    if version == "current":
        return await start_envoy(settings)
    return await start_envoy(
        replace(settings, envoy_version=parse_version(version)), binary=older_envoy(version)
    )


async def test_original_dst_goes_where_the_router_says_and_nowhere_else(start_envoy):
    async with Upstream() as one, aiohttp.ClientSession() as client:
        routing = RecordingRouting(Route((one.endpoint,), "lease-1"))
        async with running(routing) as host:
            settings = EnvoySettings(
                workers=generate.STATIC,
                routers=(host.server.address,),
                listen_address="127.0.0.1",
                listen_port=0,
                admin_port=0,
            )
            envoy = await start_envoy(generate.original_dst(generate.bootstrap(settings)))
            async with client.post(envoy.url + CHAT, data=b"{}") as reply:
                assert (await reply.json())["served_by"] == one.endpoint
            # A client cannot choose, and without the router there is no destination.
            routing.answer = RuntimeError("no decision")
            theirs = {"x-gateway-destination-endpoint": one.endpoint}
            async with client.post(envoy.url + CHAT, data=b"{}", headers=theirs) as reply:
                assert reply.status == 503
            assert len(one.requests) == 1
