"""What is known of the fleet, from everything that tells of it, and whom that is told.

Discovery says who is there; `/metrics` and `/v1/models` how they are and what they serve; KV events what they
hold. Each piece of news goes to the router first, and then to those it changes something for: the service
finishes requests that are lost, Envoy gets its endpoints, health turns, and an operator reads one line.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from extproc.adapters.assembled import Assembled
from extproc.adapters.discovery import Discovery
from extproc.adapters.eds_server import EdsService
from extproc.adapters.engine_key import EngineKey, Refusal
from extproc.adapters.health_server import HealthService
from extproc.adapters.index_memory import IndexMemory
from extproc.adapters.kv_stream import KvSource
from extproc.adapters.kv_subscriber import KvSubscriber
from extproc.adapters.metrics_scraper import Fault, MetricsScraper, ScrapeFailure, ScrapeSettings
from extproc.adapters.routing_service import WarmRoutingService
from extproc.adapters.telemetry.recorder import Telemetry
from extproc.assembly import kv_sources, sources_of
from extproc.config import Config
from extproc.core.dp_ranks import mismatch, told_rank
from extproc.core.model_catalog import ModelCatalog
from extproc.core.router import Router
from extproc.core.types import EngineMetrics, KvEvent, Member, WorkerId
from extproc.protocol.endpoint_discovery import Health, KnownWorker, snapshot
from extproc.protocol.model_cards import ModelCard

_KV_RETRY_S = 3.0  # a router that stops may hold its address for longer than once
_DISCOVERY_GRACE_S = 5.0  # then an Envoy without any list is told what is known so far


class FleetWatch(Assembled):
    """Follows all workers of all pools while it is entered. An async context manager.

    Args:
        config: pools, and how to scrape.
        router: told first.
        service: finishes the requests that turn out lost.
        telemetry: counts KV events.
        catalog: which models the servers name; forgets those of servers that left.
        health: ready while there is somewhere to send requests.
        eds: tells Envoy the endpoints.
        memory: what was known of the workers' caches before.
        keys: of the pools' engines, where they ask for one.
        clock: seconds, monotonic.
        report: told, in one line, what an operator should know.
        behind: whether ends of requests are known that the router has not been told of yet.

    Attributes:
        subscriber: reads the KV events.
        scrape_errors: by endpoint, why its last scrape failed, or what on its page is not as configured.
        models_refused: by endpoint, why it does not say what it serves.
    """

    def __init__(
        self,
        config: Config,
        *,
        router: Router,
        service: WarmRoutingService,
        telemetry: Telemetry,
        catalog: ModelCatalog,
        health: HealthService,
        eds: EdsService,
        memory: IndexMemory,
        keys: Mapping[str, EngineKey],
        clock: Callable[[], float],
        report: Callable[[str], None],
        behind: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self._config = config
        self._router = router
        self._service = service
        self._telemetry = telemetry
        self._catalog = catalog
        self._health = health
        self._eds = eds
        self._clock = clock
        self._report = report
        self._behind = behind
        self._keys = keys
        self._topics = {pool.name: pool.kv_events.topic for pool in config.pools}
        self._memory = memory
        self._members: dict[str, tuple[Member, ...]] = {}
        self._discoveries: list[Discovery] = []
        self._complaints: dict[WorkerId, str | None] = {}
        self._told_ranks: dict[str, int] = {}  # what servers with one rank call it; 0 until one says another
        self._unfit: dict[str, str] = {}
        self._kv_refused: dict[str, str] = {}  # addresses that were reported to be
        self._kv_retry_at = 0.0
        self._not_ready: dict[str, None] = {}  # endpoints that were reported to be
        self._last_resort: dict[str, None] = {}  # pools that were reported to have nothing better
        self.scrape_errors: dict[str, str] = {}
        self.models_refused: dict[str, Refusal] = {}
        self._scraper = MetricsScraper(
            on_metrics=self._on_metrics,
            on_failure=self._on_scrape_failure,
            on_models=self._on_models,
            on_refusal=self._on_refusal,
            key_of=self._key_of,
            settings=ScrapeSettings(
                config.scrape.interval_s,
                config.scrape.timeout_s,
                models_interval_s=config.scrape.models_interval_s,
            ),
        )
        self.subscriber = KvSubscriber(
            on_events=self._on_kv_events,
            on_reset=self._on_kv_reset,
            on_trust=self._on_kv_trust,
            clock=clock,
            on_suspend=self._on_kv_suspended,
            on_heard=self._on_kv_heard,
            recall=memory.recall,
        )

    async def _start(self) -> None:
        self._cleanup.push_async_callback(self.subscriber.close)
        await self._cleanup.enter_async_context(self._scraper)
        self._started = self._clock()
        for pool in self._config.pools:
            discovery = Discovery(sources_of(pool), on_members=self._taker(pool.name), on_error=self._report)
            self._discoveries.append(discovery)
            await self._cleanup.enter_async_context(discovery)

    def look_at_models(self) -> None:
        """Ask the servers what they serve, now: a request named a model that none has told of."""
        self._scraper.look_at_models()

    def _taker(self, pool: str) -> Callable[[tuple[Member, ...]], None]:
        def take(members: tuple[Member, ...]) -> None:
            self._members[pool] = members
            self._on_members()

        return take

    def _on_members(self) -> None:
        members = [member for pool in self._members.values() for member in pool]
        change, released = self._router.on_membership(members, self._clock())
        self._service.finish(*released)
        for worker in change.added:
            self._report(f"worker {worker} joined")
        for worker in change.reseeded:
            self._report_revision(worker)
        endpoints = {member.endpoint for member in members}
        self._catalog.keep(endpoints.__contains__)
        for worker in change.removed:
            self._report(f"worker {worker} left")
            self._telemetry.kv_forgotten(worker)
            self._complaints.pop(worker, None)
            for known in (self.scrape_errors, self._told_ranks, self._unfit, self._not_ready):
                known.pop(worker.endpoint, None)
            self.models_refused.pop(worker.endpoint, None)
        self._scraper.set_endpoints(member.endpoint for member in members)
        self._follow_kv_events(members, change.reseeded)
        self.update_health()

    def _follow_kv_events(self, members: Sequence[Member], anew: Collection[WorkerId] = ()) -> None:
        """Subscribe to what can be; an address that is wrong costs one worker its events, and no request.

        An address that is refused is reported once, and tried again (`follow_again`). Streams of the workers
        in `anew` are read again from their beginning.
        """
        sources: list[KvSource] = []
        problems: list[str] = []
        for member in members:
            try:
                sources += kv_sources(
                    member, self._topics[member.pool], self._told_ranks.get(member.endpoint)
                )
            except ValueError as error:
                problems.append(f"{member.endpoint}: {error}")
        try:
            self.subscriber.set_sources(sources, anew)
        except OSError:
            self._kv_retry_at = self._clock() + _KV_RETRY_S
        for problem in problems:
            self._report(f"KV events: {problem}; check the pool's `kv_events`")
        self._report_kv_addresses({source.endpoint for source in sources})

    def follow_again(self) -> None:
        """Try KV event addresses that were refused again, now and then: one in use may have come free."""
        if self.subscriber.refused and self._clock() >= self._kv_retry_at:
            self._kv_retry_at = self._clock() + _KV_RETRY_S
            self._report_kv_addresses(self.subscriber.retry())

    def _report_kv_addresses(self, wanted: Collection[str]) -> None:
        """Say it once when an address cannot be used, and once when one that is still wanted can be."""
        refused = self.subscriber.refused
        for endpoint, why in refused.items():
            if endpoint not in self._kv_refused:
                self._report(
                    f"KV events: {endpoint}: {why}; check the pool's `kv_events`; it is tried again every "
                    f"{_KV_RETRY_S:g} s"
                )
        for endpoint in self._kv_refused:
            if endpoint in wanted and endpoint not in refused:
                self._report(f"KV events: {endpoint} can be used now")
        self._kv_refused = refused

    def _on_metrics(self, endpoint: str, by_rank: dict[int, EngineMetrics]) -> None:
        before = not self._is_ready(endpoint)
        self.scrape_errors.pop(endpoint, None)
        self._compare_ranks(endpoint, by_rank)
        # Their events have not told of it, so what is known of the stream may be another process's.
        others = {one.id for one in self._router.table.restarted(endpoint, by_rank) if not one.kv_reset}
        self._service.finish(*self._router.on_metrics(endpoint, by_rank, self._clock(), self._behind()))
        if others:
            self._follow_kv_events([member for pool in self._members.values() for member in pool], others)
        ready = self._is_ready(endpoint)
        if ready and before:
            self._not_ready.pop(endpoint, None)
            self._report(f"worker {endpoint} is ready again")
        elif not ready and (not before or endpoint not in self._not_ready):
            self._not_ready[endpoint] = None
            self._report(f"worker {endpoint} is not ready: its engine is asleep")
        else:
            return
        self.update_health()

    def _compare_ranks(self, endpoint: str, ranks: Collection[int]) -> None:
        """Whether the ranks on a page are those expected, and which one it is if there is only one."""
        states = self._router.table.at(endpoint)
        if not states:
            return
        member = states[0].member
        told = told_rank(member, ranks)
        if told is not None and told != self._told_ranks.get(endpoint, 0):
            self._told_ranks[endpoint] = told
            self._report(f"worker {endpoint} is data-parallel rank {told} of its deployment")
            self._memory.give_again(states[0].id)
            self._follow_kv_events([one for pool in self._members.values() for one in pool])
        found = mismatch(member, ranks)
        if found is not None:
            text = self.scrape_errors[endpoint] = f"{found.detail}: {found.advice}"
            if self._unfit.get(endpoint) != text:
                self._report(f"worker {endpoint}: {text}")
            self._unfit[endpoint] = text
        else:
            self._unfit.pop(endpoint, None)

    def _on_scrape_failure(self, endpoint: str, failure: ScrapeFailure) -> None:
        self.scrape_errors[endpoint] = failure.text
        if endpoint in self._not_ready and self._is_ready(endpoint):
            self.update_health()
        if failure.fault is Fault.UNREACHED:
            left = self._router.on_scrape_failure(endpoint)
        else:
            began, slow = self._clock() - failure.took_s, failure.fault is Fault.SLOW
            left = self._router.on_page_failure(endpoint, began, slow=slow)
        if left:
            self._not_ready[endpoint] = None
            self._report(f"worker {endpoint} is not ready: {failure.text}")
            self.update_health()

    def _key_of(self, endpoint: str) -> EngineKey | None:
        states = self._router.table.at(endpoint)
        return self._keys.get(states[0].member.pool) if states else None

    def _on_refusal(self, endpoint: str, why: Refusal) -> None:
        if self._router.table.at(endpoint) and self.models_refused.get(endpoint) != why:
            self.models_refused[endpoint] = why
            self._report(f"worker {endpoint}: {why.text}: {why.advice}")

    def _on_models(self, endpoint: str, cards: tuple[ModelCard, ...]) -> None:
        if self.models_refused.pop(endpoint, None) is not None:
            self._report(f"worker {endpoint}: /v1/models can be read now")
        base = [card for card in cards if card.parent is None]
        adapters = [card.id for card in cards if card.parent is not None]
        for state in self._router.table.at(endpoint)[:1]:
            self._service.models_learned(endpoint, state.member.pool, [card.id for card in base], adapters)
        root = next((card.root for card in base if card.root), None)
        reseeded = self._router.on_models(endpoint, root, adapters)
        for worker in reseeded:
            self._report_revision(worker)
        if reseeded:
            members = [member for pool in self._members.values() for member in pool]
            self._follow_kv_events(members, reseeded)

    def _report_revision(self, worker: WorkerId) -> None:
        state = self._router.table.get(worker)
        if state is not None:
            self._report(f"worker {worker} serves model revision {state.revision!r}")

    def _on_kv_events(self, worker: WorkerId, events: Sequence[KvEvent]) -> None:
        self._router.on_kv_events(worker, events, self._clock())
        state = self._router.table.get(worker)
        if state is not None:
            self._telemetry.kv_events(worker, state.member.pool, events)

    def _on_kv_reset(self, worker: WorkerId) -> None:
        self._router.on_kv_reset(worker)
        self._telemetry.kv_forgotten(worker)

    def _on_kv_trust(self, worker: WorkerId, trusted: bool, cause: str) -> None:
        self._router.on_kv_trust(worker, cause, trusted=trusted)
        self._report(f"KV events of {worker}: {'complete' if trusted else 'not complete'} ({cause})")

    def _on_kv_suspended(self, worker: WorkerId, suspended: bool) -> None:
        self._router.on_kv_suspended(worker, suspended=suspended)

    def _on_kv_heard(self, worker: WorkerId) -> None:
        self._router.on_kv_heard(worker, self._clock())

    def _is_ready(self, endpoint: str) -> bool:
        now = self._clock()
        return all(self._router.table.is_ready(state, now) for state in self._router.table.at(endpoint))

    def update_health(self) -> None:
        """Ready when there is somewhere to send requests. Envoy learns where."""
        now = self._clock()
        self._report_readiness(now)
        table = self._router.table
        pools = self._config.pools
        ready = {state.id.endpoint for pool in pools for state in table.ready(pool.name, None, now)}
        reached = {state.id.endpoint for pool in pools for state in table.reached(pool.name, None, now)}
        self._health.set_ready(bool(ready))

        def told(endpoint: str) -> KnownWorker:
            if endpoint in ready:
                return KnownWorker(endpoint)
            return KnownWorker(endpoint, Health.DEGRADED if endpoint in reached else Health.UNHEALTHY)

        known = {
            pool.name: [told(member.endpoint) for member in self._members.get(pool.name, ())]
            for pool in pools
        }
        complete = len(self._discoveries) == len(known) and all(one.complete for one in self._discoveries)
        usable = any(self._members.values()) and now - self._started >= _DISCOVERY_GRACE_S
        self._eds.set(snapshot(known, complete=complete, usable=usable))

    def _report_readiness(self, now: float) -> None:
        """Say it once when what a worker served makes it ready, and when a pool has a last resort only."""
        table = self._router.table
        for endpoint in [one for one in self._not_ready if self._is_ready(one)]:
            del self._not_ready[endpoint]
            self._report(f"worker {endpoint} is ready again: it serves requests")
        for pool in (pool.name for pool in self._config.pools):
            sent_to = table.ready(pool, None, now)
            resort = any(not table.is_ready(state, now) for state in sent_to)
            if resort and pool not in self._last_resort:
                self._last_resort[pool] = None
                why = "no worker's metrics page can be read; requests go all the same to"
                if any(state.asleep for state in sent_to):
                    why = "no worker is awake whose metrics page can be read; requests go, and wait, to"
                self._report(f"pool {pool}: {why} {len(sent_to)} that were reached")
            elif sent_to and not resort and pool in self._last_resort:
                del self._last_resort[pool]
                self._report(f"pool {pool}: workers are ready again")

    def report_complaints(self) -> None:
        """Say it once when predictions for a worker begin to fail, and once when they hold again."""
        now = self._clock()
        for state in self._router.table.all():
            complaint = self._router.trust.complaint(state.id, now)
            if complaint != self._complaints.get(state.id):
                self._complaints[state.id] = complaint
                self._report(f"worker {state.id}: {complaint or 'predictions hold again'}")
