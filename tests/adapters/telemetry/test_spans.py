import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode

from extproc.adapters.telemetry.spans import Spans
from extproc.adapters.telemetry.stages import Stages
from extproc.core.types import Outcome
from extproc.protocol.rejections import Reject
from tests.adapters.telemetry.values import SPAN, TRACE, Clock, decision, http, released

WALL = 1_700_000_000_000_000_000


@pytest.fixture
def written():
    return InMemorySpanExporter()


@pytest.fixture
def make(written):
    providers = []

    def make(sampler=None):
        provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(written))
        providers.append(provider)
        return Spans(provider.get_tracer("test"))

    yield make
    for provider in providers:
        provider.shutdown()


def stages():
    clock = Clock(10.0)
    made = Stages(clock, lambda: WALL)
    for name, now in (("parse", 10.001), ("match", 10.003), ("decide", 10.004)):
        clock.now = now
        made.mark(name)
    return made


def by_name(written):
    return {span.name: span for span in written.get_finished_spans()}


def hexes(span):
    parent = None if span.parent is None else f"{span.parent.span_id:016x}"
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}", parent


def test_a_decision_hangs_below_the_gateways_span_with_a_child_for_each_stage(make, written):
    make().decided(http(), decision(), stages())
    spans = by_name(written)
    trace, own, parent = hexes(spans["warmroute.decision"])
    assert (trace, parent) == (TRACE, SPAN)
    assert spans["warmroute.decision"].kind is SpanKind.SERVER
    assert set(spans) == {f"warmroute.{name}" for name in ("decision", "parse", "match", "decide")}
    for name in ("parse", "match", "decide"):
        assert hexes(spans[f"warmroute.{name}"])[::2] == (TRACE, own)
    match = spans["warmroute.match"]
    assert (match.start_time, match.end_time) == (WALL + 1_000_000, WALL + 3_000_000)
    assert spans["warmroute.decision"].end_time == WALL + 4_000_000
    assert spans["warmroute.decision"].attributes["warmroute.chosen.cost.total_ms"] == 100.0


def test_the_end_of_a_request_is_a_second_span_below_the_first(make, written):
    spans = make()
    spans.decided(http(), decision("a"), stages())
    trace = spans.finished(released(decision("a")), WALL + 900_000_000)
    done, made = by_name(written)["warmroute.completion"], by_name(written)["warmroute.decision"]
    assert trace == TRACE
    assert hexes(done)[2] == hexes(made)[1]
    assert (done.start_time, done.end_time) == (made.end_time, WALL + 900_000_000)
    assert done.attributes["gen_ai.usage.cache_read.input_tokens"] == 64
    assert done.status.status_code is StatusCode.UNSET
    # It ends once, and what is kept of it is gone.
    assert spans.finished(released(decision("a")), WALL) is None


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.REJECTED, Outcome.LOST])
def test_an_end_that_is_a_fault_is_an_error(make, written, outcome):
    spans = make()
    spans.decided(http(), decision(), stages())
    spans.finished(released(decision(), outcome=outcome, details="why"), WALL)
    span = by_name(written)["warmroute.completion"]
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "why")
    assert span.attributes["error.type"] == outcome.value


def test_engines_get_the_context_of_the_decision(make, written):
    headers = make().decided(http(trace_state="vendor=1"), decision(), stages())
    _, own, _ = hexes(by_name(written)["warmroute.decision"])
    assert headers == {"traceparent": f"00-{TRACE}-{own}-01", "tracestate": "vendor=1"}


def test_what_the_gateway_does_not_sample_is_not_written(make, written):
    spans = make()
    assert spans.decided(http(trace_parent=f"00-{TRACE}-{SPAN}-00"), decision(), stages()) == {}
    assert spans.finished(released(decision()), WALL) is None
    assert written.get_finished_spans() == ()


def test_without_a_gateways_span_the_sampler_decides(make, written):
    assert make(ParentBased(ALWAYS_OFF)).decided(http(trace_parent=None), decision(), stages()) == {}
    assert written.get_finished_spans() == ()
    assert make(ParentBased(TraceIdRatioBased(1.0))).decided(http(trace_parent=None), decision(), stages())
    assert by_name(written)["warmroute.decision"].parent is None


def test_a_context_that_cannot_be_read_begins_a_new_trace(make, written):
    make().decided(http(trace_parent="garbage"), decision(), stages())
    assert by_name(written)["warmroute.decision"].parent is None


@pytest.mark.parametrize(("status", "code"), [(400, StatusCode.UNSET), (503, StatusCode.ERROR)])
def test_a_refusal_is_a_span_too_and_an_error_where_it_is_ours(make, written, status, code):
    make().rejected(http(), Reject(status, "no", "why_not"), stages())
    span = by_name(written)["warmroute.decision"]
    assert span.attributes["warmroute.rejected"] == "why_not"
    assert span.status.status_code is code
    assert hexes(span)[0] == TRACE
