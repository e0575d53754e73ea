"""Whether a worker has room for one more request, from what the router knows of it.

A worker is *full* when any of these is beyond its bound. A bound that is None does not count, nor does a
figure that is not known; a worker on which nothing runs is never full, whatever the bounds.

    requests   sequences there, ours and others', waiting ones included        >= max_requests
    queue      prefill booked there and not computed yet                       >  max_queue_ms
               + others' waiting requests * prefill of this one
               + stalled * expected output * time per token
    memory     tokens that sequences there hold / tokens of KV it can hold     >= max_kv_usage
    waiting    requests that found no room in the engine's last step, at the   >  max_waiting
               last scrape (those that wait for a grammar are none)

The queue is that of `extproc.core.cost`, without what every request waits for (the step under way, its
adapter). Memory is what open requests are expected to hold by now, at most what the engine said of itself and
what may have been sent there without being in its figures yet (see `extproc.core.engine_steps`); and all of
that where requests run that nobody has told us of. What other replicas tell that they have sent counts like
our own.

A request is *held* when every worker that may serve it is full. That is a gate and no cap: where one worker
has room, the policy chooses among all of them, and may well prefer a warm one with a longer queue. Only
`max_requests` is a cap as well: `uncapped` are the workers below it.
"""

from dataclasses import dataclass
from enum import StrEnum

from extproc.core.namespace import Namespace
from extproc.core.router import Router
from extproc.core.types import RoutingRequest, WorkerId
from extproc.core.worker_table import WorkerState


class Full(StrEnum):
    """Why a worker has no room. See the module."""

    REQUESTS = "requests"
    QUEUE = "queue"
    MEMORY = "memory"
    WAITING = "waiting"


@dataclass(frozen=True, slots=True)
class RoomSettings:
    """Bounds of each worker; None: none. See the module.

    Attributes:
        max_queue_ms: predicted wait there before prefill begins.
        max_kv_usage: share of its KV memory that running requests hold, 0 to 1.
        max_requests: requests there at once.
        max_waiting: requests that wait in the engine for room.
    """

    max_queue_ms: float | None = 1000.0
    max_kv_usage: float | None = 0.95
    max_requests: int | None = None
    max_waiting: int | None = None


class Saturation:
    """Reads a router's state; changes nothing."""

    def __init__(self, router: Router, settings: RoomSettings) -> None:
        self._router = router
        self._settings = settings

    def room(self, request: RoutingRequest, now: float) -> bool:
        """Whether any worker that may serve `request` has room, or there is none at all to wait for."""
        states = self._router.eligible(request, now)
        return not states or any(self.full(state, request, now) is None for state in states)

    def uncapped(self, request: RoutingRequest, now: float) -> frozenset[str] | None:
        """Endpoints that may serve `request` and are below `max_requests`; None: nothing is capped.

        An endpoint with several ranks is below it while one of them is.
        """
        if self._settings.max_requests is None:
            return None
        states = self._router.eligible(request, now)
        return frozenset(
            s.id.endpoint for s in states if self._requests(s, now) < self._settings.max_requests
        )

    def full(self, state: WorkerState, request: RoutingRequest, now: float) -> Full | None:
        """Why a worker has no room for `request`; None: it has."""
        bounds, router = self._settings, self._router
        running = self._requests(state, now)
        if not running:
            return None
        if bounds.max_requests is not None and running >= bounds.max_requests:
            return Full.REQUESTS
        if bounds.max_queue_ms is not None and self._queue_ms(state, request, now) > bounds.max_queue_ms:
            return Full.QUEUE
        if bounds.max_kv_usage is not None:
            usage = self.kv_usage(state, now)
            if usage is not None and usage >= bounds.max_kv_usage:
                return Full.MEMORY
        if bounds.max_waiting is not None:
            metrics = state.fresh_metrics(now, router.settings.stale_after_s)
            if metrics is not None and metrics.crowded > bounds.max_waiting:
                return Full.WAITING
        return None

    def kv_usage(self, state: WorkerState, now: float) -> float | None:
        """Share of a worker's KV memory that sequences hold by now; None: not known."""
        router = self._router
        metrics = state.fresh_metrics(now, router.settings.stale_after_s)
        if metrics is None or not metrics.num_gpu_blocks:
            return None
        size = router.block_size(state)
        if size is None:
            return None
        capacity = metrics.num_gpu_blocks * size
        load, theirs = router.ledger.load(state.id, now), router.peers.load(state.id, now)
        private = load.private_tokens + theirs.private_tokens
        held = float(private + size * router.index.reserved_blocks(state.id))
        if metrics.kv_usage is not None:
            unseen = state.steps.unseen(router.ledger.sent_tokens(state.id), theirs)
            most = metrics.kv_usage * capacity + unseen
            strangers = state.foreign is not None and state.foreign.running
            held = most if strangers else min(held, most)
        return held / capacity

    def workers(self, pool: str, now: float) -> list[tuple[WorkerId, Full | None]]:
        """Every ready worker of `pool`, and why a short request would find no room there."""
        probe = _probe(pool)
        states = self._router.table.ready(pool, None, now)
        return [(state.id, self.full(state, probe, now)) for state in states]

    # --- inside ------------------------------------------------------------------------------------

    def _requests(self, state: WorkerState, now: float) -> int:
        fresh = state.fresh_metrics(now, self._router.settings.stale_after_s) is not None
        foreign = state.foreign if fresh else None
        others = 0 if foreign is None else foreign.running + foreign.waiting
        theirs = self._router.peers.load(state.id, now).sequences
        return self._router.ledger.sequences(state.id) + theirs + others

    def _queue_ms(self, state: WorkerState, request: RoutingRequest, now: float) -> float:
        router, pool = self._router, state.member.pool
        load, theirs = router.ledger.load(state.id, now), router.peers.load(state.id, now)
        queue_ms = load.queued_prefill_ms + theirs.queued_prefill_ms
        if state.fresh_metrics(now, router.settings.stale_after_s) is None:
            return queue_ms
        foreign = state.foreign
        if foreign is not None and foreign.waiting:
            ttft = router.learned.ttft.of(pool).coefficients(state.id)
            queue_ms += foreign.waiting * ttft.prefill_ms(request.prompt_tokens, 0)
        running = load.sequences + theirs.sequences + (0 if foreign is None else foreign.running)
        stalled = state.stalled(running)
        if stalled:
            output = router.learned.outputs.estimate(request, now).expected
            step = router.learned.steps.of(pool).coefficients
            context = load.context_tokens + theirs.context_tokens
            queue_ms += stalled * output * step.tpot_ms(running, context)
        return queue_ms


def _probe(pool: str) -> RoutingRequest:
    return RoutingRequest("", "", pool, Namespace("", ""), prompt_tokens=1)
