"""What comes back to us from a real Envoy: usage, first tokens, clients that leave, workers that die."""

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web

from extproc.core.types import Outcome
from extproc.protocol.ext_proc_messages import Route
from tests.support.mesh import CHAT, mesh
from tests.support.waiting import until

pytestmark = pytest.mark.envoy

OPENAI = {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 64}}
RESPONSES = {"input_tokens": 100, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 64}}
# Anthropic's input_tokens do not contain the cached ones, nor those that are cached from now on.
ANTHROPIC = {
    "input_tokens": 4,
    "output_tokens": 7,
    "cache_read_input_tokens": 64,
    "cache_creation_input_tokens": 32,
}


def first(*endpoints):
    return Route(endpoints, "lease-1")


def events(*data):
    return [f"data: {one if isinstance(one, str) else json.dumps(one)}\n\n".encode() for one in data]


SSE = {
    CHAT: events(
        {"choices": [{"delta": {"content": "x" * 20_000}}], "usage": None},
        {"choices": [], "usage": OPENAI},
        "[DONE]",
    ),
    "/v1/completions": events({"choices": [{"text": "a"}]}, {"choices": [], "usage": OPENAI}, "[DONE]"),
    "/v1/responses": events(
        {"type": "response.created", "response": {"usage": None}},
        {"type": "response.completed", "response": {"usage": RESPONSES, "output": ["y" * 100_000]}},
    ),
    "/v1/messages": events(
        {"type": "message_start", "message": {"usage": {"input_tokens": 1, "output_tokens": 0}}},
        {"type": "message_delta", "delta": {}, "usage": ANTHROPIC},
    ),
}
JSON = {CHAT: OPENAI, "/v1/completions": OPENAI, "/v1/responses": RESPONSES, "/v1/messages": ANTHROPIC}


class Stream:
    """An upstream that streams as the test says."""

    def __init__(self):
        self.open, self.gone, self.go = 0, 0, asyncio.Event()

    async def respond(self, request, received):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        self.open += 1
        try:
            while not self.go.is_set():
                await response.write(b"data: {}\n\n")
                await asyncio.sleep(0.01)
        except (ConnectionError, asyncio.CancelledError):
            self.gone += 1
            raise
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.mark.parametrize("path", JSON)
async def test_usage_of_a_json_answer(start_envoy, path):
    async def respond(request, received):
        return web.json_response({"usage": JSON[path], "choices": ["z" * 100_000]})

    async with mesh(start_envoy, first, respond=respond) as net:
        async with net.client.post(net.url(path), data=b"{}") as reply:
            assert (await reply.json())["usage"] == JSON[path]
        done = await net.completion()
        assert (done.outcome, done.status) == (Outcome.FINISHED, 200)
        assert (done.prompt_tokens, done.output_tokens, done.cached_tokens) == (100, 7, 64)
        assert done.served_by == net.upstreams[0].endpoint


@pytest.mark.parametrize("path", SSE)
async def test_usage_of_a_streamed_answer(start_envoy, path):
    whole = b"".join(SSE[path])

    async def respond(request, received):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for start in range(0, len(whole), 9_973):
            await response.write(whole[start : start + 9_973])
        return response

    async with mesh(start_envoy, first, respond=respond) as net:
        async with net.client.post(net.url(path), data=b"{}") as reply:
            assert await reply.read() == whole
        done = await net.completion()
        assert (done.prompt_tokens, done.output_tokens, done.cached_tokens) == (100, 7, 64)
        assert done.first_body_ms is not None
        assert done.upstream_first_body_ms is not None
        assert done.duration_ms >= done.first_body_ms >= 0


async def test_an_answer_without_usage_reports_none(start_envoy):
    async with mesh(start_envoy, first) as net:
        async with net.client.post(net.url(), data=b"{}") as reply:
            assert reply.status == 200
        done = await net.completion()
        assert (done.prompt_tokens, done.output_tokens, done.cached_tokens) == (None, None, None)


