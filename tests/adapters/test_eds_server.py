import asyncio

from extproc.pb import discovery_pb2 as pb
from extproc.protocol.endpoint_discovery import (
    ALL_WORKERS,
    ASSIGNMENT_TYPE,
    OVERPROVISIONING,
    Health,
    KnownWorker,
    snapshot,
)
from tests.support.grpc_host import RecordingRouting, running
from tests.support.waiting import until

DOWN = KnownWorker("[fd00::7]:8001", Health.UNHEALTHY)
SLOW = KnownWorker("10.0.0.2:8000", Health.DEGRADED)
UP = KnownWorker("10.0.0.1:8000")


def known(*workers):
    return snapshot({"p": workers}, complete=True)


def request(*names, version="", nonce="", error=""):
    message = pb.DiscoveryRequest(resource_names=names, version_info=version, response_nonce=nonce)
    if error:
        message.error_detail.message = error
    return message


def entries(resource):
    assert resource.type_url == ASSIGNMENT_TYPE
    assignment = pb.ClusterLoadAssignment.FromString(resource.value)
    assert assignment.policy.overprovisioning_factor.value == OVERPROVISIONING
    found = []
    for locality in assignment.endpoints:
        for entry in locality.lb_endpoints:
            where = entry.endpoint.address.socket_address
            found.append((where.address, where.port_value, pb.HealthStatus.Name(entry.health_status)))
    return assignment.cluster_name, found


async def test_a_stream_gets_the_list_and_every_change():
    async with running(RecordingRouting()) as host:
        host.eds.set(known(UP, DOWN, SLOW))
        call = host.endpoints()
        await call.write(request(ALL_WORKERS))
        first = await call.read()
        assert first.type_url == ASSIGNMENT_TYPE
        expected = [
            ("10.0.0.1", 8000, "HEALTHY"),
            ("fd00::7", 8001, "UNHEALTHY"),
            ("10.0.0.2", 8000, "DEGRADED"),
        ]
        assert entries(first.resources[0]) == (ALL_WORKERS, expected)
        await call.write(request(ALL_WORKERS, version=first.version_info, nonce=first.nonce))
        host.eds.set(known())
        second = await call.read()
        assert entries(second.resources[0]) == (ALL_WORKERS, [])
        assert host.eds.counters.open_streams == 1
        assert host.eds.counters.pushes == 2
        call.cancel()
        await until(lambda: host.eds.counters.open_streams == 0)


async def test_a_stream_waits_until_something_is_known():
    async with running(RecordingRouting()) as host:
        call = host.endpoints()
        await call.write(request(ALL_WORKERS))
        await until(lambda: host.eds.counters.open_streams == 1)
        reading = asyncio.ensure_future(call.read())
        host.eds.set(snapshot({"p": [UP]}, complete=False))
        host.eds.set(known(UP))
        response = await reading
        assert entries(response.resources[0])[1] == [("10.0.0.1", 8000, "HEALTHY")]
        assert host.eds.counters.pushes == 1


async def test_delta_sends_changes_and_removals():
    async with running(RecordingRouting()) as host:
        host.eds.set(known(UP))
        call = host.delta_endpoints()
        await call.write(pb.DeltaDiscoveryRequest(resource_names_subscribe=[ALL_WORKERS, "workers/none"]))
        response = await call.read()
        assert [resource.name for resource in response.resources] == [ALL_WORKERS]
        assert entries(response.resources[0].resource)[1] == [("10.0.0.1", 8000, "HEALTHY")]
        assert list(response.removed_resources) == ["workers/none"]
        call.cancel()


async def test_a_refusal_and_an_unknown_name_are_reported_once():
    async with running(RecordingRouting()) as host:
        host.eds.set(known(UP))
        call = host.endpoints()
        await call.write(request(ALL_WORKERS, "engines"))
        response = await call.read()
        for _ in range(2):
            await call.write(
                request(ALL_WORKERS, "engines", nonce=response.nonce, error="duplicate endpoint")
            )
        await until(lambda: host.eds.counters.refused == 2)
        assert len(host.reports) == 2
        assert "'engines'" in host.reports[0]
        assert "workers/p" in host.reports[0]
        assert "duplicate endpoint" in host.reports[1]
        call.cancel()


async def test_a_stop_ends_the_streams():
    async with running(RecordingRouting()) as host:
        host.eds.set(known(UP))
        call = host.endpoints()
        await call.write(request(ALL_WORKERS))
        await call.read()
        async with asyncio.timeout(30):  # half of the grace
            await host.server.stop(60)
