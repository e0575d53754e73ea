"""The price of a request on a worker, in milliseconds, by cause.

    queue   = prefill admitted ahead of it and not computed yet            [own leases, and the engine's
              + requests waiting there that are not ours * mean prefill     waiting count beyond them]
    prefill = uncovered / rate + quadratic * uncovered * (context / 1000)   [tokens; attention growth]
              + offloaded / reload_rate                                     [blocks in CPU or disk tiers]
    decode  = expected_output * 2 * step_ms_per_sequence * n                [they slow us, we slow them]
              + expected_output * step_ms_per_1k_context * context_there / 1000
              + interference * (n + 1) * prefill       [our prefill delays them, and whoever is next]
    kv risk = max(0, tokens needed - tokens the worker can hold) / rate     [expected recomputation]

n is the number of sequences running there; sizes are tokens. Source of the shape: prefill is compute
bound and linear until attention dominates; a decode step reads the weights once, plus each sequence's
context, so its time grows with the batch and with the context read (the usual roofline argument).
"""

from dataclasses import dataclass

from extproc.core.types import CostBreakdown


@dataclass(frozen=True, slots=True)
class CostSettings:
    """Coefficients. Rates are priors: they are learned per worker as requests complete.

    Attributes:
        prefill_tokens_per_s: prefill rate until it is learned. 8,000 is a 7-8B model on one A100-class GPU.
        quadratic_ms: extra ms per uncovered token for each 1,000 tokens of context (attention growth).
        reload_tokens_per_s: rate at which offloaded KV comes back to the GPU.
        step_ms_per_sequence: what one more sequence adds to a decode step.
        step_ms_per_1k_context: what 1,000 more tokens of context add to a decode step.
        interference: share of our prefill time that each running sequence, and the next to come, is delayed
            by. It is why, at equal wait, a warm worker wins over an idle cold one: less work is done.
        expected_output_tokens: generated tokens per request until learned.
        tie_ms: costs closer than this (or than 2 %) are equal.
        max_extra_ttft_ms: a warm worker may be worse than the best cold one by this much predicted TTFT.
        max_warm_wait_ms: with a longer queue, warmth no longer counts against a faster cold worker.
    """

    prefill_tokens_per_s: float = 8_000.0
    quadratic_ms: float = 0.0
    reload_tokens_per_s: float = 60_000.0
    step_ms_per_sequence: float = 0.1
    step_ms_per_1k_context: float = 0.02
    interference: float = 0.25
    expected_output_tokens: float = 128.0
    tie_ms: float = 1.0
    max_extra_ttft_ms: float = 2_000.0
    max_warm_wait_ms: float = 10_000.0


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What the price depends on, besides the request. None: not known."""

    prefill_tokens_per_s: float
    queued_prefill_ms: float
    foreign_waiting: float  # requests waiting there that are not ours
    sequences: int  # running there, ours and others'
    context_tokens: int
    capacity_tokens: int | None


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What the price depends on, besides the worker. Tokens."""

    prompt_tokens: int
    uncovered_tokens: int
    offloaded_tokens: int
    expected_output: float
    sequences: int


def price(request: RequestFacts, worker: WorkerFacts, settings: CostSettings) -> CostBreakdown:
    """Predicted cost of `request` on `worker`."""
    per_token_ms = 1000.0 / worker.prefill_tokens_per_s
    prefill_ms = (
        request.uncovered_tokens * per_token_ms
        + settings.quadratic_ms * request.uncovered_tokens * request.prompt_tokens / 1000.0
        + request.offloaded_tokens * 1000.0 / settings.reload_tokens_per_s
    )
    queue_ms = worker.queued_prefill_ms + worker.foreign_waiting * request.prompt_tokens * per_token_ms
    output = request.expected_output * request.sequences
    decode_ms = (
        output * 2.0 * settings.step_ms_per_sequence * worker.sequences
        + output * settings.step_ms_per_1k_context * worker.context_tokens / 1000.0
        + settings.interference * (worker.sequences + 1) * prefill_ms
    )
    kv_risk_ms = 0.0
    if worker.capacity_tokens is not None:
        needed = worker.context_tokens + request.prompt_tokens + output
        kv_risk_ms = max(0.0, needed - worker.capacity_tokens) * per_token_ms
    return CostBreakdown(queue_ms, prefill_ms, decode_ms, kv_risk_ms)
