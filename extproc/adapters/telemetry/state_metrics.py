"""Gauges: the router's snapshot and the servers' counters as metric families, made when somebody asks."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from extproc.adapters.holding import HeldState
from extproc.adapters.peer_status import PeersStatus, PeerStatus
from extproc.adapters.prompt_processes import NO_PROCESSES, ProcessesState
from extproc.adapters.telemetry.catalogue import STATE_METRICS, fleet, service
from extproc.adapters.telemetry.metric import Kind, Metric
from extproc.core.hashing import REMEMBERED
from extproc.core.router import Router
from extproc.core.snapshot import PoolSnapshot, RouterSnapshot, WorkerSnapshot, snapshot
from extproc.core.types import WorkerId
from extproc.prompt.piece_cache import PieceCacheStats

_MS = 1000.0


class KvStream(Protocol):
    """What is known of one engine's stream of KV events; only grows, apart from `lag_s`."""

    messages: int
    gaps: int
    replays: int
    resets: int
    lag_s: float | None


class ExtProcCounts(Protocol):
    """See `ext_proc_server.ExtProcCounters`."""

    active: int
    passed_through: int
    routing_errors: int
    unsendable_answers: int
    protocol_errors: int


class AccessLogCounts(Protocol):
    """See `access_log_server.AccessLogCounters`."""

    open_streams: int
    entries: int
    foreign: int
    errors: int


@dataclass(frozen=True, slots=True)
class StateSources:
    """Where the figures come from, each read anew every time.

    Attributes:
        version: of Warmroute.
        router: the router now.
        index_bytes: estimated memory of its index.
        oldest_lease_s: age of the oldest open lease.
        kv_streams: workers whose KV events are followed, and how their streams are doing.
        ext_proc: the ext_proc server's counters; None before it runs.
        access_log: the access log server's counters; None before it runs.
        access_log_streams: open streams that tell of our requests; None: those of our own server.
        held: what is held, by pool; nothing where nothing is.
        prompt_caches: what each pool's encoders remember.
        prompt_processes: how the processes that encode long prompts are doing.
        peers: other replicas; None where there are none.
        recalled: workers whose index was taken over at our start.
        admin_cut: connections to the admin server that were cut; None where there is none.
        held_faults: times that holding failed; None where nothing is held.
    """

    version: str
    router: Callable[[], RouterSnapshot]
    index_bytes: Callable[[], int]
    oldest_lease_s: Callable[[], float]
    kv_streams: Callable[[], Mapping[WorkerId, KvStream]]
    ext_proc: Callable[[], ExtProcCounts | None]
    access_log: Callable[[], AccessLogCounts | None]
    access_log_streams: Callable[[], int | None] = lambda: None
    held: Callable[[], Sequence[HeldState]] = tuple
    prompt_caches: Callable[[], Mapping[str, Sequence[PieceCacheStats]]] = dict
    prompt_processes: Callable[[], ProcessesState] = lambda: NO_PROCESSES
    peers: Callable[[], PeersStatus | None] = lambda: None
    recalled: Callable[[], int] = lambda: 0
    admin_cut: Callable[[], int | None] = lambda: None
    held_faults: Callable[[], int | None] = lambda: None

    @classmethod
    def of(
        cls,
        router: Router,
        clock: Callable[[], float],
        *,
        version: str,
        kv_streams: Callable[[], Mapping[WorkerId, KvStream]],
        ext_proc: ExtProcCounts | None = None,
        access_log: AccessLogCounts | None = None,
        access_log_streams: Callable[[], int | None] = lambda: None,
        held: Callable[[], Sequence[HeldState]] = tuple,
        prompt_caches: Callable[[], Mapping[str, Sequence[PieceCacheStats]]] = dict,
        prompt_processes: Callable[[], ProcessesState] = lambda: NO_PROCESSES,
        peers: Callable[[], PeersStatus | None] = lambda: None,
        recalled: Callable[[], int] = lambda: 0,
        admin_cut: Callable[[], int | None] = lambda: None,
        held_faults: Callable[[], int | None] = lambda: None,
    ) -> Self:
        """Of this router, by this clock."""

        def oldest_lease_s() -> float:
            now = clock()
            return max((now - lease.admitted_at for lease in router.ledger), default=0.0)

        return cls(
            version=version,
            router=lambda: snapshot(router, clock()),
            index_bytes=router.index.memory_bytes,
            oldest_lease_s=oldest_lease_s,
            kv_streams=kv_streams,
            ext_proc=lambda: ext_proc,
            access_log=lambda: access_log,
            access_log_streams=access_log_streams,
            held=held,
            prompt_caches=prompt_caches,
            prompt_processes=prompt_processes,
            peers=peers,
            recalled=recalled,
            admin_cut=admin_cut,
            held_faults=held_faults,
        )


