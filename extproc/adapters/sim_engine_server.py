"""An HTTP server that behaves like `vllm serve` (0.32) without a model: same API, cache, events, metrics.

What is real: prompts are rendered and encoded with the model's own template and tokenizer; the prefix cache
is block-exact; KV events and their replay go over the engine's wire; metrics have the engine's names. What is
modelled: how long a step takes (`extproc.sim.time_model`). What is made up: the words of the answers, though
an answer that comes back in the next turn of a chat has the token ids it was generated with.

Sampling parameters other than lengths and `seed` are accepted and change nothing.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from extproc.adapters.kv_publisher import KvPublisher
from extproc.adapters.sim_engine_auth import asking_for
from extproc.adapters.sim_engine_driver import EngineDriver, Generation
from extproc.adapters.sim_engine_metrics import CONTENT_TYPE, EngineMetricsPage
from extproc.adapters.sim_engine_replies import SHAPES, Answered, Choice
from extproc.adapters.sim_engine_requests import Encode, Prepared, RefusedError, RequestReader
from extproc.adapters.sim_engine_text import Vocabulary
from extproc.core.errors import WarmrouteError
from extproc.core.types import KvEvent
from extproc.sim.engine_model import EngineModel
from extproc.sim.engine_types import EngineConfig

VERSION = "0.32.0+simulated"
_BODY_LIMIT = 1 << 30
_SHUTDOWN_S = 0.1
_BACKLOG = 2048  # connections not yet accepted: uvicorn's default, and so vLLM's


@dataclass(frozen=True, slots=True)
class SimEngineSettings:
    """How one simulated engine is set up. Ports of 0 take free ones.

    `kv_events_connect` makes the engine dial the listener of its events instead of binding a port. `dp_rank`
    is the number of its only data-parallel rank, in metrics and KV events; ports are as given all the same.
    """

    model_dir: Path
    engine: EngineConfig = field(default_factory=EngineConfig)
    host: str = "127.0.0.1"
    port: int = 0
    served_model_names: tuple[str, ...] = ("tiny",)
    adapters: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    kv_events: bool = True
    kv_events_port: int = 0
    kv_replay_port: int = 0
    kv_events_connect: str | None = None
    kv_buffer_batches: int = 10_000
    kv_topic: str = ""
    dp_rank: int = 0
    force_include_usage: bool = False
    mean_output_tokens: float = 128.0


@dataclass(slots=True)
class Faults:
    """What is wrong with the engine at the moment. Everything here can be changed while it runs.

    Attributes:
        status: Answer every generating request with this status.
        hang: Take generating requests and never answer them, not even with headers.
        health_status: Answer `/health` with this status.
        metrics_status: Answer `/metrics` with this status.
        metrics_frozen: Keep answering `/metrics` with the page as it was when this was set.
        metrics_hang: Never answer `/metrics`.
        lose_events: KV events go into the replay buffer but not onto the wire.
        asleep: Tell on `/metrics` that the engine was put to sleep.
    """

    status: int | None = None
    hang: bool = False
    health_status: int | None = None
    metrics_status: int | None = None
    metrics_frozen: bool = False
    metrics_hang: bool = False
    lose_events: bool = False
    asleep: bool = False


class SimEngineServer:
    """One engine core behind one HTTP port.

    `start` and `close` may alternate; every start has an empty cache and counts KV batches from 0, on the
    ports of the first.

    Args:
        settings: How it is set up.
        encode: Renders and encodes prompts (see `Encode`).

    Raises:
        WarmrouteError: the model directory has no usable tokenizer.
    """

    def __init__(self, settings: SimEngineSettings, encode: Encode) -> None:
        self.settings = settings
        self.faults = Faults()
        self.port = settings.port
        self.kv_events: str | None = None
        self.kv_replay: str | None = None
        self._kv_ports = (settings.kv_events_port, settings.kv_replay_port)
        self._reader = RequestReader(
            settings.engine,
            encode,
            Vocabulary.load(settings.model_dir),
            models=settings.served_model_names,
            adapters=settings.adapters,
            mean_output_tokens=settings.mean_output_tokens,
            force_include_usage=settings.force_include_usage,
        )
        self._executor: ThreadPoolExecutor | None = None
        self._publisher: KvPublisher | None = None
        self._driver: EngineDriver | None = None
        self._page: EngineMetricsPage | None = None
        self._frozen_page: bytes | None = None
        self._runner: web.AppRunner | None = None
        self._connections: set[asyncio.Transport] = set()

    @property
    def driver(self) -> EngineDriver:
        """The running engine's clock.

        Raises:
            RuntimeError: it is not running.
        """
        if self._driver is None:
            raise RuntimeError("the engine is not running; call start()")
        return self._driver

    @property
    def model(self) -> EngineModel:
        """The running engine's model."""
        return self.driver.model

    @property
    def kv_batches(self) -> int:
        """KV event batches published since the start; 0 without KV events."""
        return 0 if self._publisher is None else self._publisher.next_sequence

    @property
    def endpoint(self) -> str:
        """`host:port` of the HTTP server."""
        return f"{self.settings.host}:{self.port}"

    async def start(self) -> None:
        """Open the ports.

        Raises:
            WarmrouteError: a port is taken or the address is not ours.
        """
        settings = self.settings
        try:
            self._open_publisher()
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")
            self._driver = EngineDriver(EngineModel(settings.engine), self._publish)
            self._page = EngineMetricsPage(
                self.model,
                settings.served_model_names[0],
                max_loras=len(settings.adapters),
                engine=settings.dp_rank,
            )
            app = web.Application(
                client_max_size=_BODY_LIMIT, middlewares=[self._guard, asking_for(settings.api_keys)]
            )
            app.add_routes(self._routes())
            self._runner = web.AppRunner(
                app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S
            )
            await self._runner.setup()
            await web.TCPSite(
                self._runner, settings.host, self.port, backlog=_BACKLOG, reuse_address=True
            ).start()
        except (OSError, WarmrouteError) as error:
            await self.close()
            raise WarmrouteError(
                f"cannot listen on {settings.host}:{self.port} and the KV ports: {error}"
            ) from error
        self.port = int(self._runner.addresses[0][1])
        if self._publisher is not None:
            await self._publisher.start()

    async def close(self) -> None:
        """Abort what runs, close the ports and forget the cache. Idempotent."""
        self.kill_connections()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._driver is not None:
            self._driver.close()
            self._driver = None
        if self._publisher is not None:
            await self._publisher.close()
            self._publisher = None
        if self._executor is not None:
            self._executor.shutdown(wait=True)
            self._executor = None

    def kill_connections(self) -> None:
        """Reset every client connection, in the middle of whatever it is doing."""
        for transport in tuple(self._connections):
            transport.abort()

    # --- set-up ------------------------------------------------------------------------------------------

    def _open_publisher(self) -> None:
        settings = self.settings
        if not settings.kv_events:
            return
        events_port, replay_port = self._kv_ports
        self._publisher = KvPublisher(
            settings.host,
            events_port=events_port,
            replay_port=replay_port,
            connect=settings.kv_events_connect,
            topic=settings.kv_topic,
            buffer_batches=settings.kv_buffer_batches,
            dp_rank=settings.dp_rank,
            adapter_ids={name: number for number, name in enumerate(settings.adapters, 1)},
        )
        self.kv_events = self._publisher.events_endpoint
        self.kv_replay = self._publisher.replay_endpoint
        self._kv_ports = (_port(self.kv_events), _port(self.kv_replay))

    def _routes(self) -> Sequence[web.RouteDef]:
        return [
            *(web.post(path, self._generate) for path in SHAPES),
            web.post("/tokenize", self._tokenize),
            web.post("/reset_prefix_cache", self._reset),
            web.get("/health", self._health),
            web.get("/v1/models", self._models),
            web.get("/version", self._version),
            web.get("/kv_event_sources", self._kv_sources),
            web.get("/metrics", self._metrics),
        ]

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Knows every connection, and turns refusals into error bodies."""
        transport = request.transport
        if transport is not None:
            self._connections = {one for one in self._connections if not one.is_closing()}
            self._connections.add(transport)
        try:
            return await handler(request)
        except RefusedError as refused:
            return web.json_response(refused.body(), status=refused.status)
        except web.HTTPException as error:
            body = RefusedError(error.status, error.reason, kind=type(error).__name__).body()
            return web.json_response(body, status=error.status)

    def _publish(self, events: Sequence[KvEvent]) -> None:
        if self._publisher is not None:
            self._publisher.publish(events, time.time(), lose=self.faults.lose_events)

    # --- generating --------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        if self.faults.hang:
            await asyncio.Event().wait()
        if self.faults.status is not None:
            raise RefusedError(self.faults.status, "The engine was told to fail.", kind="InternalServerError")
        headers = {name.lower(): value for name, value in request.headers.items()}
        prepared = await self._off_loop(self._reader.generation, request.path, headers, raw)
        changed = asyncio.Event()
        driver = self.driver
        generations = driver.submit([one.request for one in prepared.sequences], changed)
        try:
            run = _Run(prepared, generations, changed)
            if not prepared.stream:
                async for _ in run.news():
                    pass
                return web.json_response(prepared.shape.whole(run.answered))
            return await self._stream(request, run)
        finally:
            driver.abort(generations)

    async def _stream(self, request: web.Request, run: "_Run") -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        # The engine sends headers as soon as the request is accepted, long before the first token.
        await response.prepare(request)
        shape, answered = run.prepared.shape, run.answered
        with contextlib.suppress(ConnectionError):  # the client has left: the request is aborted
            opened = False
            async for choice, text, token_ids in run.news():
                if not opened:
                    opened = True
                    for chunk in shape.opening(answered):
                        await response.write(chunk)
                await response.write(shape.news(answered, choice, text, token_ids))
            for chunk in shape.closing(answered):
                await response.write(chunk)
            await response.write_eof()
        return response

    async def _off_loop(self, function: Callable[..., Any], *args: object) -> Any:
        # Encoding a long prompt takes longer than a step: the engine's clock must not wait for it.
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    # --- everything else ---------------------------------------------------------------------------------

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response(await self._off_loop(self._reader.tokenize, await request.read()))

    async def _reset(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"success": self.model.reset_prefix_cache()})

    async def _health(self, request: web.Request) -> web.Response:
        del request
        return web.Response(status=self.faults.health_status or 200)

    async def _version(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"version": VERSION})

    async def _models(self, request: web.Request) -> web.Response:
        del request
        settings = self.settings
        base = {"object": "model", "created": int(time.time()), "owned_by": "vllm"}
        cards: list[dict[str, Any]] = [
            {
                "id": name,
                **base,
                "root": str(settings.model_dir),
                "parent": None,
                "max_model_len": settings.engine.max_model_len,
            }
            for name in settings.served_model_names
        ]
        parent = settings.served_model_names[0]
        cards += [
            {"id": name, **base, "root": name, "parent": parent, "max_model_len": None}
            for name in settings.adapters
        ]
        return web.json_response({"object": "list", "data": cards})

    async def _kv_sources(self, request: web.Request) -> web.Response:
        del request
        if self._publisher is None:
            return web.json_response({})
        source = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.kv_events,
            "replay_endpoint": self.kv_replay,
            "buffer_steps": self.settings.kv_buffer_batches,
            "topic": self.settings.kv_topic,
        }
        return web.json_response({str(self.settings.dp_rank): source})

    async def _metrics(self, request: web.Request) -> web.Response:
        del request
        if self.faults.metrics_hang:
            await asyncio.Event().wait()
        if self.faults.metrics_status is not None:
            return web.Response(status=self.faults.metrics_status)
        assert self._page is not None  # noqa: S101 - set before the port opens
        self._page.asleep = self.faults.asleep
        if not self.faults.metrics_frozen:
            self._frozen_page = None
            page = self._page.render()
        else:
            page = self._frozen_page = self._frozen_page or self._page.render()
        return web.Response(body=page, headers={"content-type": CONTENT_TYPE})


class _Run:
    """One HTTP request in the engine: turns the driver's counts into text."""

    def __init__(self, prepared: Prepared, generations: Sequence[Generation], changed: asyncio.Event) -> None:
        self.prepared = prepared
        self._generations = generations
        self._changed = changed
        self.answered = Answered(
            request_id=prepared.request_id,
            model=prepared.model,
            created=int(time.time()),
            choices=[Choice(index, one.prompt) for index, one in enumerate(prepared.sequences)],
            prompts=prepared.prompts,
            include_usage=prepared.include_usage,
            return_token_ids=prepared.return_token_ids,
        )

    async def news(self) -> AsyncIterator[tuple[Choice, str, Sequence[int]]]:
        """What every choice has gained, as it comes, until all have finished."""
        while True:
            self._changed.clear()
            for choice, sequence, generation in zip(
                self.answered.choices, self.prepared.sequences, self._generations, strict=True
            ):
                known, emitted = len(choice.token_ids), generation.emitted
                if emitted == known:
                    continue
                ids = list(sequence.answer.token_ids[known:emitted])
                text = "".join(sequence.answer.pieces[known:emitted])
                choice.token_ids += ids
                choice.text += text
                choice.cached_tokens = generation.cached_tokens
                if generation.finished:
                    choice.finish_reason = sequence.request.finish_reason
                yield choice, text, ids
            if all(choice.finish_reason for choice in self.answered.choices):
                return
            await self._changed.wait()


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])
