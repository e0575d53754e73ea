"""The façade: everything that decides, behind synchronous calls that are given the time.

`schedule` matches, prices, orders, chooses *and* books in one step, so a burst of equal requests sees
each other: the second already pays for the first. The same object runs in the live server, on a virtual
clock, and over a recording.

It keeps no rules of its own about the three things it brings together: which candidate a request gets
(`chooser`), what engines claim of their caches (`cache_claims`), and what they hold because we sent it there
(`sent_prefixes`). What it says is in which order these, the ledger and the books hear of what happens.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from extproc.core.adapter_slots import AdapterSlots
from extproc.core.cache_claims import CacheClaims
from extproc.core.candidates import CandidateBuilder, PoolFacts, PromptHashes, Scope, prompt_hashes
from extproc.core.chooser import Chooser, LastWord, as_ordered
from extproc.core.cost import CostSettings
from extproc.core.departed import Departed
from extproc.core.destinations import destinations, taken_by
from extproc.core.editions import build as build_editions
from extproc.core.editions import quote
from extproc.core.engine_shares import EngineShares
from extproc.core.engine_steps import Mark
from extproc.core.errors import NoEndpointError
from extproc.core.evictions import Evictions
from extproc.core.kv_chain import EventHashes, event_chain
from extproc.core.kv_transfer import EnginePart
from extproc.core.learned import Learned
from extproc.core.leases import Lease
from extproc.core.left_early import LeftEarly
from extproc.core.load_ledger import LoadLedger
from extproc.core.outcomes import Released, served_at, suspects
from extproc.core.peer_loads import NOMINAL_OUTPUT, PeerLoads, PeerNews
from extproc.core.peer_prefixes import PeerPrefixes
from extproc.core.peer_teller import LoadTeller, told_load
from extproc.core.policies.base import Policy
from extproc.core.reconcile import Reconciler
from extproc.core.rollout import Mode
from extproc.core.sent_prefixes import SentPrefixes
from extproc.core.shortlist import SMALL
from extproc.core.tenancy import EVERYTHING, TenantBook
from extproc.core.tenant_shares import NOBODY, TenantShares
from extproc.core.ttft_errors import ErrorBook
from extproc.core.types import (
    Candidate,
    Completion,
    Decision,
    EngineMetrics,
    KvEvent,
    Member,
    Outcome,
    RoutingRequest,
    WorkerId,
)
from extproc.core.worker_table import MembershipChange, WorkerState, WorkerTable


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """How the router behaves.

    Attributes:
        stale_after_s: engine metrics older than this are not used.
        lease_expiry_s: a lease with no sign of life for this long is released as lost.
        stream_grace_s: how long after its ext_proc stream ended a lease waits for its access log entry,
            when no access log stream is open.
        failure_limit: failed scrapes in a row that must count before a worker is not ready.
        unreachable_s: how long a failed connection keeps a worker out when no scrape clears it.
        peer_fade_after_s: a replica that has been silent for so long counts for less and less.
        peer_gone_after_s: and after so long for nothing.
        max_index_blocks: ceiling of the index (see `KvIndex`); 0: none.
    """

    stale_after_s: float = 5.0
    lease_expiry_s: float = 1800.0
    stream_grace_s: float = 5.0
    failure_limit: int = 3
    unreachable_s: float = 10.0
    peer_fade_after_s: float = 2.0
    peer_gone_after_s: float = 6.0
    max_index_blocks: int = 0


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
        price_all: every worker is priced, however many there are.
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
        price_all: bool = False,
    ) -> None:
        self._price_all = price_all
        self.settings = settings or RouterSettings()
        self.costs = costs or CostSettings()
        self._new_lease_id = new_lease_id
        self._pools = dict(pools)
        self.table = WorkerTable(self.settings.failure_limit, self.settings.unreachable_s)
        self.ledger = LoadLedger(self._tpot_ms)
        self.observed = LoadLedger()
        self._claims = CacheClaims(self.table, self._pools, event_hashes, self.settings.max_index_blocks)
        self.index, self.trust, self.doubts = self._claims.index, self._claims.trust, self._claims.doubts
        self._sent = SentPrefixes(self.table, self._claims)
        self.assumed = self._sent.assumed
        self.learned = Learned(self.costs)
        self.shares = EngineShares()
        self.errors = ErrorBook()
        self.adapters = AdapterSlots()
        self.evictions = Evictions()
        self._left_early = LeftEarly()
        self.departed = Departed()
        self.tenant_shares = TenantShares(tenants)
        self.peers = PeerLoads(self.settings.peer_fade_after_s, self.settings.peer_gone_after_s)
        self.peer_prefixes = PeerPrefixes(self.index)
        self.teller: LoadTeller | None = None
        self._chooser = Chooser(
            policy,
            rng,
            others=others,
            shadow=shadow,
            tenant_shares=self.tenant_shares,
            last_word=last_word,
        )
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
            peers=self.peers,
            stale_after_s=self.settings.stale_after_s,
            prompt_hashes=prompt_hashes,
        )
        self._access_log_open = False

    @property
    def policy(self) -> str:
        """Name of the policy that decides."""
        return self._chooser.policy.name

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
            NoEndpointError: no worker that may serve it is ready, or could be reached at least.
        """
        states = self.eligible(request, now)
        if not states:
            raise NoEndpointError(self.table.why_none_is_ready(request.pool, request.subset))
        tie_seed = self._chooser.draw()
        scope = self._scope(request, states, tie_seed, now)
        candidates, seen, output = build_editions(self._candidates, request, states, now, mark, scope)
        left_out = NOBODY if scope is None else scope.left_out(len(states), candidates)
        choice = self._chooser.choose(request, candidates, tie_seed, left_out)
        decision = Decision(
            lease_id=self._new_lease_id(),
            request=request,
            candidates=tuple(choice.ordered),
            reason=choice.reason,
            policy=choice.policy,
            decided_at=now,
            shadow=choice.shadow,
            considered=len(states),
            tie_seed=choice.tie_seed,
            inputs=choice.inputs,
            costs=self.costs,
            output=output,
        )
        chosen = decision.chosen
        seen_as, chains = seen.get(chosen.worker, (request, {}))
        if seen_as is not request:
            decision = replace(decision, request=seen_as)
        state = self.table.get(chosen.worker)
        if state is None:
            raise NoEndpointError(f"the policy {choice.policy} chose {chosen.worker}, not a member")
        reserved = chains.get(chosen.block_size, ()) if chosen.block_size is not None else ()
        expires_at = now + self.settings.lease_expiry_s
        if request.mode is Mode.OBSERVE:  # the gateway chooses: nothing is known to be on its way anywhere
            self.observed.admit(decision, state.generation, reserved, now, expires_at)
            self.evictions.begin(decision.lease_id, [candidate.worker for candidate in choice.ordered])
            return decision
        self._sent.send(decision, reserved, state)
        self.adapters.on_use(chosen.worker, request.namespace.adapter)
        self.shares.book(decision, now)
        self.evictions.begin(decision.lease_id, [chosen.worker])
        self.tenant_shares.book(decision)
        lease = self.ledger.admit(decision, state.generation, reserved, now, expires_at)
        self._left_early.begin(lease)
        if self.teller is not None:
            self.teller.sent(lease, now)
        self.learned.sent(chosen.worker, chosen.uncovered_tokens, self._waiting(state, now), now)
        self._candidates.changed(chosen.worker)
        return decision

    def eligible(self, request: RoutingRequest, now: float) -> Sequence[WorkerState]:
        """Who may serve `request` now: of those it is for, the fittest (see `worker_table`)."""
        pool = request.pool
        reached = self.table.reached(pool, request.subset, now)
        return self.table.fittest(pool, self.adapters.eligible(reached, request.namespace.adapter), now)

    def _waiting(self, state: WorkerState, now: float) -> int:
        """Requests that found no room on a worker in its last step, whoever sent them."""
        metrics = state.fresh_metrics(now, self.settings.stale_after_s)
        return 0 if metrics is None else metrics.crowded

    def destinations(self, decision: Decision, limit: int) -> tuple[str, ...]:
        """At most `limit` endpoints for the gateway, the chosen one first."""
        return destinations(decision, self.table, limit)

    def on_first_token(self, lease_id: str, now: float) -> None:
        """The first token of this request has been produced."""
        self._candidates.settle()
        lease = self.ledger.first_token(lease_id, now)
        if lease is not None:
            lease.expires_at = now + self.settings.lease_expiry_s
            self._candidates.changed(lease.worker)
        departed = self.departed.get(lease_id)
        if departed is not None and departed.first_token_at is None:
            departed.first_token_at = now

    def on_progress(self, lease_id: str, tokens: int, now: float) -> None:
        """`tokens` more were generated: the request is alive."""
        self.ledger.progress(lease_id, tokens, now)
        lease = self._unfinished(lease_id)
        if lease is not None:
            lease.expires_at = now + self.settings.lease_expiry_s

    def on_stream_ended(self, lease_id: str, now: float, *, undelivered: bool = False) -> Released | None:
        """The ext_proc stream of this request ended.

        On some Envoy versions that is the end of the request, on others only the end of its headers; so
        it starts a grace period when no access log entry can be expected: none is open, or the ticket
        may never have left (`undelivered`). Otherwise it marks the lease as the first to go when the
        engine's own counts show that something was lost. Returns the request where that ends it: its client
        is known to have left (see `on_left_early`).
        """
        lease = self._unfinished(lease_id)
        if lease is None or lease.stream_ended_at is not None:
            return None
        lease.stream_ended_at = now
        completion = self._left_early.stream_ended(lease, now)
        if completion is not None:
            return self.release(lease_id, completion, now)
        if undelivered or not self._access_log_open:
            lease.expires_at = min(lease.expires_at, now + self.settings.stream_grace_s)
        return None

    def on_left_early(self, request_id: str, completion: Completion, now: float) -> Released | None:
        """A request ended before the gateway took our answer: its access log entry names no lease.

        Ends the one lease it can be about (see `extproc.core.left_early`); None: there is none, or none yet.
        """
        lease = self._left_early.told(request_id, completion, now)
        return None if lease is None else self.release(lease.id, completion, now)

    def on_served(self, lease_id: str, endpoint: str, now: float) -> None:
        """The gateway says who really serves this request: it is load there."""
        lease = self._unfinished(lease_id)
        if lease is None:
            return
        lease.served_by = endpoint
        if endpoint == lease.worker.endpoint or lease_id not in self.ledger:
            return
        worker, elsewhere = taken_by(lease.decision, self.table, endpoint)
        if elsewhere is None and worker is not None:
            elsewhere = self.quote(lease.decision.request, worker, now)
        here, there = self.table.get(lease.worker), self.table.get(elsewhere.worker) if elsewhere else None
        if here is None or there is None or elsewhere is None:
            return
        self._candidates.changed(lease.worker)
        self._candidates.changed(there.id)
        alike = elsewhere.block_size == lease.candidate.block_size and here.revision == there.revision
        reserved = lease.reserved if alike else ()
        self._sent.move(lease, there.id, reserved)
        self.ledger.move(lease_id, elsewhere, there.generation, reserved, now)
        if lease.first_token_at is None:
            self.learned.sent(there.id, elsewhere.uncovered_tokens, self._waiting(there, now), now)

    def on_access_log(self, *, is_open: bool) -> None:
        """Whether any access log stream is open."""
        self._access_log_open = is_open

    def unfinished(self) -> tuple[Lease, ...]:
        """Leases of all requests that may be running: on members, on workers that left, and observed ones."""
        return (*self.ledger, *self.departed, *self.observed)

    def release(self, lease_id: str, completion: Completion, now: float) -> Released | None:
        """End a request: give back its load and learn from it. None when it had ended before."""
        self._candidates.settle()
        lease = self.ledger.get(lease_id)
        if lease is None:
            departed = self._release_departed(lease_id, completion, now)
            return departed or self._release_observed(lease_id, completion, now)
        load, beside_ms = self.ledger.load(lease.worker, now), self.ledger.booked_since_ms(lease)
        self.ledger.release(lease_id, now)
        self._left_early.end(lease)
        self._candidates.changed(lease.worker)
        if completion.served_by is None and lease.served_by is not None:
            completion = replace(completion, served_by=lease.served_by)
        for endpoint in suspects(lease, completion):
            self.table.on_connect_failure(endpoint, now)
        self._served(lease, completion, now)
        released = Released(lease, completion, now, self._forget_request(lease_id, lease.worker))
        self._sent.end(released)
        self.errors.observe(released)
        self._claims.audit(released)
        self._sent.remember(released)
        self.learned.learn(released, load, beside_ms)
        return released

    # --- signals -----------------------------------------------------------------------------------

    def on_membership(self, members: Iterable[Member], now: float) -> tuple[MembershipChange, list[Released]]:
        """`members` is the whole membership now. Leases of workers that left are load no more.

        Their requests may still be answered, and end as they end (see `extproc.core.departed`); those are
        returned that cannot be waited for.
        """
        change = self.table.update(members, now)
        released: list[Released] = []
        for worker in change.removed:
            for lease in self.ledger.drop_worker(worker):
                self._forget_request(lease.id, worker)
                oldest = self.departed.keep(lease)
                if oldest is not None:
                    released += self._release_lost([oldest.id], "too many wait for their end", now)
            self.evictions.forget(worker)
            self._claims.remove(worker)
            self._sent.remove(worker)
            self.peers.forget(worker)
            self.peer_prefixes.forget(worker)
            self.learned.forget(worker)
            self.shares.forget(worker)
            self._reconciler.forget(worker)
        for worker in change.added:
            state = self.table.get(worker)
            if state is not None:
                self._claims.add(state, self._claims.revision_of(state))
        endpoints = {state.id.endpoint for state in self.table.all()}
        self.adapters.keep(endpoints.__contains__)
        states = self.table.all()
        reseeded = [state.id for state in states if self._reseed(state, self._claims.revision_of(state))]
        return replace(change, reseeded=tuple(reseeded)), released

    def on_models(self, endpoint: str, root: str | None, adapters: Iterable[str]) -> tuple[WorkerId, ...]:
        """A server told what it serves: what its base model was loaded from, and every adapter it has.

        Returns the workers whose model revision is another than before: all that was known of their caches
        is forgotten, and their KV events have to be read again from the first.
        """
        self.adapters.on_models(endpoint, adapters)
        return tuple(
            state.id
            for state in self.table.at(endpoint)
            if self._claims.learns_revision(state) and self._reseed(state, root)
        )

    def on_kv_events(self, worker: WorkerId, events: Sequence[KvEvent], now: float) -> None:
        """An engine told what it stored and removed."""
        self.evictions.on_events(worker, events)
        self._sent.drop_assumed(worker)
        self._claims.on_events(worker, events, now)
        self._sent.stop_lingering(worker)
        self._candidates.told(worker)

    def on_kv_heard(self, worker: WorkerId, now: float) -> None:
        """An engine has sent events that wait for others: it is not silent, and nothing more is known."""
        self.trust.on_heard(worker, now)

    def on_kv_restored(self, worker: WorkerId, parts: Sequence[EnginePart], now: float) -> bool:
        """What another router has known of a worker's cache, before its first event; False: it is damaged."""
        self._sent.drop_assumed(worker)
        known = self._claims.on_restored(worker, parts, now)
        self._candidates.told(worker)
        self._candidates.changed(worker)
        return known

    def on_kv_reset(self, worker: WorkerId) -> None:
        """What the worker held is no longer known."""
        self._sent.drop_assumed(worker)
        self._claims.on_reset(worker)
        self._candidates.told(worker)

    def on_kv_trust(self, worker: WorkerId, cause: str, *, trusted: bool) -> None:
        """Whether every event of the worker has been seen. News that some were not make it doubtful."""
        self._claims.on_trust(worker, cause, trusted=trusted)

    def on_kv_suspended(self, worker: WorkerId, *, suspended: bool) -> None:
        """Whether what events have said of a worker counts for nothing: it may have restarted, empty."""
        self._claims.on_suspended(worker, suspended=suspended)

    def on_metrics(
        self, endpoint: str, by_rank: Mapping[int, EngineMetrics], now: float, behind: bool = False
    ) -> list[Released]:
        """A scrape succeeded. Returns leases that the engine's counts prove lost.

        They prove nothing while ends of requests are known but not told here yet (`behind`).
        """
        for state in self.table.restarted(endpoint, by_rank):
            if not state.kv_reset:  # else its KV events have told of it
                self._sent.drop_assumed(state.id)
                self._claims.on_restart(state)
        told = self.table.on_metrics(endpoint, by_rank, now)
        for worker, metrics in told.items():
            self.adapters.on_metrics(worker, metrics.adapters, metrics.max_adapters)
        lost: list[str] = []
        for state in self.table.at(endpoint):
            seen = told.get(state.id)
            if seen is None:
                continue
            theirs = self.peers.load(state.id, now)
            computed = self.ledger.computed_tokens(state.id, now)
            state.steps.note(seen, Mark(now, computed, theirs.context_tokens))
            self.learned.seen(state.id, self._waiting(state, now), now)
            state.note_foreign(self.ledger.sequences(state.id) + theirs.sequences)
            state.note_stalled(self.ledger.load(state.id, now).prefilling + theirs.prefilling)
            self._candidates.told(state.id)
            self._candidates.changed(state.id)
            if not behind:
                lost += self._reconciler.check(state.id, seen, state.steps, now)
        return self._release_lost(lost, "the engine no longer has it", now)

    def on_scrape_failure(self, endpoint: str) -> bool:
        """A scrape failed: the server was not reached. True when that made it not ready."""
        return self.table.on_scrape_failure(endpoint)

    def on_page_failure(self, endpoint: str, began: float, *, slow: bool) -> bool:
        """A scrape failed though the server was reached. True when that made it not ready.

        Args:
            endpoint: where.
            began: when that scrape did.
            slow: its page did not come in time; else there was an answer that is none.
        """
        return self.table.on_page_failure(endpoint, began, slow=slow)

    def on_peer_news(self, news: PeerNews, now: float) -> None:
        """Another replica told what it has on the workers."""
        if self.peers.take(news, self.index.__contains__, now):
            self.peer_prefixes.take(news.sent, now)
        for worker, _ in news.loads:
            self._candidates.changed(worker)

    def tell(self, now: float) -> LoadTeller:
        """What there is to tell the other replicas, as of now. Changes no answer.

        Raises:
            ValueError: this router has no `teller`.
        """
        if self.teller is None:
            raise ValueError("this router tells nobody anything: set `teller` first")
        ledger = self.ledger
        self.teller.look(
            (
                (
                    state.id,
                    told_load(ledger.load(state.id, now), ledger.steps_beside(state.id, NOMINAL_OUTPUT, now)),
                )
                for state in self.table.all()
            ),
            now,
        )
        return self.teller

    def tick(self, now: float) -> list[Released]:
        """Release leases whose time is up."""
        self._candidates.settle()
        self._sent.tick(now)
        self.peers.tick(now)
        self.peer_prefixes.tick(now)
        expired = [lease.id for lease in self.unfinished() if lease.expires_at <= now]
        return self._release_lost(expired, "no access log entry came", now)

    def quote(self, request: RoutingRequest, worker: WorkerId, now: float) -> Candidate | None:
        """A worker as it would be priced for `request`; None: it is no member. Changes no answer."""
        state = self.table.get(worker)
        return None if state is None else quote(self._candidates, request, state, now)

    def block_size(self, state: WorkerState) -> int | None:
        """Tokens per KV block of a worker, as its events, its metrics or the configuration tell."""
        return self._candidates.block_size(state)

    # --- inside ------------------------------------------------------------------------------------

    def _scope(
        self, request: RoutingRequest, states: Sequence[WorkerState], chance: int, now: float
    ) -> Scope | None:
        """What to make a shortlist of; None: every worker is priced."""
        if len(states) <= SMALL or self._price_all or not self._chooser.takes_shortlist(request):
            return None
        ready = self.table.ready(request.pool, None, now)
        named = self.tenant_shares.used(request)
        return self._candidates.scope(request.pool, ready, states, named, chance)

    def _reseed(self, state: WorkerState, revision: str | None) -> bool:
        """Whether a worker serves another revision now; what was known of its cache is then forgotten."""
        if revision == state.revision:
            return False
        self._sent.drop_assumed(state.id)
        self._claims.renew(state, revision)
        self.peer_prefixes.forget(state.id)
        self._sent.reserve_again(state.id, self.ledger.leases(state.id))
        self._candidates.told(state.id)
        return True

    def _tpot_ms(self, worker: WorkerId, sequences: float, context_tokens: float) -> float | None:
        state = self.table.get(worker)
        if state is None:
            return None
        others = 0 if state.foreign is None else state.foreign.running
        others += self.peers.sequences(worker)
        steps = self.learned.steps.of(state.member.pool).coefficients
        return steps.tpot_ms(sequences + others, context_tokens)

    def _served(self, lease: Lease, completion: Completion, now: float) -> None:
        """A worker that has served a request is alive, however slow its metrics page is."""
        endpoint = served_at(lease, completion)
        if endpoint is not None:
            self.table.on_served(endpoint, now)

    def _forget_request(self, lease_id: str, worker: WorkerId) -> int | None:
        """What is kept beside the lease of a request that has ended; blocks evicted while it was there."""
        self.tenant_shares.release(lease_id)
        return self.evictions.end(lease_id, worker)

    def _unfinished(self, lease_id: str) -> Lease | None:
        """The lease of a request that may be running, on a member or not."""
        return self.ledger.get(lease_id) or self.departed.get(lease_id)

    def _release_departed(self, lease_id: str, completion: Completion, now: float) -> Released | None:
        """End a request whose worker has left: nothing is given back, and only its lengths are learned."""
        lease = self.departed.take(lease_id)
        if lease is None:
            return None
        self._left_early.end(lease)
        if completion.served_by is None and lease.served_by is not None:
            completion = replace(completion, served_by=lease.served_by)
        released = Released(lease, completion, now)
        self.errors.observe(released)
        self.learned.learn_lengths(released)
        return released

    def _release_observed(self, lease_id: str, completion: Completion, now: float) -> Released | None:
        """End a request that the gateway sent where it liked: there is nothing to give back or to learn."""
        lease = self.observed.release(lease_id, now)
        if lease is None:
            return None
        self._served(lease, completion, now)
        served = lease.worker if completion.served_by is None else WorkerId(completion.served_by)
        return Released(lease, completion, now, self.evictions.end(lease_id, served))

    def _release_lost(self, lease_ids: Iterable[str], why: str, now: float) -> list[Released]:
        completion = Completion(Outcome.LOST, details=why)
        released = (self.release(lease_id, completion, now) for lease_id in lease_ids)
        return [r for r in released if r is not None]
