from hypothesis import given
from hypothesis import strategies as st

from extproc.sim.histogram import Histogram


def test_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 3):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert histogram.totals().sum_s == 8.0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5))))
def test_weighted_observations_equal_repeated_ones(values: list[tuple[int, int]]) -> None:
    weighted, repeated = Histogram((10, 20, 40)), Histogram((10, 20, 40))
    for value, times in values:
        weighted.observe(value, times)
        for _ in range(times):
            repeated.observe(value)
    assert weighted.cumulative() == repeated.cumulative()
    assert weighted.totals() == repeated.totals()


def test_a_run_of_values_is_counted_at_once_unless_a_bound_lies_between_them():
    one, many = Histogram([1.0, 2.0]), Histogram([1.0, 2.0])
    for value in (1.25, 1.5, 2.0):
        one.observe(value)
    assert many.observe_run(1.25, 2.0, 4.75, 3)
    assert (one.counts, one.total, one.count) == (many.counts, many.total, many.count)
    assert not many.observe_run(0.5, 1.5, 2.0, 2)
    assert many.count == 3
