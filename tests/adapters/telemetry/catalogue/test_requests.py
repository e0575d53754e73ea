from extproc.adapters.telemetry.catalogue import requests
from extproc.adapters.telemetry.metric import Kind, Metric


def test_every_metric_of_the_module_is_listed_once():
    defined = [one.name for one in vars(requests).values() if isinstance(one, Metric)]
    assert sorted(one.name for one in requests.REQUEST_METRICS) == sorted(defined)


def test_what_is_counted_as_it_comes_is_no_gauge():
    assert [one.name for one in requests.REQUEST_METRICS if one.kind is Kind.GAUGE] == []


def test_latencies_and_tokens_are_told_by_class_of_prompt():
    for metric in (requests.TTFT, requests.INPUT_TOKENS, requests.REQUEST_SECONDS, requests.QUEUE_WAIT):
        assert "prompt_class" in metric.labels