async def test_large_embeddings_pass_though_they_exceed_the_response_limit(start_envoy):
    async def respond(request, received):
        return web.json_response({"data": "0" * 500_000, "usage": OPENAI})

    async with mesh(start_envoy, first, respond=respond, response_limit=100_000) as net:
        async with net.client.post(net.url("/v1/embeddings"), data=b"{}") as reply:
            assert (reply.status, len((await reply.json())["data"])) == (200, 500_000)
        assert (await net.completion()).prompt_tokens is None
        assert len(net.routing.requests) == 1


async def test_the_observer_tells_of_the_first_token_while_the_answer_runs(start_envoy):
    stream = Stream()
    async with mesh(start_envoy, first, respond=stream.respond, first_token_observer=True) as net:
        async with net.client.post(net.url(), data=b"{}") as reply:
            await until(lambda: ("first_body", "lease-1") in net.routing.signals)
            assert net.routing.completions == []
            stream.go.set()
            body = await reply.read()
        assert body.startswith(b"data: {}\n\n")
        assert body.endswith(b"data: [DONE]\n\n")
        assert (await net.completion()).outcome is Outcome.FINISHED
        assert net.routing.signals.count(("first_body", "lease-1")) == 1


async def test_a_long_answer_is_reported_while_it_runs(start_envoy):
    stream = Stream()
    async with mesh(start_envoy, first, respond=stream.respond, log_progress_interval=0.05) as net:
        async with net.client.post(net.url(), data=b"{}") as reply:
            await until(lambda: ("first_body", "lease-1") in net.routing.signals)
            assert net.routing.completions == []
            stream.go.set()
            await reply.read()
        assert (await net.completion()).outcome is Outcome.FINISHED


async def test_a_client_that_leaves_is_a_cancellation_and_the_worker_hears_of_it(start_envoy):
    stream = Stream()
    async with mesh(start_envoy, first, respond=stream.respond) as net:
        reply = await net.client.post(net.url(), data=b"{}")
        await reply.content.readany()
        reply.close()
        assert (await net.completion()).outcome is Outcome.CANCELLED
        await until(lambda: stream.gone == 1)
        await until(lambda: any(signal[0] == "stream_ended" for signal in net.routing.signals))


async def test_a_client_that_leaves_while_we_decide(start_envoy):
    async with mesh(start_envoy, first, message_timeout=30) as net:
        net.routing.gate = asyncio.Event()
        request = asyncio.create_task(net.client.post(net.url(), data=b"{}"))
        await until(lambda: net.routing.requests)
        request.cancel()
        await until(lambda: net.routing.cancelled_routes == 1)
        assert net.upstreams[0].requests == []


async def test_a_worker_that_dies_while_answering_is_a_failure(start_envoy):
    async def respond(request, received):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        request.transport.abort()
        return response

    async with mesh(start_envoy, first, respond=respond) as net:
        with pytest.raises(aiohttp.ClientError):
            async with net.client.post(net.url(), data=b"{}") as reply:
                await reply.read()
        done = await net.completion()
        assert done.outcome is Outcome.FAILED
        assert done.served_by == net.upstreams[0].endpoint


async def test_fifty_streams_survive_the_death_of_the_router(start_envoy):
    stream = Stream()
    async with mesh(start_envoy, first, respond=stream.respond) as net:

        async def ask():
            async with net.client.post(net.url(), data=b"{}", timeout=aiohttp.ClientTimeout(60)) as reply:
                return reply.status, await reply.read()

        answers = [asyncio.create_task(ask()) for _ in range(50)]
        await until(lambda: stream.open == 50)
        await net.host.server.server.stop(0)
        later = asyncio.create_task(ask())
        await until(lambda: stream.open == 51)
        stream.go.set()
        for status, body in await asyncio.gather(*answers, later):
            assert status == 200
            assert body.endswith(b"data: [DONE]\n\n")
