"""What each worker has to offer one request: predicted hit, load, and price."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from extproc.core.adapter_slots import AdapterSlots
from extproc.core.cost import CostSettings, RequestFacts, WorkerFacts, price
from extproc.core.doubts import Doubts
from extproc.core.engine_shares import EngineShares, kind_of
from extproc.core.fleet_view import FleetView
from extproc.core.hashing import REMEMBERED
from extproc.core.kv_index import KvIndex
from extproc.core.learned import Learned
from extproc.core.load_ledger import LoadLedger
from extproc.core.peer_loads import PeerLoads
from extproc.core.prefix_classes import PrefixClasses
from extproc.core.prefix_hits import NOTHING, Chains, Hit, Hits, look_up
from extproc.core.shortlist import Read, Wanted, pick
from extproc.core.tenant_shares import LeftOut
from extproc.core.trust import TrustBook
from extproc.core.types import Candidate, LengthEstimate, Priced, RoutingRequest, ShareFacts, WorkerId
from extproc.core.worker_facts import FactsReader, Reading, slowness
from extproc.core.worker_table import WorkerState


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """What is configured about one pool.

    Attributes:
        model_revision: seeds the pool's hash chains, as does `tokenizer_revision`.
        tokenizer_revision: see there.
        block_size: tokens per block of a worker that has not told its own; None = claim no prefix.
        learn_revision: workers tell their model revision themselves; `model_revision` is only the requests'.
        tokenizer_revisions: by model revision, where it is another than `tokenizer_revision`.
    """

    model_revision: str = ""
    tokenizer_revision: str = ""
    block_size: int | None = None
    learn_revision: bool = False
    tokenizer_revisions: Mapping[str, str] = field(default_factory=dict)

    def tokenizer_of(self, revision: str | None) -> str:
        """The tokenizer revision that belongs to a model revision."""
        return self.tokenizer_revisions.get(revision or "", self.tokenizer_revision)


NOTHING_CONFIGURED = PoolFacts()

PromptHashes: TypeAlias = Callable[[RoutingRequest, int], tuple[tuple[int, ...], ...]]
"""What `prompt_hashes` does. Another may stand for it where hashes are known and token ids are not."""


def prompt_hashes(request: RoutingRequest, size: int) -> tuple[tuple[int, ...], ...]:
    """Hashes of the blocks of `size` tokens that each prompt can hit."""
    if request.chains is not None and size in request.chains:
        return request.chains[size]
    seed = request.namespace.seed
    return tuple(REMEMBERED.prompt_chain(prompt, size, seed) for prompt in request.prompts)


class Scope(NamedTuple):
    """That only a shortlist is wanted.

    Attributes:
        view: of all ready workers of the pool.
        named: workers that its tenant is on: the cheapest of them must not be missed.
        chance: seeds what is drawn.
        among: those that may serve the request; None: all.
    """

    view: FleetView
    named: Collection[WorkerId]
    chance: int
    among: Collection[WorkerId] | None = None

    def narrowed(self, states: Sequence[WorkerState]) -> "Scope":
        """For these of the workers only."""
        if len(states) == len(self.view.states):
            return self
        return self._replace(among={state.id: None for state in states})

    def left_out(self, workers: int, candidates: Sequence[Candidate]) -> LeftOut:
        """Who of so many workers that may serve the request is not among `candidates`."""
        used = sum(self.state(worker) is not None for worker in self.named)
        priced = sum(candidate.worker in self.named for candidate in candidates)
        return LeftOut(workers - len(candidates), used - priced)

    def state(self, worker: WorkerId) -> WorkerState | None:
        """The state of a worker that may serve the request."""
        at = self.view.at.get(worker)
        if at is None or (self.among is not None and worker not in self.among):
            return None
        return self.view.states[at]


@dataclass(frozen=True, slots=True)
class CandidateBuilder:
    """Reads the router's state; changes nothing but what prefixes tell about classes of prompts.

    Attributes:
        stale_after_s: engine metrics older than this are not used.
        prompt_hashes: tells a request's block hashes.
    """

    ledger: LoadLedger
    index: KvIndex
    learned: Learned
    trust: TrustBook
    pools: Mapping[str, PoolFacts]
    costs: CostSettings
    stale_after_s: float
    doubts: Doubts = field(default_factory=Doubts)
    classes: PrefixClasses = field(default_factory=PrefixClasses)
    adapters: AdapterSlots = field(default_factory=AdapterSlots)
    shares: EngineShares = field(default_factory=EngineShares)
    peers: PeerLoads = field(default_factory=PeerLoads)
    prompt_hashes: PromptHashes = prompt_hashes
    views: dict[str, FleetView] = field(default_factory=dict)
    _reader: FactsReader = field(init=False)

    def __post_init__(self) -> None:
        reader = FactsReader(
            ledger=self.ledger,
            peers=self.peers,
            index=self.index,
            learned=self.learned,
            adapters=self.adapters,
            shares=self.shares,
            costs=self.costs,
            block_size=self._block_size,
            stale_after_s=self.stale_after_s,
        )
        object.__setattr__(self, "_reader", reader)

    def build(
        self,
        request: RoutingRequest,
        states: Sequence[WorkerState],
        now: float,
        mark: Callable[[str], None] | None = None,
        scope: Scope | None = None,
    ) -> tuple[list[Candidate], Chains, LengthEstimate]:
        """One candidate per state, in their order; the request's block hashes; its expected length.

        `mark` is told when `match` (hashing the prompt and looking it up) is over. With a `scope` only those
        of a shortlist are made.
        """
        found = self._match(request, states, now, scope)
        hits, chains = found.of, found.chains
        if mark is not None:
            mark("match")
        self._classify(request, chains, now)
        output = self.learned.outputs.estimate(request, now)
        kind = self._kind(request, len(states), found, now)
        facts = self._request(request, hits, kind, output.expected, now)
        if scope is None:
            foreign = self._reader.foreign(states, now)
            priced = [(state, foreign[state.id]) for state in states]
        else:
            picked = self._pick(request, facts, kind, hits, scope, now)
            priced = [(state, scope.view.foreign(state, now)) for state in picked]
        adapter, terms = request.namespace.adapter, self._reader.terms(request.pool)
        candidates = []
        for position, (state, foreign_there) in enumerate(priced):
            reading = self._reader.read(state, foreign_there, terms, adapter, output.expected, now)
            hit = hits.get(state.id, NOTHING)
            candidates.append(self._candidate(request, facts, state, hit, kind, reading, position, now))
        return candidates, chains, output

    def quote(self, request: RoutingRequest, state: WorkerState, now: float) -> Candidate:
        """One worker, as `build` would price it if it were alone. Changes nothing."""
        found = self._match(request, [state], now, None)
        expected = self.learned.outputs.estimate(request, now).expected
        kind = self._kind(request, 1, found, now)
        facts = self._request(request, found.of, kind, expected, now)
        foreign = self._reader.foreign([state], now)[state.id]
        terms = self._reader.terms(state.member.pool)
        reading = self._reader.read(state, foreign, terms, request.namespace.adapter, expected, now)
        hit = found.of.get(state.id, NOTHING)
        return self._candidate(request, facts, state, hit, kind, reading, 0, now)

    def scope(
        self,
        pool: str,
        ready: Sequence[WorkerState],
        states: Sequence[WorkerState],
        named: Collection[WorkerId],
        chance: int,
    ) -> Scope | None:
        """Asks for a shortlist; None: there is none of these.

        Args:
            pool: whose workers they are.
            ready: all of the pool that are ready; the same object as long as they are the same.
            states: those that may serve the request; some may not be ready, and be its last resort.
            named: workers that must not be missed.
            chance: seeds what is drawn.
        """
        view = self.views.get(pool)
        if view is None:
            view = self.views[pool] = FleetView(
                self.block_size, self._reader.told, self._read_row(pool), self.costs
            )
        view.look(ready)
        if states is not ready and any(state.id not in view.at for state in states):
            return None
        return Scope(view, named, chance).narrowed(states)

    def changed(self, worker: WorkerId) -> None:
        """The load of a worker is another now; what nobody tells is found out within `BUSY_S`."""
        for view in self.views.values():
            view.mark(worker)

    def told(self, worker: WorkerId) -> None:
        """A worker told of itself."""
        for view in self.views.values():
            view.renew(worker)

    def settle(self) -> None:
        """Do what the latest decision has put off. Changes no answer."""
        self.classes.settle()

    def _read_row(self, pool: str) -> Read:
        def read(worker: WorkerId, output: float, now: float) -> tuple[WorkerFacts, float]:
            view = self.views[pool]
            state = view.states[view.at[worker]]
            terms = self._reader.terms(pool)
            facts = self._reader.read(state, view.foreign(state, now), terms, None, output, now).facts
            return facts, slowness(facts.ttft, terms.ttft.typical)

        return read

    def _kind(self, request: RoutingRequest, workers: int, found: Hits, now: float) -> ShareFacts:
        held = {worker: hit.cached + hit.offloaded for worker, hit in found.of.items()}
        cold_demand = self.shares.cold(request.pool, now) / max(1, workers)
        return kind_of(request.prompt_tokens, held, found.sizes, found.chains, cold_demand)

    def _request(
        self,
        request: RoutingRequest,
        hits: Mapping[WorkerId, Hit],
        kind: ShareFacts,
        expected_output: float,
        now: float,
    ) -> RequestFacts:
        """What a request brings where nothing hits."""
        prefix_share = 0.0
        if kind.prefix is not None:
            prefix_share = max(self.shares.prefix(worker, kind.prefix, now) for worker in hits)
        return RequestFacts(
            prompt_tokens=request.prompt_tokens,
            uncovered_tokens=request.prompt_tokens,
            cached_tokens=0,
            offloaded_tokens=0,
            expected_output=expected_output,
            sequences=request.sequences,
            most_cached_tokens=max((hit.cached + hit.offloaded for hit in hits.values()), default=0),
            prefix_share=prefix_share,
        )

    def _pick(
        self,
        request: RoutingRequest,
        facts: RequestFacts,
        kind: ShareFacts,
        hits: Mapping[WorkerId, Hit],
        scope: Scope,
        now: float,
    ) -> list[WorkerState]:
        """Whom to price, in the order of membership."""
        view, costs, adapter = scope.view, self.costs, request.namespace.adapter
        ttft = self.learned.ttft.of(request.pool).typical
        prompt, most = facts.prompt_tokens, facts.most_cached_tokens
        cold_ms = ttft.prefill_ms(prompt, 0)
        rare = 1.0 - min(1.0, facts.prefix_share / costs.max_prefix_share)
        again_ms = max(0.0, cold_ms - ttft.prefill_ms(max(0, prompt - most), most))
        wanted = Wanted(
            prompt=prompt,
            output=facts.expected_output,
            sequences=facts.sequences,
            prefill_ms=cold_ms,
            twice=rare,
            twice_ms=rare * again_ms,
            per_token_ms=ttft.per_token_ms,
            eviction_ms=costs.eviction * self.learned.reuse.of(request.pool) * ttft.per_token_ms,
            warm=kind.warm,
            named=scope.named,
            chance=scope.chance,
        )

        def saved_ms(worker: WorkerId) -> float:
            hit = hits[worker]
            believed = self._believed_tokens(worker, hit, request, now)
            left = max(0, prompt - believed - hit.offloaded)
            reload_ms = hit.offloaded * 1000.0 / costs.reload_tokens_per_s
            return cold_ms - ttft.prefill_ms(left, believed + hit.offloaded) - reload_ms

        picked = pick(
            view.rows(facts.expected_output, scope.chance, now),
            wanted,
            {worker: hit.cached + hit.offloaded + hit.doubtful for worker, hit in hits.items()},
            saved_ms,
            costs,
            now,
            among=scope.among,
            cold_pool=view.cold_pool,
            has_time=lambda worker: self.shares.cold_prefill(worker, now) < costs.cold_share,
            delay_ms=None
            if adapter is None
            else lambda worker: self.adapters.load_ms(worker, adapter, costs.adapter_load_ms),
        )
        return [view.states[at] for at in sorted(map(view.at.__getitem__, picked))]

    def _classify(self, request: RoutingRequest, chains: Chains, now: float) -> None:
        """Learn from the request's first prompt, and say what class it is of if the client has not."""
        finest = chains[min(chains)] if chains else ()
        for chain in finest[:1]:
            group = (request.pool, request.model, request.namespace.model_revision)
            found = self.classes.observe(group, chain, now)
            request.prompt_class = request.prompt_class or found.value

    def block_size(self, state: WorkerState) -> int | None:
        """Tokens per KV block: what events say, else metrics, else the configured default."""
        return self._block_size(state, self.index.block_size(state.id))

    def _block_size(self, state: WorkerState, told: int | None) -> int | None:
        if told is None and state.metrics is not None:
            told = state.metrics.block_size
        return told or self.pools.get(state.member.pool, NOTHING_CONFIGURED).block_size

    def _match(
        self, request: RoutingRequest, states: Sequence[WorkerState], now: float, scope: Scope | None
    ) -> Hits:
        """Look the request's prompts up."""
        if not request.keyed_prompts:
            return Hits({}, {}, {})
        if scope is not None:
            view = scope.view
            chains = {size: self.prompt_hashes(request, size) for size in view.block_sizes}
            return look_up(self.index, self.doubts, chains, view.block_size, scope.state, now)
        known = {state.id: self.block_size(state) for state in states}
        sizes = sorted({size for size in known.values() if size is not None})
        chains = {size: self.prompt_hashes(request, size) for size in sizes}
        state_of = {state.id: state for state in states}.get
        return look_up(self.index, self.doubts, chains, known.get, state_of, now)

    def _believed_tokens(self, worker: WorkerId, hit: Hit, request: RoutingRequest, now: float) -> int:
        """Cached tokens that a price counts on."""
        if not hit.cached + hit.doubtful:
            return 0
        confidence = self.trust.confidence(worker, request.namespace, now)
        return round(confidence * (hit.cached + hit.odds * hit.doubtful))

    def _candidate(
        self,
        request: RoutingRequest,
        facts: RequestFacts,
        state: WorkerState,
        hit: Hit,
        kind: ShareFacts,
        reading: Reading,
        position: int,
        now: float,
    ) -> Candidate:
        worker, (worker_facts, load, context_tokens, block_size) = state.id, reading
        cached, offloaded, doubtful, odds = hit
        uncovered = facts.uncovered_tokens
        confidence = 1.0
        if hit is not NOTHING:
            uncovered = max(0, uncovered - cached - offloaded)
            if cached + doubtful:
                confidence = self.trust.confidence(worker, request.namespace, now)
            believed = round(confidence * (cached + odds * doubtful))
            facts = RequestFacts(
                facts.prompt_tokens,
                uncovered + cached - believed,
                believed,
                offloaded,
                facts.expected_output,
                facts.sequences,
                facts.most_cached_tokens,
                facts.prefix_share,
            )
        return Candidate(
            worker,
            cached,
            offloaded,
            uncovered,
            block_size,
            price(facts, worker_facts, self.costs),
            load.active,
            load.queued_prefill_tokens,
            state.metrics_age_s(now),
            confidence,
            worker_facts.sequences,
            context_tokens,
            doubtful,
            odds,
            position,
            tuple.__new__(Priced, (facts, worker_facts)),
            self.shares.of(worker, kind, now, cold_only=state.member.cold),
        )
