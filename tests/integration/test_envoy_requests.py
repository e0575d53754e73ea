"""How requests pass a real Envoy and our server: bytes, destinations, refusals."""

import asyncio
import gzip
import hashlib
import io
import json
import random

import pytest
from aiohttp import web

from extproc.adapters.envoy_bootstrap import BodyMode
from extproc.protocol.ext_proc_messages import PassThrough, Route
from extproc.protocol.rejections import malformed
from tests.support.h2_client import post_with_trailers
from tests.support.http import Upstream
from tests.support.mesh import CHAT, mesh
from tests.support.ports import free_ports

pytestmark = pytest.mark.envoy

DUPLEX = BodyMode.FULL_DUPLEX_STREAMED
MODES = pytest.mark.parametrize("mode", list(BodyMode), ids=lambda mode: mode.value.lower())
DESTINATION = "x-gateway-destination-endpoint"


def first(*endpoints):
    """Everything to the first upstream, the others as fallbacks."""
    return Route(endpoints, "lease-1")


def noise(size):
    return random.Random(size).randbytes(size)


def sent(body):
    """As a file: aiohttp warns of large bytes."""
    return io.BytesIO(body)


def arrived_whole(received, body):
    return (received.size, received.sha256) == (len(body), hashlib.sha256(body).hexdigest())


@pytest.mark.parametrize(
    ("mode", "size"), [(BodyMode.BUFFERED, 20_000_000), (DUPLEX, 200_000), (DUPLEX, 5_000_000)]
)
async def test_large_bodies_arrive_byte_for_byte(start_envoy, mode, size):
    body = noise(size)
    async with mesh(start_envoy, first, body_mode=mode) as net:
        async with net.client.post(net.url(), data=sent(body)) as reply:
            assert reply.status == 200
            assert (await reply.json())["served_by"] == net.upstreams[0].endpoint
        assert arrived_whole(net.upstreams[0].requests[0], body)
        assert net.routing.requests[0].body == body


@MODES
async def test_a_body_sent_in_pieces_of_unknown_length(start_envoy, mode):
    body = noise(300_000)

    async def pieces():
        for start in range(0, len(body), 7_001):
            yield body[start : start + 7_001]

    async with mesh(start_envoy, first, body_mode=mode) as net:
        async with net.client.post(net.url(), data=pieces()) as reply:
            assert reply.status == 200
        assert arrived_whole(net.upstreams[0].requests[0], body)
        assert net.routing.requests[0].body == body


@MODES
async def test_a_body_that_ends_with_trailers(start_envoy, mode):
    body = noise(200_000)
    # Envoy sends such a body twice in full duplex mode when there are retries (envoy#45470).
    retries = 0 if mode is DUPLEX else 2
    async with mesh(start_envoy, first, body_mode=mode, retries=retries) as net:
        status, _ = await post_with_trailers(net.envoy.address, CHAT, body, {"x-checksum": "1"})
        assert status == 200
        assert arrived_whole(net.upstreams[0].requests[0], body)
        assert net.routing.requests[0].body == body


@MODES
async def test_a_gzip_body_arrives_as_it_was_sent(start_envoy, mode):
    body = gzip.compress(json.dumps({"model": "m", "prompt": "hello" * 1000}).encode())
    async with mesh(start_envoy, first, body_mode=mode) as net:
        async with net.client.post(net.url(), data=body, headers={"Content-Encoding": "gzip"}) as reply:
            assert reply.status == 200
        assert net.upstreams[0].requests[0].headers["content-encoding"] == "gzip"
        # What arrived is what was sent, undecoded: aiohttp's server decodes, so the router is asked.
        assert net.routing.requests[0].body == body
        assert net.upstreams[0].requests[0].sha256 == hashlib.sha256(gzip.decompress(body)).hexdigest()


@MODES
async def test_requests_without_a_body_are_answered_at_once(start_envoy, mode):
    async with mesh(start_envoy, first, body_mode=mode) as net:
        async with net.client.post(net.url(), headers={"Content-Length": "0"}) as reply:
            assert reply.status == 200
        async with net.client.get(net.url("/v1/models")) as reply:
            assert reply.status == 200
        assert [(one.method, one.path, one.size) for one in net.upstreams[0].requests] == [
            ("POST", CHAT, 0),
            ("GET", "/v1/models", 0),
        ]
        assert [request.path for request in net.routing.requests] == [CHAT, "/v1/models"]


async def test_other_paths_do_not_ask_the_router(start_envoy):
    async with mesh(start_envoy, first) as net:
        for path in ("/health", "/metrics", "/v1"):
            async with net.client.get(net.url(path)) as reply:
                assert reply.status == 200
        assert net.routing.requests == []


