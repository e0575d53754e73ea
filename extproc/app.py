"""Composition root: wires adapters to the core. What follows the fleet is wired in `extproc.fleet_watch`."""

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime

from extproc import __version__
from extproc.adapters.access_log_server import AccessLogCounters, AccessLogService
from extproc.adapters.admin_server import AdminError, AdminServer, AdminSources
from extproc.adapters.assembled import Assembled
from extproc.adapters.decision_writer import DecisionLog
from extproc.adapters.deferred import Deferred
from extproc.adapters.eds_server import EdsService
from extproc.adapters.ext_proc_server import ExtProcService, ExtProcSettings
from extproc.adapters.grpc_ports import refuse_taken
from extproc.adapters.grpc_server import GrpcServer, start_grpc_server
from extproc.adapters.health_server import HealthService
from extproc.adapters.held_requests import HeldRequests
from extproc.adapters.holding import Ending, Wait
from extproc.adapters.index_memory import IndexMemory
from extproc.adapters.journal import Journal
from extproc.adapters.peer_exchange import PeerExchange
from extproc.adapters.peer_forwarding import SEPARATOR
from extproc.adapters.peer_status import PeersStatus
from extproc.adapters.policy_plugins import available_policies
from extproc.adapters.process_group import ProcessPlace, port_of
from extproc.adapters.recent_decisions import RecentDecisions
from extproc.adapters.routing_service import WarmRoutingService
from extproc.adapters.status import StatusBoard
from extproc.adapters.telemetry.running import running_telemetry
from extproc.adapters.telemetry.state_metrics import StateSources
from extproc.adapters.warm_start import SnapshotWriter, from_disk, from_peers
from extproc.adapters.warm_up import warm_up
from extproc.assembly import admission_of, peer_settings, peer_sources, router_header
from extproc.config import Config, book_of
from extproc.core.types import Completion
from extproc.fleet_watch import FleetWatch
from extproc.pool_contexts import PoolContexts
from extproc.protocol.tenant_identity import namespaces

_LOG = logging.getLogger("warmroute.app")
_TICK_S = 0.5
_STOP_GRACE_S = 2.0
_TICKET_BYTES = 12  # unguessable: a ticket names a lease, and anyone who names it could end it


