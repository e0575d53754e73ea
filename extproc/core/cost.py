"""The price of a request on a worker, in milliseconds, by cause.

    queue   = overhead + busy * min(d, 1) + per_sequence * d                [the steps it has to wait for]
              + prefill admitted ahead of it and not computed yet           [our own leases]
              + requests waiting there that are not ours * prefill of ours  [the engine's count beyond them]
              + stalled * output * time per token           [waiting for memory or a place in the batch]
              + loading the adapter, where it is not on the GPU             [see `extproc.core.adapter_slots`]
    prefill = per_token * uncovered + per_mpair * attention pairs           [see `extproc.core.ttft_model`]
              + offloaded / reload_rate                                     [blocks in CPU or disk tiers]
    decode  = decode_weight * (
                  per_sequence * beside + per_1k_context * context beside / 1000       [they slow us]
                  + beside * (per_sequence + per_1k_context * prompt / 1000))          [we slow them]
              + delay * rare * (prefill - least prefill)                               [work done twice]
    delay   = max(interference * n / (n + CROWD), min(idle_interference, u / (1 - u)))
    kv risk = max(0, tokens needed - what the worker can hold) * per_token  [expected recomputation]
              + eviction * reuse * evicted * per_token                      [warm prefixes that have to go]

evicted is how many tokens of other prefixes must leave the cache for this request's new blocks; reuse, the
share of prompt tokens found cached lately in the pool, is how much of them would have been asked for again.
least prefill is what would be left to compute on the worker that holds most of the prompt: what is computed
beyond it delays all who decode or wait here and would be delayed nowhere there. On an idle worker it delays
those who come meanwhile: u / (1 - u) of them, where a share u of its time is taken lately (what a millisecond
more of work adds to the waiting of others in a queue with Poisson arrivals). rare is 1 for a prefix that
nobody else asks for and falls to 0 where its share of its worker's time reaches `max_prefix_share` (see
`extproc.core.engine_shares`): a copy of what many ask for serves them all.
stalled is how many requests the engine keeps waiting that the prefill booked there does not explain, per
running one: a place is free again when one of those that run has ended.
n is the number of sequences running there, d of them past the queue; beside, the decode steps we share with
each of them, summed: for ours the shorter of what we and they are expected to generate yet (see
`extproc.core.decode_clock`), for others' all of our output; context beside, the context that ours hold in
those steps, with what they will have generated. Sizes are tokens. Source of the shape: prefill is compute
bound and linear until attention dominates; a decode step reads the weights once, plus each sequence's
context, so its time grows with the batch and with the context read (the usual roofline argument).
"""

from dataclasses import dataclass

from extproc.core.step_model import StepCoefficients
from extproc.core.ttft_model import TtftCoefficients
from extproc.core.types import CostBreakdown

TIE_SHARE = 0.02  # of the lowest total: costs that are closer to it are equal
CROWD = 4.0  # sequences at which a prefill that need not be is charged half of what it may be
_STEP_BASE_MS = 10.0  # only differences between workers count, and this is no difference