@MODES
async def test_a_destination_sent_by_a_client_has_no_effect(start_envoy, mode):
    answers = {"route": None}

    def second(one, two):
        answers["route"] = Route((two,), "lease-1")
        return lambda request: answers["route"]

    async with Upstream() as outside, mesh(start_envoy, second, upstreams=2, body_mode=mode) as net:
        one, two = net.upstreams
        for wanted in (outside.endpoint, one.endpoint, f"{outside.endpoint},{one.endpoint}"):
            headers = {DESTINATION: wanted, "X-Warmroute-Ticket": "forged"}
            async with net.client.post(net.url(), data=b"{}", headers=headers) as reply:
                assert (await reply.json())["served_by"] == two.endpoint
        # Nor where the router is not asked, or has no opinion.
        answers["route"] = PassThrough()
        for path in (CHAT, "/health"):
            async with net.client.post(
                net.url(path), data=b"{}", headers={DESTINATION: outside.endpoint}
            ) as reply:
                assert reply.status == 200
        assert outside.requests == []
        assert one.requests == [] or all(DESTINATION not in request.headers for request in one.requests)
        assert {request.headers[DESTINATION] for request in two.requests[:3]} == {two.endpoint}
        assert all("x-warmroute-ticket" not in request.headers for request in one.requests + two.requests)
        assert all(DESTINATION not in request.headers for request in net.routing.requests)


@MODES
async def test_retries_take_the_fallbacks_in_order(start_envoy, mode):
    dead = [f"127.0.0.1:{port}" for port in free_ports(2)]

    def behind_the_dead(one, two, three):
        return lambda request: Route((*dead[: int(request.headers["x-dead"])], two, one), "lease-1")

    body = noise(100_000)
    async with mesh(start_envoy, behind_the_dead, upstreams=3, extra_workers=dead, body_mode=mode) as net:
        for number in (0, 1, 2):
            async with net.client.post(net.url(), data=body, headers={"x-dead": str(number)}) as reply:
                assert (await reply.json())["served_by"] == net.upstreams[1].endpoint
            completion = await net.completion(number)
            assert (completion.attempts, completion.served_by) == (number + 1, net.upstreams[1].endpoint)
        assert all(arrived_whole(request, body) for request in net.upstreams[1].requests)


async def test_a_worker_that_answers_503_is_left_for_the_next(start_envoy):
    async def respond(request, received):
        if request.host and request.transport.get_extra_info("sockname")[1] == full[0]:
            return web.Response(status=503)
        return web.Response(text="served")

    full = []

    def in_order(one, two):
        full.append(int(one.rpartition(":")[2]))
        return Route((one, two), "lease-1")

    async with mesh(start_envoy, in_order, upstreams=2, respond=respond) as net:
        async with net.client.post(net.url(), data=b"{}") as reply:
            assert (reply.status, await reply.text()) == (200, "served")
        assert [len(upstream.requests) for upstream in net.upstreams] == [1, 1]
        assert (await net.completion()).served_by == net.upstreams[1].endpoint


async def test_an_endpoint_envoy_does_not_know_is_skipped(start_envoy):
    async with (
        Upstream() as outside,
        mesh(start_envoy, lambda one, two: Route((outside.endpoint, two), "lease-1"), upstreams=2) as net,
    ):
        async with net.client.post(net.url(), data=b"{}") as reply:
            assert (await reply.json())["served_by"] == net.upstreams[1].endpoint
        assert outside.requests == []


@MODES
async def test_a_refusal_reaches_the_client_as_a_clean_error(start_envoy, mode):
    async with mesh(start_envoy, lambda one: malformed("The body is not JSON."), body_mode=mode) as net:
        async with net.client.post(net.url(), data=b'{"model":') as reply:
            assert reply.status == 400
            assert reply.content_type == "application/json"
            assert (await reply.json())["error"]["message"] == "The body is not JSON."
        assert net.upstreams[0].requests == []


@MODES
async def test_a_body_over_the_routers_limit_is_a_413_in_openai_shape(start_envoy, mode):
    async with mesh(start_envoy, first, body_mode=mode, max_body_bytes=100_000) as net:
        async with net.client.post(net.url(), data=noise(150_000)) as reply:
            assert reply.status == 413
            assert "error" in await reply.json()
        async with net.client.post(net.url(), data=noise(99_000)) as reply:
            assert reply.status == 200
        assert len(net.upstreams[0].requests) == 1


async def test_a_body_over_envoys_limit_is_a_413(start_envoy):
    async with mesh(start_envoy, first, body_limit=200_000, response_limit=100_000) as net:
        async with net.client.post(net.url(), data=sent(noise(3_000_000))) as reply:
            assert reply.status == 413
        async with net.client.post(net.url(), data=noise(150_000)) as reply:
            assert reply.status == 200
        assert len(net.upstreams[0].requests) == 1


async def test_a_router_that_fails_or_is_slow_costs_no_request(start_envoy):
    async with mesh(start_envoy, lambda one: RuntimeError("a bug"), message_timeout=0.2) as net:
        async with net.client.post(net.url(), data=b"{}") as reply:
            assert reply.status == 200
        net.routing.gate = asyncio.Event()
        async with net.client.post(net.url(), data=b"{}") as reply:
            assert reply.status == 200
        await net.host.server.stop(0)
        async with net.client.post(net.url(), data=b"{}") as reply:
            assert reply.status == 200
        assert len(net.upstreams[0].requests) == 3
