import asyncio
import contextlib

import grpc
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, PingAckReceived, RemoteSettingsChanged
from h2.settings import SettingCodes

from extproc.adapters import grpc_server
from extproc.adapters.access_log_server import AccessLogService
from extproc.adapters.eds_server import EdsService
from extproc.adapters.ext_proc_server import ExtProcService
from extproc.adapters.grpc_server import start_grpc_server
from extproc.adapters.health_server import HealthService
from extproc.core.errors import WarmrouteError
from extproc.pb import health_pb2
from tests.support.grpc_host import RecordingRouting, request_body, request_headers, running
from tests.support.waiting import until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


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


async def test_who_goes_says_so_first_and_answers_those_that_have_not_heard(monkeypatch):
    monkeypatch.setattr(grpc_server, "_LEAVING_S", 30.0)
    routing = RecordingRouting()
    async with running(routing) as host:
        host.health.set_ready(True)
        assert await host.check("") == SERVING
        stopping = asyncio.ensure_future(host.server.stop(60))
        await until(lambda: not host.health.ready)
        assert await host.check("") == NOT_SERVING
        assert len(await host.exchange(request_headers(end=True))) == 1
        assert not stopping.done()
        stopping.cancel()


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


class RawClient:
    """An HTTP/2 connection that does what gRPC clients do not."""

    def __init__(self, address):
        self.address = address
        self.connection = H2Connection(H2Configuration(client_side=True))
        self.events = []
        self.closed = False

    async def __aenter__(self):
        host, _, port = self.address.rpartition(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port))
        self.connection.initiate_connection()
        await self.send()
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_):
        self._task.cancel()
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def send(self):
        with contextlib.suppress(ConnectionError):
            self._writer.write(self.connection.data_to_send())
            await self._writer.drain()

    async def _read(self):
        with contextlib.suppress(ConnectionError):
            while data := await self._reader.read(65_536):
                self.events += self.connection.receive_data(data)
                await self.send()
        self.closed = True

    def open_stream(self, method):
        stream = self.connection.get_next_available_stream_id()
        headers = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "x"}
        also = {"content-type": "application/grpc", "te": "trailers"}
        self.connection.send_headers(stream, [*headers.items(), *also.items()])
        return stream

    def got(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"


async def test_how_many_streams_a_connection_may_have_is_announced():
    async with running(RecordingRouting(), max_streams=7) as host, RawClient(host.server.address) as client:
        await until(lambda: client.got(RemoteSettingsChanged))
        settings = client.got(RemoteSettingsChanged)[0].changed_settings
        assert settings[SettingCodes.MAX_CONCURRENT_STREAMS].new_value == 7


async def test_a_flood_of_pings_ends_its_connection_and_no_other():
    routing = RecordingRouting()
    async with running(routing) as host:
        call = host.stream()
        await call.write(request_headers())
        assert (await call.read()).HasField("request_headers")
        async with RawClient(host.server.address) as client:
            await until(lambda: client.got(RemoteSettingsChanged))
            for number in range(2000):
                client.connection.ping(number.to_bytes(8, "big"))
            await client.send()
            await until(lambda: client.got(ConnectionTerminated) or client.closed, 60)
        await call.write(request_body(b"{}", end=True))
        assert (await call.read()).HasField("request_body")
        await call.done_writing()


async def test_keepalive_pings_end_nothing():
    async with running(RecordingRouting()) as host, RawClient(host.server.address) as client:
        await until(lambda: client.got(RemoteSettingsChanged))
        for number in range(30):
            client.connection.ping(number.to_bytes(8, "big"))
            await client.send()
            await asyncio.sleep(0.12)  # the fastest that is allowed is 0.1
            await until(lambda: len(client.got(PingAckReceived)) == number + 1)  # noqa: B023
        assert not client.closed
        assert not client.got(ConnectionTerminated)


async def test_streams_that_are_opened_and_reset_leave_nothing():
    routing = RecordingRouting()
    async with running(routing) as host, RawClient(host.server.address) as client:
        await until(lambda: client.got(RemoteSettingsChanged))
        for _ in range(500):
            stream = client.open_stream(PROCESS)
            client.connection.reset_stream(stream)
        await client.send()
        await until(lambda: host.ext_proc.counters.active == 0)
        replies = await host.exchange(request_headers(), request_body(b"{}", end=True))
        assert len(replies) == 2
        await until(lambda: host.ext_proc.counters.active == 0)
