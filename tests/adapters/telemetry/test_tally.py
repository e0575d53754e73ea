import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram

from extproc.adapters.telemetry.metric import Kind, Metric
from extproc.adapters.telemetry.tally import Tally

COUNTED = Metric("warmroute_counted", Kind.COUNTER, "1", "Counted.", ("pool", "why"))
TIMED = Metric("warmroute_timed_seconds", Kind.HISTOGRAM, "s", "Timed.", ("pool",), (0.1, 1.0, 10.0))

labels = st.sampled_from(["a", "b"])
counts = st.lists(st.tuples(labels, labels, st.floats(0, 100)))
times = st.lists(st.tuples(labels, st.one_of(st.floats(0, 20), st.sampled_from(TIMED.buckets))))


def samples(registry):
    """What is exposed, without the times at which series began."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@given(counts, times)
def test_it_counts_as_the_library_does(counted, timed):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = Tally((COUNTED, TIMED))
    ours.register(tally)
    counter = Counter(COUNTED.name, COUNTED.meaning, COUNTED.labels, registry=theirs)
    histogram = Histogram(TIMED.name, TIMED.meaning, TIMED.labels, registry=theirs, buckets=TIMED.buckets)
    for pool, why, amount in counted:
        tally.add(COUNTED, amount, pool, why)
        counter.labels(pool, why).inc(amount)
    for pool, value in timed:
        tally.observe(TIMED, value, pool)
        histogram.labels(pool).observe(value)
    assert samples(ours) == pytest.approx(samples(theirs))


def test_an_example_stays_with_its_bucket():
    registry, tally = CollectorRegistry(), Tally((TIMED,))
    registry.register(tally)
    for value, name in ((0.5, "first"), (0.6, "second"), (5.0, "third"), (-1.0, "early")):
        tally.observe(TIMED, value, "a", exemplar={"trace_id": name})
    (family,) = registry.collect()
    found = {
        s.labels["le"]: (s.exemplar.labels["trace_id"], s.exemplar.value)
        for s in family.samples
        if s.exemplar
    }
    assert found == {"0.1": ("early", 0.0), "1.0": ("second", 0.6), "10.0": ("third", 5.0)}


def test_a_metric_that_is_not_there_is_an_error():
    tally = Tally((COUNTED,))
    with pytest.raises(KeyError):
        tally.observe(TIMED, 1.0, "a")
    with pytest.raises(KeyError):
        tally.add(TIMED, 1.0, "a")