class StateCollector(Collector):
    """Registered with a `CollectorRegistry`."""

    def __init__(self, sources: StateSources) -> None:
        self._sources = sources
        self._routed: dict[WorkerId, int] = {}  # requests by worker, of members only

    def count_routed(self, worker: WorkerId) -> None:
        """A request was sent to `worker`."""
        self._routed[worker] = self._routed.get(worker, 0) + 1

    def describe(self) -> Iterable[Family]:
        """The families without samples, so that registering asks nobody for figures."""
        return [_Family(metric).family for metric in STATE_METRICS]

    def collect(self) -> Iterator[Family]:
        """All families."""
        families = {metric.name: _Family(metric) for metric in STATE_METRICS}

        def put(metric: Metric, value: float | None, *labels: str) -> None:
            if value is not None:
                families[metric.name].add(labels, float(value))

        state = self._sources.router()
        self._service(state, put)
        for pool in state.pools:
            _pool(pool, state, put)
        members = {worker.worker for worker in state.workers}
        for gone in [worker for worker in self._routed if worker not in members]:
            del self._routed[gone]
        streams = self._sources.kv_streams()
        for worker in state.workers:
            labels = (worker.pool, str(worker.worker))
            put(fleet.WORKER_ROUTED, self._routed.get(worker.worker, 0), *labels)
            _load(worker, labels, put)
            _signals(worker, labels, put)
            stream = streams.get(worker.worker)
            if stream is not None:
                _events(worker, stream, labels, put)
        for family in families.values():
            yield family.family

    def _service(self, state: RouterSnapshot, put: "_Put") -> None:
        sources = self._sources
        put(service.BUILD, 1, sources.version, state.policy)
        put(service.LEASES, state.open_requests)
        put(service.OLDEST_LEASE, sources.oldest_lease_s())
        put(service.INDEX_BLOCKS, state.distinct_blocks)
        put(service.INDEX_ENTRIES, state.index_entries)
        put(service.INDEX_GIVEN_UP, state.index_given_up)
        put(service.INDEX_RECALLED, sources.recalled())
        put(service.INDEX_BYTES, sources.index_bytes())
        put(service.ADMIN_CUT, sources.admin_cut())
        put(service.HELD_FAULTS, sources.held_faults())
        encoding = sources.prompt_processes()
        put(service.PROMPT_PROCESSES, encoding.running)
        put(service.PROMPT_PROCESSES_LOST, encoding.lost)
        put(service.HASH_STRETCHES, REMEMBERED.hits + encoding.hashed.known, "known")
        put(service.HASH_STRETCHES, REMEMBERED.misses + encoding.hashed.new, "new")
        put(service.HASH_BLOCKS, REMEMBERED.blocks + encoding.hashed.blocks)
        for held in sources.held():
            put(service.HELD, held.requests, held.pool)
            put(service.HELD_BYTES, held.bytes, held.pool)
            for why, count in Counter(why for why in held.full.values() if why is not None).items():
                put(fleet.WORKERS_FULL, count, held.pool, why)
        for pool, caches in sources.prompt_caches().items():
            put(service.PROMPT_CHARACTERS, sum(cache.known for cache in caches), pool, "known")
            put(service.PROMPT_CHARACTERS, sum(cache.new for cache in caches), pool, "new")
            put(service.PROMPT_CACHE_BYTES, sum(cache.size for cache in caches), pool)
            put(service.PROMPT_CACHE_EVICTED, sum(cache.evicted for cache in caches), pool)
        peers = sources.peers()
        if peers is not None:
            _peers(peers, put)
        streams, log = sources.ext_proc(), sources.access_log()
        if streams is not None:
            put(service.STREAMS, streams.active)
            put(service.PASSED, streams.passed_through)
            put(service.ERRORS, streams.routing_errors, "routing")
            put(service.ERRORS, streams.unsendable_answers, "answer")
            put(service.ERRORS, streams.protocol_errors, "protocol")
        if log is not None:
            reached = sources.access_log_streams()
            put(service.ACCESS_LOG_STREAMS, log.open_streams if reached is None else reached)
            put(service.ACCESS_LOG_ENTRIES, log.entries - log.foreign - log.errors, "ours")
            put(service.ACCESS_LOG_ENTRIES, log.foreign, "foreign")
            put(service.ACCESS_LOG_ENTRIES, log.errors, "unreadable")


class _Put(Protocol):
    def __call__(self, metric: Metric, value: float | None, *labels: str) -> None: ...


class _Family:
    """A family being filled."""

    __slots__ = ("family",)

    def __init__(self, metric: Metric) -> None:
        self.family: GaugeMetricFamily | CounterMetricFamily
        make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        self.family = make(metric.name, metric.meaning, labels=metric.labels)

    def add(self, labels: tuple[str, ...], value: float) -> None:
        self.family.add_metric(labels, value)


