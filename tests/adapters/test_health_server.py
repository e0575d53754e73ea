import grpc
import pytest

from extproc.pb import health_pb2
from tests.support.grpc_host import RecordingRouting, running

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
READY_NAMES = ["", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"]


async def test_readiness_can_be_switched_and_liveness_stays():
    async with running(RecordingRouting()) as host:
        for ready, status in ((False, NOT_SERVING), (True, SERVING), (False, NOT_SERVING)):
            host.health.set_ready(ready)
            assert host.health.ready is ready
            assert [await host.check(name) for name in READY_NAMES] == [status] * 3
            assert await host.check("liveness") == SERVING


async def test_an_unknown_service_is_not_found():
    async with running(RecordingRouting()) as host:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await host.check("nobody")
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        watch = host.watch("nobody")
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()


async def test_a_watch_hears_of_changes_only():
    async with running(RecordingRouting()) as host:
        watch = host.watch("readiness")
        assert (await watch.read()).status == NOT_SERVING
        host.health.set_ready(False)
        host.health.set_ready(True)
        assert (await watch.read()).status == SERVING
        watch.cancel()


async def test_a_shutdown_tells_watchers_and_ends_them():
    async with running(RecordingRouting()) as host:
        host.health.set_ready(True)
        watch = host.watch("")
        assert (await watch.read()).status == SERVING
        host.health.close()
        assert (await watch.read()).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF
        assert await watch.code() is grpc.StatusCode.OK
        assert await host.check("") == NOT_SERVING
        host.health.set_ready(True)  # there are workers still
        assert await host.check("") == NOT_SERVING
