"""What the router knows, as plain values for people and dashboards: read without changing anything.

Its cost grows with the number of workers and open requests, not with what their caches hold.
"""

from dataclasses import dataclass

from extproc.core.divergence import Cause
from extproc.core.kv_index import IndexFaults
from extproc.core.leases import WorkerLoad
from extproc.core.router import Router
from extproc.core.step_model import StepCoefficients
from extproc.core.ttft_errors import TtftErrors
from extproc.core.ttft_model import TtftCoefficients
from extproc.core.types import EngineMetrics, WorkerId
from extproc.core.worker_table import ForeignLoad, Readiness, WorkerState


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """One worker. None: not known.

    Attributes:
        worker: who.
        pool: its pool.
        generation: how often any worker has joined up to and including this one's joining.
        joined_s: seconds since it joined.
        ready: whether requests go there that any worker of its pool may serve.
        last_resort: they do so only because no worker of its pool is ready by itself.
        reached: whether requests go there that no other may serve, at least.
        scrape_failures: in a row, whether they count or not.
        unreachable_s: seconds since the proxy could not reach it; None: it can.
        metrics: its own figures at the last good scrape.
        metrics_age_s: seconds since then.
        load: what we have sent there and is not known to have ended.
        foreign: requests there that are not ours.
        kv_trusted: whether every KV event has been seen.
        kv_cause: why, or why not.
        kv_suspended: what events have said counts for nothing until its engine is known to be the same.
        event_age_s: seconds since its last KV event.
        blocks: KV blocks that events say it holds.
        assumed_blocks: blocks it is assumed to hold, where there are no events.
        block_size: tokens per block, as its events tell.
        faults: signs that its events are incomplete or unlike ours.
        confidence: share of predicted hits that really happened lately, 0 to 1.
        audits: how many predictions that rests on.
        complaint: what to tell, while predictions keep failing.
        cause: the likely cause of that.
        doubtful_blocks: blocks that have to be verified before they are believed: events were lost.
        ttft: learned cost of a first token there.
    """

    worker: WorkerId
    pool: str
    generation: int
    joined_s: float
    ready: bool
    last_resort: bool
    reached: bool
    scrape_failures: int
    unreachable_s: float | None
    metrics: EngineMetrics | None
    metrics_age_s: float | None
    load: WorkerLoad
    foreign: ForeignLoad | None
    kv_trusted: bool
    kv_cause: str
    kv_suspended: bool
    event_age_s: float | None
    blocks: int
    assumed_blocks: int
    block_size: int | None
    faults: IndexFaults
    confidence: float
    audits: int
    complaint: str | None
    cause: Cause | None
    doubtful_blocks: int
    ttft: TtftCoefficients


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """What was learned of one pool.

    Attributes:
        name: its name.
        ttft: cost of a first token.
        ttft_learned: whether that rests on requests rather than on the settings.
        step: cost of a further token.
        reuse: share of prompt tokens that engines found in their caches lately, 0 to 1.
        ttft_errors: how well times to first token were predicted lately.
    """

    name: str
    ttft: TtftCoefficients
    ttft_learned: bool
    step: StepCoefficients
    reuse: float
    ttft_errors: TtftErrors


@dataclass(frozen=True, slots=True)
class RouterSnapshot:
    """The router at one moment.

    Attributes:
        policy: the one that decides.
        workers: in the order they joined.
        pools: those that are configured, and any other that has workers.
        distinct_blocks: KV blocks that events say any worker holds, each counted once.
        index_entries: blocks that are kept, each counted for every worker that holds it.
        index_limit: the most of them; 0: no limit.
        index_given_up: blocks so far that were forgotten because of it.
        open_requests: routed and not known to have ended.
    """

    policy: str
    workers: tuple[WorkerSnapshot, ...]
    pools: tuple[PoolSnapshot, ...]
    distinct_blocks: int
    open_requests: int
    index_entries: int = 0
    index_limit: int = 0
    index_given_up: int = 0


def snapshot(router: Router, now: float) -> RouterSnapshot:
    """Everything at `now`."""
    states = router.table.all()
    names = dict.fromkeys([*router.pools, *(state.member.pool for state in states)])
    sent_to = {state.id for name in names for state in router.table.ready(name, None, now)}
    return RouterSnapshot(
        policy=router.policy,
        workers=tuple(_worker(router, state, state.id in sent_to, now) for state in states),
        pools=tuple(_pool(router, name) for name in names),
        distinct_blocks=router.index.distinct_blocks,
        open_requests=len(router.ledger),
        index_entries=router.index.entries,
        index_limit=router.index.max_blocks,
        index_given_up=router.index.given_up,
    )


def _pool(router: Router, name: str) -> PoolSnapshot:
    learned = router.learned
    ttft = learned.ttft.of(name)
    return PoolSnapshot(
        name=name,
        ttft=ttft.typical,
        ttft_learned=ttft.learned,
        step=learned.steps.of(name).coefficients,
        reuse=learned.reuse.of(name),
        ttft_errors=router.errors.of(name),
    )


def _worker(router: Router, state: WorkerState, sent_to: bool, now: float) -> WorkerSnapshot:
    worker, since = state.id, state.unreachable_since
    belief = router.trust.belief(worker, now)
    divergence = router.trust.diagnosis(worker, now)
    fresh = state.fresh_metrics(now, router.settings.stale_after_s) is not None
    return WorkerSnapshot(
        worker=worker,
        pool=state.member.pool,
        generation=state.generation,
        joined_s=max(0.0, now - state.joined_at),
        ready=sent_to,
        last_resort=sent_to and not router.table.is_ready(state, now),
        reached=router.table.readiness(state, now) is not Readiness.OUT,
        scrape_failures=state.scrape_failures,
        unreachable_s=None if since is None else max(0.0, now - since),
        metrics=state.metrics,
        metrics_age_s=state.metrics_age_s(now),
        load=router.ledger.load(worker, now),
        foreign=state.foreign if fresh else None,
        kv_trusted=state.kv_trusted,
        kv_cause=state.kv_cause,
        kv_suspended=state.kv_suspended,
        event_age_s=belief.event_age_s,
        blocks=router.index.resident_blocks(worker),
        assumed_blocks=router.assumed.blocks(worker),
        block_size=router.index.block_size(worker),
        faults=router.index.faults(worker),
        confidence=belief.confidence,
        audits=belief.audits,
        complaint=None if divergence is None else divergence.message,
        cause=None if divergence is None else divergence.cause,
        doubtful_blocks=router.doubts.blocks(worker),
        ttft=router.learned.ttft.of(state.member.pool).coefficients(worker),
    )
