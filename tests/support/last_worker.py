"""The only worker of several that takes connections, for Envoys that must find it without a router.

It is kept busy: each of Envoy's draws by least requests then prefers those that refuse.
"""

import asyncio
from collections import Counter
from types import TracebackType
from typing import Self

import aiohttp
from aiohttp import web

from tests.support.http import Received, Upstream
from tests.support.mesh import CHAT
from tests.support.ports import free_ports
from tests.support.waiting import until

_STAY = "x-stay"


class LastWorker:
    """Entered, it takes requests; `endpoints` are those of all, of which `dead` refuse."""

    def __init__(self, dead: int = 2) -> None:
        self._dead = dead
        self._upstream = Upstream(self._respond)
        self._over = asyncio.Event()
        self.endpoints: tuple[str, ...] = ()

    async def __aenter__(self) -> Self:
        await self._upstream.start()
        dead = [f"127.0.0.1:{port}" for port in free_ports(self._dead)]
        self.endpoints = (*dead, self._upstream.endpoint)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._upstream.stop()

    async def statuses(self, url: str, requests: int = 40) -> Counter[int]:
        """What so many requests, and the one that keeps the worker busy meanwhile, were answered by Envoy."""
        async with aiohttp.ClientSession() as client:

            async def ask(headers: dict[str, str] | None = None) -> int:
                async with client.post(url + CHAT, json={}, headers=headers) as reply:
                    return reply.status

            busy = asyncio.create_task(ask({_STAY: "yes"}))
            try:
                await until(lambda: self._upstream.requests or busy.done())
                statuses = [await ask() for _ in range(requests)]
            finally:
                self._over.set()
            return Counter([*statuses, await busy])

    async def _respond(self, request: web.Request, _received: Received) -> web.Response:
        if _STAY in request.headers:
            await self._over.wait()
        return web.Response()
