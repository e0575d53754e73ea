import pytest

from extproc.adapters.telemetry.metric import AGES, LONG, SECOND, SHORT, Kind, counter, gauge, histogram


@pytest.mark.parametrize(
    ("metric", "kind", "series"),
    [
        (counter("a", "1", "A.", ("b",)), Kind.COUNTER, ("a_total",)),
        (gauge("a", "1", "A."), Kind.GAUGE, ("a",)),
        (histogram("a", "A.", ()), Kind.HISTOGRAM, ("a_bucket", "a_count", "a_sum")),
    ],
)
def test_series_are_what_prometheus_will_see(metric, kind, series):
    assert metric.kind is kind
    assert metric.series == series
    assert all(one.startswith(metric.exposed) for one in series)


@pytest.mark.parametrize("buckets", [LONG, SHORT, AGES])
def test_histograms_are_of_times_in_growing_buckets(buckets):
    metric = histogram("a", "A.", ("b",), buckets)
    assert (metric.unit, metric.labels, metric.buckets) == (SECOND, ("b",), buckets)
    assert list(buckets) == sorted(set(buckets))
