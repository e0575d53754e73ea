"""In front of an engine's HTTP port: everything passes, but its metrics page may be anything.

async with MetricsFront(engine.endpoint) as front:
    front.endpoint                       # what the router and Envoy are told
    front.page = lambda real: b"garbage" # what is sent instead of the page; None: reset the connection
    front.delay_s = 30.0                 # how long it takes
    front.honest()

A connection that begins with anything but a GET is forwarded untouched.
"""

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Self

import aiohttp

from tests.support.tcp_proxy import TcpProxy

_GET = b"GET "
_PAGE = "/metrics"
_HEAD_END = b"\r\n\r\n"

Page = Callable[[bytes], bytes | None]


class MetricsFront(TcpProxy):
    """See the module's docstring. `asked` counts the pages that were wanted."""

    def __init__(self, engine: str) -> None:
        super().__init__(engine)
        self._engine = engine
        self.asked = 0
        self.honest()

    def honest(self) -> None:
        """No more faults."""
        self.page: Page = lambda real: real
        self.delay_s = 0.0
        self.length: int | None = None  # what the header claims; None: the truth

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10))
        await super().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        await self._session.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, aiohttp.ClientError, TimeoutError):
            begin = await reader.readexactly(len(_GET))
            if begin == _GET:
                head = await reader.readuntil(_HEAD_END)
                await self._answer(head.split()[0].decode(), writer)
            else:
                await self._pass(begin, reader, writer)
        writer.close()
        self._writers.discard(writer)

    async def _pass(self, begin: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(self._host, self._target_port)
        self._writers.add(there[1])
        there[1].write(begin)
        try:
            await asyncio.gather(self.pipe(reader, there[1]), self.pipe(there[0], writer))
        finally:
            there[1].transport.abort()
            self._writers.discard(there[1])

    async def _answer(self, path: str, writer: asyncio.StreamWriter) -> None:
        async with self._session.get(f"http://{self._engine}{path}") as reply:
            status, page = reply.status, await reply.read()
        length = len(page)
        if path.startswith(_PAGE):
            self.asked += 1
            shown = self.page(page)
            await asyncio.sleep(self.delay_s)
            if shown is None:
                writer.transport.abort()
                return
            page, length = shown, len(shown) if self.length is None else self.length
        head = f"HTTP/1.1 {status} -\r\ncontent-type: text/plain\r\ncontent-length: {length}\r\n"
        writer.write(head.encode() + b"connection: close\r\n\r\n" + page)
        await writer.drain()
