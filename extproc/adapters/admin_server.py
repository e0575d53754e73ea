"""Health, metrics, state, decisions and the status page over HTTP.

`/livez` and `/readyz` answer anybody. All else asks for the bearer token where one is set; the page itself
holds nothing and is open, its script asks for the token. Without a token, on a loopback address, requests are
answered only under a loopback name: else a web page on this machine's browser could read us through a name
of its own (DNS rebinding). Nothing here changes anything, and connections are bounded (`http_listener`).
"""

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Protocol

import msgspec
from aiohttp import web

from extproc.adapters.http_listener import HttpListener
from extproc.core.errors import WarmrouteError
from extproc.protocol.addresses import parse_address

_OPEN = frozenset({"/", "/livez", "/readyz"})
_REMEMBERED_S = 0.25  # what is younger is given again: many watchers cost as much as one
_MOST_PAGES = 8  # a scraper always accepts the same
_LOOPBACK_ONLY = "this address answers under a loopback name only; set `admin.token_file` to use others\n"
_ENCODER = msgspec.json.Encoder()

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AdminError(WarmrouteError):
    """The admin server cannot be started; the message says what to do."""


class MetricsPage(Protocol):
    """An exposition."""

    @property
    def body(self) -> bytes:
        """The text."""
        ...

    @property
    def content_type(self) -> str:
        """Its format."""
        ...


@dataclass(frozen=True, slots=True)
class AdminSources:
    """Where answers come from. All are called on the event loop, and quick.

    Attributes:
        ready: whether there is somewhere to send requests.
        state: see `extproc.adapters.status`.
        explained: the explained line about a request id; None: nothing is known of it.
        metrics: the metrics page for an Accept header.
    """

    ready: Callable[[], bool]
    state: Callable[[], Mapping[str, Any]]
    explained: Callable[[str], Mapping[str, Any] | None]
    metrics: Callable[[str], MetricsPage]


