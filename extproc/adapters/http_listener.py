"""Listens for HTTP with bounds on connections, which aiohttp has none of.

A connection must get an answer every `silent_s` seconds, or it is cut: who connects and says nothing, sends a
request byte by byte, or does not read what is answered. Of more than `most` connections, the one longest
without an answer goes: so somebody who holds all of them does not keep a health check out.
"""

import asyncio

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

MOST_CONNECTIONS = 100
SILENT_S = 15.0


class HttpListener:
    """Connections of one `web.AppRunner`, which must have been set up.

    Args:
        runner: answers.
        most: connections at one time.
        silent_s: longest a connection may be without an answer.

    Attributes:
        cut: connections that were cut, since the start.
    """

    def __init__(
        self, runner: web.AppRunner, *, most: int = MOST_CONNECTIONS, silent_s: float = SILENT_S
    ) -> None:
        self._runner = runner
        self._most = most
        self._silent_s = silent_s
        self._answered: dict[RequestHandler, float] = {}  # when last, or connected; the first is the oldest
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._bounding = False
        self.cut = 0

    async def start(self, host: str, port: int) -> str:
        """Listen, and say where: `host:port`.

        Raises:
            OSError: the address cannot be bound.
        """
        self._server = await asyncio.get_running_loop().create_server(self._connection, host, port)
        name, number = self._server.sockets[0].getsockname()[:2]
        return f"[{name}]:{number}" if ":" in name else f"{name}:{number}"

    def close(self) -> None:
        """Take no more connections."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def answered(self, request: web.BaseRequest) -> None:
        """Call it when a request is answered: its connection has as much time again."""
        handler = request.protocol
        if self._answered.pop(handler, None) is not None:  # to the end: the first is longest without
            self._answered[handler] = asyncio.get_running_loop().time()

    def _connection(self) -> RequestHandler:
        server = self._runner.server
        if server is None:
            raise RuntimeError("the runner is not set up")
        loop = asyncio.get_running_loop()
        handler = server()
        self._answered[handler] = loop.time()
        self._bound()
        if self._timer is None:
            self._timer = loop.call_later(self._silent_s, self._look)
        return handler

    def _bound(self) -> None:
        """See to it soon that there are no more than `most`.

        Not at once: a handler has its transport a turn of the loop after it was made, and many may be made
        in one turn. Those that have none in the turn after next are gone by themselves.
        """
        if len(self._answered) > self._most and not self._bounding:
            self._bounding = True
            loop = asyncio.get_running_loop()
            loop.call_soon(lambda: loop.call_soon(self._make_place, tuple(self._answered)))

    def _make_place(self, made: tuple[RequestHandler, ...]) -> None:
        self._bounding = False
        for handler in made:
            if handler.transport is None:
                self._answered.pop(handler, None)
        for handler in tuple(self._answered):
            if len(self._answered) > self._most and handler.transport is not None:
                self._cut(handler)
        self._bound()

    def _look(self) -> None:
        """One timer for all: a connection that comes and goes leaves nothing behind."""
        loop = asyncio.get_running_loop()
        self._timer = None
        for handler, since in tuple(self._answered.items()):
            left = since + self._silent_s - loop.time()
            if left > 0:
                self._timer = loop.call_later(left, self._look)
                return
            self._cut(handler)

    def _cut(self, handler: RequestHandler) -> None:
        self._answered.pop(handler, None)
        transport = handler.transport
        if transport is not None:  # else gone by itself
            self.cut += 1
            transport.abort()
