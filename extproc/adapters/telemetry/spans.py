"""Decisions and completions as spans.

A decision's span is a child of the gateway's (its `traceparent` comes with the ext_proc call, else with the
client's request), with one child for each stage; it is made when the decision is over, from the times that
were noted, so that nothing is carried along meanwhile. What becomes of the request is known much later, when
that span has long been exported: it is a second span, from the decision to the end, a child of the first.
"""

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from extproc.adapters.routing import HttpRequest
from extproc.adapters.telemetry.attributes import completion_attributes, decision_attributes
from extproc.adapters.telemetry.stages import Stages
from extproc.core.outcomes import Released
from extproc.core.types import Decision, Outcome
from extproc.protocol.rejections import Reject

DECISION = "warmroute.decision"
COMPLETION = "warmroute.completion"
_CONTEXT = TraceContextTextMapPropagator()
_WELL = frozenset({Outcome.FINISHED, Outcome.CANCELLED})
_SERVER_ERROR = 500


class Spans:
    """Writes spans with a tracer of an OpenTelemetry SDK; its sampler decides which."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        # Of requests that are traced and have not ended: the decision's span, and when it ended.
        self._open: dict[str, tuple[Context, int]] = {}

    def decided(self, http: HttpRequest, decision: Decision, stages: Stages) -> dict[str, str]:
        """A request was routed. Returns headers that make the engine's span one of the same trace.

        A gateway that traces puts its own in their place, which is then their parent as well as ours.
        """
        span = self._tracer.start_span(
            DECISION, _parent(http), SpanKind.SERVER, start_time=stages.unix_ns(stages.started)
        )
        if not span.is_recording():
            return {}
        span.set_attributes({**decision_attributes(decision, http.path), **stages.about})
        context = self._stages(set_span_in_context(span, Context()), stages)
        ended = stages.unix_ns(stages.ended)
        span.end(ended)
        self._open[decision.lease_id] = context, ended
        headers: dict[str, str] = {}
        _CONTEXT.inject(headers, context)
        return headers

    def rejected(self, http: HttpRequest, reject: Reject, stages: Stages) -> None:
        """A request was refused."""
        span = self._tracer.start_span(
            DECISION, _parent(http), SpanKind.SERVER, start_time=stages.unix_ns(stages.started)
        )
        if not span.is_recording():
            return
        span.set_attributes(
            {
                "warmroute.request_id": http.request_id,
                "warmroute.rejected": reject.why,
                "error.type": reject.why,
                "http.response.status_code": reject.status,
                **stages.about,
            }
        )
        if reject.status >= _SERVER_ERROR:
            span.set_status(Status(StatusCode.ERROR, reject.message))
        self._stages(set_span_in_context(span, Context()), stages)
        span.end(stages.unix_ns(stages.ended))

    def finished(self, released: Released, now_ns: int) -> str | None:
        """A request has ended. Returns the id of its trace, in hex, if it is traced."""
        found = self._open.pop(released.lease.id, None)
        if found is None:
            return None
        context, began = found
        span = self._tracer.start_span(COMPLETION, context, start_time=began)
        span.set_attributes(completion_attributes(released))
        outcome = released.completion.outcome
        if outcome not in _WELL:
            span.set_attribute("error.type", outcome.value)
            span.set_status(Status(StatusCode.ERROR, released.completion.details or outcome.value))
        span.end(max(now_ns, began))
        return format_trace_id(span.get_span_context().trace_id)

    def _stages(self, context: Context, stages: Stages) -> Context:
        for stage in stages.all():
            child = self._tracer.start_span(
                f"warmroute.{stage.name}", context, start_time=stages.unix_ns(stage.start)
            )
            child.end(stages.unix_ns(stage.end))
        return context


def _parent(http: HttpRequest) -> Context:
    # An explicit context: whatever else this process traces is no parent of ours.
    if http.trace_parent is None:
        return Context()
    carrier = {"traceparent": http.trace_parent}
    if http.trace_state:
        carrier["tracestate"] = http.trace_state
    return _CONTEXT.extract(carrier, Context())
