"""What a worker's price is made from: load of ours and of others, memory, and what time things take there."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from extproc.core.adapter_slots import AdapterSlots
from extproc.core.cost import CostSettings, WorkerFacts
from extproc.core.engine_shares import EngineShares
from extproc.core.kv_index import KvIndex
from extproc.core.learned import Learned
from extproc.core.leases import WorkerLoad
from extproc.core.load_ledger import LoadLedger
from extproc.core.peer_loads import NOTHING_TOLD, PeerLoads
from extproc.core.step_model import StepCoefficients
from extproc.core.ttft_model import TtftCoefficients, TtftModel
from extproc.core.types import WorkerId
from extproc.core.worker_table import ForeignLoad, WorkerState


class PoolTerms(NamedTuple):
    """What is the same for all workers of a pool, as learned.

    Attributes:
        ttft: what first tokens cost; a worker may have coefficients of its own.
        step: what output tokens cost.
        reuse: share of prompt tokens found cached lately.
    """

    ttft: TtftModel
    step: StepCoefficients
    reuse: float


class Reading(NamedTuple):
    """One worker at one moment.

    Attributes:
        facts: what the price is made from.
        load: what we have put there.
        context_tokens: held there by requests of ours and of other routers.
        block_size: tokens per KV block; None: not known.
    """

    facts: WorkerFacts
    load: WorkerLoad
    context_tokens: int
    block_size: int | None


@dataclass(frozen=True, slots=True)
class FactsReader:
    """Reads them; changes nothing.

    Attributes:
        block_size: tells a worker's tokens per KV block, given what its events tell.
        stale_after_s: engine metrics older than this are not used.
    """

    ledger: LoadLedger
    peers: PeerLoads
    index: KvIndex
    learned: Learned
    adapters: AdapterSlots
    shares: EngineShares
    costs: CostSettings
    block_size: Callable[[WorkerState, int | None], int | None]
    stale_after_s: float

    def terms(self, pool: str) -> PoolTerms:
        """What is learned of a pool, as it is now."""
        learned = self.learned
        return PoolTerms(learned.ttft.of(pool), learned.steps.of(pool).coefficients, learned.reuse.of(pool))

    def read(
        self,
        state: WorkerState,
        foreign: ForeignLoad,
        terms: PoolTerms,
        adapter: str | None,
        output: float,
        now: float,
    ) -> Reading:
        """A worker, for a request that is expected to generate `output` tokens with `adapter`.

        `terms` are those of its pool now.
        """
        worker = state.id
        load, beside, context_beside = self.ledger.ahead(worker, output, now)
        _, sequences, context, queued_ms, queued_tokens, private, prefilling = load
        theirs = self.peers.load(worker, now)
        if theirs is not NOTHING_TOLD:
            sequences += theirs.sequences
            context += theirs.context_tokens
            prefilling += theirs.prefilling
            private += theirs.private_tokens
            queued_ms += theirs.queued_prefill_ms
            queued_tokens += theirs.queued_prefill_tokens
            beside += theirs.beside(output)
            context_beside += theirs.context_beside(output)
        metrics = state.fresh_metrics(now, self.stale_after_s)
        told_size, resident, reserved = self.index.usage(worker)
        size = self.block_size(state, told_size)
        capacity = unused = None
        # Full blocks that prompts have in common are held once; the index tells them apart.
        held = private if size is None else private + size * reserved
        if metrics is not None and metrics.num_gpu_blocks is not None and size is not None:
            capacity = metrics.num_gpu_blocks * size
            unused = max(0, capacity - resident * size)
            if metrics.kv_usage is not None:
                # Requests that share a prefix hold it once, and the engine counts them so; and only it knows
                # what requests hold that are nobody's of ours.
                told = round(metrics.kv_usage * capacity)
                # What it has not counted yet is at least what is queued; it is looked up where it matters.
                if foreign.running or held > told + queued_tokens:
                    unseen = state.steps.unseen(self.ledger.sent_tokens(worker), theirs)
                    most = told + round(unseen)
                    held = most if foreign.running else min(held, most)
        facts = WorkerFacts(
            terms.ttft.coefficients(worker),
            queued_ms,
            foreign.waiting,
            sequences + foreign.running,
            context,
            held,
            capacity,
            terms.step,
            unused,
            terms.reuse,
            0.0 if adapter is None else self.adapters.load_ms(worker, adapter, self.costs.adapter_load_ms),
            prefilling,
            beside + foreign.running * output,
            context_beside,
            0.0 if metrics is None else state.stalled(sequences + foreign.running),
            self.shares.utilization(worker, now),
        )
        return tuple.__new__(Reading, (facts, load, context, size))

    def foreign(self, states: Sequence[WorkerState], now: float) -> Mapping[WorkerId, ForeignLoad]:
        """Requests at each worker that are not ours.

        A worker that has not told lately is taken to be as bad as the worst that has: silence is not
        idleness.
        """
        known = {state.id: told for state in states if (told := self.told(state, now)) is not None}
        if len(known) == len(states):
            return known
        worst = worst_of(known.values())
        return {state.id: known.get(state.id, worst) for state in states}

    def told(self, state: WorkerState, now: float) -> ForeignLoad | None:
        """What a worker has told of it lately; None: nothing."""
        if state.foreign is None or state.fresh_metrics(now, self.stale_after_s) is None:
            return None
        return state.foreign


def slowness(own: TtftCoefficients, usual: TtftCoefficients) -> float:
    """How many times as long as a usual worker of its pool one takes for prefill."""
    return 1.0 if own is usual or usual.per_token_ms <= 0.0 else own.per_token_ms / usual.per_token_ms


def worst_of(loads: Iterable[ForeignLoad]) -> ForeignLoad:
    """The most of each that any of them has."""
    waiting = running = 0
    for load in loads:
        waiting, running = max(waiting, load.waiting), max(running, load.running)
    return ForeignLoad(waiting, running)
