"""TLS between a real Envoy and us: ext_proc, access log and endpoint discovery."""

import aiohttp
import pytest

from extproc.adapters.envoy_bootstrap import EdsServiceWorkers, EnvoySettings, RouterTls, StaticWorkers
from extproc.protocol.endpoint_discovery import KnownWorker, snapshot
from extproc.protocol.ext_proc_messages import Route
from tests.support.grpc_host import RecordingRouting, running
from tests.support.http import Upstream
from tests.support.mesh import CHAT
from tests.support.tls import NAME, Authority
from tests.support.waiting import until

pytestmark = pytest.mark.envoy


async def test_everything_goes_over_tls_with_certificates_on_both_sides(start_envoy, tmp_path):
    authority = Authority(tmp_path)
    own, key = tmp_path / "envoy.pem", tmp_path / "envoy-key.pem"
    for path, content in zip((own, key), authority.issue("envoy.test"), strict=True):
        path.write_bytes(content)
    routing = RecordingRouting()
    async with (
        Upstream() as one,
        Upstream() as two,
        running(routing, tls=authority.files(ask_clients=True)) as host,
        aiohttp.ClientSession() as client,
    ):
        routing.answer = Route((two.endpoint,), "lease-1")
        workers = [KnownWorker(one.endpoint), KnownWorker(two.endpoint)]
        host.eds.set(snapshot({"p": workers}, complete=True))
        envoy = await start_envoy(
            EnvoySettings(
                workers=EdsServiceWorkers(),
                routers=(host.server.address,),
                router_tls=RouterTls(str(authority.ca_file), NAME, str(own), str(key)),
            )
        )
        for _ in range(5):
            async with client.post(envoy.url + CHAT, data=b"{}") as reply:
                assert (await reply.json())["served_by"] == two.endpoint
        await until(lambda: len(routing.completions) == 5, what="access log entries")


@pytest.mark.parametrize("wrong", ["authority", "name"])
async def test_a_router_that_is_not_ours_is_not_believed_and_requests_go_on(start_envoy, tmp_path, wrong):
    authority = Authority(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    ca = Authority(other).ca_file if wrong == "authority" else authority.ca_file
    name = "elsewhere.test" if wrong == "name" else NAME
    routing = RecordingRouting()
    async with (
        Upstream() as one,
        running(routing, tls=authority.files()) as host,
        aiohttp.ClientSession() as client,
    ):
        envoy = await start_envoy(
            EnvoySettings(
                workers=StaticWorkers((one.endpoint,)),
                routers=(host.server.address,),
                router_tls=RouterTls(str(ca), name),
            )
        )
        async with client.post(envoy.url + CHAT, data=b"{}") as reply:
            assert (await reply.json())["served_by"] == one.endpoint
        assert routing.requests == []
