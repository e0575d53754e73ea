"""What spans say. `gen_ai.*` and `server.*` are OpenTelemetry's conventions, `warmroute.*` our own words.

Durations end in `_ms`, sizes in `_tokens`; what is not known is left out. No attribute holds prompt text, a
cache salt, or the ticket that names a lease.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from extproc.adapters.telemetry.request_metrics import prompt_tokens, ttft_error_ms, warmth
from extproc.core.outcomes import Released
from extproc.core.types import Candidate, Decision

Value = str | bool | int | float
Attributes = dict[str, Value]

# The conventions' names of what is asked for, by path.
_OPERATIONS: Mapping[str, str] = MappingProxyType(
    {
        "/v1/chat/completions": "chat",
        "/v1/responses": "chat",
        "/v1/messages": "chat",
        "/v1/completions": "text_completion",
        "/v1/embeddings": "embeddings",
    }
)
_PROVIDER = "vllm"

CANDIDATE: Mapping[str, str] = MappingProxyType(
    {
        "worker": "who",
        "cached_tokens": "predicted prefix hit",
        "offloaded_tokens": "predicted to be loadable from a slower tier, beyond that",
        "doubtful_tokens": "claimed beyond that, and to be verified before it is predicted",
        "uncovered_tokens": "prefill left to compute",
        "overlap": "share of the prompt predicted to be there, 0 to 1",
        "confidence": "share of the predicted hit that the price counts on, 0 to 1",
        "cost.queue_ms": "cost term: waiting",
        "cost.prefill_ms": "cost term: uncovered prefill",
        "cost.decode_ms": "cost term: impact on decodes, ours and theirs",
        "cost.kv_risk_ms": "cost term: KV memory running out, and evictions",
        "cost.total_ms": "their sum",
        "ttft_ms": "predicted time to first token",
        "active_requests": "load at decision: our unfinished requests there",
        "sequences": "load at decision: sequences running there, ours and others'",
        "context_tokens": "load at decision: context our sequences hold",
        "queued_prefill_tokens": "load at decision: prefill sent there and not computed yet",
        "metrics_age_s": "age of the engine's own figures",
    }
)
"""Attributes of one candidate, under `warmroute.chosen.` and `warmroute.next.`, with their meanings."""


def decision_attributes(decision: Decision, path: str) -> Attributes:
    """The decision: the chosen and the next best candidate with every cost term, and why."""
    request = decision.request
    namespace = request.namespace
    found: Attributes = {
        **_gen_ai(decision, path),
        "warmroute.request_id": request.request_id,
        "warmroute.pool": request.pool,
        "warmroute.policy": decision.policy,
        "warmroute.reason": decision.reason.value,
        "warmroute.mode": request.mode.value,
        "warmroute.prompt_tokens": request.prompt_tokens,
        "warmroute.candidates": decision.considered or len(decision.candidates),
        "warmroute.namespace": "/".join(
            (namespace.model_revision, namespace.tokenizer_revision, namespace.adapter or "")
        ),
        "warmroute.namespace.salted": namespace.cache_salt is not None,
    }
    for name, text in (
        ("prompt_class", request.prompt_class),
        ("tenant", request.tenant),
        ("traffic_class", request.traffic_class),
        ("load_only", request.load_only),
    ):
        if text:
            found[f"warmroute.{name}"] = text
    if decision.output is not None:
        found["warmroute.expected_output_tokens"] = decision.output.expected
        found["warmroute.expected_output_source"] = decision.output.source.value
    for role, candidate in zip(("chosen", "next"), decision.candidates, strict=False):
        found |= {
            f"warmroute.{role}.{name}": value
            for name, value in _candidate(candidate, request.prompt_tokens)
            if value is not None
        }
    for choice in decision.shadow:
        prefix = f"warmroute.shadow.{choice.policy}"
        found[f"{prefix}.worker"] = str(choice.chosen.worker)
        found[f"{prefix}.reason"] = choice.reason.value
        found[f"{prefix}.cost.total_ms"] = choice.chosen.cost.total_ms
    return found


def completion_attributes(released: Released) -> Attributes:
    """What became of the request, beside what was predicted."""
    decision, completion = released.lease.decision, released.completion
    served = completion.served_by or decision.chosen.worker.endpoint
    found: dict[str, Value | None] = {
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": decision.request.model or None,
        "gen_ai.usage.input_tokens": completion.prompt_tokens,
        "gen_ai.usage.output_tokens": completion.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": completion.cached_tokens,
        **_server(served),
        "http.response.status_code": completion.status,
        "warmroute.request_id": decision.request.request_id,
        "warmroute.pool": decision.request.pool,
        "warmroute.reason": decision.reason.value,
        "warmroute.outcome": completion.outcome.value,
        "warmroute.attempts": completion.attempts,
        "warmroute.details": completion.details,
        "warmroute.warmth": warmth(released),
        "warmroute.duration_ms": completion.duration_ms,
        "warmroute.prefill_tokens": (
            None
            if completion.cached_tokens is None
            else max(0, prompt_tokens(released) - completion.cached_tokens)
        ),
        "warmroute.predicted.cached_tokens": released.predicted_cached_tokens,
        "warmroute.predicted.ttft_ms": decision.chosen.cost.ttft_ms,
        "warmroute.error.ttft_ms": ttft_error_ms(released),
    }
    if decision.request.stream and completion.first_body_ms is not None:
        found["gen_ai.response.time_to_first_chunk"] = completion.first_body_ms / 1000.0
        found["warmroute.ttft_ms"] = completion.first_body_ms
    predicted, actual = released.predicted_cached_tokens, completion.cached_tokens
    if predicted is not None and actual is not None:
        found["warmroute.error.cached_tokens"] = actual - predicted
    return {name: value for name, value in found.items() if value is not None}


def _gen_ai(decision: Decision, path: str) -> Attributes:
    request = decision.request
    operation = _OPERATIONS.get(path.partition("?")[0])
    found: dict[str, Value | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": request.model or None,
        "gen_ai.request.max_tokens": request.max_output_tokens,
        "gen_ai.request.stream": request.stream,
        "gen_ai.request.choice.count": request.sequences if request.sequences != 1 else None,
        **_server(decision.chosen.worker.endpoint),
    }
    return {name: value for name, value in found.items() if value is not None}


def _server(endpoint: str) -> Attributes:
    host, _, port = endpoint.rpartition(":")
    address: Attributes = {"server.address": host.strip("[]")}
    if port.isdigit():
        address["server.port"] = int(port)
    return address


def _candidate(candidate: Candidate, tokens: int) -> Iterator[tuple[str, Value | None]]:
    cost = candidate.cost
    there = candidate.cached_tokens + candidate.offloaded_tokens
    values: tuple[Value | None, ...] = (
        str(candidate.worker),
        candidate.cached_tokens,
        candidate.offloaded_tokens,
        candidate.doubtful_tokens,
        candidate.uncovered_tokens,
        there / tokens if tokens else 0.0,
        candidate.confidence,
        cost.queue_ms,
        cost.prefill_ms,
        cost.decode_ms,
        cost.kv_risk_ms,
        cost.total_ms,
        cost.ttft_ms,
        candidate.active,
        candidate.sequences,
        candidate.context_tokens,
        candidate.queued_prefill_tokens,
        candidate.metrics_age_s,
    )
    return zip(CANDIDATE, values, strict=True)
