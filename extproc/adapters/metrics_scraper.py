"""Reads `/metrics` (and, slower, `/v1/models`) of every engine server, one task per endpoint and page.

A scrape asks only for the samples it needs where the server can filter. vLLM serves the same registry
twice: `/metrics` ignores `name[]`, `/metrics/` (with the slash) honours it. So the filtered page is asked
for first; a server that answers it with anything but metrics is asked for the plain page from then on,
until it fails (a restart may bring another version).

Nothing raises out of here: a page that is slow, huge, cut off or garbage is one `on_failure`, which tells
whether the server was reached. Whether a worker with failures is still used is the worker table's business.
"""

import asyncio
import itertools
import logging
import math
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import SimpleNamespace, TracebackType
from typing import Self
from urllib.parse import urlencode

import aiohttp

from extproc.adapters.engine_key import REFUSALS, EngineKey, Refusal, headers_for, refusal
from extproc.adapters.http_errors import in_words
from extproc.core.errors import ProtocolError
from extproc.core.types import EngineMetrics
from extproc.protocol.engine_metrics import SAMPLE_NAMES, parse_engine_metrics
from extproc.protocol.model_cards import ModelCard, parse_model_cards

_LOG = logging.getLogger(__name__)

FILTERED_PATH = "/metrics/"
PLAIN_PATH = "/metrics"
MODELS_PATH = "/v1/models"
_FILTER = "?" + urlencode([("name[]", name) for name in SAMPLE_NAMES], safe="[]:")


class Fault(StrEnum):
    """How a scrape failed, as far as the server is concerned."""

    UNREACHED = "unreached"
    """It refused or cut the connection, was not connected to in time, or does not speak HTTP."""
    SLOW = "slow"
    """It was connected to, and the page had not arrived in time."""
    UNREADABLE = "unreadable"
    """It answered with an error, or with something that is no metrics page."""


@dataclass(frozen=True, slots=True)
class ScrapeFailure:
    """Why a scrape failed, for people (`text`) and for the router, and how many seconds that took."""

    text: str
    fault: Fault
    took_s: float


OnMetrics = Callable[[str, dict[int, EngineMetrics]], None]
OnFailure = Callable[[str, ScrapeFailure], None]
OnModels = Callable[[str, tuple[ModelCard, ...]], None]
OnRefusal = Callable[[str, Refusal], None]
KeyOf = Callable[[str], EngineKey | None]


@dataclass(frozen=True, slots=True)
class ScrapeSettings:
    """How often and how patiently. Seconds and bytes.

    Attributes:
        interval_s: time between the starts of two scrapes of one endpoint.
        timeout_s: a page must have arrived completely within this.
        max_bytes: a larger page is a failure.
        models_interval_s: time between two looks at `/v1/models`.
        models_pause_s: least time between two that somebody asks for.
        headers: sent with each request.
        jitter: share of an interval by which it varies, so that endpoints are not asked all at once.
    """

    interval_s: float = 1.0
    timeout_s: float = 2.0
    max_bytes: int = 4 << 20
    models_interval_s: float = 15.0
    models_pause_s: float = 1.0
    headers: Mapping[str, str] = field(default_factory=dict)
    jitter: float = 0.1


class _PageError(Exception):
    """A page could not be had. `status` is set when the server did answer with another one than 200."""

    def __init__(self, message: str, fault: Fault, status: int | None = None) -> None:
        super().__init__(message)
        self.fault = fault
        self.status = status


@dataclass(slots=True)
class _Connection:
    """Whether one request had one. A server under load has its connections accepted by the kernel."""

    made: bool = False


