import asyncio
import gzip
import random
import socket
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import prometheus_client
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from extproc.adapters.metrics_scraper import Fault, MetricsScraper, ScrapeSettings
from extproc.core.types import HistogramTotals
from extproc.protocol.model_cards import ModelCard
from tests.support.http import Upstream
from tests.support.waiting import until

PAGE = gzip.decompress((Path(__file__).parents[1] / "data/vllm/metrics_0.32.txt.gz").read_bytes())
QUICK = ScrapeSettings(interval_s=0.02, timeout_s=0.2, models_interval_s=0.02, max_bytes=100_000)


class Seen:
    def __init__(self):
        self.metrics, self.failures, self.models = [], [], []

    def scraper(self, models=False, settings=QUICK, **more):
        return MetricsScraper(
            on_metrics=lambda endpoint, engines: self.metrics.append((endpoint, engines)),
            on_failure=lambda endpoint, failure: self.failures.append((endpoint, failure)),
            on_models=(lambda endpoint, cards: self.models.append((endpoint, cards))) if models else None,
            settings=settings,
            rng=random.Random(1),
            **more,
        )


def plain_only(body=PAGE):
    """A server without the filtered page."""

    async def respond(request, received):
        if request.path != "/metrics":
            return web.Response(status=404)
        return web.Response(body=body)

    return respond


async def scrape(respond, enough, settings=QUICK):
    seen = Seen()
    async with Upstream(respond) as server, seen.scraper(settings=settings) as scraper:
        scraper.set_endpoints([server.endpoint])
        await until(lambda: enough(seen))
    return seen, server


async def test_a_server_that_filters_is_asked_only_for_what_is_needed():
    registry = CollectorRegistry()
    running = prometheus_client.Gauge("vllm:num_requests_running", "x", ["engine"], registry=registry)
    running.labels("1").set(3)
    ttft = prometheus_client.Histogram("vllm:time_to_first_token_seconds", "x", registry=registry)
    ttft.observe(2.0)
    prometheus_client.Gauge("vllm:other", "x", registry=registry).set(1)
    pages = []

    async def respond(request, received):
        # As vLLM: the path without the slash is another handler, which ignores the names.
        chosen = registry
        if request.path == "/metrics/":
            chosen = registry.restricted_registry(request.query.getall("name[]"))
        pages.append(generate_latest(chosen))
        return web.Response(body=pages[-1])

    seen, server = await scrape(respond, lambda seen: len(seen.metrics) >= 3)
    engines = seen.metrics[0][1]
    assert (engines[0].ttft, engines[1].running) == (HistogramTotals(2.0, 1), 3)
    assert {one.path for one in server.requests} == {"/metrics/"}
    assert b"_bucket" not in pages[0]
    assert b"vllm:other" not in pages[0]
    assert not seen.failures


async def test_a_server_that_ignores_the_filter_is_read_all_the_same():
    async def respond(request, received):
        return web.Response(body=PAGE)

    seen, _ = await scrape(respond, lambda seen: seen.metrics)
    assert seen.metrics[0][1][0].prompt_tokens == 90300.0


@pytest.mark.parametrize("status", [301, 307, 400, 404, 405, 500])
async def test_a_server_without_a_filtered_page_is_asked_for_the_plain_one_from_then_on(status):
    async def respond(request, received):
        if request.path == "/metrics":
            return web.Response(body=PAGE)
        return web.Response(status=status, headers={"Location": "/metrics"})

    seen, server = await scrape(respond, lambda seen: len(seen.metrics) >= 3)
    assert seen.metrics[0][1][0].block_size == 128
    assert [one.path for one in server.requests][:4] == ["/metrics/", "/metrics", "/metrics", "/metrics"]
    assert not seen.failures


async def test_a_filtered_page_that_is_empty_or_html_is_not_believed():
    bodies = [b"", b"<html></html>\n"]

    async def respond(request, received):
        if request.path == "/metrics":
            return web.Response(body=PAGE)
        return web.Response(body=bodies[0])

    while bodies:
        seen, _ = await scrape(respond, lambda seen: seen.metrics)
        assert seen.metrics[0][1][0].block_size == 128
        assert not seen.failures
        bodies.pop(0)


async def test_a_page_without_an_engine_is_no_failure():
    seen, _ = await scrape(plain_only(b"process_cpu_seconds_total 1\n"), lambda seen: seen.metrics)
    assert seen.metrics[0][1] == {}


async def test_a_page_without_lora_information_is_no_failure():
    assert b"lora_requests_info{" not in PAGE
    seen, _ = await scrape(plain_only(), lambda seen: len(seen.metrics) >= 2)
    assert seen.metrics[0][1][0].adapters == ()
    assert not seen.failures


async def cut_off(request, received):
    response = web.StreamResponse(headers={"Content-Length": str(len(PAGE))})
    await response.prepare(request)
    await response.write(PAGE[:20_000])
    request.transport.close()
    return response


async def cut_off_unnoticed(request, received):
    return web.Response(body=PAGE[:20_000])


