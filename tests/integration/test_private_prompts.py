"""No text of a prompt, an answer or a tool leaves by the log, the decision log, the journal, traces, metrics
or the admin server: whatever field it stands in, and whatever goes wrong with it. Also with `-v`."""

import copy
import gzip
import io
import itertools
import json
import logging
import zlib
from pathlib import Path
from urllib.parse import quote

import aiohttp
import grpc
import pytest
import yaml

from extproc import config as configuration
from extproc.adapters.service_log import start_log
from extproc.app import App
from extproc.pb import ext_proc_pb2
from extproc.prompt.tiny import tiny_model_path
from tests.support.grpc_host import (
    BUFFERED,
    DUPLEX,
    request_body,
    request_headers,
    response_body,
    response_headers,
)
from tests.support.otlp import OtlpCollector
from tests.support.prompt_cases import WEATHER
from tests.support.sim_engine import SimEngine
from tests.support.waiting import until

CANARY = "canary-5ecre7-word"
CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "x"}'}}
VALID = [
    (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "Be good."},
                {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
                {"role": "tool", "tool_call_id": "c1", "content": "Sunny"},
                {"role": "user", "content": "Thanks", "name": "me"},
            ],
            "tools": [WEATHER],
            "tool_choice": "auto",
            "documents": [{"title": "t", "text": "d"}],
            "chat_template_kwargs": {"enable_thinking": True, "bos_token": "b"},
            "reasoning_effort": "low",
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
            "stop": ["x"],
            "max_tokens": 5,
            "expected_output_tokens": 5,
            "user": "u",
            "cache_salt": "s",
            "stream": False,
            "truncate_prompt_tokens": 100,
        },
    ),
    (COMPLETIONS, {"prompt": ["Once", "upon"], "max_tokens": 2, "suffix": "end"}),
    (COMPLETIONS, {"prompt": "Once", "n": 2, "add_special_tokens": True, "echo": False}),
    (
        RESPONSES,
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
            "instructions": "Be good.",
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            "previous_response_id": None,
            "prompt_cache_key": "k",
        },
    ),
    (
        MESSAGES,
        {
            "system": [{"type": "text", "text": "Be good."}],
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "t", "content": "done"}],
                },
            ],
            "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
            "max_tokens": 5,
            "metadata": {"user_id": "u"},
        },
    ),
]
# A template that fails on most messages, and says on what.
QUOTING = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('bad: ' ~ m) }}{% endif %}{{ m.content + 'x' }}{{ m.content | int + 1 }}{% endfor %}"
)


