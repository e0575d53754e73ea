import asyncio
import json

import pytest
from aiohttp import web

from extproc.demo.client import Client
from extproc.demo.workload import Dialogue, Workload
from tests.support.http import Upstream
from tests.support.sim_engine import SimEngine


def dialogue(*questions, name="d", system="Be brief."):
    return Dialogue(name, system, questions, 4)


def client(url, concurrency=2, done=lambda: None):
    return Client(url, "tiny", concurrency, done)


async def test_it_measures_what_a_streaming_client_sees():
    done = []
    workload = Workload(tuple(dialogue("Well? " * 40, "And now?", name=f"d{n}") for n in range(3)))
    async with SimEngine() as engine:
        result = await client(engine.base_url, done=lambda: done.append(1)).run(workload, "p")
    assert (result.policy, result.requests, result.failures, len(done)) == ("p", 6, [], 6)
    assert len(result.ttft_ms) == 6
    assert all(ttft > 0 for ttft in result.ttft_ms)
    assert 0 < result.cached_tokens < result.prompt_tokens
    assert result.wall_s > 0


def event(**fields):
    return f"data: {json.dumps(fields)}\n\n".encode()


ANSWER = event(choices=[{"delta": {"content": "yes"}}])
USAGE = event(choices=[], usage={"prompt_tokens": 10})


class Script:
    """Answers with these pieces and keeps the bodies that came."""

    def __init__(self, *pieces, status=200):
        self.pieces, self.status = pieces, status
        self.bodies, self.open, self.most = [], 0, 0

    async def handle(self, request):
        self.bodies.append(await request.json())
        self.open += 1
        self.most = max(self.most, self.open)
        response = web.StreamResponse(status=self.status)
        await response.prepare(request)
        for piece in self.pieces:
            await response.write(piece)
            await asyncio.sleep(0)
        self.open -= 1
        return response


async def run(script, workload, **options):
    app = web.Application()
    app.router.add_post("/v1/chat/completions", script.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        return await client(f"http://{host}:{port}", **options).run(workload, "p")
    finally:
        await runner.cleanup()


async def test_each_answer_stays_in_the_history():
    script = Script(ANSWER, USAGE, b"data: [DONE]\n\n")
    result = await run(script, Workload((dialogue("one", "two"),)))
    assert result.failures == []
    assert (result.prompt_tokens, result.cached_tokens) == (20, 0)
    roles = [[message["role"] for message in body["messages"]] for body in script.bodies]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"]]
    assert script.bodies[1]["messages"][2]["content"] == "yes"
    assert script.bodies[0]["stream_options"] == {"include_usage": True}


async def test_no_more_users_at_once_than_asked_for():
    script = Script(*[ANSWER] * 20, USAGE)
    result = await run(script, Workload(tuple(dialogue("q") for _ in range(20))), concurrency=3)
    assert (len(script.bodies), result.failures) == (20, [])
    assert 1 < script.most <= 3


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (Script(b"overloaded", status=503), "HTTP 503: overloaded"),
        (Script(ANSWER), "without an answer and its usage"),
        (Script(USAGE), "without an answer and its usage"),
        (Script(b"data: {\n\n"), "DecodeError"),
    ],
)
async def test_a_failure_is_counted_and_ends_its_dialogue_only(script, words):
    done = []
    workload = Workload((dialogue("one", "two", name="chat"), dialogue("three")))
    result = await run(script, workload, concurrency=1, done=lambda: done.append(1))
    assert (result.requests, len(result.failures), len(done)) == (2, 2, 2)
    assert any(failure.startswith("chat: ") and words in failure for failure in result.failures)
    assert result.ttft_ms == []


async def test_a_gateway_that_is_gone_is_a_failure_too():
    async with Upstream() as gone:
        url = f"http://{gone.endpoint}"
    result = await client(url).run(Workload((dialogue("q"),)), "p")
    assert "ClientConnectorError" in result.failures[0]