@dataclass(frozen=True, slots=True)
class CostSettings:
    """Coefficients. Rates, times and steps are priors: they are learned as requests complete.

    Attributes:
        prefill_tokens_per_s: prefill rate until it is learned. 8,000 is a 7-8B model on one A100-class GPU.
        overhead_ms: time to first token of an empty prompt on an idle worker, until it is learned.
        attention_ms_per_mpair: ms per million (token, earlier token) pairs of a prefill, until it is learned.
        reload_tokens_per_s: rate at which offloaded KV comes back to the GPU.
        step_ms_per_sequence: what one more sequence adds to a decode step.
        step_ms_per_1k_context: what 1,000 more tokens of context add to a decode step.
        decode_weight: what a millisecond of slower decoding weighs, beside one of a later first token. At 1
            the mean end-to-end time is lowest, at the price of its tail: prefill is heaped on the workers
            that decode least.
        interference: milliseconds that others are delayed by, on a crowded worker, per millisecond of prefill
            that another worker would not have to do. It is what keeps sessions where their history is.
        idle_interference: the same on a worker that is idle for a moment, at most. 0: idle workers are free
            to compute what others have computed already.
        expected_output_tokens: generated tokens per request until learned.
        cold_share: share of each worker's time kept for cold requests, of which no worker holds half: up to
            it they are not made to wait for the sake of those that decode there, and warm requests may not
            fill the worker (see `extproc.core.share_bounds`). A worker that spends a share c in prefill
            makes its decoding 1 / (1 - c) times as slow: at 0.5, twice. 0: nothing is kept.
        max_cold_slowdown: a cold request may wait this many times as long as at the worker that would answer
            first (and `COLD_SLACK_MS` more), where that one has time left that is kept for it.
        max_prefix_share: a worker that spends this share of its time on requests with one prefix takes no
            more of them while others can: 0.5 makes the rest there at most twice as slow. 1: no bound.
        eviction: how much of the expected loss by eviction is charged to the request that evicts.
        adapter_load_ms: time to bring an adapter to the GPU. A guess for small ones: a rank-16 LoRA of an 8B
            model is some 50 MB.
        tie_ms: costs closer than this (or than 2 %) are equal.
        max_extra_ttft_ms: a warm worker may be worse than the best cold one by this much predicted TTFT.
        max_warm_wait_ms: with a longer queue, warmth no longer counts against a faster cold worker.
        long_output_tokens: from this expected length on, a generation is long, and has bounds of its own.
        long_max_extra_ttft_ms: `max_extra_ttft_ms` of long generations; None: the same.
        long_max_warm_wait_ms: `max_warm_wait_ms` of long generations; None: the same.
    """

    prefill_tokens_per_s: float = 8_000.0
    overhead_ms: float = 10.0
    attention_ms_per_mpair: float = 0.0
    reload_tokens_per_s: float = 60_000.0
    step_ms_per_sequence: float = 0.1
    step_ms_per_1k_context: float = 0.02
    decode_weight: float = 0.5
    interference: float = 2.5
    idle_interference: float = 1.0
    cold_share: float = 0.5
    max_cold_slowdown: float = 1.25
    max_prefix_share: float = 0.5
    expected_output_tokens: float = 128.0
    eviction: float = 1.0
    adapter_load_ms: float = 20.0
    tie_ms: float = 1.0
    max_extra_ttft_ms: float = 20_000.0
    max_warm_wait_ms: float = 60_000.0
    long_output_tokens: float = 512.0
    long_max_extra_ttft_ms: float | None = None
    long_max_warm_wait_ms: float | None = None

    def step_prior(self) -> StepCoefficients:
        """What output tokens cost until it is learned."""
        return StepCoefficients(_STEP_BASE_MS, self.step_ms_per_sequence, self.step_ms_per_1k_context)

    def warm_bounds(self, expected_output: float) -> tuple[float, float]:
        """`max_extra_ttft_ms` and `max_warm_wait_ms` for a generation of this length.

        For a short answer the first token is most of the wait; a long one may wait longer for a warm worker,
        or shorter, where its decoding would be in others' way.
        """
        extra, wait = self.max_extra_ttft_ms, self.max_warm_wait_ms
        if expected_output < self.long_output_tokens:
            return extra, wait
        long_extra, long_wait = self.long_max_extra_ttft_ms, self.long_max_warm_wait_ms
        return (extra if long_extra is None else long_extra), (wait if long_wait is None else long_wait)

    def ttft_prior(self) -> TtftCoefficients:
        """What first tokens cost until it is learned."""
        return TtftCoefficients(
            overhead_ms=self.overhead_ms,
            per_sequence_ms=self.step_ms_per_sequence,
            per_token_ms=1000.0 / self.prefill_tokens_per_s,
            per_mpair_ms=self.attention_ms_per_mpair,
        )


