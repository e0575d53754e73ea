"""The decision log's line: one JSON object per finished request, made from values the router returned.

A line is enough to make its decision again: `settings` and `facts` hold what all candidates were priced
with, each candidate's own `facts` what differs from one to another (see `extproc.core.cost` for both),
`inputs` what the policy brought itself. Where a policy leaves it to chance, the lower `draw` goes first.

No line ever holds prompt text. It is written by `extproc.adapters.decision_writer`.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from random import Random
from typing import Any

import msgspec

from extproc.core.load_ledger import Lease
from extproc.core.namespace import RoutingNamespace
from extproc.core.outcomes import Released
from extproc.core.ttft_errors import relative_error
from extproc.core.types import Candidate, Completion, Decision, Outcome


def _ms(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _draws(decision: Decision) -> list[int]:
    """By position: the place of each candidate in the random order that ties are broken by."""
    count = decision.considered
    drawn = Random(decision.tie_seed).sample(range(count), count)  # noqa: S311 - the policy's own chance again
    draws = [0] * count
    for place, position in enumerate(drawn):
        draws[position] = place
    return draws


def _facts(candidates: Sequence[Candidate]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What candidates were priced from, unrounded: common to all of them, and each one's own."""
    all_facts = [
        {}
        if candidate.priced is None
        else {
            kind: msgspec.to_builtins(facts)
            for kind, facts in zip(candidate.priced._fields, candidate.priced, strict=True)
        }
        for candidate in candidates
    ]
    common: dict[str, dict[str, Any]] = {}
    for kind, facts in all_facts[0].items():
        common[kind] = {
            name: value
            for name, value in facts.items()
            if all(kind in other and other[kind][name] == value for other in all_facts[1:])
        }
    own = [
        {
            kind: {name: value for name, value in values.items() if name not in common.get(kind, ())}
            for kind, values in facts.items()
        }
        for facts in all_facts
    ]
    return common, own


def _shares(candidate: Candidate) -> dict[str, Any]:
    facts = candidate.shares
    prefix = None if facts.prefix is None else f"{facts.prefix:016x}"
    return {**facts._asdict(), "prefix": prefix}


def _candidate(candidate: Candidate, draw: int, facts: dict[str, Any]) -> dict[str, Any]:
    cost = candidate.cost
    return {
        "worker": str(candidate.worker),
        "cached_tokens": candidate.cached_tokens,
        "offloaded_tokens": candidate.offloaded_tokens,
        "uncovered_tokens": candidate.uncovered_tokens,
        "queue_ms": _ms(cost.queue_ms),
        "prefill_ms": _ms(cost.prefill_ms),
        "decode_ms": _ms(cost.decode_ms),
        "kv_risk_ms": _ms(cost.kv_risk_ms),
        "total_ms": _ms(cost.total_ms),
        "active": candidate.active,
        "queued_prefill_tokens": candidate.queued_prefill_tokens,
        "sequences": candidate.sequences,
        "context_tokens": candidate.context_tokens,
        "block_size": candidate.block_size,
        "metrics_age_s": _ms(candidate.metrics_age_s),
        "confidence": round(candidate.confidence, 3),
        "doubtful_tokens": candidate.doubtful_tokens,
        "odds": round(candidate.odds, 3),
        "position": candidate.position,
        "shares": _shares(candidate),
        "draw": draw,
        "facts": facts,
    }


def prefix_key(released: Released) -> str | None:
    """Names the prefix that decided: the routing namespace, then the chain hash of the longest known prefix.

    Where no prefix is known it is the hash of the first block. Equal keys mean equal tokens, of one tenant,
    in one namespace; equal hashes behind different namespaces mean that the engine shares them. None when
    the prompt has no full block or was not tokenized.
    """
    lease = released.lease
    if not lease.reserved or not lease.reserved[0]:
        return None
    hashes = lease.reserved[0]
    block_size = lease.decision.chosen.block_size or 1
    longest = max(c.cached_tokens for c in lease.decision.candidates) // block_size
    request = lease.decision.request
    space = RoutingNamespace(request.namespace, request.pool, request.tenant, request.template_version)
    return f"{space.key}:{hashes[min(max(longest, 1), len(hashes)) - 1]:016x}"


def record(released: Released, finished_at: datetime) -> dict[str, Any]:
    """The line for one ended request. Times are milliseconds, sizes tokens; null means not known."""
    decision, completion = released.lease.decision, released.completion
    request, chosen = decision.request, decision.chosen
    decided_at = finished_at - timedelta(seconds=max(0.0, released.released_at - decision.decided_at))
    facts, own_facts = _facts(decision.candidates)
    draws = _draws(decision)
    return {
        "time": finished_at.isoformat(timespec="milliseconds"),
        "decided": decided_at.isoformat(timespec="milliseconds"),
        "request_id": request.request_id,
        "model": request.model,
        "alias": request.alias,
        "pool": request.pool,
        "tenant": request.tenant or None,
        "adapter": request.namespace.adapter,
        "model_revision": request.namespace.model_revision or None,
        "template_version": request.template_version or None,
        "salted": request.namespace.cache_salt is not None,
        "prefix_key": prefix_key(released),
        "selected_worker": str(chosen.worker),
        "served_by": completion.served_by,
        "mode": request.mode.value,
        "traffic_class": request.traffic_class or None,
        "policy": decision.policy,
        "decision": decision.reason.value,
        "load_only": request.load_only,
        "prompt_class": request.prompt_class or None,
        "normalization": None if request.normalization is None else request.normalization._asdict(),
        "stream": request.stream,
        "prompt_tokens": completion.prompt_tokens or request.prompt_tokens,
        "prefill_tokens": chosen.uncovered_tokens,
        "predicted_cached_tokens": released.predicted_cached_tokens,
        "actual_cached_tokens": completion.cached_tokens,
        "output_tokens": completion.output_tokens,
        "evicted_blocks": released.evicted_blocks,
        "expected_output": None if decision.output is None else decision.output._asdict(),
        "queue_wait_ms": _ms(chosen.cost.queue_ms),
        "predicted_ttft_ms": _ms(chosen.cost.ttft_ms),
        "ttft_ms": _ms(completion.first_body_ms),
        "upstream_ttft_ms": _ms(completion.upstream_first_body_ms),
        "ttft_error": _ms(relative_error(released)),
        "duration_ms": _ms(completion.duration_ms),
        "outcome": completion.outcome.value,
        "status": completion.status,
        "attempts": completion.attempts,
        "details": completion.details,
        "shadow": {
            choice.policy: {
                "worker": str(choice.chosen.worker),
                "decision": choice.reason.value,
                "predicted_ttft_ms": _ms(choice.chosen.cost.ttft_ms),
                "total_ms": _ms(choice.chosen.cost.total_ms),
                "inputs": dict(choice.inputs),
            }
            for choice in decision.shadow
        },
        "prompts": request.keyed_prompts,
        "inputs": dict(decision.inputs),
        "tie_seed": decision.tie_seed,
        "settings": decision.costs,
        "facts": facts,
        "candidate_workers": [
            _candidate(candidate, draws[candidate.position], own)
            for candidate, own in zip(decision.candidates, own_facts, strict=True)
        ],
    }


def open_record(lease: Lease, now: float, at: datetime) -> dict[str, Any]:
    """The line a request has while it is not over: what was decided, and `open` as its outcome."""
    undecided = Released(lease, Completion(Outcome.LOST), now)
    return record(undecided, at) | {"outcome": "open"}
