"""What each worker has to offer one request: predicted hit, load, and price."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from extproc.core.adapter_slots import AdapterSlots
from extproc.core.cost import CostSettings, RequestFacts, WorkerFacts, price
from extproc.core.doubts import Doubts
from extproc.core.engine_shares import EngineShares, kind_of
from extproc.core.hashing import prompt_chain
from extproc.core.kv_index import KvIndex, Match
from extproc.core.learned import Learned
from extproc.core.load_ledger import LoadLedger
from extproc.core.prefix_classes import PrefixClasses
from extproc.core.trust import TrustBook
from extproc.core.types import Candidate, LengthEstimate, Priced, RoutingRequest, ShareFacts, WorkerId
from extproc.core.worker_table import ForeignLoad, WorkerState

Chains = dict[int, tuple[tuple[int, ...], ...]]
"""Block hashes of a request's prompts, by block size."""


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
    return tuple(tuple(prompt_chain(prompt, size, seed)) for prompt in request.prompts)


class Hit(NamedTuple):
    """What one worker has of a prompt, in tokens: predicted on the GPU and in slower tiers, and doubted."""

    cached: int
    offloaded: int
    doubtful: int
    odds: float  # share of `doubtful` to count on

    def plus(self, other: "Hit") -> "Hit":
        """Together with the hit of another prompt of the same request."""
        doubtful = self.doubtful + other.doubtful
        odds = (self.doubtful * self.odds + other.doubtful * other.odds) / doubtful if doubtful else 1.0
        return Hit(self.cached + other.cached, self.offloaded + other.offloaded, doubtful, odds)


