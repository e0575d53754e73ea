"""Small builders for the core's values."""

from extproc.core.cost import CostSettings
from extproc.core.hashing import prompt_chain, token_array
from extproc.core.namespace import Namespace
from extproc.core.types import (
    BlockStored,
    Candidate,
    CostBreakdown,
    Decision,
    EngineMetrics,
    LengthEstimate,
    LengthSource,
    Member,
    Reason,
    RoutingRequest,
    WorkerId,
)

NAMESPACE = Namespace("model", "tokenizer")
BLOCK = 16


def worker(n=0):
    return WorkerId(f"10.0.0.{n}:8000")


def members(count, **fields):
    return tuple(Member(worker(n).endpoint, **fields) for n in range(count))


def request(tokens=(), *, request_id="r", max_output=16, **fields):
    prompt = token_array(tokens)
    return RoutingRequest(
        request_id=request_id,
        model="tiny",
        pool="default",
        namespace=fields.pop("namespace", NAMESPACE),
        prompts=(prompt,) if len(prompt) else (),
        prompt_tokens=fields.pop("prompt_tokens", len(prompt)),
        max_output_tokens=max_output,
        **fields,
    )


def candidate(n=0, *, cached=0, uncovered=100, cost=None, active=0, queued=0.0, block_size=BLOCK):
    return Candidate(
        worker=worker(n),
        cached_tokens=cached,
        offloaded_tokens=0,
        uncovered_tokens=uncovered,
        block_size=block_size,
        cost=cost or CostBreakdown(0.0, float(uncovered), 0.0, 0.0),
        active=active,
        queued_prefill_tokens=queued,
        metrics_age_s=None,
    )


def decision(
    lease_id="l",
    n=0,
    *,
    prompt_tokens=100,
    prefill_ms=100.0,
    uncovered=100,
    now=0.0,
    sequences=1,
    output=None,
):
    chosen = candidate(n, uncovered=uncovered, cost=CostBreakdown(0.0, prefill_ms, 0.0, 0.0))
    limit = 16 if output is None else None
    routed = request(prompt_tokens=prompt_tokens, sequences=sequences, max_output=limit)
    expected = None if output is None else LengthEstimate(output, output, LengthSource.MODEL)
    return Decision(lease_id, routed, (chosen,), Reason.COLD_IDLE, "token-load", now, output=expected)


def stored(tokens, *, block_size=BLOCK, first_handle=1, parent=None, **fields):
    """One event that stores every full block of `tokens`, with small integers as engine hashes."""
    count = len(tokens) // block_size
    return BlockStored(
        block_hashes=tuple(range(first_handle, first_handle + count)),
        parent=parent,
        token_ids=list(tokens[: count * block_size]),
        block_size=block_size,
        **fields,
    )


def hashes(tokens, block_size=BLOCK, namespace=NAMESPACE):
    return prompt_chain(token_array(tokens), block_size, namespace.seed)


def metrics(**fields):
    defaults = {"running": 0, "waiting": 0, "block_size": BLOCK, "num_gpu_blocks": 10_000}
    return EngineMetrics(**{**defaults, **fields})


COSTS = CostSettings(prefill_tokens_per_s=1000.0)
