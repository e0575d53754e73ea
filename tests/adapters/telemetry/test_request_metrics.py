import pytest
from prometheus_client import CollectorRegistry

from extproc.adapters.telemetry.labels import ServedModels
from extproc.adapters.telemetry.request_metrics import RequestMetrics, timed_out, ttft_error_ms, warmth
from extproc.adapters.telemetry.stages import Stages
from extproc.core.kv_lifetimes import Evictions
from extproc.core.outcomes import STOPPED
from extproc.core.rollout import Mode
from extproc.core.types import Completion, Normalization, Outcome, Reason
from tests.adapters.telemetry.values import Clock, decision, released
from tests.support.core import worker

GROUP = {"pool": "default", "prompt_class": "document"}
TOKENS = {"model": "tiny", **GROUP}
ENFORCED = {**GROUP, "mode": "enforce"}


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def metrics(registry):
    return RequestMetrics(registry, ServedModels(lambda name: name == "tiny"))


def decide(metrics, made, *marks):
    clock = Clock()
    stages = Stages(clock)
    for name, now in marks:
        clock.now = now
        stages.mark(name)
    metrics.decided(made, stages)


def test_a_decision_is_counted_by_policy_and_reason_with_its_stages_and_predicted_wait(metrics, registry):
    decide(metrics, decision(), ("parse", 0.002), ("match", 0.005), ("decide", 0.0055))
    value = registry.get_sample_value
    labels = {"pool": "default", "policy": "token-load", "reason": "cold-idle", "mode": "enforce"}
    assert value("warmroute_decisions_total", labels) == 1
    seconds = "warmroute_decision_duration_seconds_sum"
    assert value(seconds, {"stage": "parse"}) == pytest.approx(0.002)
    assert value(seconds, {"stage": "match"}) == pytest.approx(0.003)
    assert value(seconds, {"stage": "total"}) == pytest.approx(0.0055)
    wait = {**GROUP, "reason": "cold-idle"}
    assert value("warmroute_queue_wait_seconds_sum", wait) == pytest.approx(0.010)
    assert value("warmroute_load_only_total", {"pool": "default", "cause": "path"}) is None


def test_what_became_of_warmth_is_counted_where_there_was_any(metrics, registry):
    def counts():
        found = {
            result: registry.get_sample_value("warmroute_warm_requests_total", {**GROUP, "result": result})
            for result in ("taken", "passed", "denied")
        }
        return {result: count for result, count in found.items() if count}

    decide(metrics, decision())
    assert counts() == {}
    decide(metrics, decision(cached=64, reason=Reason.WARM_PARTIAL))
    decide(metrics, decision(next_cached=64))
    decide(metrics, decision(next_cached=64, reason=Reason.WARM_DENIED_WAIT))
    assert counts() == {"taken": 1, "passed": 1, "denied": 1}


@pytest.mark.parametrize(("total", "result", "regret"), [(40.0, "cheaper", 0.060), (180.0, "dearer", 0.080)])
def test_a_shadow_shows_what_it_would_have_saved_or_lost(metrics, registry, total, result, regret):
    decide(metrics, decision(shadow_total=total))  # ours costs 100 ms
    labels = {"pool": "default", "policy": "least-load", "result": result}
    assert registry.get_sample_value("warmroute_shadow_decisions_total", labels) == 1
    assert registry.get_sample_value("warmroute_shadow_regret_seconds_total", labels) == pytest.approx(regret)


def test_why_a_request_was_routed_by_load_is_counted(metrics, registry):
    decide(metrics, decision(load_only="prompt-budget"))
    labels = {"pool": "default", "cause": "prompt-budget"}
    assert registry.get_sample_value("warmroute_load_only_total", labels) == 1


def test_what_normalization_did_is_counted(metrics, registry):
    decide(metrics, decision())
    decide(metrics, decision(normalization=Normalization("unchanged", {})))
    for count in (2, 3):
        decide(metrics, decision(normalization=Normalization("applied", {"key-order": count})))
    labels = {"pool": "default", "outcome": "applied"}
    assert registry.get_sample_value("warmroute_normalized_requests_total", labels) == 2
    changes = {**labels, "rule": "key-order"}
    assert registry.get_sample_value("warmroute_normalization_changes_total", changes) == 5
    unchanged = {"pool": "default", "outcome": "unchanged"}
    assert registry.get_sample_value("warmroute_normalized_requests_total", unchanged) == 1


