"""One request, one trace: Envoy's spans, ours and the engine's, read from a real OTLP endpoint."""

import dataclasses

import aiohttp
import pytest
from aiohttp import web

from extproc.adapters.envoy_bootstrap import EnvoySettings, StaticWorkers
from extproc.core.types import CostBreakdown
from extproc.protocol.ext_proc_messages import Route
from tests.support.envoy import OLDER_VERSIONS, older_envoy
from tests.support.full_stack import FullStack, Worker
from tests.support.grpc_host import RecordingRouting, running
from tests.support.http import Upstream
from tests.support.otlp import OtlpCollector
from tests.support.sim_engine import SimEngine
from tests.support.vllm import ReplicaSpec

pytestmark = [pytest.mark.envoy]

INGRESS, CALL, UPSTREAM = (
    "ingress",
    "async envoy.service.ext_proc.v3.ExternalProcessor.Process egress",
    "router workers egress",
)
CURRENT = "1.40"
PROMPT = "What does the collector see of a request that passes through all of this? " * 4


def exporting(monkeypatch, collector, protocol="grpc"):
    """Make the router that is started next export its spans soon."""
    monkeypatch.setenv(
        "OTEL_EXPORTER_OTLP_ENDPOINT", collector.grpc if protocol == "grpc" else collector.http
    )
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")


def stack_of(tmp_path, collector, engines, **envoy):
    return FullStack(
        tmp_path,
        [Worker(engine.endpoint, engine.kv_events, engine.kv_replay) for engine in engines],
        settings={
            "shadow": ["round-robin"],
            "envoy": {"message_timeout_s": 10, "trace_collector": collector.grpc_address, **envoy},
        },
    )


async def trace_of(collector, request_id, names):
    """Spans of the request's trace by name, once all of `names` are there."""

    def trace():
        ids = {s.trace for s in collector.spans if s.attributes.get("warmroute.request_id") == request_id}
        return [span for span in collector.spans if span.trace in ids]

    # Envoy sends its spans every five seconds.
    await collector.until_spans(lambda _: set(names) <= {span.name for span in trace()}, f"all of {names}")
    return {span.name: span for span in trace()}


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_envoy_router_and_completion_are_one_trace_with_every_cost_term(
    tmp_path, monkeypatch, protocol
):
    async with OtlpCollector() as collector, SimEngine() as first, SimEngine() as second:
        exporting(monkeypatch, collector, protocol)
        async with stack_of(tmp_path, collector, (first, second)) as stack:
            reply = await stack.chat(PROMPT, stream=True)
            await stack.until(stack.log_entries)
            entry = next(iter(stack.log_entries().values()))
            stages = [f"warmroute.{name}" for name in ("parse", "render", "tokenize", "match", "decide")]
            names = (INGRESS, CALL, UPSTREAM, "warmroute.decision", *stages, "warmroute.completion")
            spans = await trace_of(collector, entry["request_id"], names)
    assert reply.status == 200
    assert set(spans) == set(names)
    assert len({span.trace for span in spans.values()}) == 1
    assert {span.service for span in spans.values()} == {"warmroute-envoy", "warmroute"}

    decision, completion = spans["warmroute.decision"], spans["warmroute.completion"]
    assert spans[INGRESS].parent == ""
    assert spans[CALL].parent == spans[UPSTREAM].parent == spans[INGRESS].id
    assert decision.parent == spans[CALL].id
    assert spans[INGRESS].holds(decision)
    for name in stages:
        assert spans[name].parent == decision.id
        assert decision.holds(spans[name])
    starts = [spans[name].start for name in stages]
    assert starts == sorted(starts)
    assert completion.parent == decision.id
    assert completion.start == decision.end

    found = decision.attributes
    for role, candidate in zip(("chosen", "next"), entry["candidate_workers"], strict=True):
        assert found[f"warmroute.{role}.worker"] == candidate["worker"]
        terms = [field.name for field in dataclasses.fields(CostBreakdown)]
        for term in (*terms, "total_ms"):
            assert found[f"warmroute.{role}.cost.{term}"] == pytest.approx(candidate[term], abs=0.001)
        assert found[f"warmroute.{role}.cost.total_ms"] == pytest.approx(
            sum(found[f"warmroute.{role}.cost.{term}"] for term in terms)
        )
        assert found[f"warmroute.{role}.overlap"] == 0.0
    assert found["warmroute.reason"] == entry["decision"] == "cold-idle"
    assert found["gen_ai.request.model"] == "tiny"
    assert found["warmroute.shadow.round-robin.worker"]
    done = completion.attributes
    assert done["gen_ai.usage.cache_read.input_tokens"] == entry["actual_cached_tokens"] == 0
    assert done["gen_ai.usage.output_tokens"] == entry["output_tokens"] == 8
    assert done["warmroute.ttft_ms"] == pytest.approx(entry["ttft_ms"], abs=0.001)
    assert "warmroute.error.ttft_ms" in done