_NOTHING = Hit(0, 0, 0, 1.0)


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
    prompt_hashes: PromptHashes = prompt_hashes

    def build(
        self,
        request: RoutingRequest,
        states: Sequence[WorkerState],
        now: float,
        mark: Callable[[str], None] | None = None,
    ) -> tuple[list[Candidate], Chains, LengthEstimate]:
        """One candidate per state, in their order; the request's block hashes; its expected length.

        `mark` is told when `match` (hashing the prompt and looking it up) is over.
        """
        hits, chains = self._match(request, states, now)
        if mark is not None:
            mark("match")
        self._classify(request, chains, now)
        output = self.learned.outputs.estimate(request, now)
        foreign = self._foreign(states, now)
        kind = self._kind(request, states, hits, chains, now)
        facts = RequestFacts(
            prompt_tokens=request.prompt_tokens,
            uncovered_tokens=request.prompt_tokens,
            cached_tokens=0,
            offloaded_tokens=0,
            expected_output=output.expected,
            sequences=request.sequences,
            most_cached_tokens=max((hit.cached + hit.offloaded for hit in hits.values()), default=0),
            prefix_share=max((self.shares.prefix(worker, kind.prefix, now) for worker in hits), default=0.0),
        )
        candidates = [
            self._candidate(
                request, facts, state, hits.get(state.id, _NOTHING), kind, foreign[state.id], position, now
            )
            for position, state in enumerate(states)
        ]
        return candidates, chains, output

    def _kind(
        self,
        request: RoutingRequest,
        states: Sequence[WorkerState],
        hits: Mapping[WorkerId, Hit],
        chains: Chains,
        now: float,
    ) -> ShareFacts:
        held = {worker: hit.cached + hit.offloaded for worker, hit in hits.items()}
        sizes = {state.id: self.block_size(state) or 1 for state in states if state.id in held}
        kind = kind_of(request.prompt_tokens, held, sizes, chains)
        return kind._replace(cold_demand=self.shares.cold(request.pool, now) / max(1, len(states)))

    def _classify(self, request: RoutingRequest, chains: Chains, now: float) -> None:
        """Learn from the request's first prompt, and say what class it is of if the client has not."""
        finest = chains[min(chains)] if chains else ()
        for chain in finest[:1]:
            group = (request.pool, request.model, request.namespace.model_revision)
            found = self.classes.observe(group, chain, now)
            request.prompt_class = request.prompt_class or found.value

    def block_size(self, state: WorkerState) -> int | None:
        """Tokens per KV block: what events say, else metrics, else the configured default."""
        learned = self.index.block_size(state.id)
        if learned is None and state.metrics is not None:
            learned = state.metrics.block_size
        return learned or self.pools.get(state.member.pool, NOTHING_CONFIGURED).block_size

    def _match(
        self, request: RoutingRequest, states: Sequence[WorkerState], now: float
    ) -> tuple[dict[WorkerId, Hit], Chains]:
        """What each worker that holds a prefix has of it, and the chains that found that."""
        hits: dict[WorkerId, Hit] = {}
        chains: Chains = {}
        if not request.keyed_prompts:
            return hits, chains
        sizes = {state.id: size for state in states if (size := self.block_size(state)) is not None}
        suspended = {state.id for state in states if state.kv_suspended}
        for size in sorted(set(sizes.values())):
            chains[size] = self.prompt_hashes(request, size)
            for hashes in chains[size]:
                for match in self.index.match(hashes):
                    if sizes.get(match.worker) == size and match.worker not in suspended:
                        hit = self._believed(match, hashes, size, now)
                        before = hits.get(match.worker)
                        hits[match.worker] = hit if before is None else before.plus(hit)
        return hits, chains

    def _believed(self, match: Match, hashes: Sequence[int], size: int, now: float) -> Hit:
        """What a match is worth when what is doubted is left out of it."""
        claimed, odds = match.blocks + match.offloaded, 1.0
        sure = claimed
        if match.worker in self.doubts:
            sent = self.index.reserved(match.worker)
            sure, odds = self.doubts.believed(match.worker, hashes, claimed, sent, now)
        cached = min(match.blocks, sure)
        return Hit(cached * size, (sure - cached) * size, (claimed - sure) * size, odds)

    def _foreign(self, states: Sequence[WorkerState], now: float) -> dict[WorkerId, ForeignLoad]:
        """Requests at each worker that are not ours.

        A worker that has not told lately is taken to be as bad as the worst that has: silence is not
        idleness.
        """
        known = {
            state.id: state.foreign
            for state in states
            if state.foreign is not None and state.fresh_metrics(now, self.stale_after_s) is not None
        }
        worst = ForeignLoad(
            max((load.waiting for load in known.values()), default=0),
            max((load.running for load in known.values()), default=0),
        )
        return {state.id: known.get(state.id, worst) for state in states}

    def _candidate(
        self,
        request: RoutingRequest,
        facts: RequestFacts,
        state: WorkerState,
        hit: Hit,
        kind: ShareFacts,
        foreign: ForeignLoad,
        position: int,
        now: float,
    ) -> Candidate:
        load = self.ledger.load(state.id, now)
        metrics = state.fresh_metrics(now, self.stale_after_s)
        cached, offloaded, doubtful, odds = hit
        uncovered = max(0, request.prompt_tokens - cached - offloaded)
        confidence = self.trust.confidence(state.id, request.namespace, now) if cached + doubtful else 1.0
        believed = round(confidence * (cached + odds * doubtful))
        block_size = self.block_size(state)
        capacity = unused = None
        if metrics is not None and metrics.num_gpu_blocks is not None and block_size is not None:
            capacity = metrics.num_gpu_blocks * block_size
            unused = max(0, capacity - self.index.resident_blocks(state.id) * block_size)
        running = load.sequences + foreign.running
        # Full blocks that prompts have in common are held once; the index tells them apart.
        held = load.private_tokens + (block_size or 0) * self.index.reserved_blocks(state.id)
        if capacity is not None and metrics is not None and metrics.kv_usage is not None:
            # Requests that share a prefix hold it once; what was sent since the scrape is not in its count.
            held = min(held, round(metrics.kv_usage * capacity) + round(load.queued_prefill_tokens))
        priced = Priced(
            replace(
                facts,
                uncovered_tokens=uncovered + cached - believed,
                cached_tokens=believed,
                offloaded_tokens=offloaded,
            ),
            WorkerFacts(
                ttft=self.learned.ttft.of(state.member.pool).coefficients(state.id),
                step=self.learned.steps.of(state.member.pool).coefficients,
                queued_prefill_ms=load.queued_prefill_ms,
                foreign_waiting=foreign.waiting,
                sequences=running,
                context_tokens=load.context_tokens,
                held_tokens=held,
                capacity_tokens=capacity,
                unused_tokens=unused,
                reuse=self.learned.reuse.of(state.member.pool),
                adapter_ms=self.adapters.load_ms(
                    state.id, request.namespace.adapter, self.costs.adapter_load_ms
                ),
                beside=self.ledger.steps_beside(state.id, facts.expected_output, now)
                + foreign.running * facts.expected_output,
                context_beside=self.ledger.context_beside(state.id, facts.expected_output, now),
                prefilling=load.prefilling,
                stalled=0.0 if metrics is None else state.stalled,
            ),
        )
        return Candidate(
            worker=state.id,
            cached_tokens=cached,
            offloaded_tokens=offloaded,
            uncovered_tokens=uncovered,
            block_size=block_size,
            cost=price(*priced, self.costs),
            active=load.active,
            queued_prefill_tokens=load.queued_prefill_tokens,
            metrics_age_s=state.metrics_age_s(now),
            confidence=confidence,
            doubtful_tokens=doubtful,
            odds=odds,
            sequences=running,
            context_tokens=load.context_tokens,
            position=position,
            priced=priced,
            shares=kind._replace(
                prefix_share=self.shares.prefix(state.id, kind.prefix, now),
                warm_share=self.shares.warm(state.id, now),
                cold_prefill=self.shares.cold_prefill(state.id, now),
                cold_only=state.member.cold,
            ),
        )
