import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from extproc.adapters import envoy_usage

import pytest
from betterproto2 import Casing

from extproc.protocol.usage import normalize

ANSWERS = {
    "openai": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
    "responses": {"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}},
    "anthropic": {
        "input_tokens": 2,
        "output_tokens": 2,
        "cache_read_input_tokens": 4,
        "cache_creation_input_tokens": 3,
    },
}


def rules(name):
    message = dict(envoy_usage.filters((1, 40), streamed=True))[name]
    found = message.to_dict(casing=Casing.SNAKE)["response_rules"]
    if name == envoy_usage.SSE:
        return [one["rule"] for one in found["content_parser"]["typed_config"]["rules"]]
    return found["rules"]


def lift(rules, event):
    """What Envoy's filters do with these rules."""
    lifted = {}
    for rule in rules:
        value = event
        for selector in rule["selectors"]:
            value = value.get(selector["key"]) if isinstance(value, dict) else None
        if value is not None:
            assert rule["on_present"]["metadata_namespace"] == "llm.usage"
            lifted[rule["on_present"]["key"]] = float(value)
    return lifted


@pytest.mark.parametrize("api", ANSWERS)
@pytest.mark.parametrize("name", [envoy_usage.JSON, envoy_usage.SSE])
def test_what_is_lifted_is_what_the_router_reads(api, name):
    usage = normalize(lift(rules(name), {"usage": ANSWERS[api]}))
    assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens) == (9, 4, 2)


@pytest.mark.parametrize(
    ("api", "event"),
    [
        ("responses", {"response": {"usage": ANSWERS["responses"]}}),
        ("anthropic", {"message": {"usage": ANSWERS["anthropic"]}}),
    ],
)
def test_streamed_usage_may_sit_deeper(api, event):
    assert lift(rules(envoy_usage.SSE), event) == lift(rules(envoy_usage.SSE), {"usage": ANSWERS[api]})
    assert lift(rules(envoy_usage.JSON), event) == {}


def test_the_streaming_filter_exists_from_1_38_on_and_can_be_left_out():
    assert envoy_usage.filter_names((1, 37), streamed=True) == (envoy_usage.JSON,)
    assert envoy_usage.filter_names((1, 38), streamed=True) == (envoy_usage.SSE, envoy_usage.JSON)
    assert envoy_usage.filter_names((1, 40), streamed=False) == (envoy_usage.JSON,)