def _peers(peers: PeersStatus, put: _Put) -> None:
    by_name: dict[str, list[PeerStatus]] = {}
    for peer in peers.peers:
        by_name.setdefault(peer.name or peer.address, []).append(peer)
    for name, same in by_name.items():  # one that has several addresses: what it told is the same for all
        put(service.PEER_CONNECTED, any(peer.connected for peer in same), name)
        put(service.PEER_CONNECTS, sum(peer.connects for peer in same), name)
        put(service.PEER_SILENT, same[0].silent_s, name)
        put(service.PEER_SEQUENCES, same[0].sequences, name)
    put(service.PEER_LISTENERS, peers.listeners)
    put(service.PEER_INDEXES, peers.indexes)
    for kind, count in peers.refused.items():
        put(service.PEER_REFUSED, count, kind)
    for kind in ("forwarded", "taken", "unknown", "dropped"):
        put(service.PEER_SIGNALS, getattr(peers, kind), kind)


def _pool(pool: PoolSnapshot, state: RouterSnapshot, put: _Put) -> None:
    ready = sum(worker.ready for worker in state.workers if worker.pool == pool.name)
    members = sum(worker.pool == pool.name for worker in state.workers)
    put(fleet.WORKERS, ready, pool.name, "ready")
    put(fleet.WORKERS, members - ready, pool.name, "not-ready")
    put(fleet.POOL_OVERHEAD, pool.ttft.overhead_ms / _MS, pool.name)
    put(fleet.POOL_PREFILL, pool.ttft.per_token_ms / _MS, pool.name)
    put(fleet.POOL_REUSE, pool.reuse, pool.name)
    put(fleet.POOL_LEARNED, pool.ttft_learned, pool.name)
    for figure in ("bias", "median", "p90"):
        put(fleet.POOL_TTFT_ERROR, getattr(pool.ttft_errors, figure), pool.name, figure)


def _load(worker: WorkerSnapshot, labels: tuple[str, str], put: _Put) -> None:
    put(fleet.WORKER_READY, worker.ready, *labels)
    put(fleet.WORKER_LAST_RESORT, worker.last_resort, *labels)
    put(fleet.WORKER_ACTIVE, worker.load.active, *labels)
    put(fleet.WORKER_SEQUENCES, worker.load.sequences, *labels)
    put(fleet.WORKER_CONTEXT, worker.load.context_tokens, *labels)
    put(fleet.WORKER_QUEUED, worker.load.queued_prefill_tokens, *labels)
    put(fleet.WORKER_QUEUE_SECONDS, worker.load.queued_prefill_ms / _MS, *labels)
    if worker.foreign is not None:
        put(fleet.WORKER_FOREIGN, worker.foreign.running, *labels, "running")
        put(fleet.WORKER_FOREIGN, worker.foreign.waiting, *labels, "waiting")


def _signals(worker: WorkerSnapshot, labels: tuple[str, str], put: _Put) -> None:
    age = worker.metrics_age_s
    put(fleet.WORKER_SCRAPE_AGE, worker.joined_s if age is None else age, *labels)
    put(fleet.WORKER_SCRAPE_FAILURES, worker.scrape_failures, *labels)
    put(fleet.WORKER_TRUST, worker.confidence, *labels)
    cause = "none" if worker.cause is None else worker.cause.value
    put(fleet.WORKER_DIVERGING, worker.cause is not None, *labels, cause)
    put(fleet.WORKER_BLOCKS, worker.blocks, *labels, "events")
    put(fleet.WORKER_BLOCKS, worker.assumed_blocks, *labels, "assumed")
    metrics = worker.metrics
    if metrics is not None:
        put(fleet.WORKER_ENGINE, metrics.running, *labels, "running")
        put(fleet.WORKER_ENGINE, metrics.waiting, *labels, "waiting")
        put(fleet.WORKER_KV_USAGE, metrics.kv_usage, *labels)


def _events(worker: WorkerSnapshot, stream: KvStream, labels: tuple[str, str], put: _Put) -> None:
    put(fleet.WORKER_COMPLETE, worker.kv_trusted, *labels)
    put(fleet.WORKER_SUSPENDED, worker.kv_suspended, *labels)
    put(fleet.WORKER_EVENT_AGE, worker.event_age_s, *labels)
    put(fleet.WORKER_DOUBTFUL, worker.doubtful_blocks, *labels)
    put(fleet.WORKER_ORPHANS, worker.faults.orphans, *labels)
    put(fleet.WORKER_UNKNOWN_REMOVES, worker.faults.unknown_removes, *labels)
    put(fleet.WORKER_MESSAGES, stream.messages, *labels)
    put(fleet.WORKER_GAPS, stream.gaps, *labels)
    put(fleet.WORKER_REPLAYS, stream.replays, *labels)
    put(fleet.WORKER_RESETS, stream.resets, *labels)
    put(fleet.WORKER_EVENT_LAG, stream.lag_s, *labels)
