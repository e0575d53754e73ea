import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.protocol import usage as module
from extproc.protocol.usage import Usage, UsageReader, normalize

CHAT = {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 64}}
RESPONSES = {"input_tokens": 100, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 64}}
ANTHROPIC = {"input_tokens": 36, "output_tokens": 7, "cache_read_input_tokens": 64}
SAME = Usage(prompt_tokens=100, cached_tokens=64, output_tokens=7)


def events(*documents, end="\n") -> bytes:
    lines = []
    for document in documents:
        data = document if isinstance(document, str) else json.dumps(document)
        lines.append(f"data: {data}{end}{end}")
    return "".join(lines).encode()


STREAMS = {
    "chat": events(
        {"choices": [{"delta": {"content": 'says "usage" itself'}}], "usage": None},
        {"choices": [], "usage": CHAT},
        "[DONE]",
    ),
    "responses": b"event: response.completed\n"
    + events({"type": "response.completed", "response": {"output": [], "usage": RESPONSES}}),
    "anthropic": events(
        {"type": "message_start", "message": {"usage": {"input_tokens": 100, "output_tokens": 0}}},
        {"type": "content_block_delta", "delta": {"text": "x"}},
        {"type": "message_delta", "usage": ANTHROPIC},
    ),
    "crlf": events({"usage": CHAT}, "[DONE]", end="\r\n"),
    "several data lines": b': comment\ndata: {"usage":\ndata: ' + json.dumps(CHAT).encode() + b"}\n\n",
    "no blank line at the end": b"data: " + json.dumps({"usage": CHAT}).encode(),
    "continuous": events({"usage": {"prompt_tokens": 100, "completion_tokens": 1}}, {"usage": CHAT}),
}
DOCUMENTS = {
    "chat": json.dumps({"choices": [], "usage": CHAT}).encode(),
    "responses": json.dumps({"usage": RESPONSES}, indent=1).encode(),
    "anthropic": json.dumps({"type": "message", "usage": ANTHROPIC}).encode(),
}


def read(data: bytes, content_type: str | None, cuts=()) -> Usage | None:
    reader = UsageReader(content_type)
    edges = [0, *sorted(cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        reader.feed(data[start:end])
    return reader.finish()


@pytest.mark.parametrize("name", STREAMS)
def test_pitfall_76_streams_split_at_every_byte(name):
    data = STREAMS[name]
    for cut in range(len(data) + 1):
        assert read(data, "text/event-stream; charset=utf-8", [cut]) == SAME
    assert read(data, "text/event-stream", range(len(data))) == SAME


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_split_at_every_byte(name):
    data = DOCUMENTS[name]
    for cut in range(len(data) + 1):
        assert read(data, "application/json", [cut]) == SAME


@given(st.sampled_from([*STREAMS.values(), *DOCUMENTS.values()]), st.data())
def test_without_a_content_type_the_first_byte_decides(data, draws):
    cuts = draws.draw(st.lists(st.integers(0, len(data)), max_size=5))
    assert read(b" \n" + data, None, cuts) == SAME


def test_usage_can_be_asked_for_while_the_stream_runs():
    reader = UsageReader("text/event-stream")
    reader.feed(STREAMS["chat"])
    assert reader.usage == SAME


@given(st.binary(max_size=300), st.sampled_from([None, "application/json", "text/event-stream", "x"]))
def test_garbage_has_no_usage_and_no_exception(data, content_type):
    assert read(data, content_type) is None


@pytest.mark.parametrize(
    "document",
    [
        b'{"usage": null}',
        b'{"usage": []}',
        b'{"usage": {}}',
        b'{"usage": {"prompt_tokens": "5"}}',
        b'{"usage": {"prompt_tokens": true, "completion_tokens": -1}}',
        b'["usage"]',
        b'{"usage": {"prompt_tokens"',
        b'{"usage":' * 50_000,
    ],
)
def test_usage_that_is_none(document):
    assert read(document, "application/json") is None
    assert read(b"data: " + document + b"\n\n", "text/event-stream") is None


def test_missing_details_are_unknown_and_zero_is_zero():
    flat = {"prompt_tokens": 5, "completion_tokens": 0}
    assert read(json.dumps({"usage": flat}).encode(), None) == Usage(5, None, 0)
    flat["prompt_tokens_details"] = {"cached_tokens": 0}
    assert read(json.dumps({"usage": flat}).encode(), None) == Usage(5, 0, 0)


def test_embeddings_have_no_output():
    assert read(b'{"usage": {"prompt_tokens": 5, "total_tokens": 5}}', None) == Usage(5, None, None)


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_JSON_BYTES", 100)
    monkeypatch.setattr(module, "MAX_EVENT_BYTES", 300)
    long_document = DOCUMENTS["chat"] + b" " * 200
    assert read(long_document, "application/json", [50]) is None
    reader = UsageReader("text/event-stream")
    reader.feed(b"data: " + b"x" * 400)
    reader.feed(b"y" * 400 + b"\n\n")
    assert len(reader._rest) == 0
    reader.feed(STREAMS["chat"])
    assert reader.finish() == SAME


def test_an_event_of_lines_without_end_is_bounded_too(monkeypatch):
    monkeypatch.setattr(module, "MAX_EVENT_BYTES", 300)
    reader = UsageReader("text/event-stream")
    for _ in range(1000):
        reader.feed(b"data: x\n")
    assert len(reader._event) == 0
    reader.feed(b"\n" + STREAMS["chat"])
    assert reader.finish() == SAME


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt_tokens": 100.0, "cached_tokens": 64.0, "completion_tokens": 7.0}, SAME),
        ({"input_tokens": 100.0, "input_cached_tokens": 64.0, "output_tokens": 7.0}, SAME),
        ({"input_tokens": 36.0, "cache_read_input_tokens": 64.0, "output_tokens": 7.0}, SAME),
        (
            {
                "input_tokens": 30,
                "cache_creation_input_tokens": 6,
                "cache_read_input_tokens": 64,
                "output_tokens": 7,
            },
            SAME,
        ),
        ({"input_tokens": 30}, Usage(30, None, None)),
        ({"output_tokens": 3}, Usage(None, None, 3)),
        ({"cached_tokens": 3}, None),
        ({"prompt_tokens": float("nan")}, None),
        ({}, None),
    ],
)
def test_normalize(fields, expected):
    assert normalize(fields) == expected


STARTED = {"message": {"usage": {"input_tokens": 36, "cache_read_input_tokens": 64, "output_tokens": 1}}}


def test_anthropics_last_part_may_speak_of_the_output_only():
    assert read(events(STARTED, {"usage": {"output_tokens": 7}}), "text/event-stream") == SAME


def test_anthropics_second_account_of_the_prompt_replaces_the_first():
    data = events(STARTED, {"usage": {"input_tokens": 100, "output_tokens": 7}})
    assert read(data, "text/event-stream") == Usage(100, None, 7)
