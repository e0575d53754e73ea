"""Which destinations a real Envoy can be sent to, for each way of telling it the workers."""

import aiohttp
import pytest

from extproc.adapters.discovery import Discovery, FileDiscovery
from extproc.adapters.envoy_bootstrap import (
    DnsWorkers,
    EdsFileWorkers,
    EnvoySettings,
    StaticWorkers,
    write_workers_file,
)
from extproc.core.types import Member
from extproc.protocol.ext_proc_messages import Route
from tests.support.grpc_host import RecordingRouting, running
from tests.support.http import Upstream
from tests.support.mesh import CHAT
from tests.support.waiting import until, until_told

pytestmark = pytest.mark.envoy


def port_of(endpoint):
    return int(endpoint.rpartition(":")[2])


def workers(kind, folder, one, two):
    match kind:
        case "static":
            return StaticWorkers((one, two))
        case "names":
            return StaticWorkers((f"localhost:{port_of(one)}", f"localhost:{port_of(two)}"))
        case "dns":
            return DnsWorkers("localhost", port_of(two))
        case _:
            write_workers_file(folder / "workers.yaml", [one, two])
            return EdsFileWorkers(str(folder / "workers.yaml"))


@pytest.mark.parametrize("kind", ["static", "names", "dns", "file"])
async def test_the_destination_is_honoured_however_the_workers_are_found(start_envoy, tmp_path, kind):
    async with Upstream() as one, Upstream() as two:
        routing = RecordingRouting(Route((two.endpoint,), "lease-1"))
        async with running(routing) as host, aiohttp.ClientSession() as client:
            envoy = await start_envoy(
                EnvoySettings(
                    workers=workers(kind, tmp_path, one.endpoint, two.endpoint),
                    routers=(host.server.address,),
                )
            )
            for _ in range(10):
                async with client.post(envoy.url + CHAT, data=b"{}") as reply:
                    assert (await reply.json())["served_by"] == two.endpoint


async def test_a_new_worker_in_the_file_reaches_envoy_and_us(start_envoy, tmp_path):
    path = tmp_path / "workers.yaml"
    async with Upstream() as one, Upstream() as two:
        write_workers_file(path, [one.endpoint])
        known: list[Member] = []
        source = FileDiscovery(path, Member(""), interval_s=0.02)

        def choose(request):
            return Route([member.endpoint for member in reversed(known)], "lease-1")

        discovery = Discovery([source], on_members=lambda members: known.__setitem__(slice(None), members),
                              on_error=pytest.fail)  # fmt: skip
        async with discovery, running(RecordingRouting(choose)) as host, aiohttp.ClientSession() as client:
            envoy = await start_envoy(
                EnvoySettings(workers=EdsFileWorkers(str(path)), routers=(host.server.address,))
            )

            async def served_by():
                async with client.post(envoy.url + CHAT, data=b"{}") as reply:
                    return (await reply.json())["served_by"]

            assert await served_by() == one.endpoint
            write_workers_file(path, [one.endpoint, two.endpoint])
            await until(lambda: len(known) == 2)
            # Each notices the file by itself; until Envoy has, it skips the endpoint it does not know.
            await until_told(served_by, lambda endpoint: endpoint == two.endpoint)
            assert await served_by() == two.endpoint


async def test_a_router_under_a_second_address_is_asked_when_the_first_is_gone(start_envoy):
    async with Upstream() as one, Upstream() as two:
        routing = RecordingRouting(Route((two.endpoint,), "lease-1"))
        async with (
            running(RecordingRouting(RuntimeError("not asked"))) as gone,
            running(routing) as host,
            aiohttp.ClientSession() as client,
        ):
            await gone.server.server.stop(0)
            envoy = await start_envoy(
                EnvoySettings(
                    workers=StaticWorkers((one.endpoint, two.endpoint)),
                    routers=(gone.server.address, host.server.address),
                )
            )
            for _ in range(20):
                async with client.post(envoy.url + CHAT, data=b"{}") as reply:
                    assert (await reply.json())["served_by"] == two.endpoint
            assert len(routing.requests) == 20


async def test_each_of_several_routers_hears_how_its_requests_ended(start_envoy):
    async with Upstream() as one:
        routings = [RecordingRouting(), RecordingRouting()]
        async with (
            running(routings[0]) as first,
            running(routings[1]) as second,
            aiohttp.ClientSession() as client,
        ):
            for name, routing in zip("ab", routings, strict=True):
                numbers = iter(range(1000))
                routing.answer = lambda _, n=name, count=numbers: Route((one.endpoint,), f"{n}-{next(count)}")
            envoy = await start_envoy(
                EnvoySettings(
                    workers=StaticWorkers((one.endpoint,)),
                    routers=(first.server.address, second.server.address),
                )
            )
            for _ in range(20):
                async with client.post(envoy.url + CHAT, data=b"{}") as reply:
                    assert reply.status == 200
            for name, routing in zip("ab", routings, strict=True):
                asked = len(routing.requests)
                assert asked > 0
                own = {f"{name}-{number}" for number in range(asked)}
                await until(lambda r=routing, o=own: o <= {lease for lease, _ in r.completions})
