"""Composition root: wires adapters to the core. What follows the fleet is wired in `extproc.fleet_watch`."""

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

import aiohttp

from extproc import __version__
from extproc.adapters.access_log_server import AccessLogCounters, AccessLogService
from extproc.adapters.admin_server import AdminError, AdminServer, AdminSources
from extproc.adapters.decision_writer import DecisionLog
from extproc.adapters.eds_server import EdsService
from extproc.adapters.ext_proc_server import ExtProcService, ExtProcSettings
from extproc.adapters.grpc_server import GrpcServer, start_grpc_server
from extproc.adapters.health_server import HealthService
from extproc.adapters.journal import Journal
from extproc.adapters.policy_plugins import available_policies
from extproc.adapters.prompt_service import PromptService
from extproc.adapters.recent_decisions import RecentDecisions
from extproc.adapters.routing_service import PoolContext, WarmRoutingService
from extproc.adapters.status import StatusBoard
from extproc.adapters.telemetry.running import running_telemetry
from extproc.adapters.telemetry.state_metrics import StateSources
from extproc.adapters.worker_tokenizer import WorkerTokenizer
from extproc.assembly import admission_of, load_encoder, load_normalizer, load_revisions
from extproc.config import Config, Pool, book_of
from extproc.core.candidates import PoolFacts
from extproc.core.rollout import Mode
from extproc.fleet_watch import FleetWatch
from extproc.journal.header import Header
from extproc.prompt.encoder import PromptEncoder
from extproc.protocol.tenant_identity import namespaces

_TICK_S = 0.5
_STOP_GRACE_S = 2.0
_TICKET_BYTES = 12  # unguessable: a ticket names a lease, and anyone who names it could end it


