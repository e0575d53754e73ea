from extproc.adapters.telemetry.catalogue import service
from extproc.adapters.telemetry.metric import Kind, Metric


def test_every_metric_of_the_module_is_listed_once():
    defined = [one.name for one in vars(service).values() if isinstance(one, Metric)]
    assert sorted(one.name for one in service.SERVICE_METRICS) == sorted(defined)


def test_what_is_read_when_somebody_asks_is_no_histogram():
    assert [one.name for one in service.SERVICE_METRICS if one.kind is Kind.HISTOGRAM] == []


def test_nothing_is_about_one_worker():
    assert [one.name for one in service.SERVICE_METRICS if "worker" in one.labels] == []
