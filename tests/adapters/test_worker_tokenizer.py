import json
from array import array
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web

from extproc.adapters import worker_tokenizer
from extproc.adapters.engine_key import EngineKey
from extproc.adapters.worker_tokenizer import WorkerTokenizer, WorkerTokenizerError
from extproc.protocol.openai import parse_request
from tests.support.http import Upstream

PATIENT_S = 60.0
ANSWERS: dict = {
    "/tokenize": {"tokens": [1, 2], "count": 2},
    "/v1/chat/completions/render": {"token_ids": [3, 4]},
    "/v1/completions/render": [{"token_ids": [5]}, {"token_ids": [6, 7]}],
    "/v1/messages/render": {"token_ids": []},
    "/v1/responses/render": {"unexpected": 1},
}


@pytest.fixture
async def worker():
    """A worker's tokenizing endpoints; `worker.asked` are the requests they got."""
    app = web.Application()
    asked = []

    async def answer(request):
        asked.append((request.path, await request.json()))
        return (
            web.json_response(ANSWERS[request.path]) if request.path in ANSWERS else web.Response(status=404)
        )

    app.router.add_post("/{tail:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = "http://{}:{}".format(*runner.addresses[0])
    async with aiohttp.ClientSession() as session:
        yield session, url, asked
    await runner.cleanup()


def request_for(path, **body):
    return parse_request("POST", path, {}, json.dumps({"model": "m", **body}).encode())


CHAT = {"messages": [{"role": "user", "content": "q"}]}


async def ask(worker, request, style="tokenize", url=None):
    session, base, _ = worker
    tokenizer = WorkerTokenizer(session, lambda: url or base, style)
    return (await tokenizer.encode(request, timeout_s=PATIENT_S)).prompts


async def test_conversations_go_to_tokenize_with_the_fields_it_knows(worker):
    request = request_for("/v1/chat/completions", **CHAT, reasoning_effort="none", max_tokens=5, stream=True)
    assert await ask(worker, request) == (array("I", [1, 2]),)
    ((path, asked),) = worker[2]
    assert path == "/tokenize"
    assert asked == {
        "model": "m",
        **CHAT,
        "chat_template_kwargs": {"reasoning_effort": "none", "enable_thinking": False},
    }


async def test_single_texts_go_to_tokenize(worker):
    assert await ask(worker, request_for("/v1/completions", prompt="x")) == (array("I", [1, 2]),)
    assert worker[2] == [("/tokenize", {"model": "m", "prompt": "x"})]


async def test_every_kind_can_be_rendered(worker):
    chat = request_for("/v1/chat/completions", **CHAT, documents=[])
    assert await ask(worker, chat, "render") == (array("I", [3, 4]),)
    assert worker[2][-1][1] == chat.body
    batch = request_for("/v1/completions", prompt=["a", "b"])
    assert await ask(worker, batch, "render") == (array("I", [5]), array("I", [6, 7]))


@pytest.mark.parametrize(
    ("path", "body", "style"),
    [
        ("/v1/chat/completions", {**CHAT, "documents": [{"text": "x"}]}, "tokenize"),
        ("/v1/chat/completions", {**CHAT, "truncate_prompt_tokens": 5}, "tokenize"),
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"tokenize": True}}, "tokenize"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "tokenize"),
        ("/v1/responses", {"input": "x"}, "tokenize"),
        ("/v1/responses", {"input": "x"}, "render"),
        ("/v1/messages", CHAT, "render"),
    ],
)
async def test_no_ids_is_an_error(worker, path, body, style):
    with pytest.raises(WorkerTokenizerError):
        await ask(worker, request_for(path, **body), style)


async def test_a_worker_that_refuses_or_is_gone_is_an_error(worker, unused_tcp_port):
    chat = request_for("/v1/chat/completions", **CHAT)
    with pytest.raises(WorkerTokenizerError, match="404"):
        await ask(worker, chat, url=worker[1] + "/elsewhere")
    with pytest.raises(WorkerTokenizerError):
        await ask(worker, chat, url=f"http://127.0.0.1:{unused_tcp_port}")
    tokenizer = WorkerTokenizer(worker[0], lambda: None)
    with pytest.raises(WorkerTokenizerError, match="no worker"):
        await tokenizer.encode(chat, timeout_s=PATIENT_S)


