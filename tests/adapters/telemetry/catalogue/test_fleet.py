from extproc.adapters.telemetry.catalogue import fleet
from extproc.adapters.telemetry.metric import Kind, Metric


def test_every_metric_of_the_module_is_listed_once():
    defined = [one.name for one in vars(fleet).values() if isinstance(one, Metric)]
    assert sorted(one.name for one in fleet.FLEET_METRICS) == sorted(defined)


def test_what_is_read_when_somebody_asks_is_no_histogram():
    assert [one.name for one in fleet.FLEET_METRICS if one.kind is Kind.HISTOGRAM] == []


def test_everything_says_whose_it_is():
    for metric in fleet.FLEET_METRICS:
        assert metric.labels[0] == "pool", metric.name
        assert ("worker" in metric.labels) == metric.name.startswith("warmroute_worker_"), metric.name
