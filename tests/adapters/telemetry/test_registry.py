from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as plain

from extproc.adapters.telemetry.recorder import Telemetry
from tests.adapters.telemetry.values import decision, released

TRACE = "ab" * 16


def test_the_page_is_prometheus_text_with_the_process_in_it():
    page = Telemetry().page()
    assert page.content_type.startswith("text/plain")
    names = {family.name for family in plain(page.body.decode())}
    assert "process_resident_memory_bytes" in names
    assert "warmroute_requests" in names
    assert b"_created" not in page.body


def test_open_metrics_leads_from_a_histogram_to_a_trace():
    telemetry = Telemetry()
    telemetry.metrics.finished(released(decision()), TRACE)
    page = telemetry.page("application/openmetrics-text; version=1.0.0")
    assert page.content_type.startswith("application/openmetrics-text")
    found = [
        sample.exemplar.labels
        for family in open_metrics(page.body.decode())
        for sample in family.samples
        if sample.name == "warmroute_ttft_seconds_bucket" and sample.exemplar
    ]
    assert found == [{"trace_id": TRACE}]
