"""Decisions and completions for the tests of this folder."""

from dataclasses import replace

from extproc.adapters.routing import HttpRequest
from extproc.core.load_ledger import LoadLedger
from extproc.core.outcomes import Released
from extproc.core.types import (
    Completion,
    CostBreakdown,
    Decision,
    LengthEstimate,
    LengthSource,
    Outcome,
    Reason,
    ShadowChoice,
)
from tests.support.core import candidate, request

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def http(path="/v1/chat/completions", *, trace_parent=f"00-{TRACE}-{SPAN}-01", trace_state=None):
    return HttpRequest(
        method="POST",
        path=path,
        headers={},
        body=b"{}",
        subset=None,
        trace_parent=trace_parent,
        request_id="request-1",
        trace_state=trace_state,
    )


def decision(
    lease_id="lease-1",
    *,
    cached=0,
    next_cached=0,
    tokens=100,
    reason=Reason.COLD_IDLE,
    shadow_total=None,
    **fields,
):
    """Two candidates, worker 0 (chosen) and worker 1, all their figures different."""
    chosen = replace(
        candidate(
            0, cached=cached, uncovered=tokens - cached, cost=CostBreakdown(10.0, 20.0, 30.0, 40.0), active=3
        ),
        sequences=4,
        context_tokens=500,
        queued_prefill_tokens=60.0,
        metrics_age_s=0.25,
        confidence=0.75,
    )
    other = candidate(
        1, cached=next_cached, uncovered=tokens - next_cached, cost=CostBreakdown(1.5, 200.0, 3.5, 4.5)
    )
    shadow = ()
    if shadow_total is not None:
        shadow = (
            ShadowChoice(
                "least-load", replace(other, cost=CostBreakdown(0.0, shadow_total, 0.0, 0.0)), reason
            ),
        )
    defaults = {"prompt_tokens": tokens, "stream": True, "prompt_class": "document", "tenant": "acme"}
    routed = request(range(fields.pop("ids", tokens)), **{**defaults, **fields})
    return Decision(
        lease_id,
        routed,
        (chosen, other),
        reason,
        "token-load",
        0.0,
        shadow=shadow,
        considered=2,
        output=LengthEstimate(99.0, 200.0, LengthSource.HINT),
    )


def released(made=None, **completion):
    """`made`, served by worker 0 and finished, unless `completion` says otherwise."""
    made = made or decision()
    lease = LoadLedger().admit(made, 1, ((1, 2, 3),), 0.0, 100.0)
    defaults = {
        "outcome": Outcome.FINISHED,
        "served_by": made.chosen.worker.endpoint,
        "status": 200,
        "attempts": 1,
        "first_body_ms": 50.0,
        "upstream_first_body_ms": 45.0,
        "duration_ms": 900.0,
        "prompt_tokens": made.request.prompt_tokens,
        "cached_tokens": 64,
        "output_tokens": 7,
    }
    return Released(lease, Completion(**{**defaults, **completion}), 1.0)


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self, now=0.0):
        self.now = now

    def __call__(self):
        return self.now
