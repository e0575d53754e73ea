"""A small upstream server that records what reached it, byte-exactly."""

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from aiohttp import web

_KEPT = 1 << 20  # bytes of each body

Handler = Callable[[web.Request, "Received"], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class Received:
    """One request as it arrived; `body` is its first MiB."""

    method: str
    path: str
    headers: dict[str, str]
    size: int
    sha256: str
    body: bytes = b""


@dataclass
class Upstream:
    """Answers every request with who it is and what it got; `respond` may answer otherwise."""

    respond: Handler | None = None
    requests: list[Received] = field(default_factory=list)
    endpoint: str = ""
    _runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.endpoint = f"127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        digest, size, kept = hashlib.sha256(), 0, bytearray()
        async for piece in request.content.iter_any():
            digest.update(piece)
            size += len(piece)
            kept += piece[: _KEPT - len(kept)]
        headers = {key.lower(): value for key, value in request.headers.items()}
        received = Received(request.method, request.path, headers, size, digest.hexdigest(), bytes(kept))
        self.requests.append(received)
        if self.respond is not None:
            return await self.respond(request, received)
        return web.json_response({"served_by": self.endpoint, "size": size, "sha256": received.sha256})
