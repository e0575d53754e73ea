"""The decision log's line: one JSON object per finished request, made from values the router returned.

A line is enough to make its decision again: `settings` and `facts` hold what all candidates were priced
with, each candidate's own `facts` what differs from one to another (see `extproc.core.cost` for both),
`inputs` what the policy brought itself. Where a policy leaves it to chance, the lower `draw` goes first.

No line ever holds prompt text. It is written by `extproc.adapters.decision_writer`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime, timedelta
from functools import lru_cache
from operator import attrgetter
from random import Random
from types import NoneType
from typing import Any

import msgspec

from extproc.core.cost import RequestFacts, WorkerFacts
from extproc.core.leases import Lease
from extproc.core.namespace import Namespace, RoutingNamespace
from extproc.core.outcomes import Released
from extproc.core.ttft_errors import relative_error
from extproc.core.types import Candidate, Completion, Decision, Outcome


def _ms(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _draws(decision: Decision) -> list[int]:
    """By position: the place of each candidate in the random order that ties are broken by."""
    count = len(decision.candidates)
    _CHANCE.seed(decision.tie_seed)
    drawn = _CHANCE.sample(range(count), count)
    draws = [0] * count
    for place, position in enumerate(drawn):
        draws[position] = place
    return draws


_CHANCE = Random()  # noqa: S311 - the policy's own chance again; seeded anew for each decision


def _facts(candidates: Sequence[Candidate]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What candidates were priced from, unrounded: common to all of them, and each one's own."""
    own: list[dict[str, Any]] = [{} for _ in candidates]
    common: dict[str, dict[str, Any]] = {}
    priced = [candidate.priced for candidate in candidates if candidate.priced is not None]
    if len(priced) < len(candidates):  # nothing is common with one of which nothing is known
        for facts, candidate in zip(own, candidates, strict=True):
            for kind, values in () if candidate.priced is None else candidate.priced._asdict().items():
                facts[kind] = msgspec.to_builtins(values)
        return common, own
    for kind, rows in zip(priced[0]._fields, zip(*priced, strict=True), strict=True):
        names, read = _READERS[type(rows[0])]
        shared = common[kind] = {}
        theirs: list[dict[str, Any]] = [{} for _ in rows]
        for facts, mine in zip(own, theirs, strict=True):
            facts[kind] = mine
        for name, column in zip(names, zip(*map(read, rows), strict=True), strict=True):
            if column.count(column[0]) == len(column):
                shared[name] = _plain(column[0])
                continue
            for mine, value in zip(theirs, column, strict=True):
                mine[name] = value if type(value) in _PLAIN else _plain(value)
    return common, own


_READERS: Mapping[type[object], tuple[tuple[str, ...], Callable[[object], tuple[Any, ...]]]] = {
    kind: (names, attrgetter(*names))
    for kind in (RequestFacts, WorkerFacts)
    for names in (tuple(field.name for field in fields(kind)),)
}
"""Of each kind of facts, the names of its fields, and what reads all of them at once."""


_PLAIN = frozenset({float, int, bool, str, NoneType})


def _plain(value: Any) -> Any:
    return value if type(value) in _PLAIN else msgspec.to_builtins(value)


def _shares(candidate: Candidate) -> dict[str, Any]:
    facts = candidate.shares._asdict()
    prefix = facts["prefix"]
    if prefix is not None:
        facts["prefix"] = f"{prefix:016x}"
    return facts


def _candidate(candidate: Candidate, draw: int, facts: dict[str, Any]) -> dict[str, Any]:
    cost, age_s = candidate.cost, candidate.metrics_age_s
    return {
        "worker": str(candidate.worker),
        "cached_tokens": candidate.cached_tokens,
        "offloaded_tokens": candidate.offloaded_tokens,
        "uncovered_tokens": candidate.uncovered_tokens,
        "queue_ms": round(cost.queue_ms, 3),
        "prefill_ms": round(cost.prefill_ms, 3),
        "decode_ms": round(cost.decode_ms, 3),
        "kv_risk_ms": round(cost.kv_risk_ms, 3),
        "total_ms": round(cost.total_ms, 3),
        "active": candidate.active,
        "queued_prefill_tokens": candidate.queued_prefill_tokens,
        "sequences": candidate.sequences,
        "context_tokens": candidate.context_tokens,
        "block_size": candidate.block_size,
        "metrics_age_s": None if age_s is None else round(age_s, 3),
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
    space = _space_key(request.namespace, request.pool, request.tenant, request.template_version)
    return f"{space}:{hashes[min(max(longest, 1), len(hashes)) - 1]:016x}"


@lru_cache(maxsize=4096)
def _space_key(namespace: Namespace, pool: str, tenant: str, template_version: str) -> str:
    return RoutingNamespace(namespace, pool, tenant, template_version).key


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
        "admission": None if request.admission is None else request.admission._asdict(),
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
        "considered": decision.considered or len(decision.candidates),
        "candidate_workers": [
            _candidate(candidate, draws[candidate.position], own)
            for candidate, own in zip(decision.candidates, own_facts, strict=True)
        ],
    }


def open_record(lease: Lease, now: float, at: datetime) -> dict[str, Any]:
    """The line a request has while it is not over: what was decided, and `open` as its outcome."""
    undecided = Released(lease, Completion(Outcome.LOST), now)
    return record(undecided, at) | {"outcome": "open"}
