import pytest

from extproc.core.policies import POLICIES
from extproc.protocol.explanation import explain


def candidate(name, *, queue=10.0, prefill=100.0, decode=5.0, risk=0.0, **fields):
    return {
        "worker": name,
        "cached_tokens": 0,
        "offloaded_tokens": 0,
        "uncovered_tokens": 1000,
        "queue_ms": queue,
        "prefill_ms": prefill,
        "decode_ms": decode,
        "kv_risk_ms": risk,
        "total_ms": queue + prefill + decode + risk,
        "active": 0,
        "sequences": 0,
        "metrics_age_s": 0.5,
        "confidence": 1.0,
        **fields,
    }


WARM = candidate("a:1", prefill=20.0, cached_tokens=800, uncovered_tokens=200)
COLD = candidate("b:1")


def line(*candidates, **fields):
    return {
        "request_id": "r",
        "model": "m",
        "pool": "default",
        "prompt_tokens": 1000,
        "selected_worker": candidates[0]["worker"] if candidates else None,
        "policy": "token-load",
        "decision": "warm-partial",
        "settings": {"tie_ms": 1.0},
        "outcome": "finished",
        "stream": True,
        "candidate_workers": list(candidates),
        **fields,
    }


def why(*candidates, **fields):
    return " ".join(explain(line(*candidates, **fields)).why)


def happened(**fields):
    return " ".join(explain(line(WARM, COLD, **fields)).happened)


def test_the_headline_says_which_request_went_where_and_why():
    assert explain(line(WARM, COLD)).headline == "Request r -> a:1: warm-partial"


def test_the_cheapest_is_said_to_be_cheapest_and_what_makes_the_difference():
    said = why(WARM, candidate("c:1", prefill=300.0), COLD)
    assert "a:1 is predicted to be cheapest: 35.0 ms, the next is b:1 with 115.0 ms (+80.0 ms)" in said
    assert "80.0 ms more prefill (1,000 tokens to compute instead of 200)" in said
    assert "holds a part" in said


def test_terms_come_by_weight_and_those_that_do_not_matter_are_left_out():
    said = why(WARM, candidate("b:1", queue=40.0, prefill=100.0, decode=5.6, sequences=7))
    assert said.index("more prefill") < said.index("more queue (7 sequences running instead of 0)")
    assert "decode" not in said


def test_a_term_that_speaks_against_the_winner_is_told():
    assert "9.0 ms less queue" in why(WARM, candidate("b:1", queue=1.0))


def test_equal_prices_are_said_to_be_equal():
    said = why(COLD, candidate("c:1", prefill=100.9), decision="cold-idle")
    assert "count as equally cheap" in said
    assert "then chance" in said
    assert "then chance" not in why(COLD, candidate("c:1"), policy="mine")


def test_a_policy_that_preferred_a_dearer_worker_is_named():
    assert "The policy mine preferred it, although a:1" in why(COLD, WARM, policy="mine")


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"token-load"}))
def test_other_policies_are_explained_by_their_rule_not_by_price(policy):
    said = why(COLD, WARM, policy=policy)
    assert policy in said.lower()
    assert "cheapest" not in said


def test_a_denied_warm_worker_is_named_with_what_it_would_have_cost():
    slow = candidate("a:1", queue=30_000.0, prefill=20.0, cached_tokens=800)
    said = why(COLD, slow, decision="warm-denied-wait")
    assert "a:1 holds 800 tokens of the prompt" in said
    assert "30.0 s" in said
    assert "110.0 ms on b:1" in said


def test_a_worker_that_is_full_is_named_with_who_filled_it():
    shares = {"prefix_share": 0.62, "warm_share": 0.7}
    full = candidate("a:1", prefill=20.0, cached_tokens=800, shares=shares)
    said = why(COLD, full, decision="warm-denied-share")
    assert "Of the time of a:1, requests with this prefix have taken 62%" in said
    assert "warm requests 70%" in said
    assert "b:1 gets a copy of the prefix" in said
    copy = {**COLD, "cached_tokens": 800}
    assert "b:1 has the prefix as well" in why(copy, full, decision="warm-denied-share")


def test_a_cold_pool_is_named_as_the_reason():
    assert "serves cold requests only" in why(COLD, WARM, decision="cold-pool")


def test_load_only_says_what_kept_us_from_more():
    assert "load alone decided: too-long" in why(COLD, WARM, decision="load-only", load_only="too-long")


def test_the_only_candidate_needs_no_reason():
    assert "only worker" in why(WARM)


def test_doubts_and_missing_figures_are_told():
    said = why({**WARM, "confidence": 0.5, "doubtful_tokens": 96, "metrics_age_s": None}, COLD)
    assert "Only 50% of its predicted hit" in said
    assert "96 more tokens may be there" in said
    assert "not reported metrics" in said


def test_a_session_that_moved():
    assert "too much of our load" in why(COLD, WARM, policy="session-affinity", decision="session-moved")