def test_tokens_cached_and_not_and_what_a_cold_start_would_have_computed(metrics, registry):
    metrics.finished(released(decision(cached=64, tokens=100), cached_tokens=64, output_tokens=7))
    value = registry.get_sample_value
    assert value("warmroute_input_tokens_total", {**TOKENS, "cache": "cached"}) == 64
    assert value("warmroute_input_tokens_total", {**TOKENS, "cache": "uncached"}) == 36
    assert value("warmroute_output_tokens_total", TOKENS) == 7
    assert value("warmroute_prefill_cold_tokens_total", ENFORCED) == 100
    assert value("warmroute_prefill_computed_tokens_total", ENFORCED) == 36


def test_an_engine_that_does_not_say_leaves_the_prediction(metrics, registry):
    metrics.finished(released(decision(cached=48, tokens=100), cached_tokens=None))
    value = registry.get_sample_value
    assert value("warmroute_input_tokens_total", {**TOKENS, "cache": "unknown"}) == 100
    assert value("warmroute_prefill_computed_tokens_total", ENFORCED) == 52


def test_a_request_that_reached_no_worker_computed_nothing(metrics, registry):
    metrics.finished(released(outcome=Outcome.REJECTED, status=503, cached_tokens=None))
    assert registry.get_sample_value("warmroute_prefill_cold_tokens_total", ENFORCED) is None
    assert registry.get_sample_value("warmroute_requests_total", {**TOKENS, "outcome": "rejected"}) == 1


@pytest.mark.parametrize(
    ("cached", "expected"), [(0, "cold"), (32, "partial"), (80, "partial"), (96, "warm"), (84, "warm")]
)
def test_warmth_is_what_the_engine_found(cached, expected):
    assert warmth(released(decision(cached=0, tokens=100), cached_tokens=cached)) == expected


def test_warmth_is_predicted_where_the_engine_does_not_say_and_else_unknown():
    assert warmth(released(decision(cached=96, tokens=100), cached_tokens=None)) == "warm"
    unread = decision(ids=0, load_only="path")
    assert warmth(released(unread, cached_tokens=None)) == "unknown"


def test_time_to_first_token_is_by_warmth_and_only_of_streams(metrics, registry):
    metrics.finished(released(decision(tokens=100), cached_tokens=96, first_body_ms=50.0), trace_id="ab" * 16)
    metrics.finished(released(decision(tokens=100, stream=False), cached_tokens=96, first_body_ms=5000.0))
    labels = {**ENFORCED, "warmth": "warm"}
    assert registry.get_sample_value("warmroute_ttft_seconds_count", labels) == 1
    assert registry.get_sample_value("warmroute_ttft_seconds_sum", labels) == pytest.approx(0.050)


def test_groups_of_a_rollout_are_told_apart(metrics, registry):
    for mode, cached in ((Mode.ENFORCE, 96), (Mode.SHADOW, 0)):
        made = decision(tokens=100, mode=mode)
        decide(metrics, made)
        metrics.finished(released(made, cached_tokens=cached))
    value = registry.get_sample_value
    for mode, computed, warm in (("enforce", 4, "warm"), ("shadow", 100, "cold")):
        labels = {**GROUP, "mode": mode}
        assert value("warmroute_prefill_computed_tokens_total", labels) == computed
        assert value("warmroute_ttft_seconds_count", {**labels, "warmth": warm}) == 1


def test_prediction_error_has_a_direction_and_compares_only_what_was_predicted(metrics, registry):
    # Predicted: queue 10 + prefill 20 = 30 ms from when it was sent on.
    assert ttft_error_ms(released(upstream_first_body_ms=45.0)) == pytest.approx(15.0)
    assert ttft_error_ms(released(upstream_first_body_ms=None)) is None
    assert ttft_error_ms(released(served_by=worker(1).endpoint)) is None
    assert ttft_error_ms(released(decision(stream=False))) is None
    assert ttft_error_ms(released(status=400)) is None
    metrics.finished(released(upstream_first_body_ms=45.0))
    metrics.finished(released(upstream_first_body_ms=10.0))
    name = "warmroute_ttft_prediction_error_seconds_sum"
    assert registry.get_sample_value(name, {"pool": "default", "direction": "late"}) == pytest.approx(0.015)
    assert registry.get_sample_value(name, {"pool": "default", "direction": "early"}) == pytest.approx(0.020)