class App:
    """A running Warmroute. An async context manager.

    Args:
        config: what to run.
        report: told, in one line, what an operator should know.

    Raises (on entering):
        WarmrouteError: the listening address cannot be bound, or a model cannot be loaded.
    """

    def __init__(self, config: Config, report: Callable[[str], None]) -> None:
        self.config = config
        self._report = report
        self._clock = time.monotonic
        self._cleanup = contextlib.AsyncExitStack()
        self.server: GrpcServer | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._cleanup.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._cleanup.aclose()

    @property
    def address(self) -> str:
        """Where Envoy reaches us: `host:port`."""
        if self.server is None:
            raise RuntimeError("not started")
        return self.server.address

    async def _start(self) -> None:
        config = self.config
        encoders = {pool.name: load_encoder(pool) for pool in config.pools}
        self._revisions = {pool.name: load_revisions(pool) for pool in config.pools}
        self._build_router(encoders)
        self._recent = RecentDecisions() if config.admin.listen else None
        self._log = DecisionLog(
            config.decision_log.path, self._report, config.decision_log.settings(), self._recent
        )
        self._cleanup.callback(self._log.close)
        contexts = {pool.name: self._context(pool, encoders[pool.name]) for pool in config.pools}
        self.admission = admission_of(config)
        self.telemetry = await self._cleanup.enter_async_context(
            running_telemetry(
                os.environ,
                version=__version__,
                clock=self._clock,
                is_base_model=self.admission.catalog.is_base,
                report=self._report,
            )
        )
        for name in contexts:
            self.telemetry.metrics.pool_known(name)
        self.service = WarmRoutingService(
            self.router,
            contexts,
            self._log,
            self._clock,
            fallback_count=config.fallbacks,
            session_header=config.session_header,
            policy_header=config.policy_header,
            telemetry=self.telemetry,
            admission=self.admission,
            rollout=config.rollout.settings(),
            baseline=config.rollout.baseline,
            on_unknown_model=self._look_at_models,
        )
        self.health = HealthService()
        self.eds = EdsService(self._report)
        self._watch = FleetWatch(
            config,
            router=self.router,
            service=self.service,
            telemetry=self.telemetry,
            catalog=self.admission.catalog,
            health=self.health,
            eds=self.eds,
            clock=self._clock,
            report=self._report,
        )
        await self._cleanup.enter_async_context(self._watch)
        self._cleanup.push_async_callback(_cancel, asyncio.create_task(self._tick(), name="tick"))
        await self._serve()

    def _build_router(self, encoders: Mapping[str, PromptEncoder | None]) -> None:
        config = self.config
        costs = config.cost.settings()
        facts = {}
        for pool in config.pools:
            encoder = encoders[pool.name]
            revision = "" if encoder is None else encoder.tokenizer_revision
            facts[pool.name] = PoolFacts(
                pool.model.revision,
                revision,
                pool.block_size,
                learn_revision=pool.model.revision_from == "models",
                tokenizer_revisions={
                    name: other.tokenizer_revision for name, other in self._revisions[pool.name].items()
                },
            )
        self._facts = facts
        policies = available_policies()
        others = set(policies) if config.policy_header is not None else set[str]()
        if Mode.SHADOW in config.rollout.settings().modes:
            others.add(config.rollout.baseline)
        header = Header(
            seed=secrets.randbits(32) if config.seed is None else config.seed,
            policy=config.policy,
            pools=facts,
            costs=costs,
            settings=config.router_settings(),
            tenants=book_of(config.tenants),
            others=tuple(name for name in policies if name in others),
            shadow=tuple(config.shadow),
            version=__version__,
            started=datetime.now(UTC).isoformat(timespec="milliseconds"),
            clock=self._clock(),
        )
        self._journal: Journal | None = None
        kept = config.journal
        if kept.path is None:
            self.router = header.build(policies, _new_ticket)
        else:
            self._journal = Journal(kept.path, header, round(kept.max_mb * 1e6), kept.keep, self._report)
            self._cleanup.callback(self._journal.close)
            self.router = self._journal.build(policies, _new_ticket)

    def _context(self, pool: Pool, encoder: PromptEncoder | None) -> PoolContext:
        facts = self._facts[pool.name]
        prompts = None
        if encoder is not None:
            prompts = self._prompts(pool, encoder)
            self._report(
                f"pool {pool.name}: encoding with {encoder.encoder.name}"
                + (f" ({encoder.encoder.note})" if encoder.encoder.note else "")
            )
        else:
            self._report(f"pool {pool.name}: no model path, so requests are routed by load only")
        normalizer = load_normalizer(self.config, pool)
        if normalizer is not None:
            self._cleanup.callback(normalizer.close)
        return PoolContext(
            pool.name,
            prompts,
            facts.model_revision,
            facts.tokenizer_revision,
            set(pool.model.names),
            normalizer,
            revisions={
                name: (other.tokenizer_revision, self._prompts(pool, other))
                for name, other in self._revisions[pool.name].items()
            },
            template_version="" if encoder is None else encoder.template_version,
        )

    def _prompts(self, pool: Pool, encoder: PromptEncoder) -> PromptService:
        prompts = PromptService(
            encoder,
            budget_ms=self.config.limits.prompt_budget_ms,
            worker_tokenizer=self._worker_tokenizer(pool),
        )
        self._cleanup.callback(prompts.close)
        return prompts

    def _worker_tokenizer(self, pool: Pool) -> WorkerTokenizer | None:
        if pool.model.worker_tokenize == "off":
            return None

        def ready() -> str | None:
            states = self.router.table.ready(pool.name, None, self._clock())
            return f"http://{states[0].id.endpoint}" if states else None

        session = aiohttp.ClientSession()
        self._cleanup.push_async_callback(session.close)
        return WorkerTokenizer(session, ready, pool.model.worker_tokenize)

    async def _serve(self) -> None:
        config = self.config
        ext_proc = ExtProcService(
            self.service,
            ExtProcSettings(
                max_body_bytes=config.limits.body_bytes,
                test_mode=config.test_mode,
                namespaces=namespaces(() if config.tenants is None else config.tenants.sources()),
                fail_closed=config.fail_closed,
            ),
        )
        access_log = AccessLogService(self.service)
        self.telemetry.watch(
            StateSources.of(
                self.router,
                self._clock,
                version=__version__,
                kv_streams=self._watch.subscriber.streams,
                ext_proc=ext_proc.counters,
                access_log=access_log.counters,
            )
        )
        self.server = await start_grpc_server(
            config.listen,
            ext_proc=ext_proc,
            access_log=access_log,
            health=self.health,
            eds=self.eds,
            max_body_bytes=config.limits.body_bytes,
            tls=None if config.tls is None else config.tls.files(),
        )
        self._cleanup.push_async_callback(self.server.stop, _STOP_GRACE_S)
        self._watch.update_health()
        await self._start_admin(access_log.counters)
        self._report(f"listening on {self.server.address}")

    async def _start_admin(self, access_log: AccessLogCounters) -> None:
        settings = self.config.admin
        if self._recent is None:
            return
        board = StatusBoard(
            router=self.router,
            counters=self.service.counters,
            log=self._log,
            recent=self._recent,
            clock=self._clock,
            address=self.address,
            shadow=tuple(self.config.shadow),
            pools_with_events=frozenset(pool.name for pool in self.config.pools if pool.kv_events.enabled),
            access_log_streams=lambda: access_log.open_streams,
            scrape_errors=self._watch.scrape_errors,
            journal_error=lambda: None if self._journal is None else self._journal.error,
        )
        sources = AdminSources(lambda: self.health.ready, board.state, board.explained, self.telemetry.page)
        self.admin = AdminServer(sources, settings.token())
        try:
            await self.admin.start(settings.listen)
        except AdminError as error:
            if "listen" in settings.model_fields_set:
                raise
            self._report(f"{error}; requests are served all the same")  # nobody asked for this address
            return
        self._cleanup.push_async_callback(self.admin.close)
        self._report(f"status page: http://{self.admin.address}/")

    def _look_at_models(self) -> None:
        self._watch.look_at_models()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.service.finish(*self.router.tick(self._clock()))
            self._watch.update_health()
            self._watch.report_complaints()
            if self._journal is not None:
                self._journal.flush()


def _new_ticket() -> str:
    return secrets.token_urlsafe(_TICKET_BYTES)


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