async def test_a_client_that_is_not_sampled_leaves_no_spans(tmp_path, monkeypatch):
    async with OtlpCollector() as collector, SimEngine() as engine:
        exporting(monkeypatch, collector)
        async with stack_of(tmp_path, collector, (engine,)) as stack:
            quiet, loud = "c" * 32, "d" * 32
            for trace, flags in ((quiet, "00"), (loud, "01")):
                headers = {"traceparent": f"00-{trace}-{'e' * 16}-{flags}"}
                body = {"model": "tiny", "prompt": "Sampled or not?", "max_tokens": 2}
                assert (await stack.post("/v1/completions", body, headers)).status == 200

            def names(trace):
                return {span.name for span in collector.spans if span.trace == trace}

            # The later one being there, the earlier one is not on its way any more.
            await collector.until_spans(lambda _: {INGRESS, "warmroute.completion"} <= names(loud), "spans")
            assert names(quiet) == set()


async def answer(request, _received):
    if request.method == "POST":
        return web.json_response({"choices": []})
    return web.Response(text="vllm:num_requests_running 0\n")


async def test_engines_hang_below_our_decision_where_envoy_does_not_trace(tmp_path, monkeypatch):
    async with OtlpCollector() as collector, Upstream(answer) as engine:
        exporting(monkeypatch, collector)
        workers = [Worker(engine.endpoint, None, None)]
        async with FullStack(tmp_path, workers, pool={"kv_events": {"enabled": False}}) as stack:
            assert (await stack.chat(PROMPT)).status == 200
            await collector.until_spans(lambda _: collector.named("warmroute.decision"), "a decision")
        (decision,) = collector.named("warmroute.decision")
        assert decision.parent == ""
        (received,) = [one for one in engine.requests if one.method == "POST"]
        _version, trace, parent, flags = received.headers["traceparent"].split("-")
        assert (trace, parent) == (decision.trace, decision.id)
        assert int(flags, 16) & 1  # sampled


@pytest.mark.parametrize("version", [*OLDER_VERSIONS, CURRENT])
async def test_every_envoy_hands_its_context_to_router_and_engine(start_envoy, version):
    major, minor = version.split(".")
    async with OtlpCollector() as collector, Upstream() as engine:
        routing = RecordingRouting(Route((engine.endpoint,), "lease-1", {"traceparent": "00-0-0-00"}))
        async with running(routing) as host, aiohttp.ClientSession() as client:
            settings = EnvoySettings(
                workers=StaticWorkers((engine.endpoint,)),
                routers=(host.server.address,),
                envoy_version=(int(major), int(minor)),
                trace_collector=collector.grpc_address,
            )
            envoy = await start_envoy(settings, binary=None if version == CURRENT else older_envoy(version))
            async with client.post(f"{envoy.url}/v1/chat/completions", data=b"{}") as reply:
                assert reply.status == 200
            await collector.until_spans(lambda spans: len(spans) >= 3, "Envoy's spans")
    spans = {span.id: span.name for span in collector.spans}
    assert sorted(spans.values()) == sorted([INGRESS, CALL, UPSTREAM])
    # Ours hangs below the call to us; what we sent to the engine is replaced by Envoy's own.
    assert spans[routing.requests[0].trace_parent.split("-")[2]] == CALL
    assert spans[engine.requests[0].headers["traceparent"].split("-")[2]] == UPSTREAM
    assert len({span.trace for span in collector.spans}) == 1


@pytest.mark.vllm
@pytest.mark.timeout(600)
async def test_a_real_engine_is_in_the_trace(tmp_path, monkeypatch, vllm_pool):
    async with OtlpCollector() as collector:
        exporting(monkeypatch, collector)
        (replica,) = vllm_pool.start(ReplicaSpec(extra_args=("--otlp-traces-endpoint", collector.grpc)))
        async with stack_of(tmp_path, collector, (replica,)) as stack:
            assert (await stack.chat(PROMPT, stream=True)).status == 200
            await stack.until(stack.log_entries)
            request_id = next(iter(stack.log_entries()))
            names = (INGRESS, UPSTREAM, "warmroute.completion", "llm_request")
            spans = await trace_of(collector, request_id, names)
        replica.kill()
    engine, completion = spans["llm_request"], spans["warmroute.completion"]
    assert engine.parent == spans[UPSTREAM].id
    assert (
        engine.attributes["gen_ai.usage.prompt_tokens"] == completion.attributes["gen_ai.usage.input_tokens"]
    )
