"""The façade: everything that decides, behind synchronous calls that are given the time.

`schedule` matches, prices, orders, chooses *and* books in one step, so a burst of equal requests sees
each other: the second already pays for the first. The same object runs in the live server, on a virtual
clock, and over a recording.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TypeAlias

from extproc.core.adapter_slots import AdapterSlots
from extproc.core.assumed_cache import AssumedCache
from extproc.core.candidates import (
    NOTHING_CONFIGURED,
    CandidateBuilder,
    PoolFacts,
    PromptHashes,
    prompt_hashes,
)
from extproc.core.cost import CostSettings
from extproc.core.divergence import Audit
from extproc.core.doubts import Doubts
from extproc.core.editions import build as build_editions
from extproc.core.engine_shares import EngineShares
from extproc.core.errors import NoEndpointError
from extproc.core.evictions import Evictions
from extproc.core.kv_chain import EventHashes, event_chain
from extproc.core.kv_index import KvIndex
from extproc.core.learned import Learned
from extproc.core.load_ledger import Lease, LoadLedger
from extproc.core.outcomes import Released, suspects
from extproc.core.policies.base import Policy
from extproc.core.reconcile import Reconciler
from extproc.core.rollout import Mode
from extproc.core.tenancy import EVERYTHING, TenantBook
from extproc.core.tenant_shares import TenantShares
from extproc.core.trust import TrustBook, Verdict
from extproc.core.ttft_errors import ErrorBook
from extproc.core.types import (
    AllBlocksCleared,
    BlockStored,
    Candidate,
    Completion,
    Decision,
    EngineMetrics,
    KvEvent,
    Member,
    Outcome,
    Reason,
    RoutingRequest,
    ShadowChoice,
    WorkerId,
)
from extproc.core.worker_table import MembershipChange, WorkerState, WorkerTable

_LINGER_S = 1.0
_TIE_BITS = 32


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """How the router behaves.

    Attributes:
        stale_after_s: engine metrics older than this are not used.
        lease_expiry_s: a lease with no sign of life for this long is released as lost.
        stream_grace_s: how long after its ext_proc stream ended a lease waits for its access log entry,
            when no access log stream is open.
        failure_limit: scrapes in a row that must fail before a worker is not ready.
        unreachable_s: how long a failed connection keeps a worker out when no scrape clears it.
    """

    stale_after_s: float = 5.0
    lease_expiry_s: float = 1800.0
    stream_grace_s: float = 5.0
    failure_limit: int = 3
    unreachable_s: float = 10.0


LastWord: TypeAlias = Callable[[list[Candidate], Reason], list[Candidate]]
"""Given the order that was found and why its first is first, the order to go by: all of them, each once."""


def as_ordered(ordered: list[Candidate], reason: Reason) -> list[Candidate]:
    """The order that was found."""
    del reason
    return ordered


class Router:
    """Decides where requests go. Not thread-safe: one event loop owns it.

    Args:
        policy: orders the candidates.
        others: policies a request may ask for by name.
        shadow: policies that are asked as well; their choices are recorded and never acted on.
        rng: the only randomness, for ties.
        new_lease_id: makes ids of leases; they must be unguessable where clients are not trusted.
        pools: facts by pool name; a pool that is not named has none.
        prompt_hashes: tells the hashes of a request's blocks.
        event_hashes: tells the hashes of blocks that KV events are about.
        tenants: whose cold requests are kept to a part of the workers.
        last_word: may change the order that was found.
    """

    def __init__(
        self,
        policy: Policy,
        rng: Random,
        *,
        new_lease_id: Callable[[], str],
        others: Iterable[Policy] = (),
        shadow: Iterable[Policy] = (),
        pools: Mapping[str, PoolFacts],
        costs: CostSettings | None = None,
        settings: RouterSettings | None = None,
        prompt_hashes: PromptHashes = prompt_hashes,
        event_hashes: EventHashes = event_chain,
        tenants: TenantBook = EVERYTHING,
        last_word: LastWord = as_ordered,
    ) -> None:
        self.settings = settings or RouterSettings()
        self.costs = costs or CostSettings()
        self._policy = policy
        self._others = {other.name: other for other in others}
        self._shadow = tuple(shadow)
        self._rng = rng
        self._new_lease_id = new_lease_id
        self._last_word = last_word
        self._pools = dict(pools)
        self.table = WorkerTable(self.settings.failure_limit, self.settings.unreachable_s)
        self.ledger = LoadLedger(self._tpot_ms)
        self.observed = LoadLedger()
        self.index = KvIndex(event_hashes=event_hashes)
        self.assumed = AssumedCache(self.index)
        self.learned = Learned(self.costs)
        self.shares = EngineShares()
        self.errors = ErrorBook()
        self.trust = TrustBook()
        self.doubts = Doubts()
        self.adapters = AdapterSlots()
        self.evictions = Evictions()
        self.tenant_shares = TenantShares(tenants)
        self._lingering: dict[WorkerId, list[tuple[float, Lease]]] = {}
        self._reconciler = Reconciler(self.ledger)
        self._candidates = CandidateBuilder(
            ledger=self.ledger,
            index=self.index,
            learned=self.learned,
            trust=self.trust,
            doubts=self.doubts,
            adapters=self.adapters,
            pools=self._pools,
            costs=self.costs,
            shares=self.shares,
            stale_after_s=self.settings.stale_after_s,
            prompt_hashes=prompt_hashes,
        )
        self._access_log_open = False

    @property
    def policy(self) -> str:
        """Name of the policy that decides."""
        return self._policy.name

    @property
    def pools(self) -> Mapping[str, PoolFacts]:
        """What is configured, by pool."""
        return self._pools

    # --- requests ----------------------------------------------------------------------------------

    def schedule(
        self, request: RoutingRequest, now: float, mark: Callable[[str], None] | None = None
    ) -> Decision:
        """Choose a worker for `request` and take a lease on it. `mark` is told when `match` is over.

        Raises:
            NoEndpointError: no ready worker may serve it.
        """
        ready = self.table.ready(request.pool, request.subset, now)
        states = self.adapters.eligible(ready, request.namespace.adapter)
        if not states:
            raise NoEndpointError(self._why_nothing_is_ready(request))
        candidates, seen, output = build_editions(self._candidates, request, states, now, mark)
        policy = self._policy if request.policy is None else self._others.get(request.policy, self._policy)
        tie_seed = self._rng.getrandbits(_TIE_BITS)
        ordered, reason = policy.order(request, candidates, _chance(tie_seed))
        ordered, reason = self.tenant_shares.bounded(request, ordered, reason)
        ordered = self._last_word(ordered, reason)
        decision = Decision(
            lease_id=self._new_lease_id(),
            request=request,
            candidates=tuple(ordered),
            reason=reason,
            policy=policy.name,
            decided_at=now,
            shadow=self._shadows(request, candidates, tie_seed, policy),
            considered=len(candidates),
            tie_seed=tie_seed,
            inputs=policy.inputs(request),
            costs=self.costs,
            output=output,
        )
        chosen = ordered[0]
        seen_as, chains = seen.get(chosen.worker, (request, {}))
        if seen_as is not request:
            decision = replace(decision, request=seen_as)
        state = self.table.get(chosen.worker)
        if state is None:
            raise NoEndpointError(f"the policy {policy.name} chose {chosen.worker}, not a member")
        reserved = chains.get(chosen.block_size, ()) if chosen.block_size is not None else ()
        expires_at = now + self.settings.lease_expiry_s
        if request.mode is Mode.OBSERVE:  # the gateway chooses: nothing is known to be on its way anywhere
            self.observed.admit(decision, state.generation, reserved, now, expires_at)
            self.evictions.begin(decision.lease_id, [candidate.worker for candidate in ordered])
            return decision
        for hashes in reserved:
            self.index.reserve(chosen.worker, hashes)
        self.adapters.on_use(chosen.worker, request.namespace.adapter)
        self.shares.book(decision, now)
        self.evictions.begin(decision.lease_id, [chosen.worker])
        self.tenant_shares.book(decision)
        self.ledger.admit(decision, state.generation, reserved, now, expires_at)
        self.learned.sent(chosen.worker, chosen.uncovered_tokens, now)
        if not self._publishes(state):
            self._assume_on_its_way(decision, reserved, state)
        return decision

    def on_first_token(self, lease_id: str, now: float) -> None:
        """The first token of this request has been produced."""
        lease = self.ledger.first_token(lease_id, now)
        if lease is not None:
            lease.expires_at = now + self.settings.lease_expiry_s

    def on_progress(self, lease_id: str, tokens: int, now: float) -> None:
        """`tokens` more were generated: the request is alive."""
        self.ledger.progress(lease_id, tokens, now)
        lease = self.ledger.get(lease_id)
        if lease is not None:
            lease.expires_at = now + self.settings.lease_expiry_s

    def on_stream_ended(self, lease_id: str, now: float, *, undelivered: bool = False) -> None:
        """The ext_proc stream of this request ended.

        On some Envoy versions that is the end of the request, on others only the end of its headers; so
        it starts a grace period when no access log entry can be expected: none is open, or the ticket
        may never have left (`undelivered`). Otherwise it marks the lease as the first to go when the
        engine's own counts show that something was lost.
        """
        lease = self.ledger.get(lease_id)
        if lease is not None and lease.stream_ended_at is None:
            lease.stream_ended_at = now
            if undelivered or not self._access_log_open:
                lease.expires_at = min(lease.expires_at, now + self.settings.stream_grace_s)

    def on_served(self, lease_id: str, endpoint: str, now: float) -> None:
        """The gateway says who really serves this request: it is load there."""
        lease = self.ledger.get(lease_id)
        if lease is None:
            return
        lease.served_by = endpoint
        if endpoint == lease.worker.endpoint:
            return
        elsewhere = next((c for c in lease.decision.candidates if c.worker.endpoint == endpoint), None)
        here, there = self.table.get(lease.worker), self.table.get(elsewhere.worker) if elsewhere else None
        if here is None or there is None or elsewhere is None:
            return
        alike = elsewhere.block_size == lease.candidate.block_size and here.revision == there.revision
        reserved = lease.reserved if alike else ()
        self._unreserve(lease)
        for hashes in reserved:
            self.index.reserve(there.id, hashes)
        self.ledger.move(lease_id, elsewhere, there.generation, reserved, now)

    def on_access_log(self, *, is_open: bool) -> None:
        """Whether any access log stream is open."""
        self._access_log_open = is_open

    def release(self, lease_id: str, completion: Completion, now: float) -> Released | None:
        """End a request: give back its load and learn from it. None when it had ended before."""
        lease = self.ledger.get(lease_id)
        if lease is None:
            return self._release_observed(lease_id, completion, now)
        load, beside_ms = self.ledger.load(lease.worker, now), self.ledger.booked_since_ms(lease)
        self.ledger.release(lease_id, now)
        if not self._lingers(lease, completion, now):
            self._unreserve(lease)
        if completion.served_by is None and lease.served_by is not None:
            completion = replace(completion, served_by=lease.served_by)
        for endpoint in suspects(lease, completion):
            self.table.on_connect_failure(endpoint, now)
        released = Released(lease, completion, now, self._forget_request(lease_id, lease.worker))
        self.errors.observe(released)
        self._audit(released)
        self._assume(released)
        self.learned.learn(released, load, beside_ms)
        return released

    # --- signals -----------------------------------------------------------------------------------

    def on_membership(self, members: Iterable[Member], now: float) -> tuple[MembershipChange, list[Released]]:
        """`members` is the whole membership now. Leases of workers that left are released."""
        change = self.table.update(members, now)
        released: list[Released] = []
        for worker in change.removed:
            gone = Completion(Outcome.LOST, details="worker left")
            released += [
                Released(lease, gone, now, self._forget_request(lease.id, worker))
                for lease in self.ledger.drop_worker(worker)
            ]
            self.evictions.forget(worker)
            self.index.remove_worker(worker)
            self.assumed.remove_worker(worker)
            self._lingering.pop(worker, None)
            self.learned.forget(worker)
            self.shares.forget(worker)
            self.trust.forget(worker)
            self.doubts.clear(worker)
            self._reconciler.forget(worker)
        for worker in change.added:
            state = self.table.get(worker)
            if state is not None:
                state.revision = self._revision_of(state)
                self._index(state)
        endpoints = {state.id.endpoint for state in self.table.all()}
        self.adapters.keep(endpoints.__contains__)
        reseeded = [state.id for state in self.table.all() if self._reseed(state, self._revision_of(state))]
        return replace(change, reseeded=tuple(reseeded)), released

    def on_models(self, endpoint: str, root: str | None, adapters: Iterable[str]) -> tuple[WorkerId, ...]:
        """A server told what it serves: what its base model was loaded from, and every adapter it has.

        Returns the workers whose model revision is another than before: all that was known of their caches
        is forgotten, and their KV events have to be read again from the first.
        """
        self.adapters.on_models(endpoint, adapters)
        reseeded = []
        for state in self.table.at(endpoint):
            learns = self._pools.get(state.member.pool, NOTHING_CONFIGURED).learn_revision
            if learns and state.member.revision is None and self._reseed(state, root):
                reseeded.append(state.id)
        return tuple(reseeded)

    def on_kv_events(self, worker: WorkerId, events: Sequence[KvEvent], now: float) -> None:
        """An engine told what it stored and removed."""
        self.trust.on_events(worker, now)
        self.evictions.on_events(worker, events)
        state = self.table.get(worker)
        if state is not None:
            state.kv_silent = False
            if worker in self.assumed:
                self.assumed.drop(worker)
        for event in events:
            if worker in self.doubts:
                self._apply_in_doubt(worker, event)
            else:
                self.index.apply(worker, event)
        for _, lease in self._lingering.pop(worker, ()):
            self._unreserve(lease)

    def on_kv_reset(self, worker: WorkerId) -> None:
        """What the worker held is no longer known."""
        state = self.table.get(worker)
        if state is not None:
            state.kv_reset = True
        self._forget(worker)

    def _forget(self, worker: WorkerId) -> None:
        self.trust.forget(worker)
        self.doubts.clear(worker)
        self.assumed.drop(worker)
        self.index.clear(worker)

    def on_kv_trust(self, worker: WorkerId, cause: str, *, trusted: bool) -> None:
        """Whether every event of the worker has been seen. News that some were not make it doubtful."""
        state = self.table.get(worker)
        if state is None:
            return
        if trusted:
            self.doubts.clear(worker)
        elif state.kv_trusted or state.kv_cause != cause:
            self._doubt(worker)
        state.kv_trusted = trusted
        state.kv_cause = cause

    def on_kv_suspended(self, worker: WorkerId, *, suspended: bool) -> None:
        """Whether what events have said of a worker counts for nothing: it may have restarted, empty."""
        state = self.table.get(worker)
        if state is not None:
            state.kv_suspended = suspended

    def on_metrics(self, endpoint: str, by_rank: Mapping[int, EngineMetrics], now: float) -> list[Released]:
        """A scrape succeeded. Returns leases that the engine's counts prove lost."""
        for state in self.table.restarted(endpoint, by_rank):
            if not state.kv_reset:
                if self._publishes(state):
                    state.kv_trusted = False
                    state.kv_cause = "the engine restarted, and its KV events did not say so"
                self._forget(state.id)
        self.table.on_metrics(endpoint, by_rank, now)
        for rank, metrics in by_rank.items():
            self.adapters.on_metrics(WorkerId(endpoint, rank), metrics.adapters, metrics.max_adapters)
        for state in self.table.at(endpoint):
            if state.id.dp_rank in by_rank:
                state.note_foreign(self.ledger.sequences(state.id))
                state.note_stalled(self.ledger.load(state.id, now).prefilling)
        lost: list[str] = []
        for rank, metrics in by_rank.items():
            lost += self._reconciler.check(WorkerId(endpoint, rank), metrics, now)
        return self._release_lost(lost, "the engine no longer has it", now)

    def on_scrape_failure(self, endpoint: str) -> bool:
        """A scrape failed. True when the worker stopped being ready because of it."""
        return self.table.on_scrape_failure(endpoint)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do at the earliest."""
        return min((lease.expires_at for lease in self.ledger), default=None)

    def tick(self, now: float) -> list[Released]:
        """Release leases whose time is up."""
        for worker, leases in list(self._lingering.items()):
            for _, lease in (pair for pair in leases if pair[0] <= now):
                self._unreserve(lease)
            left = [pair for pair in leases if pair[0] > now]
            if left:
                self._lingering[worker] = left
            else:
                del self._lingering[worker]
        self.assumed.expire(now)
        expired = [lease.id for lease in (*self.ledger, *self.observed) if lease.expires_at <= now]
        return self._release_lost(expired, "no access log entry came", now)

    # --- inside ------------------------------------------------------------------------------------

    def _revision_of(self, state: WorkerState) -> str | None:
        """The model revision a worker serves: as configured, else as it told."""
        if state.member.revision is not None:
            return state.member.revision
        pool = self._pools.get(state.member.pool, NOTHING_CONFIGURED)
        return state.revision if pool.learn_revision else pool.model_revision

    def _index(self, state: WorkerState) -> None:
        pool = self._pools.get(state.member.pool, NOTHING_CONFIGURED)
        self.index.add_worker(state.id, state.revision or "", pool.tokenizer_of(state.revision))

    def _reseed(self, state: WorkerState, revision: str | None) -> bool:
        """Whether a worker serves another revision now; what was known of its cache is then forgotten."""
        if revision == state.revision:
            return False
        state.revision = revision
        self.on_kv_reset(state.id)
        self.index.remove_worker(state.id)
        self._index(state)
        lingering = [lease for _, lease in self._lingering.get(state.id, ())]
        for lease in (*self.ledger.leases(state.id), *lingering):
            for hashes in lease.reserved:  # each is taken back when its lease ends
                self.index.reserve(state.id, hashes)
        return True

    def _tpot_ms(self, worker: WorkerId, sequences: float, context_tokens: float) -> float | None:
        state = self.table.get(worker)
        if state is None:
            return None
        others = 0 if state.foreign is None else state.foreign.running
        steps = self.learned.steps.of(state.member.pool).coefficients
        return steps.tpot_ms(sequences + others, context_tokens)

    def _doubt(self, worker: WorkerId) -> None:
        """Whatever events have claimed of `worker` has to be verified: some are missing."""
        heard_at = self.trust.last_event_at(worker)
        if heard_at is not None:
            self.doubts.doubt(worker, self.index.confirmed(worker), heard_at)

    def _apply_in_doubt(self, worker: WorkerId, event: KvEvent) -> None:
        """Apply an event of a worker that is doubted: what it stores again it did not have any more."""
        if isinstance(event, AllBlocksCleared):
            self.doubts.clear(worker)
        if isinstance(event, BlockStored):
            for handle in event.block_hashes:
                block = self.index.block_of(worker, handle)
                if block is not None and self.doubts.is_doubted(worker, block):
                    self.index.forget(worker, handle)
        self.index.apply(worker, event)
        if isinstance(event, BlockStored):
            stored = (self.index.block_of(worker, handle) for handle in event.block_hashes)
            self.doubts.stored(worker, (block for block in stored if block is not None))

    def _shadows(
        self, request: RoutingRequest, candidates: Sequence[Candidate], tie_seed: int, acting: Policy
    ) -> tuple[ShadowChoice, ...]:
        """What others would choose: those configured, and ours where a rollout lets another one act."""
        choices = []
        ours = (self._policy,) if request.mode is Mode.SHADOW and acting is not self._policy else ()
        for policy in (*self._shadow, *ours):
            try:
                ordered, reason = policy.order(request, candidates, _chance(tie_seed))
                choices.append(ShadowChoice(policy.name, ordered[0], reason, policy.inputs(request)))
            except Exception:  # noqa: S112 - a shadow never affects the request, whatever it does
                continue
        return tuple(choices)

    def _forget_request(self, lease_id: str, worker: WorkerId) -> int | None:
        """What is kept beside the lease of a request that has ended; blocks evicted while it was there."""
        self.tenant_shares.release(lease_id)
        return self.evictions.end(lease_id, worker)

    def _release_observed(self, lease_id: str, completion: Completion, now: float) -> Released | None:
        """End a request that the gateway sent where it liked: there is nothing to give back or to learn."""
        lease = self.observed.release(lease_id, now)
        if lease is None:
            return None
        served = lease.worker if completion.served_by is None else WorkerId(completion.served_by)
        return Released(lease, completion, now, self.evictions.end(lease_id, served))

    def _release_lost(self, lease_ids: Iterable[str], why: str, now: float) -> list[Released]:
        completion = Completion(Outcome.LOST, details=why)
        released = (self.release(lease_id, completion, now) for lease_id in lease_ids)
        return [r for r in released if r is not None]

    def _lingers(self, lease: Lease, completion: Completion, now: float) -> bool:
        """Keep what a finished request has stored, until the events that tell of it are here.

        The access log may be faster than the event stream; the next batch of events, or a second, ends it.
        """
        worker = lease.worker
        state = self.table.get(worker)
        if completion.outcome is not Outcome.FINISHED or state is None or not self._publishes(state):
            return False
        unconfirmed = any(
            match.reserved_only
            for hashes in lease.reserved
            for match in self.index.match(hashes)
            if match.worker == worker
        )
        if unconfirmed:
            self._lingering.setdefault(worker, []).append((now + _LINGER_S, lease))
        return unconfirmed

    def _unreserve(self, lease: Lease) -> None:
        for hashes in lease.reserved:
            self.index.unreserve(lease.worker, hashes)

    def _audit(self, released: Released) -> None:
        """Hold the prediction against what the engine reports; doubt what it disproves."""
        lease, completion = released.lease, released.completion
        worker, block_size = lease.worker, lease.candidate.block_size
        predicted, actual = released.predicted_cached_tokens, completion.cached_tokens
        state = self.table.get(worker)
        if predicted is None or actual is None or block_size is None or lease.sequences != 1:
            return
        if state is None or completion.served_by not in (None, worker.endpoint):
            return
        now, chosen, request = released.released_at, lease.candidate, lease.decision.request
        chain = lease.reserved[0] if lease.reserved else ()
        self.doubts.audit(
            worker,
            chain,
            claimed=(predicted + chosen.doubtful_tokens) // block_size,
            actual=actual // block_size,
            settled=not state.kv_silent,
            now=now,
        )
        verdict = self.trust.audit(
            worker,
            Audit(
                now,
                predicted,
                actual,
                request.namespace,
                block_size,
                request.prompt_tokens,
                completion.prompt_tokens,
            ),
            computed_blocks=len(chain) - actual // block_size,
            admitted_at=lease.admitted_at,
            complete=state.kv_trusted,
        )
        if verdict is not Verdict.FINE:
            state.kv_silent = verdict is Verdict.SILENT
            self._doubt(worker)
            state.kv_trusted = False
            state.kv_cause = verdict.value

    def _publishes(self, state: WorkerState) -> bool:
        """Whether KV events tell what a worker holds."""
        return self.index.block_size(state.id) is not None and not state.kv_silent

    def _assume_on_its_way(
        self, decision: Decision, reserved: Sequence[tuple[int, ...]], state: WorkerState
    ) -> None:
        """A worker without KV events makes room for a request."""
        size = decision.chosen.block_size
        if size is None or len(reserved) != 1:
            return
        # While it decodes it holds half of its answer, on average.
        answer = 0.0 if decision.output is None else decision.output.expected / 2
        tokens = decision.request.prompt_tokens + answer
        self.assumed.admit(
            state.id, decision.lease_id, reserved[0], math.ceil(tokens / size), _usable_blocks(state)
        )

    def _assume(self, released: Released) -> None:
        """Remember what a worker without KV events has just served."""
        lease, completion = released.lease, released.completion
        worker, now = lease.worker, released.released_at
        self.assumed.done(worker, lease.id, now)
        state = self.table.get(worker)
        if completion.outcome is not Outcome.FINISHED or not lease.reserved or state is None:
            return
        if self._publishes(state) or state.generation != lease.generation:
            return
        if completion.served_by not in (None, worker.endpoint):
            return
        block_size = lease.candidate.block_size
        if block_size is None:
            return
        if completion.cached_tokens is not None and lease.sequences == 1:
            self.assumed.forget(worker, lease.reserved[0][completion.cached_tokens // block_size :])
        # The last token that was generated is in no block yet.
        tokens = lease.decision.request.prompt_tokens + (completion.output_tokens or 1) - 1
        answer = max(0, tokens // block_size - sum(map(len, lease.reserved)))
        for chain in lease.reserved:
            self.assumed.record(worker, chain, _usable_blocks(state), now, answer)
            answer = 0

    def _why_nothing_is_ready(self, request: RoutingRequest) -> str:
        members = [s for s in self.table.all() if s.member.pool == request.pool]
        if not members:
            return f"pool {request.pool!r} has no workers; check its discovery settings"
        if request.subset is not None and not any(s.id.endpoint in request.subset for s in members):
            return "none of the endpoints the gateway allows is a member of the pool"
        return f"none of the {len(members)} workers of pool {request.pool!r} is ready"


def _usable_blocks(state: WorkerState) -> int | None:
    """KV blocks a worker can fill; one of them the engine keeps back (see `extproc.sim.block_pool`)."""
    blocks = None if state.metrics is None else state.metrics.num_gpu_blocks
    return None if blocks is None else max(0, blocks - 1)


def _chance(seed: int) -> Random:
    """The chance of one decision: it can be had again."""
    return Random(seed)  # noqa: S311 - breaks ties, guards nothing


def fallbacks(decision: Decision, limit: int) -> tuple[str, ...]:
    """Endpoints in order of preference, each once, at most `limit`."""
    return tuple(dict.fromkeys(c.worker.endpoint for c in decision.candidates))[:limit]