async def test_a_slow_worker_is_a_timeout(worker):
    tokenizer = WorkerTokenizer(worker[0], lambda: worker[1])
    with pytest.raises(TimeoutError):
        await tokenizer.encode(request_for("/v1/chat/completions", **CHAT), timeout_s=1e-9)


async def test_an_answer_without_end_is_not_read_to_the_end(worker, monkeypatch):
    monkeypatch.setattr(worker_tokenizer, "_MOST_BYTES", 1000)
    monkeypatch.setitem(ANSWERS, "/tokenize", {"tokens": list(range(1000))})
    with pytest.raises(WorkerTokenizerError, match="longer than 1000 bytes"):
        await ask(worker, request_for("/v1/chat/completions", **CHAT))


@pytest.mark.parametrize("answer", ["[" * 100_000, "{", "null", "1", "[1]", '{"tokens": ["x"]}', "\ud800"])
async def test_an_answer_that_is_none_is_an_error(worker, monkeypatch, answer):
    class Raw(web.Response):
        def __init__(self, _):
            super().__init__(body=answer.encode("utf-8", "surrogatepass"))

    monkeypatch.setattr(web, "json_response", Raw)
    with pytest.raises(WorkerTokenizerError):
        await ask(worker, request_for("/v1/chat/completions", **CHAT))


@pytest.fixture
async def guarded(tmp_path):
    """An engine that asks for the key `right`, or sends questions elsewhere; both know what they got."""

    async def respond(request, received):
        if engine.elsewhere:
            return web.Response(status=307, headers={"Location": engine.elsewhere})
        if received.path.startswith("/v1") and received.headers.get("authorization") != "Bearer right":
            return web.Response(status=401)
        return web.json_response(ANSWERS[request.path])

    async with Upstream(respond) as engine, Upstream() as other, aiohttp.ClientSession() as session:
        engine.elsewhere = ""

        def tokenizer(style, key):
            return WorkerTokenizer(session, lambda: f"http://{engine.endpoint}", style, key)

        yield SimpleNamespace(engine=engine, other=other, tokenizer=tokenizer, file=tmp_path / "key")


def authorizations(upstream):
    return [one.headers.get("authorization") for one in upstream.requests]


async def test_render_is_asked_with_the_key_and_tokenize_without(guarded):
    guarded.file.write_text("right")
    key = EngineKey(guarded.file)
    chat = request_for("/v1/chat/completions", **CHAT)
    for style in ("render", "tokenize"):
        await guarded.tokenizer(style, key).encode(chat, timeout_s=PATIENT_S)
    assert authorizations(guarded.engine) == ["Bearer right", None]


async def test_a_key_that_was_changed_is_read_again_and_the_question_repeated(guarded):
    guarded.file.write_text("wrong")
    key = EngineKey(guarded.file, pause_s=0.0)
    asked = guarded.tokenizer("render", key), request_for("/v1/chat/completions", **CHAT)
    with pytest.raises(WorkerTokenizerError, match="answered 401") as refused:
        await asked[0].encode(asked[1], timeout_s=PATIENT_S)
    assert "wrong" not in str(refused.value)
    guarded.file.write_text("right")
    found = await asked[0].encode(asked[1], timeout_s=PATIENT_S)
    assert found.prompts == (array("I", [3, 4]),)
    assert authorizations(guarded.engine) == ["Bearer wrong", "Bearer wrong", "Bearer right"]


async def test_a_question_does_not_follow_redirects(guarded):
    guarded.file.write_text("right")
    guarded.engine.elsewhere = f"http://{guarded.other.endpoint}/v1/chat/completions/render"
    tokenizer = guarded.tokenizer("render", EngineKey(guarded.file))
    with pytest.raises(WorkerTokenizerError, match="answered 307"):
        await tokenizer.encode(request_for("/v1/chat/completions", **CHAT), timeout_s=PATIENT_S)
    assert not guarded.other.requests
