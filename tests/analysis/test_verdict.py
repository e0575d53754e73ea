import pytest

from extproc.analysis.verdict import first_tokens_answer, judge


def report(
    *, random=0.2, prefix=0.8, repeated=0.85, mean=2000.0, recoverable=0.0, requests=5000, kind="timestamp"
):
    return {
        "requests": requests,
        "mean_tokens": mean,
        "repeated": {"share": repeated},
        "groups_for": {"replicas": 4, "cache_tokens": 1000},
        "placement": [
            {"replicas": 4, "cache_tokens": None, "random": 0.0, "prefix": 1.0},
            {"replicas": 4, "cache_tokens": 1000, "random": random, "prefix": prefix},
        ],
        "breakers": {
            "recoverable_share": recoverable,
            "found": [{"kind": kind, "position": {"median": 1234}}],
        },
    }


@pytest.mark.parametrize(
    ("given", "worth", "because"),
    [
        ({}, "yes", "1,200 tokens less"),
        ({"random": 0.7, "prefix": 0.75}, "some", "100 tokens less"),
        ({"mean": 100.0}, "some", "60 tokens less"),
        ({"mean": 50.0}, "no", "too short"),
        ({"random": 0.01, "prefix": 0.02, "repeated": 0.03}, "no", "Hardly anything repeats"),
        ({"random": 0.79, "prefix": 0.8}, "no", "every replica has it"),
        ({"random": 0.01, "prefix": 0.03, "repeated": 0.5}, "no", "too small"),
        (
            {"random": 0.0, "prefix": 0.01, "repeated": 0.02, "recoverable": 0.6},
            "some",
            "timestamp at token 1,234",
        ),
        ({"requests": 50}, "yes", "Only 50 requests"),
    ],
)
def test_verdicts_have_reasons(given, worth, because):
    verdict = judge(report(**given))
    assert verdict["worth"] == worth
    assert because in " ".join(verdict["reasons"])


def test_ten_percent_of_short_prompts_is_not_worth_it():
    assert judge(report(random=0.1, prefix=0.2, mean=100.0))["worth"] == "no"


def test_without_requests_there_is_no_verdict():
    assert judge(report(requests=0))["worth"] == "unknown"


def test_breakers_of_text_alone_name_no_place():
    reasons = " ".join(judge(report(recoverable=0.1, kind="other text"))["reasons"])
    assert "hide another 10.0%" in reasons
    assert "at token" not in reasons


@pytest.mark.parametrize(
    ("counts", "answer"),
    [
        ({10_000: (100, 75)}, "Yes: of 100 prompts with at least 10,000 tokens, 75.0%"),
        ({10_000: (100, 20)}, "Sometimes"),
        ({10_000: (100, 1)}, "Rarely"),
        ({10_000: (100, 0)}, "No:"),
        (
            {1_000: (8, 4)},
            "No prompt is that long (the longest has 9 tokens). Of 8 with at least 1,000, 50.0%",
        ),
        ({}, "No prompt is that long: the longest has 9 tokens"),
    ],
)
def test_do_users_resend_the_first_tokens(counts, answer):
    rows = [
        {"first_tokens": at, "prompts": counts.get(at, (0, 0))[0], "resent": counts.get(at, (0, 0))[1]}
        for at in (1_000, 4_000, 10_000, 32_000)
    ]
    assert first_tokens_answer({"resent": rows, "longest_tokens": 9}).startswith(answer)