async def hanging(request, received):
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(PAGE[:20_000])
    await asyncio.sleep(60)
    return response


async def endless(request, received):
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"vllm:x 1\n" * 5000)


BOMB = gzip.compress(bytes(50_000_000))


async def bomb(request, received):
    return web.Response(body=BOMB, headers={"Content-Encoding": "gzip"})


async def status(request, received):
    return web.Response(status=503)


@pytest.mark.parametrize(
    ("respond", "error", "fault"),
    [
        (cut_off, "/metrics", Fault.UNREACHED),
        (cut_off_unnoticed, "cut off", Fault.UNREADABLE),
        (hanging, "did not arrive within", Fault.SLOW),
        (endless, "larger than 100000 bytes", Fault.UNREADABLE),
        (bomb, "larger than 100000 bytes", Fault.UNREADABLE),
        (status, "/metrics answered 503", Fault.UNREADABLE),
        (plain_only(b"<html>\n"), "malformed line", Fault.UNREADABLE),
        (plain_only(b'vllm:num_requests_running{engine="0"} busy\n'), "malformed line", Fault.UNREADABLE),
    ],
)
async def test_bad_pages_are_failures_and_scraping_goes_on(respond, error, fault):
    settings = QUICK if respond is hanging else replace(QUICK, timeout_s=30)
    seen, _ = await scrape(respond, lambda seen: len(seen.failures) >= 2, settings)
    assert error in seen.failures[-1][1].text
    assert {failure.fault for _, failure in seen.failures} == {fault}
    assert not seen.metrics


async def failures_at(endpoint, enough=2):
    seen = Seen()
    async with seen.scraper() as scraper:
        scraper.set_endpoints([endpoint])
        await until(lambda: len(seen.failures) >= enough)
    return [failure for _, failure in seen.failures]


async def test_a_server_that_accepts_and_says_nothing_is_slow():
    """As a process that is too busy to look: its connections are accepted for it."""
    with socket.create_server(("127.0.0.1", 0)) as busy:
        found = await failures_at(f"127.0.0.1:{busy.getsockname()[1]}")
    assert {failure.fault for failure in found} == {Fault.SLOW}
    assert all(failure.took_s >= QUICK.timeout_s * 0.9 for failure in found)


async def test_a_kept_connection_that_is_answered_no_more_is_slow():
    answering = True

    async def respond(request, received):
        if not answering:
            await asyncio.sleep(60)
        return web.Response(body=PAGE)

    seen = Seen()
    async with Upstream(respond) as server, seen.scraper() as scraper:
        scraper.set_endpoints([server.endpoint])
        await until(lambda: len(seen.metrics) >= 2)
        answering = False
        await until(lambda: seen.failures)
    assert seen.failures[0][1].fault is Fault.SLOW


async def test_a_server_that_cannot_be_connected_to_in_time_is_not_reached():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as waiting:
        address = full.getsockname()
        for _ in range(4):  # they fill its queue, and nobody accepts them
            client = waiting.enter_context(socket.socket())
            client.settimeout(0.0)
            client.connect_ex(address)
        (failure, *_) = await failures_at(f"127.0.0.1:{address[1]}", 1)
    assert failure.fault is Fault.UNREACHED
    assert "no connection within" in failure.text


