import asyncio

import grpc
import pytest

from extproc.adapters.access_log_server import AccessLogService
from extproc.adapters.eds_server import EdsService
from extproc.adapters.ext_proc_server import ExtProcService
from extproc.adapters.grpc_server import start_grpc_server
from extproc.adapters.health_server import HealthService
from extproc.core.errors import WarmrouteError
from tests.support.grpc_host import RecordingRouting, request_headers, running
from tests.support.waiting import until


async def test_a_port_in_use_is_said_so():
    routing = RecordingRouting()
    async with running(routing) as host:
        assert host.server.port > 0
        assert host.server.address == f"127.0.0.1:{host.server.port}"
        with pytest.raises(WarmrouteError, match=r"cannot listen on 127\.0\.0\.1"):
            await start_grpc_server(
                host.server.address,
                ext_proc=ExtProcService(routing),
                access_log=AccessLogService(routing),
                health=HealthService(),
                eds=EdsService(pytest.fail),
                max_body_bytes=1000,
            )


async def test_a_graceful_stop_lets_open_streams_end():
    routing = RecordingRouting()
    async with running(routing) as host:
        call = host.stream()
        await call.write(request_headers())
        await call.read()
        stopping = asyncio.ensure_future(host.server.stop(60))
        await until(lambda: not host.health.ready)
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
        async with asyncio.timeout(30):  # half of the grace
            await stopping
            await host.server.wait()


async def test_unknown_methods_are_unimplemented():
    async with running(RecordingRouting()) as host:
        call = host.channel.unary_unary("/envoy.service.ext_proc.v3.ExternalProcessor/Nothing")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call(b"")
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_pitfall_53_a_thousand_streams_at_once():
    routing = RecordingRouting()
    async with running(routing) as host:
        replies = await asyncio.gather(*(host.exchange(request_headers(end=True)) for _ in range(1000)))
        assert all(len(each) == 1 for each in replies)
        assert host.ext_proc.counters.active == 0
    assert len(routing.signals) == 1000
