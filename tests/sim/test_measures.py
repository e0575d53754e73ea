import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.sim.measures import Measures, Series, curve_ms, percentile, times_ms


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.001, 1.0))
def test_a_percentile_is_a_sample_with_that_share_at_or_below_it(samples, share):
    ordered = sorted(samples)
    value = percentile(ordered, share)
    assert value in samples
    assert sum(s <= value for s in samples) >= share * len(samples) - 1e-9


def test_times_are_in_milliseconds():
    assert times_ms([0.003, 0.001, 0.002]) == {"p50": 2.0, "p95": 3.0, "p99": 3.0, "mean": 2.0}
    assert times_ms([]) == {"p50": None, "p95": None, "p99": None, "mean": None}


def test_a_curve_ascends_to_one():
    curve = curve_ms([at / 1000 for at in range(1000)])
    assert curve == sorted(curve)
    assert curve[-1] == (999.0, 1.0)
    assert curve_ms([]) == []


@given(st.integers(1, 5000))
def test_a_long_series_is_averaged_into_few_points(length):
    series = Series(0.5)
    for at in range(length):
        series.add([at, 2 * at])
    covered = len(series.rows) * round(series.width_s / 0.5)
    assert len(series.rows) < 480
    assert length - round(series.width_s / 0.5) < covered <= length
    if series.rows:
        mean = sum(row[0] for row in series.rows) / len(series.rows)
        assert mean == pytest.approx((covered - 1) / 2)
        assert all(row[1] == pytest.approx(2 * row[0]) for row in series.rows)


def test_variation_counts_only_bins_with_load():
    measures = Measures(2, 0.5)
    measures.sample([0, 0], [0, 0])
    measures.sample([10, 30], [0, 1])
    measures.sample([20, 20], [0, 0])
    assert (measures.cv_sum, measures.cv_bins) == (0.5, 2)


def test_a_single_token_has_no_time_per_output_token():
    measures = Measures(1, 0.5)
    measures.finished("a", 1.0, 1.0, 10, 5, 1)
    measures.finished("b", 1.0, 3.0, 10, 0, 5)
    assert list(measures.tpot) == [0.5]
    assert (measures.prompt, measures.cached) == ({"a": 10, "b": 10}, {"a": 5, "b": 0})


def test_failures_are_counted_by_cause():
    measures = Measures(1, 0.5)
    for why in ("x", "y", "x"):
        measures.fail(why)
    assert (measures.failed, measures.failures) == (3, {"x": 2, "y": 1})