def test_what_was_predicted_is_held_against_what_happened():
    said = happened(
        predicted_cached_tokens=800, actual_cached_tokens=784, predicted_ttft_ms=30.0, upstream_ttft_ms=33.0,
        ttft_ms=35.0, status=200, duration_ms=400.0, output_tokens=20,
    )  # fmt: skip
    assert "It finished, status 200, after 400.0 ms, 20 tokens generated." in said
    assert "800 predicted, 784 reported: off by -16" in said
    assert "30.0 ms predicted, 33.0 ms measured (+3.0 ms, +10%)" in said


def test_an_exact_prediction_is_said_to_be_exact_and_no_other():
    assert "exactly as predicted" in happened(predicted_cached_tokens=800, actual_cached_tokens=800)
    assert "off by +16" in happened(predicted_cached_tokens=800, actual_cached_tokens=816)


def test_what_was_not_reported_is_not_made_up():
    assert "did not report" in happened(predicted_cached_tokens=800, actual_cached_tokens=None)
    assert "no prediction" in happened(predicted_cached_tokens=None, actual_cached_tokens=5)
    assert "First token" not in happened()
    assert "Cached" not in happened()


def test_the_first_byte_of_an_answer_that_is_not_streamed_is_no_first_token():
    said = happened(stream=False, predicted_ttft_ms=30.0, ttft_ms=300.0)
    assert "Not streamed" in said
    assert "predicted," not in said


def test_a_retry_elsewhere_is_told():
    assert "served by b:1 instead of a:1, at attempt 2" in happened(served_by="b:1", attempts=2)
    assert "instead" not in happened(served_by="a:1", attempts=1)
    ranked = line({**WARM, "worker": "a:1#1"}, COLD, served_by="a:1")
    assert "instead" not in " ".join(explain(ranked).happened)


@pytest.mark.parametrize(
    ("outcome", "word"),
    [
        ("cancelled", "client left"),
        ("failed", "failed"),
        ("lost", "never told"),
        ("open", "not over"),
        ("new", "new"),
    ],
)
def test_every_end_has_its_words(outcome, word):
    assert word in happened(outcome=outcome)


def test_an_open_request_has_no_figures():
    assert len(explain(line(WARM, COLD, outcome="open", predicted_cached_tokens=800)).happened) == 1


def test_shadows_say_what_they_would_have_done():
    shadow = {
        "least-load": {"worker": "b:1", "decision": "cold-idle", "total_ms": 115.0},
        "kv-affinity": {"worker": "a:1", "decision": "warm-partial", "total_ms": 35.0},
    }
    said = explain(line(WARM, COLD, shadow=shadow)).shadows
    assert said == (
        "least-load would have chosen b:1 (cold-idle, 115.0 ms).",
        "kv-affinity would have chosen the same worker (warm-partial, 35.0 ms).",
    )


def test_a_request_that_was_only_observed_went_where_the_gateway_sent_it():
    story = explain(line(WARM, COLD, mode="observe", served_by="b:1", attempts=1))
    assert story.headline == "Request r, only observed, would have gone to a:1: warm-partial"
    assert "the gateway chose" in " ".join(story.request)
    assert "The gateway sent it to b:1." in story.happened
    assert "instead of" not in " ".join(story.happened)


def test_that_the_baseline_decided_is_told():
    assert "Mode shadow: the baseline policy decided." in explain(line(WARM, COLD, mode="shadow")).request
    assert "Mode " not in " ".join(explain(line(WARM, COLD, mode="enforce")).request)


def test_a_line_with_almost_nothing_is_no_error():
    assert explain({}).why == ()
    assert explain({"candidate_workers": [{"worker": "a"}, {"worker": "b"}]}).why


def test_how_long_a_request_was_held_is_told():
    held = line(WARM, COLD, admission={"held_ms": 1500.0, "priority": 2})
    assert (
        "It was held for 1,500.0 ms because every worker was full, with priority +2." in explain(held).request
    )
    at_once = line(WARM, COLD, admission={"held_ms": 0.0, "priority": 0})
    assert "held" not in " ".join(explain(at_once).request)


@pytest.mark.parametrize(
    ("ending", "told"),
    [("expired", "no worker had room"), ("refused", "too many waited"), ("left", "client left")],
)
def test_a_request_that_was_held_in_vain_has_a_story_too(ending, told):
    story = explain(
        {
            "request_id": "r",
            "model": "m",
            "pool": "default",
            "prompt_tokens": 10,
            "decision": ending,
            "outcome": ending,
            "admission": {"held_ms": 20_000.0, "priority": 0},
            "candidate_workers": [],
        }
    )
    assert story.headline == f"Request r -> no worker: {ending}"
    assert "It was held for 20.0 s because every worker was full." in story.request
    assert told in story.happened[0]
    assert "policy" not in " ".join(story.request)