@pytest.mark.parametrize(("actual", "result"), [(64, "exact"), (48, "over"), (80, "under")])
def test_predicted_hits_are_held_against_reported_ones(metrics, registry, actual, result):
    metrics.finished(released(decision(cached=64, tokens=100), cached_tokens=actual))
    value = registry.get_sample_value
    assert value("warmroute_predictions_total", {"pool": "default", "result": result}) == 1
    assert value("warmroute_cached_tokens_predicted_total", {"pool": "default"}) == 64
    assert value("warmroute_cached_tokens_actual_total", {"pool": "default"}) == actual


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (Completion(Outcome.FINISHED, status=200, details="via_upstream"), False),
        (Completion(Outcome.FINISHED, status=504, details="via_upstream"), True),
        (Completion(Outcome.FAILED, status=408, details="request_overall_timeout"), True),
        (Completion(Outcome.FAILED, status=200, details="stream_idle_timeout"), True),
        (Completion(Outcome.LOST), False),
    ],
)
def test_time_limits_are_recognised(completion, expected):
    assert timed_out(completion) is expected


def test_ends_are_counted_by_outcome_with_retries_losses_and_time_limits(metrics, registry):
    metrics.pool_known("default")
    value = registry.get_sample_value
    assert value("warmroute_leases_lost_total", {"pool": "default"}) == 0
    metrics.finished(released(outcome=Outcome.LOST, duration_ms=None, status=None, details="gone"))
    stopped = {"details": STOPPED.details, "duration_ms": None, "status": None}
    metrics.finished(released(outcome=STOPPED.outcome, **stopped))  # no leak that anybody could mend
    assert value("warmroute_requests_total", {**TOKENS, "outcome": "lost"}) == 2
    metrics.finished(released(outcome=Outcome.FAILED, status=504, attempts=3))
    assert value("warmroute_leases_lost_total", {"pool": "default"}) == 1
    assert value("warmroute_retries_total", {"pool": "default"}) == 2
    assert value("warmroute_timeouts_total", GROUP) == 1
    assert value("warmroute_request_duration_seconds_sum", {**GROUP, "outcome": "failed"}) == pytest.approx(
        0.9
    )
    assert value("warmroute_request_duration_seconds_count", {**GROUP, "outcome": "lost"}) is None


def test_evictions_and_the_age_of_what_was_evicted(metrics, registry):
    metrics.evicted("default", Evictions(40, (3.0, 700.0)))
    value = registry.get_sample_value
    assert value("warmroute_kv_evictions_total", {"pool": "default"}) == 40
    assert value("warmroute_kv_evicted_age_seconds_sum", {"pool": "default"}) == 703
    assert value("warmroute_kv_evicted_age_seconds_bucket", {"pool": "default", "le": "5.0"}) == 1


def test_names_that_clients_make_up_are_no_labels(metrics, registry):
    for number in range(500):
        made = decision(prompt_class=f"class-{number}")
        made.request.model = f"model-{number}"
        metrics.finished(released(made, status=404))
    families = {family.name: family for family in registry.collect()}
    samples = [s for s in families["warmroute_requests"].samples if s.name.endswith("_total")]
    assert {sample.labels["model"] for sample in samples} == {"other"}
    assert len(samples) <= 65


def test_waits_are_counted_by_tenant_and_how_they_ended(metrics, registry):
    metrics.waited("default", "acme", "passed", 0.0)
    metrics.waited("default", "acme", "admitted", 1.5)
    labels = {"pool": "default", "tenant": "acme"}
    for outcome in ("passed", "admitted"):
        assert registry.get_sample_value("warmroute_admissions_total", {**labels, "outcome": outcome}) == 1
    waited = "warmroute_admission_wait_seconds"
    assert registry.get_sample_value(f"{waited}_sum", {"pool": "default", "outcome": "admitted"}) == 1.5
    assert registry.get_sample_value(f"{waited}_count", {"pool": "default", "outcome": "passed"}) is None


def test_tenants_that_clients_make_up_are_no_labels(metrics, registry):
    for number in range(200):
        metrics.waited("default", f"tenant{number}", "refused", 0.0)
    labels = {"pool": "default", "tenant": "other", "outcome": "refused"}
    assert registry.get_sample_value("warmroute_admissions_total", labels) == 200 - 64


def test_being_held_is_no_part_of_what_a_decision_takes(metrics, registry):
    clock = Clock(10.0)
    stages = Stages(clock)
    for stage, seconds in (("parse", 0.25), ("hold", 30.0), ("match", 0.5)):
        clock.now += seconds
        stages.mark(stage)
    metrics.decided(decision(), stages)
    name = "warmroute_decision_duration_seconds_sum"
    assert registry.get_sample_value(name, {"stage": "total"}) == 0.75
    assert registry.get_sample_value(name, {"stage": "match"}) == 0.5
    assert registry.get_sample_value(name, {"stage": "hold"}) is None
