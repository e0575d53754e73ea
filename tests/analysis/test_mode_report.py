import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.analysis.mode_report import ModeReport, quantile, warmth


def line(mode="enforce", *, prompt=1000, cached=0, ttft=100.0, ours=0, **fields):
    return {
        "mode": mode,
        "outcome": "finished",
        "prompt_tokens": prompt,
        "actual_cached_tokens": cached,
        "ttft_ms": ttft,
        "queue_wait_ms": 5.0,
        "evicted_blocks": 4,
        "prompts": 1,
        "shadow": {},
        "candidate_workers": [
            {"worker": "a", "cached_tokens": ours, "block_size": 16},
            {"worker": "b", "cached_tokens": 900, "block_size": 16},
        ],
        **fields,
    }


def report_of(*lines, **filters):
    report = ModeReport(**filters)
    for one in lines:
        report.add(one)
    return report


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"cached": 0}, "cold"),
        ({"cached": 984}, "warm"),
        ({"cached": 983}, "partial"),
        ({"cached": None}, "unknown"),
        ({"cached": 5, "prompt": None}, "unknown"),
    ],
)
def test_how_warm_a_request_was(fields, expected):
    assert warmth(line(**fields)) == expected


def test_modes_are_compared_by_warmth():
    report = report_of(
        *(line("observe", ttft=float(n)) for n in range(1, 101)),
        line("enforce", cached=990, ttft=7.0, ours=990),
        line("enforce", cached=500, ttft=9.0, evicted_blocks=None),
    )
    modes = report.as_json()["modes"]
    assert list(modes) == ["observe", "enforce"]
    cold = modes["observe"]["cold"]
    assert (cold["requests"], cold["ttft_p50_ms"], cold["ttft_p90_ms"], cold["ttft_p99_ms"]) == (
        100,
        50,
        90,
        99,
    )
    assert (cold["queue_p50_ms"], cold["evicted_blocks"]) == (5.0, 4.0)
    assert modes["enforce"]["warm"]["ttft_p50_ms"] == 7.0
    assert modes["enforce"]["partial"]["evicted_blocks"] is None
    both = modes["enforce"]["all"]
    assert (both["requests"], both["cached_share"], both["prompt_tokens"]) == (2, 0.745, 2000)


def test_what_our_policy_would_have_found_cached():
    shadow = line("shadow", shadow={"token-load": {"worker": "b"}})
    report = report_of(line("observe", ours=300), shadow)
    modes = report.as_json()["modes"]
    assert modes["observe"]["all"]["ours_share"] == 0.3
    assert modes["shadow"]["all"]["ours_share"] == 0.9
    assert modes["shadow"]["all"]["cached_share"] == 0.0


def test_filters_and_what_is_left_out():
    lines = [
        line(pool="a", tenant="t", traffic_class="c"),
        line(pool="b", tenant="t", traffic_class="c"),
        line(pool="a", tenant="u", traffic_class="c"),
        line(pool="a", tenant="t", traffic_class=None),
        line(pool="a", tenant="t", traffic_class="c", outcome="failed"),
        {"some": "other log"},
        7,
    ]
    report = report_of(*lines, pool="a", tenant="t", traffic_class="c")
    assert report.total("enforce").requests == 1
    assert (report.unfinished, report.foreign) == (1, 2)
    assert report_of(line(mode=None)).modes() == ("enforce",)  # logs from before there were modes


@given(st.lists(st.floats(-1e6, 1e6), max_size=50), st.floats(0, 1))
def test_quantiles_are_values_that_enough_others_do_not_exceed(values, share):
    found = quantile(values, share)
    if not values:
        assert found is None
        return
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-6


@given(
    st.dictionaries(
        st.sampled_from(list(line())), st.none() | st.booleans() | st.text() | st.lists(st.none())
    )
)
def test_odd_values_cost_no_report(fields):
    report = report_of(
        line(**{"outcome": "finished", **fields, "candidate_workers": fields.get("candidate_workers", [])})
    )
    report.as_json()
