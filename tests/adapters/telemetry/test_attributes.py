import dataclasses

import pytest

from extproc.adapters.telemetry.attributes import CANDIDATE, completion_attributes, decision_attributes
from extproc.core.types import CostBreakdown, Outcome, Reason
from tests.adapters.telemetry.values import decision, released

CHAT = "/v1/chat/completions?x=1"


def test_a_decision_says_every_cost_term_of_the_chosen_and_the_next_best():
    found = decision_attributes(decision(cached=25, tokens=100), CHAT)
    for role, costs in (("chosen", (10.0, 20.0, 30.0, 40.0)), ("next", (1.5, 200.0, 3.5, 4.5))):
        for field, value in zip(dataclasses.fields(CostBreakdown), costs, strict=True):
            assert found[f"warmroute.{role}.cost.{field.name}"] == value
        assert found[f"warmroute.{role}.cost.total_ms"] == sum(costs)
    assert found["warmroute.chosen.ttft_ms"] == 30.0
    assert found["warmroute.chosen.overlap"] == 0.25
    assert found["warmroute.chosen.confidence"] == 0.75
    assert found["warmroute.chosen.worker"] == "10.0.0.0:8000"
    assert found["warmroute.next.worker"] == "10.0.0.1:8000"


def test_a_decision_says_why_for_whom_and_at_what_load():
    found = decision_attributes(decision(reason=Reason.COLD_BUSY), CHAT)
    assert found["warmroute.reason"] == "cold-busy"
    assert found["warmroute.policy"] == "token-load"
    assert found["warmroute.candidates"] == 2
    assert (found["warmroute.expected_output_tokens"], found["warmroute.expected_output_source"]) == (
        99.0,
        "hint",
    )
    assert found["warmroute.namespace"] == "model/tokenizer/"
    assert found["warmroute.prompt_class"] == "document"
    assert found["warmroute.tenant"] == "acme"
    assert found["warmroute.mode"] == "enforce"
    assert found["warmroute.chosen.active_requests"] == 3
    assert found["warmroute.chosen.sequences"] == 4
    assert found["warmroute.chosen.context_tokens"] == 500
    assert found["warmroute.chosen.queued_prefill_tokens"] == 60.0
    assert found["warmroute.chosen.metrics_age_s"] == 0.25
    # What is not known is left out.
    assert "warmroute.next.metrics_age_s" not in found
    assert "warmroute.load_only" not in found


def test_the_conventions_of_opentelemetry_are_followed_where_there_are_any():
    found = decision_attributes(decision(), CHAT)
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.model"] == "tiny"
    assert found["gen_ai.request.max_tokens"] == 16
    assert found["gen_ai.request.stream"] is True
    assert (found["server.address"], found["server.port"]) == ("10.0.0.0", 8000)
    assert decision_attributes(decision(), "/v1/completions")["gen_ai.operation.name"] == "text_completion"
    assert "gen_ai.operation.name" not in decision_attributes(decision(), "/v1/models")
    done = completion_attributes(released(first_body_ms=50.0))
    assert done["gen_ai.usage.input_tokens"] == 100
    assert done["gen_ai.usage.output_tokens"] == 7
    assert done["gen_ai.usage.cache_read.input_tokens"] == 64
    assert done["gen_ai.response.time_to_first_chunk"] == pytest.approx(0.05)


def test_neither_salt_nor_ticket_nor_prompt_is_told():
    made = decision("the-ticket")
    made.request.namespace = made.request.namespace._replace(cache_salt="the-salt")
    everything = str([decision_attributes(made, CHAT), completion_attributes(released(made))])
    assert "the-salt" not in everything
    assert "the-ticket" not in everything
    assert decision_attributes(made, CHAT)["warmroute.namespace.salted"] is True


def test_a_completion_says_what_happened_beside_what_was_predicted():
    found = completion_attributes(
        released(decision(cached=80), cached_tokens=64, upstream_first_body_ms=45.0)
    )
    assert found["warmroute.predicted.cached_tokens"] == 80
    assert found["warmroute.error.cached_tokens"] == -16
    assert found["warmroute.predicted.ttft_ms"] == 30.0
    assert found["warmroute.error.ttft_ms"] == 15.0
    assert found["warmroute.ttft_ms"] == 50.0
    assert found["warmroute.prefill_tokens"] == 36
    assert found["warmroute.outcome"] == "finished"
    lost = completion_attributes(
        released(outcome=Outcome.LOST, cached_tokens=None, first_body_ms=None, status=None)
    )
    assert "warmroute.ttft_ms" not in lost
    assert "http.response.status_code" not in lost


def test_every_attribute_of_a_candidate_is_described():
    found = decision_attributes(decision(), CHAT)
    told = {name.removeprefix("warmroute.chosen.") for name in found if name.startswith("warmroute.chosen.")}
    assert told == set(CANDIDATE)
