"""Who is there, and what each worker last said about itself, with its age.

A worker is **ready** unless something said otherwise: `failure_limit` scrapes in a row count against it, or
the proxy could not connect to it since the last good scrape. One failed scrape proves nothing. How the last
one failed says what a worker is that is not ready:

    SLOW         it was connected to, and its page did not come in time
    UNREADABLE   it answered, but with an error, or with something that is no metrics page
    OUT          it refused the connection, cut it, or could not be connected to

Who was put to sleep (vLLM's sleep mode) serves its page, takes requests, and lets them wait until somebody
wakes it up. It looks idle, and is ASLEEP until its page tells otherwise, whatever else it is but OUT.

One process serves the page and the answers, so under load the page may come too late from a worker that
serves perfectly well. A request that is served to its end therefore takes back the failures before it, where
the last of them was of a slow page, and one that was served since a scrape began takes back that scrape's.
Whoever refuses connections may still finish what it has begun, and an error may come from a proxy before it:
that is taken back by a good scrape only.

Of the workers that may serve a request it goes to

1. those that are ready, as long as the page of one of them can be read;
2. else all that are slow, whether they have just served something or not: who was sent nothing has nothing to
   show, and the others would take all;
3. else those that are unreadable;
4. else those that are asleep.

Better these than to refuse a request. Who is out gets none. So a request that only some may serve (those of a
subset, a tenant's, those that have its adapter) may go to workers that others are kept away from while anyone
else is ready. The gateway is told which these are, and leaves them out of its own balancing likewise (see
`extproc.protocol.endpoint_discovery`).

A worker that leaves and comes back gets a new generation, so nothing that belonged to the old one touches the
new.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from extproc.core.dp_ranks import by_worker
from extproc.core.engine_steps import EngineSteps
from extproc.core.types import EngineMetrics, Member, WorkerId


class ForeignLoad(NamedTuple):
    """Requests at a worker that are not ours."""

    waiting: int
    running: int


class Readiness(IntEnum):
    """How fit a worker is to be sent requests, the fittest first. See the module."""

    READY = 0
    SLOW = 1
    UNREADABLE = 2
    ASLEEP = 3
    OUT = 4


@dataclass(slots=True)
class WorkerState:
    """One worker. Mutable; owned by the table."""

    id: WorkerId
    member: Member
    generation: int
    joined_at: float
    metrics: EngineMetrics | None = None
    metrics_at: float | None = None
    steps: EngineSteps = field(default_factory=EngineSteps)  # what its metrics are of
    foreign: ForeignLoad | None = None  # what the last two scrapes agree on
    foreign_seen: ForeignLoad | None = None  # as the last scrape looked
    left_waiting: int = 0  # requests at the last scrape that booked prefill does not explain
    scrape_failures: int = 0  # in a row
    strikes: int = 0  # those of them that count
    failed_as: Readiness = Readiness.OUT  # what the last of them makes of it
    served_at: float | None = None  # it last served a request to its end
    unreachable_since: float | None = None
    revision: str | None = None  # of the model it serves; None: not known
    kv_trusted: bool = False
    kv_cause: str = "no KV events yet"
    kv_reset: bool = False  # its KV events have begun anew since the last scrape
    kv_silent: bool = False  # its KV events have stopped without a word
    kv_suspended: bool = False  # the connection for KV events was lost: the engine may be another one now

    @property
    def asleep(self) -> bool:
        """Whether it was put to sleep, as far as it has told."""
        return self.metrics is not None and self.metrics.awake is False

    def metrics_age_s(self, now: float) -> float | None:
        """Seconds since the last good scrape; None before the first."""
        return None if self.metrics_at is None else max(0.0, now - self.metrics_at)

    def note_foreign(self, ours: int) -> None:
        """After a scrape: what the engine has beyond our own `ours` sequences.

        One scrape may count requests of ours that ended a moment ago, so the smaller of two counts.
        """
        before, metrics = self.foreign_seen, self.metrics
        if metrics is None or metrics.waiting is None:
            self.foreign = self.foreign_seen = None
            return
        total = max(0, metrics.waiting + (metrics.running or 0) - ours)
        waiting = min(metrics.waiting, total)
        seen = ForeignLoad(waiting, total - waiting)
        self.foreign_seen = seen
        self.foreign = seen if before is None else ForeignLoad(*map(min, seen, before))

    def note_stalled(self, queued: int) -> None:
        """After a scrape and `note_foreign`: who waits for something other than others' prefill.

        Args:
            queued: sequences of ours that are expected to wait for their first token.
        """
        metrics = self.metrics
        if metrics is None or metrics.waiting is None:
            self.left_waiting = 0
            return
        others = 0 if self.foreign_seen is None else self.foreign_seen.waiting
        self.left_waiting = max(0, metrics.crowded - others - queued)

    def stalled(self, sequences: int) -> float:
        """Requests that wait for something other than others' prefill, per running one.

        Since the scrape that told of them some may have ended, and others have taken their places: no more
        wait than there are beyond those that ran.

        Args:
            sequences: on the worker now, ours and others', but for those of others that wait.
        """
        if not self.left_waiting or self.metrics is None:
            return 0.0
        running = self.metrics.running or 0
        return min(self.left_waiting, max(0, sequences - running)) / max(1, running)

    def fresh_metrics(self, now: float, stale_after_s: float) -> EngineMetrics | None:
        """The engine's own figures, or None when they are missing or too old to mean anything."""
        if self.metrics_at is None or now - self.metrics_at > stale_after_s:
            return None
        return self.metrics


