"""The Endpoint Picker Protocol 1.0, case by case, with a gateway that conforms and the whole application."""

import json
from contextlib import asynccontextmanager

import pytest
import yaml

from extproc import config as configuration
from extproc.app import App
from extproc.prompt.tiny import tiny_model_path
from extproc.protocol.rejections import overloaded
from tests.support.gateway import DESTINATION, Gateway
from tests.support.grpc_host import RecordingRouting, running
from tests.support.ports import free_port
from tests.support.sim_engine import SimEngine
from tests.support.waiting import until

SELECT = "test-epp-endpoint-selection"
ECHO = "x-conformance-test-served-endpoint"


def chat(text="Hello", **fields):
    message = {"role": "user", "content": text}
    return json.dumps({"model": "tiny", "messages": [message], **fields}).encode()


@asynccontextmanager
async def picker(tmp_path, *, engines=2, **settings):
    """(gateway, the engines' endpoints, the application)"""
    async with SimEngine() as one, SimEngine() as two:
        endpoints = [one.endpoint, two.endpoint][:engines]
        given = {
            "listen": "127.0.0.1:0",
            "seed": 1,
            "scrape": {"interval_s": 0.05, "failure_limit": 1},
            "limits": {"prompt_budget_ms": 5_000},
            "decision_log": {"path": str(tmp_path / "decisions.jsonl")},
            "pools": [
                {
                    "model": {"path": str(tiny_model_path()), "names": ["tiny"]},
                    "discovery": {"static": endpoints},
                    "kv_events": {"enabled": False},
                }
            ],
            **settings,
        }
        config = configuration.parse(yaml.safe_dump(given))
        async with App(config, lambda _: None) as app, Gateway(app.address) as gateway:
            yield gateway, endpoints, app


async def test_without_a_hint_all_endpoints_are_candidates_in_order(tmp_path):
    async with picker(tmp_path) as (gateway, endpoints, _):
        answer = await gateway.request(chat())
        assert sorted(answer.endpoints) == sorted(endpoints)
        assert answer.held_until_body_end


@pytest.mark.parametrize("form", ["list", "one string", "without port", "with blanks", "with strangers"])
async def test_a_subset_hint_restricts_the_choice(tmp_path, form):
    async with picker(tmp_path) as (gateway, endpoints, _):
        for only in endpoints:
            hint = {
                "list": [only],
                "one string": only,
                "without port": [only, only.partition(":")[0] + "9"],
                "with blanks": f" , {only} ,",
                "with strangers": ["10.0.0.9:1", only, ""],
            }[form]
            for number in range(3):
                assert (await gateway.request(chat(f"{only} {number}"), subset=hint)).endpoints == [only]


async def test_an_address_without_a_port_admits_all_its_ports(tmp_path):
    async with picker(tmp_path) as (gateway, endpoints, _):
        answer = await gateway.request(chat(), subset=["127.0.0.1"])
        assert sorted(answer.endpoints) == sorted(endpoints)


@pytest.mark.parametrize("hint", [[], "", ["  "], ["10.0.0.9:1"], "10.0.0.9:1,10.0.0.8"])
async def test_a_hint_that_admits_nobody_is_a_503(tmp_path, hint):
    async with picker(tmp_path) as (gateway, _, _app):
        answer = await gateway.request(chat(), subset=hint)
        assert answer.status == 503
        assert json.loads(answer.body)["error"]["message"]


async def test_no_ready_endpoint_is_a_503_and_not_ready(tmp_path):
    nobody = {"discovery": {"static": [f"127.0.0.1:{free_port()}"]}, "kv_events": {"enabled": False}}
    async with picker(tmp_path, pools=[nobody]) as (gateway, _, app):
        await until(lambda: not app.health.ready)
        assert (await gateway.request(chat())).status == 503
        for name in ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
            assert await gateway.health(name) == "NOT_SERVING"
        assert await gateway.health("liveness") == "SERVING"


async def test_shed_because_of_load_is_a_429():
    routing = RecordingRouting(overloaded(3))
    async with running(routing) as host, Gateway(host.server.address) as gateway:
        answer = await gateway.request(chat())
        assert answer.status == 429
        assert json.loads(answer.body)["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("name", ["", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"])
async def test_health_under_every_name(tmp_path, name):
    async with picker(tmp_path) as (gateway, _, _app):
        assert await gateway.health(name) == "SERVING"


@pytest.mark.parametrize("trailers", [False, True])
@pytest.mark.parametrize("size", [0, 10, 63 * 1024, 300 * 1024])
async def test_bodies_of_every_size_pass_unchanged_after_the_headers(tmp_path, size, trailers):
    async with picker(tmp_path) as (gateway, endpoints, _):
        body = chat("word " * (size // 5))
        response = [b"data: {}\n\n"] * 3 + [b"x" * size]
        answer = await gateway.request(body, trailers=trailers, response=response)
        assert set(answer.endpoints) == set(endpoints)
        assert answer.held_until_body_end


async def test_a_request_without_a_body_is_answered_at_its_headers(tmp_path):
    async with picker(tmp_path) as (gateway, endpoints, _):
        answer = await gateway.request(None, path="/v1/models", headers={":method": "GET"})
        assert set(answer.endpoints) == set(endpoints)


async def test_what_a_client_says_about_the_destination_is_overwritten(tmp_path):
    async with picker(tmp_path) as (gateway, endpoints, _):
        answer = await gateway.request(chat(), headers={DESTINATION: "10.6.6.6:1"})
        assert set(answer.endpoints) == set(endpoints)


async def test_the_gateway_tells_who_served(tmp_path):
    async with picker(tmp_path) as (gateway, _, app):
        answer = await gateway.request(chat("first"))
        first, second = answer.endpoints
        # It went elsewhere: the load and the prefix are the other's.
        answer = await gateway.request(chat("Once upon a time. " * 40), served=second)
        log = tmp_path / "decisions.jsonl"
        await until(lambda: log.exists() and log.read_text().count("\n") == 2, what="both are written")
        assert len(app.router.ledger) == 0
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert lines[0]["served_by"] in (first, None)
        assert lines[1]["served_by"] == second


async def test_conformance_headers_count_in_test_mode_only(tmp_path):
    async with picker(tmp_path, test_mode=True) as (gateway, endpoints, _):
        for chosen in endpoints:
            answer = await gateway.request(chat(), headers={SELECT: chosen})
            assert answer.endpoints[0] == chosen
            assert answer.response_headers[ECHO] == chosen
        other = endpoints[1]
        answer = await gateway.request(chat(), headers={SELECT: endpoints[0]}, served=other)
        assert answer.response_headers[ECHO] == other
        answer = await gateway.request(
            None, headers={SELECT: ",".join(reversed(endpoints)), ":method": "GET"}
        )
        assert answer.endpoints == endpoints[::-1]
    async with picker(tmp_path) as (gateway, endpoints, _):
        answers = [await gateway.request(chat(f"{n}"), headers={SELECT: "10.0.0.9:1"}) for n in range(3)]
        assert all("10.0.0.9:1" not in answer.endpoints for answer in answers)
        assert all(ECHO not in answer.response_headers for answer in answers)


async def test_the_choice_follows_the_prefix(tmp_path):
    async with picker(tmp_path) as (gateway, _, app):
        # Prefixes are counted in blocks, whose size the engines tell.
        await until(lambda: all(state.metrics for state in app.router.table.all()))
        text = "A long story about a prefix. " * 60
        first = (await gateway.request(chat(text))).endpoints[0]
        for number in range(4):
            assert (await gateway.request(chat(f"{text} And then? {number}"))).endpoints[0] == first