async def _connected(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
    context.trace_request_ctx.made = True


def _tracing() -> aiohttp.TraceConfig:
    # Where all of a request has one time limit, its error does not tell what was waited for.
    tracing = aiohttp.TraceConfig()
    tracing.on_connection_create_end.append(_connected)
    tracing.on_connection_reuseconn.append(_connected)
    return tracing


class MetricsScraper:
    """Scrapes a changing set of endpoints (`ip:port`) and reports by callback, on the event loop's thread.

    Args:
        on_metrics: endpoint and its engines by rank; empty when the page has no engine on it.
        on_failure: endpoint, and how its scrape failed.
        on_models: endpoint and the models it serves; None leaves `/v1/models` alone.
        on_refusal: endpoint, and why it does not say what it serves, at every look.
        key_of: the key that an endpoint's `/v1/models` asks for; None: it asks for none.
        settings: intervals and bounds.
        rng: source of jitter.
    """

    def __init__(
        self,
        *,
        on_metrics: OnMetrics,
        on_failure: OnFailure,
        on_models: OnModels | None = None,
        on_refusal: OnRefusal | None = None,
        key_of: KeyOf = lambda _: None,
        settings: ScrapeSettings | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._on_metrics = on_metrics
        self._on_failure = on_failure
        self._on_models = on_models
        self._on_refusal = on_refusal
        self._key_of = key_of
        self._settings = settings or ScrapeSettings()
        self._rng = rng or random.Random()  # noqa: S311  # spreads load, guards nothing
        self._session: aiohttp.ClientSession | None = None
        self._endpoints: dict[str, None] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._asked: set[asyncio.Task[None]] = set()
        self._plain: set[str] = set()
        self._asked_at = -math.inf

    async def start(self) -> None:
        """Begin with the endpoints set so far."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._settings.timeout_s),
            headers={"Accept-Encoding": "identity", **self._settings.headers},
            trace_configs=[_tracing()],
        )
        self.set_endpoints(tuple(self._endpoints))

    async def close(self) -> None:
        """Stop all tasks; no callback comes after this."""
        tasks = [*self._asked, *(task for group in self._tasks.values() for task in group)]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def set_endpoints(self, endpoints: Iterable[str]) -> None:
        """Make these the endpoints. No callback comes for one that left."""
        self._endpoints = dict.fromkeys(endpoints)
        if self._session is None:
            return
        for endpoint in [known for known in self._tasks if known not in self._endpoints]:
            for task in self._tasks.pop(endpoint):
                task.cancel()
            self._plain.discard(endpoint)
        for endpoint in self._endpoints:
            if endpoint not in self._tasks:
                self._tasks[endpoint] = self._watch(endpoint)

    def look_at_models(self) -> None:
        """Read every `/v1/models` now: a model was asked for that is not known.

        Not while that is being done, nor right after: clients may make up names all the time.
        """
        now = asyncio.get_running_loop().time()
        if self._session is None or self._asked or now - self._asked_at < self._settings.models_pause_s:
            return
        self._asked_at = now
        for endpoint in self._endpoints:
            task = asyncio.create_task(self._look_at_models(endpoint), name=f"models of {endpoint}")
            self._asked.add(task)
            task.add_done_callback(self._asked.discard)

    def _watch(self, endpoint: str) -> list[asyncio.Task[None]]:
        loops = [self._repeat(self._scrape, endpoint, self._settings.interval_s)]
        if self._on_models is not None:
            loops.append(self._repeat(self._look_at_models, endpoint, self._settings.models_interval_s))
        return [asyncio.create_task(loop, name=f"scrape {endpoint}") for loop in loops]

    async def _repeat(self, once: Callable[[str], Awaitable[None]], endpoint: str, interval_s: float) -> None:
        clock = asyncio.get_running_loop().time
        jitter = self._settings.jitter
        await asyncio.sleep(self._rng.uniform(0.0, interval_s * jitter))
        # All are asked at the start; from then on they are spread over the interval, or a large fleet's pages
        # would come all at once and hold up decisions.
        shares = itertools.chain([(jitter, 1.0)], itertools.repeat((1.0 - jitter, 1.0 + jitter)))
        for least, most in shares:
            started = clock()
            try:
                await once(endpoint)
            except Exception:
                _LOG.exception("scrape of %s: a bug, the next scrape goes on", endpoint)
            due = started + interval_s * self._rng.uniform(least, most)
            # A server slower than the interval still gets a pause.
            await asyncio.sleep(max(due - clock(), interval_s * jitter))

    async def _scrape(self, endpoint: str) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            metrics = await self._engines(endpoint)
        except (_PageError, ProtocolError) as error:
            self._plain.discard(endpoint)
            fault = error.fault if isinstance(error, _PageError) else Fault.UNREADABLE
            self._on_failure(endpoint, ScrapeFailure(str(error), fault, clock() - began))
        else:
            self._on_metrics(endpoint, metrics)

    async def _engines(self, endpoint: str) -> dict[int, EngineMetrics]:
        if endpoint not in self._plain:
            try:
                metrics = parse_engine_metrics(await self._get(endpoint, FILTERED_PATH, _FILTER))
            except ProtocolError:
                metrics = {}
            except _PageError as error:
                if error.status is None:
                    raise
                metrics = {}
            if metrics:
                return metrics
        metrics = parse_engine_metrics(await self._get(endpoint, PLAIN_PATH))
        if metrics:
            self._plain.add(endpoint)
        return metrics

    async def _look_at_models(self, endpoint: str) -> None:
        key = self._key_of(endpoint)
        try:
            cards = parse_model_cards(await self._models(endpoint, key))
        except (_PageError, ProtocolError) as error:
            # Readiness is the metrics page's business; this one only names what is served.
            _LOG.info("models of %s: %s", endpoint, error)
            status = error.status if isinstance(error, _PageError) else None
            if status in REFUSALS and self._on_refusal is not None:
                self._on_refusal(endpoint, refusal(status, key))
            return
        if self._on_models is not None:
            self._on_models(endpoint, cards)

    async def _models(self, endpoint: str, key: EngineKey | None) -> bytes:
        headers = headers_for(key, MODELS_PATH)
        try:
            return await self._get(endpoint, MODELS_PATH, headers=headers)
        except _PageError as error:
            if key is None or error.status not in REFUSALS or not await key.renewed(headers):
                raise
        return await self._get(endpoint, MODELS_PATH, headers=key.headers(MODELS_PATH))

    async def _get(
        self, endpoint: str, path: str, query: str = "", headers: Mapping[str, str] | None = None
    ) -> bytes:
        if self._session is None:
            raise _PageError("the scraper is closed", Fault.UNREACHED)
        url, connection = f"http://{endpoint}{path}{query}", _Connection()
        try:
            async with self._session.get(
                url, headers=headers, allow_redirects=False, trace_request_ctx=connection
            ) as reply:
                if reply.status != 200:
                    raise _PageError(f"{path} answered {reply.status}", Fault.UNREADABLE, reply.status)
                return await self._body(reply, path)
        except TimeoutError as error:
            limit = f"within {self._settings.timeout_s:g} s"
            if connection.made:
                raise _PageError(f"{path} did not arrive {limit}", Fault.SLOW) from error
            raise _PageError(f"{path}: no connection {limit}", Fault.UNREACHED) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _PageError(f"{path}: {in_words(error)}", Fault.UNREACHED) from error

    async def _body(self, reply: aiohttp.ClientResponse, path: str) -> bytes:
        body = bytearray()
        async for piece in reply.content.iter_any():
            body += piece
            if len(body) > self._settings.max_bytes:
                reply.close()
                raise _PageError(f"{path} is larger than {self._settings.max_bytes} bytes", Fault.UNREADABLE)
        return bytes(body)
