import re

from extproc.adapters.telemetry.catalogue import METRICS
from extproc.adapters.telemetry.metric import Kind

BASE_UNITS = {"s": "_seconds", "By": "_bytes"}


def test_names_are_ours_and_unique():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"warmroute_[a-z0-9_]+", name) for name in names)
    # Prometheus adds it, so that OTLP and Prometheus carry the same name.
    assert [name for name in names if name.endswith("_total")] == []


def test_units_are_base_units_and_in_the_name():
    for metric in METRICS:
        ending = BASE_UNITS.get(metric.unit)
        if ending is not None:
            assert metric.name.endswith(ending), metric.name
        if metric.name.endswith(("_seconds", "_bytes", "_tokens")):
            assert metric.unit in {"s", "By", "{token}"}, metric.name
        assert not re.search(r"_(ms|milliseconds|percent)(_|$)", metric.name)


def test_histograms_have_growing_buckets_and_others_none():
    for metric in METRICS:
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
        assert list(metric.buckets) == sorted(set(metric.buckets))


def test_meanings_are_sentences():
    for metric in METRICS:
        assert metric.meaning[0].isupper() or metric.meaning[0].isdigit(), metric.name
        assert metric.meaning.endswith("."), metric.name
        assert "|" not in metric.meaning, metric.name
