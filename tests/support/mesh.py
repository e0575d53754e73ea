"""A client, a real Envoy, our gRPC server with a scripted routing service, and recording upstreams."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from extproc.adapters.envoy_bootstrap import EnvoySettings, StaticWorkers
from extproc.adapters.envoy_process import EnvoyProcess
from extproc.adapters.ext_proc_server import ExtProcSettings
from extproc.core.types import Completion
from tests.support.envoy import EnvoyFactory
from tests.support.grpc_host import Host, RecordingRouting, running
from tests.support.http import Handler, Upstream
from tests.support.waiting import until

CHAT = "/v1/chat/completions"


@dataclass
class Mesh:
    """Everything is started and connected."""

    envoy: EnvoyProcess
    host: Host
    routing: RecordingRouting
    upstreams: list[Upstream]
    client: aiohttp.ClientSession

    def url(self, path: str = CHAT) -> str:
        return self.envoy.url + path

    async def completion(self, number: int = 0) -> Completion:
        """What the access log said about the request that ended as the `number`th."""
        await until(lambda: len(self.routing.completions) > number, what="an access log entry")
        return self.routing.completions[number][1]


@asynccontextmanager
async def mesh(
    start_envoy: EnvoyFactory,
    answer: Any,
    *,
    upstreams: int = 1,
    respond: Handler | None = None,
    extra_workers: Sequence[str] = (),
    max_body_bytes: int = 64 << 20,
    **settings: Any,
) -> AsyncIterator[Mesh]:
    """`answer` maps the upstreams' endpoints to `RecordingRouting.answer`."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(Upstream(respond)) for _ in range(upstreams)]
        endpoints = [server.endpoint for server in servers]
        routing = RecordingRouting(answer(*endpoints))
        limits = ExtProcSettings(max_body_bytes=max_body_bytes)
        host = await stack.enter_async_context(running(routing, settings=limits))
        envoy = await start_envoy(
            EnvoySettings(
                workers=StaticWorkers((*endpoints, *extra_workers)),
                routers=(host.server.address,),
                **settings,
            )
        )
        client = await stack.enter_async_context(
            aiohttp.ClientSession(auto_decompress=False, connector=aiohttp.TCPConnector(limit=0))
        )
        yield Mesh(envoy, host, routing, servers, client)
        await client.close()
        await envoy.stop()
