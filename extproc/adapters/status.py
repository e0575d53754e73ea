"""Everything worth seeing at one moment, as JSON values: what `/state`, the status page and `top` show."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from extproc import __version__
from extproc.adapters.decision_log import open_record
from extproc.adapters.decision_writer import DecisionLog
from extproc.adapters.engine_key import Refusal
from extproc.adapters.holding import HeldState
from extproc.adapters.peer_status import PeersStatus
from extproc.adapters.recent_decisions import RecentDecisions
from extproc.adapters.routing_service import ServiceCounters
from extproc.adapters.status_warnings import Observed, warnings
from extproc.core.router import Router
from extproc.core.snapshot import PoolSnapshot, WorkerSnapshot, snapshot
from extproc.protocol.explanation import explain
from extproc.protocol.explanation_text import as_text

_DECISIONS = 40
_PREFIXES = 12
_WARNINGS = 30
_WAITING = 50
_JUDGED = 200


@dataclass(slots=True)
class StatusBoard:
    """Puts the state together from those who know it.

    Attributes:
        router: the router; read only.
        counters: what happened since the start.
        log: the decision log.
        recent: its last lines.
        clock: the router's.
        address: where Envoy reaches us.
        shadow: names of the policies in shadow.
        pools_with_events: pools whose engines should publish KV events.
        access_log_streams: open ones; None: not known.
        scrape_errors: of each endpoint whose metrics could not be read, or name ranks that are not expected.
        models_refused: of each endpoint that does not say what it serves, why.
        journal_error: why the journal ended before its time.
        held: what is held, by pool, where anything may be.
        peers: other replicas; None where there are none.
        recalled: workers whose index was taken over at our start.
        mode: how far decisions are acted on, for people.
    """

    router: Router
    counters: ServiceCounters
    log: DecisionLog
    recent: RecentDecisions
    clock: Callable[[], float]
    address: str
    shadow: tuple[str, ...]
    pools_with_events: frozenset[str]
    access_log_streams: Callable[[], int | None]
    scrape_errors: dict[str, str] = field(default_factory=dict)
    models_refused: dict[str, Refusal] = field(default_factory=dict)
    journal_error: Callable[[], str | None] = lambda: None
    held: Callable[[], Sequence[HeldState]] = tuple
    peers: Callable[[], PeersStatus | None] = lambda: None
    recalled: Callable[[], int] = lambda: 0
    mode: str = "enforce"
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()

    def state(self) -> dict[str, Any]:
        """The whole of it. Times are seconds or milliseconds as the names say; null means not known."""
        now = self.clock()
        router, held, peers = snapshot(self.router, now), self.held(), self.peers()
        seen = Observed(
            router=router,
            pools_with_events=self.pools_with_events,
            stale_after_s=self.router.settings.stale_after_s,
            scrape_errors=self.scrape_errors,
            models_refused=self.models_refused,
            access_log_streams=self.access_log_streams(),
            recent=self.recent.endings(_JUDGED),
            log_failures=self.log.failures,
            journal_error=self.journal_error(),
            held=held,
            peers=() if peers is None else peers.peers,
        )
        found = warnings(seen)
        return {
            "version": __version__,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "uptime_s": round(now - self._started, 1),
            "listen": self.address,
            "policy": router.policy,
            "shadow": list(self.shadow),
            "mode": self.mode,
            "ready": any(worker.ready for worker in router.workers),
            "open_requests": router.open_requests,
            "distinct_blocks": router.distinct_blocks,
            "index": {
                "entries": router.index_entries,
                "limit": router.index_limit,
                "given_up": router.index_given_up,
                "recalled_workers": self.recalled(),
            },
            "held": [_held(one) for one in held],
            "peers": None if peers is None else asdict(peers),
            "counters": asdict(self.counters),
            "warnings": [asdict(one) for one in found[:_WARNINGS]],
            "warnings_total": len(found),
            "workers": [_worker(worker) for worker in router.workers],
            "pools": [_pool(pool) for pool in router.pools],
            "prefixes": [asdict(prefix) for prefix in self.recent.hottest(_PREFIXES)],
            "decisions": list(self.recent.latest(_DECISIONS)),
        }

    def line(self, request_id: str) -> dict[str, Any] | None:
        """The log line about a request: of the last ones, or of one that is not over."""
        found = self.recent.find(request_id)
        if found is not None:
            return found
        for lease in reversed(tuple(self.router.ledger)):
            if lease.decision.request.request_id == request_id:
                return self.log.hide(open_record(lease, self.clock(), datetime.now(UTC)))
        return None

    def explained(self, request_id: str) -> dict[str, Any] | None:
        """The line about a request, its story, and both as text; None: nothing is known (any more)."""
        line = self.line(request_id)
        if line is None:
            return None
        return {"decision": line, "explanation": asdict(explain(line)), "text": as_text(line)}


def _held(held: HeldState) -> dict[str, Any]:
    return {
        "pool": held.pool,
        "requests": held.requests,
        "bytes": held.bytes,
        "oldest_s": round(held.oldest_s, 1),
        "wait_s": _rounded(held.wait_s),
        "waiting": [
            {"tenant": tenant, "priority": priority, "requests": requests}
            for (tenant, priority), requests in held.waiting.items()
        ][:_WAITING],
        "full_workers": {worker: why for worker, why in held.full.items() if why is not None},
    }


def _pool(pool: PoolSnapshot) -> dict[str, Any]:
    return {
        "name": pool.name,
        "learned": pool.ttft_learned,
        "overhead_ms": round(pool.ttft.overhead_ms, 3),
        "prefill_tokens_per_s": _rate(pool.ttft.per_token_ms),
        "step_ms": round(pool.step.base_ms, 3),
        "step_ms_per_sequence": round(pool.step.per_sequence_ms, 4),
        "reuse": round(pool.reuse, 4),
    }


def _worker(worker: WorkerSnapshot) -> dict[str, Any]:
    metrics, load = worker.metrics, worker.load
    return {
        "worker": str(worker.worker),
        "pool": worker.pool,
        "ready": worker.ready,
        "last_resort": worker.last_resort,
        "joined_s": round(worker.joined_s, 1),
        "scrape_failures": worker.scrape_failures,
        "unreachable_s": _rounded(worker.unreachable_s),
        "metrics_age_s": _rounded(worker.metrics_age_s),
        "load": {
            "requests": load.active,
            "sequences": load.sequences,
            "context_tokens": round(load.context_tokens),
            "queued_prefill_ms": round(load.queued_prefill_ms, 1),
            "queued_prefill_tokens": round(load.queued_prefill_tokens),
        },
        "engine": {
            "running": None if metrics is None else metrics.running,
            "waiting": None if metrics is None else metrics.waiting,
            "kv_usage": None if metrics is None else metrics.kv_usage,
        },
        "others": None if worker.foreign is None else worker.foreign._asdict(),
        "cache": {
            "blocks": worker.blocks,
            "assumed_blocks": worker.assumed_blocks,
            "capacity_blocks": None if metrics is None else metrics.num_gpu_blocks,
            "block_size": worker.block_size or (None if metrics is None else metrics.block_size),
            "events_complete": worker.kv_trusted,
            "events_cause": worker.kv_cause,
            "suspended": worker.kv_suspended,
            "event_age_s": _rounded(worker.event_age_s),
        },
        "trust": {
            "confidence": round(worker.confidence, 3),
            "audits": worker.audits,
            "complaint": worker.complaint,
        },
        "rates": {
            "overhead_ms": round(worker.ttft.overhead_ms, 3),
            "prefill_tokens_per_s": _rate(worker.ttft.per_token_ms),
        },
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _rate(ms_per_token: float) -> float | None:
    return round(1000.0 / ms_per_token, 1) if ms_per_token > 0.0 else None
