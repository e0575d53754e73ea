"""What one entry of Envoy's access log says about a request of ours. No I/O.

How a request ended, first match wins:

| outcome | when |
|---|---|
| FAILED | details `upstream_reset_after_response_started`: died while answering, the status stays 200 |
| CANCELLED | the client closed its connection or reset its stream |
| REJECTED | no worker was reached: none chosen, no route, no connection, or refused by us (`warmroute_…`) |
| FAILED | the worker reset the stream, broke the protocol, or ran into a time limit |
| FINISHED | anything else: a complete answer, whatever its status |
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from extproc.core.types import Completion, Outcome
from extproc.protocol.names import shown
from extproc.protocol.usage import normalize

USAGE_NAMESPACE = "llm.usage"
TICKET_TAG = "ticket"
FIRST_BODY_TAG = "first_body_us"
UPSTREAM_FIRST_BODY_TAG = "prefill_us"

# envoy.data.accesslog.v3.AccessLogType: the entry is the last one about its request.
_NOT_SET, _DOWNSTREAM_END = 0, 6

_MOST_DIGITS = 16  # three hundred years

_CLIENT_GONE = frozenset({"downstream_connection_termination", "downstream_remote_reset"})
_NOT_REACHED = frozenset(
    {
        "no_healthy_upstream",
        "no_route_found",
        "no_cluster_found",
        "upstream_overflow",
        "upstream_connection_failure",
        "dns_resolution_failure",
        "rate_limited",
        "unauthorized_details",
        "overload_manager",
        "downstream_protocol_error",
        "invalid_envoy_request_headers",
    }
)
_WORKER_FAILED = frozenset(
    {
        "local_reset",
        "upstream_remote_reset",
        "upstream_connection_termination",
        "upstream_protocol_error",
    }
)
_TIME_LIMITS = frozenset(
    {
        "upstream_request_timeout",
        "upstream_max_stream_duration_reached",
        "stream_idle_timeout",
        "duration_timeout",
    }
)


@dataclass(frozen=True, slots=True)
class AccessLogEntry:
    """An entry as plain values. `flags`: names of the response flags that are set. `usage`: raw numbers."""

    ticket: str | None
    log_type: int = _NOT_SET
    intermediate: bool = False
    flags: frozenset[str] = frozenset()
    status: int | None = None
    details: str = ""
    upstream: str | None = None  # ip:port
    attempts: int | None = None
    duration_ms: float | None = None
    response_bytes: int = 0
    tags: Mapping[str, str] = field(default_factory=dict)
    usage: Mapping[str, object] = field(default_factory=dict)
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """A request that is still running. `first_body_ms` is None until its answer's body began."""

    first_body_ms: float | None
    response_bytes: int


def read_entry(entry: AccessLogEntry) -> tuple[str, Completion | Progress] | None:
    """The ticket and what became of it; None if the entry is not about a request we placed."""
    ticket = _ticket(entry)
    if ticket is None:
        return None
    first_body_ms = _milliseconds(entry.tags.get(FIRST_BODY_TAG))
    if entry.intermediate or entry.log_type not in (_NOT_SET, _DOWNSTREAM_END):
        return ticket, Progress(first_body_ms, entry.response_bytes)
    outcome = classify(entry)
    reached = outcome is not Outcome.REJECTED
    usage = normalize(entry.usage)
    return ticket, Completion(
        outcome=outcome,
        served_by=entry.upstream if reached else None,
        status=entry.status,
        attempts=entry.attempts,
        first_body_ms=first_body_ms,
        upstream_first_body_ms=_milliseconds(entry.tags.get(UPSTREAM_FIRST_BODY_TAG)),
        duration_ms=entry.duration_ms,
        prompt_tokens=usage.prompt_tokens if usage else None,
        cached_tokens=usage.cached_tokens if usage else None,
        output_tokens=usage.output_tokens if usage else None,
        details=entry.details or None,
        labels=_labels(entry, outcome),
    )


def left_early(entry: AccessLogEntry) -> tuple[str, Completion] | None:
    """The request id and the end of a request that may have been placed though its entry has no ticket.

    Its client left while Envoy had not taken our answer, so there is no worker either; None: it is none such.
    """
    if _ticket(entry) is not None or not entry.request_id or entry.upstream is not None:
        return None
    if entry.intermediate or entry.log_type not in (_NOT_SET, _DOWNSTREAM_END):
        return None
    if classify(entry) is not Outcome.CANCELLED:
        return None
    completion = Completion(
        Outcome.CANCELLED,
        status=entry.status,
        duration_ms=entry.duration_ms,
        details=entry.details or None,
    )
    return shown(entry.request_id), completion


def classify(entry: AccessLogEntry) -> Outcome:
    """How a finished request ended (see the module's table)."""
    if entry.details.startswith("upstream_reset_after_response_started"):
        return Outcome.FAILED
    if entry.flags & _CLIENT_GONE:
        return Outcome.CANCELLED
    if entry.upstream is None or entry.flags & _NOT_REACHED or entry.details.startswith("warmroute_"):
        return Outcome.REJECTED
    if entry.flags & (_WORKER_FAILED | _TIME_LIMITS):
        return Outcome.FAILED
    return Outcome.FINISHED


def _labels(entry: AccessLogEntry, outcome: Outcome) -> dict[str, str]:
    """What a completion says besides: who could not be reached, and which time limit was over."""
    if outcome is Outcome.REJECTED:
        return {} if entry.upstream is None else {"tried": entry.upstream}
    limits = entry.flags & _TIME_LIMITS
    if outcome is not Outcome.FAILED or not limits or entry.flags & _WORKER_FAILED:
        return {}
    return {"time_limit": min(limits)}


def _ticket(entry: AccessLogEntry) -> str | None:
    # Envoy writes "-" for what is not there.
    ticket = entry.ticket or entry.tags.get(TICKET_TAG)
    return ticket if ticket and ticket != "-" else None


def _milliseconds(microseconds: str | None) -> float | None:
    # Envoy writes "-" for what did not happen.
    if microseconds is None or not (microseconds.isascii() and microseconds.isdigit()):
        return None
    if len(microseconds) > _MOST_DIGITS:
        return None
    return int(microseconds) / 1000
