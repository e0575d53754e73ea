"""What workers hold, or will hold, because we sent it there.

Theory of operation. From its decision on, a request's prompt counts as held by its worker: its blocks are
**reserved** in the index, beside what KV events claim. What becomes of them when the request ends:

| the worker | the request | its blocks |
|---|---|---|
| tells by KV events | finished, but not told of | **linger** until its next events, at most `LINGER_S` |
| tells by KV events | anything else | are given back: events tell what there is |
| tells nothing | finished | are **assumed** to be in its cache (see `extproc.core.assumed_cache`) |
| tells nothing | anything else | are given back |

Blocks linger because the access log may be faster than the event stream.
"""

import math
from collections.abc import Iterable, Sequence

from extproc.core.assumed_cache import AssumedCache
from extproc.core.cache_claims import CacheClaims
from extproc.core.leases import Lease
from extproc.core.outcomes import Released
from extproc.core.types import Decision, Outcome, WorkerId
from extproc.core.worker_table import WorkerState, WorkerTable

LINGER_S = 1.0


class SentPrefixes:
    """Reservations of all requests, those in flight and those that have ended.

    Args:
        table: the members; only read.
        claims: whose index the reservations are in, and who knows which workers publish KV events.

    Attributes:
        assumed: what workers without KV events are assumed to hold.
    """

    def __init__(self, table: WorkerTable, claims: CacheClaims) -> None:
        self._table = table
        self._claims = claims
        self._index = claims.index
        self.assumed = AssumedCache(claims.index)
        self._lingering: dict[WorkerId, list[tuple[float, Lease]]] = {}

    def send(self, decision: Decision, reserved: Sequence[tuple[int, ...]], state: WorkerState) -> None:
        """A request goes to the worker of `state`.

        Args:
            decision: that it does.
            reserved: hashes of the full blocks of each of its prompts, as its lease will hold them.
            state: of the worker chosen.
        """
        self._reserve(state.id, reserved)
        if not self._claims.publishes(state):
            self._make_room(decision, reserved, state)

    def move(self, lease: Lease, there: WorkerId, reserved: Iterable[tuple[int, ...]]) -> None:
        """Another worker serves an open request, and will hold `reserved`. Its lease is still the old one."""
        self._unreserve(lease, lease.admitted_at)
        self.assumed.done(lease.worker, lease.id)
        self._reserve(there, reserved)

    def end(self, released: Released) -> None:
        """A request is over: give its blocks back, or let them linger."""
        if not self._lingers(released):
            self._unreserve(released.lease, released.released_at)

    def remember(self, released: Released) -> None:
        """Assume that a worker without KV events holds what it has just served."""
        lease, completion = released.lease, released.completion
        worker, now = lease.worker, released.released_at
        self.assumed.done(worker, lease.id)
        state = self._table.get(worker)
        if completion.outcome is not Outcome.FINISHED or not lease.reserved or state is None:
            return
        if self._claims.publishes(state) or state.generation != lease.generation:
            return
        if completion.served_by not in (None, worker.endpoint):
            return
        block_size = lease.candidate.block_size
        if block_size is None:
            return
        if completion.cached_tokens is not None and lease.sequences == 1:
            held = completion.cached_tokens // block_size
            self.assumed.forget(worker, lease.reserved[0], held, lease.admitted_at)
        # The last token that was generated is in no block yet.
        tokens = lease.decision.request.prompt_tokens + (completion.output_tokens or 1) - 1
        answer = max(0, tokens // block_size - sum(map(len, lease.reserved)))
        for chain in lease.reserved:
            self.assumed.record(worker, chain, _usable_blocks(state), now, answer)
            answer = 0

    def drop_assumed(self, worker: WorkerId) -> None:
        """Its KV events tell what it holds, or it holds nothing: nothing is assumed of it any more."""
        self.assumed.drop(worker)

    def stop_lingering(self, worker: WorkerId) -> None:
        """Its next KV events are here, and applied: what they do not tell of it does not hold."""
        for _, lease in self._lingering.pop(worker, ()):
            self._unreserve(lease, lease.admitted_at)

    def remove(self, worker: WorkerId) -> None:
        """The worker has left the index, and its reservations with it."""
        self.assumed.remove_worker(worker)
        self._lingering.pop(worker, None)

    def reserve_again(self, worker: WorkerId, leases: Iterable[Lease]) -> None:
        """The worker is new in the index: reserve for its open `leases`, and for those that linger."""
        lingering = [lease for _, lease in self._lingering.get(worker, ())]
        for lease in (*leases, *lingering):  # each is taken back when its lease ends
            self._reserve(worker, lease.reserved)

    def tick(self, now: float) -> None:
        """Give back what has lingered, or was assumed, for too long."""
        for worker, leases in list(self._lingering.items()):
            for _, lease in (pair for pair in leases if pair[0] <= now):
                self._unreserve(lease, now)
            left = [pair for pair in leases if pair[0] > now]
            if left:
                self._lingering[worker] = left
            else:
                del self._lingering[worker]
        self.assumed.expire(now)

    def _reserve(self, worker: WorkerId, chains: Iterable[tuple[int, ...]]) -> None:
        for hashes in chains:
            self._index.reserve(worker, hashes)

    def _unreserve(self, lease: Lease, used_at: float) -> None:
        for hashes in lease.reserved:
            self._index.unreserve(lease.worker, hashes, used_at)

    def _lingers(self, released: Released) -> bool:
        """Keep what a finished request has stored, until the events that tell of it are here."""
        lease, worker = released.lease, released.lease.worker
        state = self._table.get(worker)
        finished = released.completion.outcome is Outcome.FINISHED
        if not finished or state is None or not self._claims.publishes(state):
            return False
        unconfirmed = any(
            match.reserved_only
            for hashes in lease.reserved
            for match in self._index.match(hashes)
            if match.worker == worker
        )
        if unconfirmed:
            self._lingering.setdefault(worker, []).append((released.released_at + LINGER_S, lease))
        return unconfirmed

    def _make_room(self, decision: Decision, reserved: Sequence[tuple[int, ...]], state: WorkerState) -> None:
        """A worker without KV events makes room for a request."""
        size = decision.chosen.block_size
        if size is None or len(reserved) != 1:
            return
        # While it decodes it holds half of its answer, on average.
        answer = 0.0 if decision.output is None else decision.output.expected / 2
        blocks = math.ceil((decision.request.prompt_tokens + answer) / size)
        further = max(0, blocks - len(reserved[0]))
        self.assumed.admit(state.id, decision.lease_id, further, _usable_blocks(state))


def _usable_blocks(state: WorkerState) -> int | None:
    """KV blocks a worker can fill; one of them the engine keeps back (see `extproc.sim.block_pool`)."""
    blocks = None if state.metrics is None else state.metrics.num_gpu_blocks
    return None if blocks is None else max(0, blocks - 1)
