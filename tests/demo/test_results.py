import io

import pytest
from rich.console import Console

from extproc.demo.results import PolicyResult, percentile, report, table


@pytest.mark.parametrize(
    ("share", "expected"), [(0.5, 50.0), (0.95, 95.0), (0.99, 99.0), (0.0, 1.0), (1.0, 100.0)]
)
def test_percentiles_are_values_that_occurred(share, expected):
    assert percentile([float(n) for n in range(1, 101)], share) == expected


def test_no_values_no_percentile():
    assert percentile([], 0.5) is None


def result(policy="token-load", **fields):
    defaults = {
        "exact": 1,
        "audited": 2,
        "ttft_ms": [10.0, 20.0],
        "prompt_tokens": 200,
        "cached_tokens": 150,
        "requests": 3,
    }
    return PolicyResult(policy, failures=["x"], **{**defaults, **fields})


def test_the_report_has_the_documented_shape():
    out = report([result("round-robin", exact=7, audited=9), result()])
    assert out["policies"]["token-load"] == {
        "requests": 3,
        "failed": 1,
        "ttft_ms": {"p50": 10.0, "p95": 20.0, "p99": 20.0},
        "cached_token_share": 0.75,
    }
    assert out["predicted_vs_actual"] == {"exact": 1, "total": 2}


def test_nothing_measured_is_null_and_does_not_crash_the_table():
    empty = PolicyResult("round-robin")
    assert report([empty])["policies"]["round-robin"]["cached_token_share"] is None
    console = Console(file=io.StringIO(), width=140)
    console.print(table([empty, result()]))
    text = console.file.getvalue()
    assert "75.0%" in text
    assert "1 of 2" in text