async def test_a_server_that_is_not_there_or_hangs_up_is_not_reached():
    async with Upstream() as gone:
        endpoint = gone.endpoint
    found = await failures_at(endpoint)

    async def hang_up(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        found += await failures_at(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert {failure.fault for failure in found} == {Fault.UNREACHED}


async def test_each_failure_is_one_report_and_recovery_is_seen():
    failing = False

    async def respond(request, received):
        return web.Response(status=500) if failing else web.Response(body=PAGE)

    seen = Seen()
    async with Upstream(respond) as server, seen.scraper() as scraper:
        scraper.set_endpoints([server.endpoint])
        await until(lambda: seen.metrics)
        assert not seen.failures
        failing = True
        await until(lambda: len(seen.failures) >= 3)
        failing = False
        good = len(seen.metrics)
        await until(lambda: len(seen.metrics) > good + 2)


async def test_a_server_that_is_not_there_is_a_failure_until_it_is():
    seen = Seen()
    async with Upstream() as taken:
        endpoint = taken.endpoint
    server = Upstream(plain_only())
    async with seen.scraper() as scraper:
        scraper.set_endpoints([endpoint])
        await until(lambda: seen.failures)
        await server.start(int(endpoint.rpartition(":")[2]))
        await until(lambda: seen.metrics)
    await server.stop()


async def test_endpoints_come_and_go():
    seen = Seen()
    async with Upstream(plain_only()) as one, Upstream(plain_only()) as two, seen.scraper() as scraper:
        scraper.set_endpoints([one.endpoint])
        await until(lambda: seen.metrics)
        scraper.set_endpoints([one.endpoint, two.endpoint])
        await until(lambda: {endpoint for endpoint, _ in seen.metrics} == {one.endpoint, two.endpoint})
        scraper.set_endpoints([two.endpoint])
        seen.metrics.clear()
        await until(lambda: len(seen.metrics) >= 3)
        assert {endpoint for endpoint, _ in seen.metrics} == {two.endpoint}


async def test_one_slow_server_does_not_hold_up_another():
    seen = Seen()
    patient = ScrapeSettings(interval_s=0.02, timeout_s=60)
    async with (
        Upstream(hanging) as slow,
        Upstream(plain_only()) as quick,
        seen.scraper(settings=patient) as scraper,
    ):
        scraper.set_endpoints([slow.endpoint, quick.endpoint])
        await until(lambda: len(seen.metrics) >= 3)
        assert {endpoint for endpoint, _ in seen.metrics} == {quick.endpoint}


async def test_endpoints_set_before_the_start_are_scraped_after_it():
    seen = Seen()
    async with Upstream(plain_only()) as server:
        scraper = seen.scraper()
        scraper.set_endpoints([server.endpoint])
        assert not server.requests
        async with scraper:
            await until(lambda: seen.metrics)


async def test_a_callback_that_raises_does_not_stop_scraping(caplog):
    calls = []

    def on_metrics(endpoint, engines):
        calls.append(endpoint)
        raise RuntimeError("a bug elsewhere")

    async with Upstream(plain_only()) as server:
        scraper = MetricsScraper(on_metrics=on_metrics, on_failure=lambda *_: None, settings=QUICK)
        async with scraper:
            scraper.set_endpoints([server.endpoint])
            await until(lambda: len(calls) >= 2)
    assert "a bug elsewhere" in caplog.text


async def test_models_are_read_and_their_failure_is_none_of_the_metrics():
    listing = {
        "object": "list",
        "data": [{"id": "tiny", "max_model_len": 64}, {"id": "fr", "parent": "tiny"}],
    }
    answers = iter([web.Response(status=500), web.Response(body=b"nonsense")])

    async def respond(request, received):
        if request.path == "/v1/models":
            return next(answers, None) or web.json_response(listing)
        return web.Response(body=PAGE)

    seen = Seen()
    async with Upstream(respond) as server, seen.scraper(models=True) as scraper:
        scraper.set_endpoints([server.endpoint])
        await until(lambda: seen.models and seen.metrics)
    assert seen.models[0] == (server.endpoint, (ModelCard("tiny", None, 64), ModelCard("fr", "tiny", None)))
    assert not seen.failures


async def test_models_are_left_alone_unless_asked_for():
    _, server = await scrape(plain_only(), lambda seen: len(seen.metrics) >= 3)
    assert "/v1/models" not in {one.path for one in server.requests}


async def test_headers_are_sent():
    settings = ScrapeSettings(interval_s=0.02, headers={"Authorization": "Bearer key"})
    _, server = await scrape(plain_only(), lambda seen: seen.metrics, settings)
    assert server.requests[0].headers["authorization"] == "Bearer key"


async def test_models_are_read_at_once_when_somebody_asks():
    async def respond(request, received):
        return web.json_response({"data": [{"id": "tiny"}]})

    seen = Seen()
    settings = replace(QUICK, models_interval_s=3600.0, models_pause_s=0.0)
    async with Upstream(respond) as server, seen.scraper(models=True, settings=settings) as scraper:
        scraper.set_endpoints([server.endpoint])
        for _ in range(5):
            scraper.look_at_models()  # and once only while that is being done
        await until(lambda: seen.models)
        scraper.look_at_models()
        await until(lambda: len(seen.models) >= 2)
        assert sum(one.path == "/v1/models" for one in server.requests) <= 3
    seen.scraper(models=True).look_at_models()  # not started: nothing to do


async def test_names_that_clients_make_up_do_not_have_models_read_all_the_time():
    async def respond(request, received):
        return web.json_response({"data": [{"id": "tiny"}]})

    seen = Seen()
    settings = replace(QUICK, models_interval_s=3600.0, models_pause_s=3600.0)
    async with Upstream(respond) as server, seen.scraper(models=True, settings=settings) as scraper:
        scraper.set_endpoints([server.endpoint])
        for _ in range(3):
            scraper.look_at_models()
            await until(lambda: seen.models and not scraper._asked)
        assert len(seen.models) == 1


async def test_all_are_asked_at_the_start_and_spread_over_the_interval_from_then_on():
    class Asked(random.Random):
        def __init__(self):
            super().__init__(1)
            self.ranges = []

        def uniform(self, a, b):
            self.ranges.append((a, b))
            return super().uniform(a, b)

    rng = Asked()
    settings = ScrapeSettings(interval_s=0.01, jitter=0.25)
    scraper = MetricsScraper(
        on_metrics=lambda *_: None, on_failure=lambda *_: None, settings=settings, rng=rng
    )
    scraper.set_endpoints(["127.0.0.1:1"])  # nobody is there
    async with scraper:
        await until(lambda: len(rng.ranges) >= 4)
    assert rng.ranges[:4] == [(0.0, 0.0025), (0.25, 1.0), (0.75, 1.25), (0.75, 1.25)]