def places(value, path=()):
    """Paths to everything in a body."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(body, path, replacement):
    body = copy.deepcopy(body)
    inner = body
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = replacement
    return body


def bodies():
    """(path, bytes, headers): the word at every place, in every shape, and bodies broken beside it."""
    for path, valid in VALID:
        body = {"model": "tiny", **valid}
        for place in places(valid):
            for shape in (CANARY, [CANARY], {CANARY: CANARY}, f'{{"{CANARY}": \ud800'):
                yield path, json.dumps(changed(body, place, shape)).encode(), {}
            if isinstance(place[-1], str):
                yield path, json.dumps(changed(body, (*place[:-1], CANARY), 1)).encode(), {}
        whole = json.dumps(changed(body, (next(iter(valid)),), CANARY)).encode()
        for cut in (len(whole) - 1, whole.index(CANARY.encode()) + len(CANARY), 3):
            yield path, whole[:cut] + CANARY.encode(), {}
        yield path, f'["{CANARY}"]'.encode(), {}
        yield path, f'"{CANARY}"'.encode(), {}
        yield path, gzip.compress(whole), {"content-encoding": "gzip"}
        yield path, gzip.compress(whole)[:-4], {"content-encoding": "gzip"}
        yield path, whole, {"content-encoding": CANARY}
        yield path, b"\xff" + whole, {}
        yield "/v1/embeddings", whole, {}
        yield path, whole, {"x-warmroute-prefix-class": CANARY, "x-warmroute-expected-output-tokens": CANARY}


class Listening(OtlpCollector):
    """Keeps what it got as bytes, events of spans included."""

    def __init__(self):
        super().__init__()
        self.raw = b""

    def _take_spans(self, request):
        self.raw += request.SerializeToString()
        super()._take_spans(request)


class Place:
    """A running Warmroute with everything switched on that writes anything."""

    def __init__(self, app, directory, log, collector, said):
        self.app, self.directory, self.log, self.collector, self.said = app, directory, log, collector, said
        self.channel = grpc.aio.insecure_channel(app.address)

    async def __aexit__(self, *_):
        await self.channel.close()

    async def ask(self, path, body, headers, request_id):
        said = {":method": "POST", ":path": path, "x-request-id": request_id, **headers}
        call = self.channel.stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            ext_proc_pb2.ProcessingRequest.SerializeToString,
            ext_proc_pb2.ProcessingResponse.FromString,
        )()
        answer = json.dumps({"choices": [{"text": CANARY}], "usage": {CANARY: CANARY}}).encode()
        messages = [
            request_headers(said, mode=BUFFERED, response_mode=DUPLEX),
            request_body(body, end=True),
            response_headers({"content-type": "application/json"}),
            response_body(answer, end=True),
        ]
        replies = []
        for message in messages:
            await call.write(message)
            replies.append(await call.read())
            if replies[-1] is grpc.aio.EOF or replies[-1].HasField("immediate_response"):
                break
        await call.done_writing()
        return replies

    async def written(self):
        """Everything that anyone but the client and the engine gets to see, by name."""
        await until(lambda: len(self.app.router.ledger) == 0)
        async with aiohttp.ClientSession(f"http://{self.app.admin.address}") as client:
            shown = {}
            for path in ("/state", "/metrics"):
                async with client.get(path) as reply:
                    shown[path] = await reply.text()
            state = json.loads(shown["/state"])
            ids = {line["request_id"] for line in self.lines()}
            assert state
            for request_id in sorted(ids)[::10]:
                async with client.get(f"/explain/{quote(request_id)}") as reply:
                    shown[f"/explain/{request_id}"] = await reply.text()
        return {
            "log": self.log.getvalue(),
            "reports": "\n".join(self.said),
            "decisions": (self.directory / "decisions.jsonl").read_text(),
            "traces": self.collector.raw.decode("latin-1"),
            **shown,
        }

    def lines(self):
        return [json.loads(line) for line in (self.directory / "decisions.jsonl").read_text().splitlines()]


def unpacked(directory: Path):
    """All that any file in it holds, compressed pieces included."""
    for file in directory.rglob("*"):
        if not file.is_file():
            continue
        data = file.read_bytes()
        yield file.name, data
        at = 0
        while (at := data.find(b"\x78", at)) >= 0:
            unpacker = zlib.decompressobj()
            try:
                yield f"{file.name}@{at}", unpacker.decompress(data[at:])
            except zlib.error:
                at += 1
            else:
                at = len(data) - len(unpacker.unused_data) if unpacker.eof else at + 1


@pytest.fixture
async def start(tmp_path, monkeypatch):
    """`await start(**settings of the model)` gives a `Place`."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    for handler in before:
        root.removeHandler(handler)
    log = io.StringIO()
    ours = start_log(verbose=True, stream=log)
    for one in list(ours.filters):
        ours.removeFilter(one)  # nothing is to be left out here
    running = []

    async def begin(**model):
        collector = await Listening().__aenter__()
        running.append(collector)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.grpc)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
        engine = await SimEngine().__aenter__()
        running.append(engine)
        text = yaml.safe_dump(
            {
                "listen": "127.0.0.1:0",
                "admin": {"listen": "127.0.0.1:0"},
                "shadow": ["round-robin"],
                "scrape": {"interval_s": 0.1},
                "limits": {"prompt_budget_ms": 5000},
                "decision_log": {"path": str(tmp_path / "decisions.jsonl")},
                "journal": {"path": str(tmp_path / "journal")},
                "pools": [
                    {
                        "model": {"path": str(tiny_model_path()), "worker_tokenize": "tokenize", **model},
                        "normalization": {"mode": "apply", "fragment_tag": "document"},
                        "discovery": {
                            "static": [
                                {
                                    "endpoint": engine.endpoint,
                                    "kv_events": engine.kv_events,
                                    "kv_replay": engine.kv_replay,
                                }
                            ]
                        },
                    }
                ],
            }
        )
        said: list[str] = []
        app = await App(configuration.parse(text), said.append).__aenter__()
        running.append(app)
        await until(lambda: all(state.metrics for state in app.router.table.all()))
        place = Place(app, tmp_path, log, collector, said)
        running.append(place)
        return place

    yield begin
    for one in reversed(running):
        await one.__aexit__(None, None, None)
    root.removeHandler(ours)
    for handler in before:
        root.addHandler(handler)
    root.setLevel(level)


async def assert_nothing_leaks(place):
    written = await place.written()
    leaks = {
        name: text[max(0, at - 200) : at + 100]
        for name, text in written.items()
        if (at := text.find(CANARY)) >= 0
    }
    assert not leaks
    if place.app._journal is not None:
        place.app._journal.flush()
    files = list(unpacked(place.directory))
    assert [name for name, data in files if CANARY.encode() in data] == []
    return files


@pytest.mark.parametrize("template", [None, QUOTING], ids=["plain", "quoting template"])
async def test_whatever_a_request_holds_is_not_written_down(start, tmp_path, template):
    if template is None:
        place = await start()
    else:
        (tmp_path / "template.jinja").write_text(template)
        place = await start(chat_template=str(tmp_path / "template.jinja"))
    numbers = itertools.count()
    asked = list(bodies())[:: 1 if template is None else 4]
    for path, body, headers in asked:
        replies = await place.ask(path, body, headers, f"request-{next(numbers)}")
        for reply in replies:
            if reply is not grpc.aio.EOF and reply.HasField("immediate_response"):
                assert CANARY not in reply.immediate_response.details
    await until(lambda: place.collector.spans)
    files = await assert_nothing_leaks(place)
    assert any(name.startswith("journal") and b"request-" in data for name, data in files)
    assert len(place.lines()) > len(asked) * 0.8


@pytest.mark.parametrize("broken", ["encode", "schedule", "normalize", "parse"])
async def test_nor_when_we_fail_ourselves(start, monkeypatch, broken):
    place = await start()

    def fail(*args, **kwargs):
        raise ValueError(f"invalid literal for int(): {CANARY!r} of {args} {kwargs}")

    service = place.app.service
    pool = service._pools["default"]
    match broken:
        case "encode":
            monkeypatch.setattr(pool.prompts._encoder, "encode", fail)
        case "schedule":
            monkeypatch.setattr(service._router, "schedule", fail)
        case "normalize":
            monkeypatch.setattr("extproc.adapters.prompt_normalizer.normalize", fail)
        case "parse":
            monkeypatch.setattr("extproc.adapters.request_preparation.parse_request", fail)
    for number, (path, valid) in enumerate(VALID):
        body = json.dumps({"model": "tiny", **valid}).encode()
        replies = await place.ask(path, body, {}, f"request-{number}")
        assert not any(reply.HasField("immediate_response") for reply in replies if reply is not grpc.aio.EOF)
    assert "ValueError" in place.log.getvalue()
    await assert_nothing_leaks(place)