@dataclass(slots=True)  # not frozen: see `extproc.core.types`
class WorkerFacts:
    """What the price depends on, besides the request. None: not known."""

    ttft: TtftCoefficients
    queued_prefill_ms: float
    foreign_waiting: float  # requests waiting there that are not ours
    sequences: int  # running there, ours and others'
    context_tokens: int
    held_tokens: int  # of KV memory in use: shared prefixes count once
    capacity_tokens: int | None
    step: StepCoefficients
    unused_tokens: int | None = None  # room in the cache that holds nothing yet
    reuse: float = 0.0
    adapter_ms: float = 0.0  # until the request's adapter is on the GPU
    prefilling: int = 0  # of `sequences`, those that are in the queue, and so in no step yet
    beside: float | None = None  # decode steps shared with one sequence of the request; None: all, with all
    context_beside: float | None = None  # context in those steps, summed; None: as now, in all
    stalled: float = 0.0  # requests kept waiting for memory or a place in the batch, per running one
    utilization: float = 0.0  # share of its time that requests of ours have taken lately, 0 to 1

    @property
    def decoding(self) -> int:
        """Sequences that the steps there go through already."""
        decoding = self.sequences - self.prefilling
        return max(0, decoding)


@dataclass(slots=True)  # not frozen: see `extproc.core.types`
class RequestFacts:
    """What the price depends on, besides the worker. Tokens."""

    prompt_tokens: int
    uncovered_tokens: int
    cached_tokens: int
    offloaded_tokens: int
    expected_output: float
    sequences: int
    most_cached_tokens: int = 0  # of the prompt, on the worker that holds most, in any tier
    prefix_share: float = 0.0  # of a worker's time that requests with the same prefix take, at most


def delayed(sequences: int, utilization: float, settings: CostSettings) -> float:
    """How many ms others lose per ms of prefill: those who are there, or else those who come meanwhile."""
    coming = settings.idle_interference
    if utilization < 1.0:
        coming = min(coming, utilization / (1.0 - utilization))
    return max(coming, settings.interference * sequences / (sequences + CROWD))


def price(request: RequestFacts, worker: WorkerFacts, settings: CostSettings) -> CostBreakdown:
    """Predicted cost of `request` on `worker`."""
    # Asked for every candidate: terms that are zero are not computed.
    ttft, step = worker.ttft, worker.step
    prompt, uncovered, offloaded = request.prompt_tokens, request.uncovered_tokens, request.offloaded_tokens
    prefill_ms = (
        ttft.prefill_ms(uncovered, request.cached_tokens + offloaded)
        + offloaded * 1000.0 / settings.reload_tokens_per_s
    )
    queue_ms = ttft.wait_ms(worker.decoding) + worker.queued_prefill_ms + worker.adapter_ms
    if worker.foreign_waiting:
        queue_ms += worker.foreign_waiting * ttft.prefill_ms(prompt, 0)
    output = request.expected_output * request.sequences
    if worker.stalled:
        tpot_ms = step.tpot_ms(worker.sequences, worker.context_tokens)
        queue_ms += worker.stalled * request.expected_output * tpot_ms
    per_token = step.per_1k_context_ms / 1000.0
    beside = output * worker.sequences if worker.beside is None else worker.beside * request.sequences
    context = (
        output * worker.context_tokens
        if worker.context_beside is None
        else worker.context_beside * request.sequences
    )
    decode_ms = settings.decode_weight * (
        step.per_sequence_ms * beside
        + per_token * context
        + beside * (step.per_sequence_ms + per_token * prompt)
    )
    most = request.most_cached_tokens
    least = prompt - most if prompt > most else 0
    again_ms = prefill_ms - ttft.prefill_ms(least, most) if uncovered != least or offloaded else 0.0
    if again_ms > 0.0:
        rare = 1.0 - min(1.0, request.prefix_share / settings.max_prefix_share)
        decode_ms += delayed(worker.sequences, worker.utilization, settings) * rare * again_ms
    kv_risk_ms = 0.0
    if worker.capacity_tokens is not None:
        missing = worker.held_tokens + prompt - request.cached_tokens + output - worker.capacity_tokens
        if missing > 0.0:
            kv_risk_ms = missing * ttft.per_token_ms
    if worker.unused_tokens is not None:
        evicted = uncovered + output - worker.unused_tokens
        if evicted > 0.0:
            kv_risk_ms += settings.eviction * worker.reuse * evicted * ttft.per_token_ms
    return CostBreakdown(queue_ms, prefill_ms, decode_ms, kv_risk_ms)