class AdminServer:
    """The server.

    Args:
        sources: where answers come from.
        token: what everything but health asks for; None: nothing.
    """

    def __init__(self, sources: AdminSources, token: str | None = None) -> None:
        self._sources = sources
        self._token = None if token is None else token.encode()
        self._only_loopback = False
        self._runner: web.AppRunner | None = None
        self._listener: HttpListener | None = None
        self._remembered: tuple[float, bytes] = (float("-inf"), b"")
        self._pages: dict[str, tuple[float, MetricsPage]] = {}
        self._page = files("extproc.data").joinpath("status.html").read_bytes()
        self._policy = _content_security_policy(self._page.decode())
        self.address = ""

    async def start(self, listen: str) -> None:
        """Begin to answer on `host:port`.

        Raises:
            AdminError: the address cannot be bound.
        """
        where = parse_address(listen, lowest_port=0)
        self._only_loopback = self._token is None and _is_loopback(where.host)
        application = web.Application(middlewares=[self._guard])
        application.router.add_get("/", self._answer_page)
        application.router.add_get("/livez", self._answer_live)
        application.router.add_get("/readyz", self._answer_ready)
        application.router.add_get("/metrics", self._answer_metrics)
        application.router.add_get("/state", self._answer_state)
        application.router.add_get("/explain/{request_id:.+}", self._answer_explain)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        listener = HttpListener(runner)
        try:
            self.address = await listener.start(where.host, where.port)
        except OSError as error:
            await runner.cleanup()
            why = os.strerror(error.errno or 0)
            raise AdminError(
                f"admin: cannot listen on {listen}: {why}; set `admin.listen` to a free address, "
                "or to nothing to do without"
            ) from error
        self._runner, self._listener = runner, listener

    async def close(self) -> None:
        """Stop."""
        if self._listener is not None and self._runner is not None:
            self._listener.close()
            await self._runner.cleanup()
            self._listener = self._runner = None

    @property
    def cut(self) -> int:
        """Connections that were cut, since the start."""
        return 0 if self._listener is None else self._listener.cut

    @property
    def is_open(self) -> bool:
        """Whether anyone who can reach the address may ask: no token is needed, and it is no loopback one."""
        return self._token is None and not self._only_loopback

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._only_loopback and not _is_loopback(_name_in(request.headers.get("Host", "localhost"))):
            reply: web.StreamResponse = web.Response(status=403, text=_LOOPBACK_ONLY)
        elif request.path not in _OPEN and not self._may(request):
            reply = web.Response(
                status=401,
                text="a bearer token is needed\n",
                headers={"WWW-Authenticate": 'Bearer realm="warmroute"'},
            )
        else:
            try:
                reply = await handler(request)
            except web.HTTPException as error:
                reply = web.Response(status=error.status, text=f"{error.reason}\n")
        if self._listener is not None:
            self._listener.answered(request)
        reply.headers.setdefault("Cache-Control", "no-store")
        reply.headers.setdefault("X-Content-Type-Options", "nosniff")
        reply.headers.setdefault("Content-Security-Policy", "default-src 'none'")
        return reply

    def _may(self, request: web.Request) -> bool:
        if self._token is None:
            return True
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        return kind.lower() == "bearer" and hmac.compare_digest(
            given.strip().encode("utf-8", "surrogateescape"), self._token
        )

    async def _answer_page(self, request: web.Request) -> web.Response:
        del request
        return web.Response(
            body=self._page,
            content_type="text/html",
            charset="utf-8",
            headers={"Content-Security-Policy": self._policy, "Referrer-Policy": "no-referrer"},
        )

    async def _answer_live(self, request: web.Request) -> web.Response:
        del request
        return web.Response(text="ok\n")

    async def _answer_ready(self, request: web.Request) -> web.Response:
        del request
        if self._sources.ready():
            return web.Response(text="ok\n")
        return web.Response(status=503, text="no worker is ready\n")

    async def _answer_metrics(self, request: web.Request) -> web.Response:
        page = self._metrics_page(request.headers.get("Accept", ""))
        return web.Response(body=page.body, headers={"Content-Type": page.content_type})

    def _metrics_page(self, accept: str) -> MetricsPage:
        now = asyncio.get_running_loop().time()
        made_at, page = self._pages.get(accept, (float("-inf"), None))
        if page is None or now - made_at > _REMEMBERED_S:
            page = self._sources.metrics(accept)
            if len(self._pages) >= _MOST_PAGES:
                self._pages.clear()
            self._pages[accept] = (now, page)
        return page

    async def _answer_state(self, request: web.Request) -> web.Response:
        del request
        now = asyncio.get_running_loop().time()
        made_at, body = self._remembered
        if now - made_at > _REMEMBERED_S:
            body = _ENCODER.encode(self._sources.state())
            self._remembered = (now, body)
        return web.Response(body=body, content_type="application/json")

    async def _answer_explain(self, request: web.Request) -> web.Response:
        request_id = request.match_info["request_id"]
        found = self._sources.explained(request_id)
        if found is None:
            text = (
                "Nothing is known of this request: it never came here, or so many came since that it is "
                "forgotten. The decision log may still have it: warmroute explain ID --log FILE\n"
            )
            return web.Response(status=404, text=text)
        accept = request.headers.get("Accept", "")
        if "text/plain" in accept and "json" not in accept:
            return web.Response(text=str(found["text"]))
        return web.Response(body=_ENCODER.encode(found), content_type="application/json")


def _name_in(host: str) -> str:
    """The name or address in a Host header, whatever else is in it."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, _, port = host.rpartition(":")
    return name if port.isdecimal() else host


def _is_loopback(host: str) -> bool:
    if host in ("localhost", "localhost.") or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _content_security_policy(page: str) -> str:
    """Nothing but the page's own script and style, and our own answers."""

    def hashes(tag: str) -> str:
        found = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