class App(Assembled):
    """A running Warmroute. An async context manager.

    Args:
        config: what to run.
        report: told, in one line, what an operator should know.
        place: which of the processes of one `serve` this is.

    Raises (on entering):
        WarmrouteError: the listening address cannot be bound, or a model cannot be loaded.
    """

    def __init__(
        self, config: Config, report: Callable[[str], None], place: ProcessPlace | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self._place = place or ProcessPlace()
        self._report = report
        self._clock = time.monotonic
        self.server: GrpcServer | None = None
        self.admin: AdminServer | None = None
        self._started = False

    @property
    def address(self) -> str:
        """Where Envoy reaches us: `host:port`."""
        if self.server is None:
            raise RuntimeError("not started")
        return self.server.address

    @property
    def _own_address(self) -> str:
        """Where this process listens alone."""
        listen, place = self.config.listen, self._place
        return listen if place.count == 1 else port_of(listen, 1 + place.number)

    async def _start(self) -> None:
        config, place = self.config, self._place
        # Before anything is opened: with the same configuration, all of it is the running router's.
        refuse_taken(self._own_address)
        self._peer_settings = peer_settings(config, place, secrets.token_urlsafe(6), time.time_ns())
        self._pools = PoolContexts(config)
        self._build_router()
        self._recent = RecentDecisions() if config.admin.listen else None
        self._later = Deferred(self._clock)
        self._log = DecisionLog(
            config.decision_log.path, self._report, config.decision_log.settings(), self._recent, self._later
        )
        self._cleanup.callback(self._log.close)
        contexts = self._pools.open(self._cleanup, self._ready_worker, self._report)
        self.admission = admission_of(config)
        self.telemetry = await self._cleanup.enter_async_context(
            running_telemetry(
                os.environ,
                version=__version__,
                clock=self._clock,
                is_base_model=self.admission.catalog.is_base,
                report=self._report,
                later=self._later,
            )
        )
        for name in contexts:
            self.telemetry.metrics.pool_known(name)
        self._held = self._holding()
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
            held=self._held,
            body_limits=config.limits.body(),
        )
        # What is entered from here on may still tell of ends, or tell peers and disk what is running.
        self._cleanup.callback(self._stopped)
        self.health = HealthService()
        self.eds = EdsService(self._report)
        self._memory = IndexMemory(self.router, self._clock, self._report)
        self._watch = FleetWatch(
            config,
            router=self.router,
            service=self.service,
            telemetry=self.telemetry,
            catalog=self.admission.catalog,
            health=self.health,
            eds=self.eds,
            memory=self._memory,
            keys=self._pools.keys,
            clock=self._clock,
            report=self._report,
            behind=lambda: len(self._later) > 0,
        )
        self.exchange = self._exchange()
        if self.exchange is not None:
            await self._cleanup.enter_async_context(self.exchange)
        await self._remember()
        await self._cleanup.enter_async_context(self._watch)
        self._keep_snapshot()
        self._cleanup.push_async_callback(_cancel, asyncio.create_task(self._tick(), name="tick"))
        counts = [stats for caches in self._pools.own_caches().values() for stats in caches]
        await warm_up(self._header.build(available_policies(), _new_ticket), contexts, self._clock, counts)
        self._pools.processes.begin()
        await self._serve()

    def _holding(self) -> HeldRequests | None:
        settings = self.config.admission.settings()
        if settings is None:
            return None
        return HeldRequests(
            self.router,
            settings,
            self._clock,
            book_of(self.config.tenants),
            on_wait=self._waited,
            on_abandoned=self._abandoned,
        )

    def _abandoned(self, lease_id: str, completion: Completion) -> None:
        self.service.completed(lease_id, completion)

    def _waited(self, wait: Wait) -> None:
        self.telemetry.waited(wait)
        if wait.ending not in (Ending.PASSED, Ending.ADMITTED):
            self._log.write_unserved(wait)

    async def _remember(self) -> None:
        """Begin with what is known of the engines' caches, if anybody knows."""
        peers = self.config.peers
        told = (
            self.exchange is not None
            and peers.warm_start
            and await from_peers(self.exchange, self._memory, self._report)
        )
        if not told and peers.snapshot.path is not None:
            await from_disk(peers.snapshot.path, peers.snapshot.max_age_s, self._memory, self._report)

    def _keep_snapshot(self) -> None:
        snapshot = self.config.peers.snapshot
        if snapshot.path is not None:
            writer = SnapshotWriter(snapshot.path, snapshot.interval_s, self._known, self._report)
            self._cleanup.push_async_callback(self._last_snapshot, writer)
            self._cleanup.push_async_callback(_cancel, asyncio.create_task(writer.run(), name="snapshot"))

    def _known(self) -> AsyncGenerator[bytes, None]:
        return self._memory.pieces(self._watch.subscriber)

    def _exchange(self) -> PeerExchange | None:
        settings = self._peer_settings
        if settings is None:
            return None
        return PeerExchange(
            settings,
            router=self.router,
            service=self.service,
            sources=peer_sources(self.config),
            index=self._known,
            clock=self._clock,
            report=self._report,
            later=self._later,
        )

    def _build_router(self) -> None:
        config = self.config
        policies = available_policies()
        header = router_header(
            config,
            self._pools.facts,
            tuple(policies),
            seed=secrets.randbits(32) if config.seed is None else config.seed,
            started=datetime.now(UTC),
            clock=self._clock(),
        )
        self._header = header
        self._journal: Journal | None = None
        kept = config.journal
        if kept.path is None:
            self.router = header.build(policies, self._new_ticket)
        else:
            self._journal = Journal(kept.path, header, round(kept.max_mb * 1e6), kept.keep, self._report)
            self._cleanup.callback(self._journal.close)
            self.router = self._journal.build(policies, self._new_ticket)

    async def _last_snapshot(self, writer: SnapshotWriter) -> None:
        if self._started:  # else the one that is there is better, or another router's
            await writer.write()

    def _ready_worker(self, pool: str) -> str | None:
        """Where a worker of a pool is asked to tokenize; None: none is ready."""
        states = self.router.table.ready(pool, None, self._clock())
        return f"http://{states[0].id.endpoint}" if states else None

    def _new_ticket(self) -> str:
        """One that says whose it is, where others may be told of its request."""
        settings = self._peer_settings
        return _new_ticket() if settings is None else f"{settings.owner}{SEPARATOR}{_new_ticket()}"

    async def _serve(self) -> None:
        config, place = self.config, self._place
        routing = self.service if self.exchange is None else self.exchange.forwarding
        ext_proc = ExtProcService(
            routing,
            ExtProcSettings(
                max_body_bytes=config.limits.body_bytes,
                max_headers=config.limits.headers,
                max_header_bytes=config.limits.header_bytes,
                test_mode=config.test_mode,
                namespaces=namespaces(() if config.tenants is None else config.tenants.sources()),
                fail_closed=config.fail_closed,
            ),
            replied=self._later.replied,
        )
        access_log = AccessLogService(routing, self._later)
        self.telemetry.watch(
            StateSources.of(
                self.router,
                self._clock,
                version=__version__,
                kv_streams=self._watch.subscriber.streams,
                ext_proc=ext_proc.counters,
                access_log=access_log.counters,
                access_log_streams=lambda: (
                    None if self.exchange is None else self.exchange.access_log_streams
                ),
                held=tuple if self._held is None else self._held.state,
                prompt_caches=self._pools.prompt_caches,
                prompt_processes=self._pools.processes.state,
                peers=self._peers,
                recalled=lambda: self._memory.recalled,
                admin_cut=lambda: None if self.admin is None else self.admin.cut,
                held_faults=lambda: None if self._held is None else self._held.faults,
            )
        )
        self.server = await start_grpc_server(
            self._own_address,
            shared=None if place.count == 1 else config.listen,
            ext_proc=ext_proc,
            access_log=access_log,
            health=self.health,
            eds=self.eds,
            max_body_bytes=config.limits.body_bytes,
            max_streams=config.limits.streams,
            tls=None if config.tls is None else config.tls.files(),
        )
        self._cleanup.push_async_callback(self.server.stop, _STOP_GRACE_S)
        if self._held is not None:
            self._cleanup.callback(self._held.close)
        self._watch.update_health()
        await self._start_admin(access_log.counters)
        if self._journal is not None:
            self._journal.open()
        self._started = True
        also = "" if place.count == 1 else f" and, with the others, on {config.listen}"
        self._report(f"listening on {self.server.address}{also}")

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
            access_log_streams=lambda: (
                access_log.open_streams if self.exchange is None else self.exchange.access_log_streams
            ),
            scrape_errors=self._watch.scrape_errors,
            models_refused=self._watch.models_refused,
            journal_error=lambda: None if self._journal is None else self._journal.error,
            held=tuple if self._held is None else self._held.state,
            peers=self._peers,
            recalled=lambda: self._memory.recalled,
            mode=self.config.rollout.settings().summary,
        )
        sources = AdminSources(
            lambda: self.health.ready,
            self._later.flushed(board.state),
            self._later.flushed(board.explained),
            self.telemetry.page,
        )
        self.admin = AdminServer(sources, settings.token())
        try:
            await self.admin.start(port_of(settings.listen, self._place.number))
        except AdminError as error:
            if "listen" in settings.model_fields_set:
                raise
            self._report(f"{error}; requests are served all the same")  # nobody asked for this address
            return
        self._cleanup.push_async_callback(self.admin.close)
        self._report(f"status page: http://{self.admin.address}/")
        if self.admin.is_open:
            self._report(
                f"admin: whoever reaches {self.admin.address} sees decisions, names of tenants and load (no "
                "prompts): set `admin.token_file`, or listen on 127.0.0.1"
            )

    def _peers(self) -> PeersStatus | None:
        return None if self.exchange is None else self.exchange.status()

    def _look_at_models(self) -> None:
        self._watch.look_at_models()

    async def _tick(self) -> None:
        duties: list[Callable[[], None]] = [
            self._finish_lost,
            self._watch.update_health,
            self._watch.report_complaints,
            self._watch.follow_again,
        ]
        if self.exchange is not None:
            duties.append(self.exchange.tick)
        if self._journal is not None:
            duties.append(self._journal.flush)
        duties.append(self._log.flush)
        while True:
            await asyncio.sleep(_TICK_S)
            for duty in duties:
                try:
                    duty()
                except Exception:
                    _LOG.exception("%s failed; it is tried again, the others go on", duty.__name__)

    def _stopped(self) -> None:
        self._later.flush()
        self.service.stopped()

    def _finish_lost(self) -> None:
        self.service.finish(*self.router.tick(self._clock()))


def _new_ticket() -> str:
    return secrets.token_urlsafe(_TICKET_BYTES)


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
