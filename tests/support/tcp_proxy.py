"""A TCP connection in between, that can be cut, refused and stalled.

async with TcpProxy("127.0.0.1:50051") as proxy:
    proxy.endpoint
    await proxy.cut()      # resets every connection and refuses new ones
    await proxy.open()     # takes them again, on the same port
    proxy.stall()          # accepts and forwards nothing, without an error
    proxy.mute()           # forwards nothing of what the target says
    proxy.flow()           # everything, again
"""

import asyncio
from types import TracebackType
from typing import Self

from tests.support.ports import free_port

_PIECE = 1 << 16


class TcpProxy:
    """See the module's docstring. `forwarded` counts bytes, both ways."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._target_port = int(port)
        self._port = free_port()
        self.endpoint = f"127.0.0.1:{self._port}"
        self.forwarded = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._answering = asyncio.Event()
        self._answering.set()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flow()
        await self.cut()

    async def open(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)

    async def cut(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()
        if server is not None:
            await server.wait_closed()

    def stall(self) -> None:
        self._flowing.clear()

    def mute(self) -> None:
        self._answering.clear()

    def flow(self) -> None:
        self._flowing.set()
        self._answering.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            there = await asyncio.open_connection(self._host, self._target_port)
        except OSError:
            writer.transport.abort()
            self._writers.discard(writer)
            return
        self._writers.add(there[1])
        try:
            answers = self.pipe(there[0], writer, self._answering)
            await asyncio.gather(self.pipe(reader, there[1]), answers)
        finally:
            for each in (writer, there[1]):
                each.transport.abort()
                self._writers.discard(each)

    async def pipe(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event | None = None
    ) -> None:
        try:
            while piece := await reader.read(_PIECE):
                await self._flowing.wait()
                if gate is not None:
                    await gate.wait()
                writer.write(piece)
                await writer.drain()
                self.forwarded += len(piece)
            writer.write_eof()
        except OSError:
            writer.transport.abort()  # what happened to one side happens to the other