class _Fit(NamedTuple):
    """Workers of a pool by what may be sent there.

    Attributes:
        until: when to look again, if nothing is heard before.
        best: where requests go that any of the pool may serve.
        reached: all that are not out.
    """

    until: float
    best: list[WorkerState]
    reached: list[WorkerState]


_NOTHING_KNOWN = _Fit(-math.inf, [], [])


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """What an update did."""

    added: tuple[WorkerId, ...] = ()
    removed: tuple[WorkerId, ...] = ()
    reseeded: tuple[WorkerId, ...] = ()  # that stayed, with another model revision


@dataclass(slots=True)
class WorkerTable:
    """All workers of all pools.

    Args:
        failure_limit: failed scrapes in a row that must count before a worker is not ready.
        unreachable_s: seconds after which a failed connection is forgiven although no scrape succeeded
            (for fleets whose metrics cannot be reached).
    """

    failure_limit: int = 3
    unreachable_s: float = 10.0
    _workers: dict[WorkerId, WorkerState] = field(default_factory=dict)
    _by_endpoint: dict[str, list[WorkerState]] = field(default_factory=dict)
    # Who may be sent requests, by pool, as long as nothing is heard that changes it.
    _ready: dict[str, _Fit] = field(default_factory=dict)
    _generation: int = 0

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, worker: WorkerId) -> WorkerState | None:
        """The state of a worker, if it is a member."""
        return self._workers.get(worker)

    def all(self) -> tuple[WorkerState, ...]:
        """Every worker, in the order they joined."""
        return tuple(self._workers.values())

    def at(self, endpoint: str) -> tuple[WorkerState, ...]:
        """The workers behind one endpoint."""
        return tuple(self._by_endpoint.get(endpoint, ()))

    def update(self, members: Iterable[Member], now: float) -> MembershipChange:
        """Make `members` the whole membership. Workers that stay keep their state."""
        self._ready.clear()
        wanted: dict[WorkerId, Member] = {}
        for member in members:
            for worker in member.workers():
                wanted.setdefault(worker, member)
        removed = tuple(worker for worker in self._workers if worker not in wanted)
        for worker in removed:
            del self._workers[worker]
        added = []
        for worker, member in wanted.items():
            state = self._workers.get(worker)
            if state is not None:
                state.member = member
                continue
            self._generation += 1
            self._workers[worker] = WorkerState(worker, member, self._generation, now)
            added.append(worker)
        self._by_endpoint = {}
        for state in self._workers.values():
            self._by_endpoint.setdefault(state.id.endpoint, []).append(state)
        return MembershipChange(tuple(added), removed)

    def at_place(self, endpoint: str, place: int) -> WorkerState | None:
        """The worker that a request to `endpoint` is served by if it names this one of its ranks, from 0."""
        states = self._by_endpoint.get(endpoint)
        if not states:
            return None
        return self._workers.get(WorkerId(endpoint, (states[0].member.dp_start_rank or 0) + place))

    def on_metrics(
        self, endpoint: str, by_rank: Mapping[int, EngineMetrics], now: float
    ) -> dict[WorkerId, EngineMetrics]:
        """A scrape of `endpoint` succeeded. Returns what it says, by worker."""
        told = self._told(endpoint, by_rank)
        for state in self._by_endpoint.get(endpoint, ()):
            if state.scrape_failures >= self.failure_limit or state.unreachable_since is not None:
                self._ready.clear()
            state.scrape_failures = state.strikes = 0
            state.unreachable_since = None
            metrics = told.get(state.id)
            if metrics is not None:
                if state.asleep != (metrics.awake is False):
                    self._ready.clear()
                state.metrics = metrics
                state.metrics_at = now
                state.kv_reset = False
        return told

    def restarted(self, endpoint: str, by_rank: Mapping[int, EngineMetrics]) -> tuple[WorkerState, ...]:
        """Workers whose counters in a new scrape are below the last ones: other processes than before."""
        out = []
        told = self._told(endpoint, by_rank)
        for state in self._by_endpoint.get(endpoint, ()):
            new = told.get(state.id)
            before = None if state.metrics is None else state.metrics.prompt_tokens
            after = None if new is None else new.prompt_tokens
            if before is not None and after is not None and after < before:
                out.append(state)
        return tuple(out)

    def _told(self, endpoint: str, by_rank: Mapping[int, EngineMetrics]) -> dict[WorkerId, EngineMetrics]:
        return by_worker([state.id for state in self._by_endpoint.get(endpoint, ())], by_rank)

    def on_scrape_failure(self, endpoint: str) -> bool:
        """A scrape of `endpoint` failed: it was not reached. True when this one made it not ready."""
        return self._strike(endpoint, Readiness.OUT, math.inf)

    def on_page_failure(self, endpoint: str, began: float, *, slow: bool) -> bool:
        """A scrape of `endpoint` failed though it was reached. True when this one made it not ready.

        Args:
            endpoint: where.
            began: when that scrape did.
            slow: its page did not come in time; else there was an answer that is none.
        """
        if slow:
            return self._strike(endpoint, Readiness.SLOW, began)
        return self._strike(endpoint, Readiness.UNREADABLE, math.inf)

    def _strike(self, endpoint: str, failed_as: Readiness, began: float) -> bool:
        """A scrape failed; what was served since `began` takes that back."""
        left = changed = False
        for state in self._by_endpoint.get(endpoint, ()):
            before = self._by_scrapes(state)
            served = state.served_at is not None and state.served_at >= began
            state.scrape_failures += 1
            state.strikes = 0 if served else state.strikes + 1
            state.failed_as = failed_as
            after = self._by_scrapes(state)
            left |= before is Readiness.READY and after is not before
            changed |= before is not after or state.scrape_failures == self.failure_limit
        if changed:
            self._ready.clear()
        return left

    def on_served(self, endpoint: str, now: float) -> None:
        """`endpoint` has served a request to its end: if its page is slow, then nothing else is."""
        for state in self._by_endpoint.get(endpoint, ()):
            state.served_at = now
            if state.strikes and state.failed_as is Readiness.SLOW:
                if state.strikes >= self.failure_limit:
                    self._ready.clear()
                state.strikes = 0

    def on_connect_failure(self, endpoint: str, now: float) -> None:
        """The proxy could not reach `endpoint`: keep away until a scrape succeeds."""
        self._ready.clear()
        for state in self._by_endpoint.get(endpoint, ()):
            state.unreachable_since = now

    def is_ready(self, state: WorkerState, now: float) -> bool:
        """Whether nothing speaks against it. One that is not ready may serve all the same: see `ready`."""
        return self.readiness(state, now) is Readiness.READY

    def readiness(self, state: WorkerState, now: float) -> Readiness:
        """How fit it is to be sent requests, whatever others are."""
        since = state.unreachable_since
        if since is not None and now - since < self.unreachable_s:
            return Readiness.OUT
        return self._by_scrapes(state)

    def _by_scrapes(self, state: WorkerState) -> Readiness:
        found = Readiness.READY if state.strikes < self.failure_limit else state.failed_as
        return max(found, Readiness.ASLEEP) if state.asleep else found

    def ready(self, pool: str, subset: frozenset[str] | None, now: float) -> Sequence[WorkerState]:
        """Where requests of `pool` may go, among the endpoints in `subset` unless it is None: see the module.

        Without a subset it is the same object as long as these are the same workers in the same state.
        """
        return self.fittest(pool, self.reached(pool, subset, now), now)

    def reached(self, pool: str, subset: frozenset[str] | None, now: float) -> Sequence[WorkerState]:
        """Who of `pool` is not out, among the endpoints in `subset` unless it is None."""
        reached = self._fit(pool, now).reached
        return reached if subset is None else [state for state in reached if state.id.endpoint in subset]

    def fittest(self, pool: str, states: Sequence[WorkerState], now: float) -> Sequence[WorkerState]:
        """Of some of `pool` that are reached, where requests go that only these may serve: see the module."""
        fit = self._fit(pool, now)
        return fit.best if states is fit.reached else self._best(states)

    def _fit(self, pool: str, now: float) -> _Fit:
        fit = self._ready.get(pool, _NOTHING_KNOWN)
        if now >= fit.until:
            fit = self._ready[pool] = self._look(pool, now)
        return fit

    def _look(self, pool: str, now: float) -> _Fit:
        members = [state for state in self._workers.values() if state.member.pool == pool]
        back = (
            state.unreachable_since + self.unreachable_s
            for state in members
            if state.unreachable_since is not None and now - state.unreachable_since < self.unreachable_s
        )
        reached = [state for state in members if self.readiness(state, now) is not Readiness.OUT]
        return _Fit(min(back, default=math.inf), self._best(reached), reached)

    def _best(self, reached: Sequence[WorkerState]) -> list[WorkerState]:
        """Of workers that are not out, those that are sent requests that only these may serve."""
        ready, slow, unreadable, asleep = [], [], [], []
        some_read, limit, no_page = False, self.failure_limit, Readiness.UNREADABLE
        for state in reached:
            if state.asleep:
                asleep.append(state)
            elif state.strikes < limit:
                ready.append(state)
                if state.scrape_failures < limit:
                    some_read = True
                else:
                    slow.append(state)
            elif state.failed_as is no_page:
                unreadable.append(state)
            else:
                slow.append(state)
        return ready if some_read else slow or unreadable or asleep

    def why_none_is_ready(self, pool: str, subset: frozenset[str] | None) -> str:
        """What to tell whoever finds `ready` empty."""
        members = [state for state in self._workers.values() if state.member.pool == pool]
        if not members:
            return f"pool {pool!r} has no workers; check its discovery settings"
        if subset is not None and not any(state.id.endpoint in subset for state in members):
            return "none of the endpoints the gateway allows is a member of the pool"
        if subset is None:
            return f"none of the {len(members)} workers of pool {pool!r} is ready"
        those = sum(state.id.endpoint in subset for state in members)
        return f"none of the {those} workers of pool {pool!r} that may serve it is ready"
