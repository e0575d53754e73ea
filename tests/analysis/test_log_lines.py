import base64
import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.analysis.log_lines import BadLine, Skipped, read_line
from extproc.protocol.openai import RequestKind

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
TEXT = {"model": "m", "prompt": "once"}
RESPONSES = {"model": "m", "input": "hi", "instructions": "be short"}
ANTHROPIC = {"model": "m", "system": "s", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
TAP_HEADERS = [{"key": ":path", "value": "/v1/completions"}, {"key": "x-tenant-id", "value": "blue"}]
LITELLM = {
    "id": "chatcmpl-1",
    "call_type": "acompletion",
    "startTime": 1764481644.0,
    "model": "vllm/m",
    "model_group": "m",
    "model_parameters": {"temperature": 0, "tools": []},
    "messages": [{"role": "user", "content": "hi"}],
    "metadata": {"user_api_key_team_alias": "blue"},
    "response": {"choices": []},
}
SPEND_LOG = {
    "request_id": "r",
    "call_type": "acompletion",
    "model": "m",
    "messages": {},
    "proxy_server_request": json.dumps(CHAT),
    "team_id": "blue",
    "session_id": "s",
}


def one(value, custom=None):
    line = value if isinstance(value, bytes) else json.dumps(value).encode()
    [request] = read_line(line, custom)
    return request


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (CHAT, RequestKind.CHAT),
        (TEXT, RequestKind.COMPLETION),
        (RESPONSES, RequestKind.RESPONSES),
        (ANTHROPIC, RequestKind.MESSAGES),
    ],
)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda body: body,
        lambda body: {"request": body, "response": {"usage": {}}},
        lambda body: {"request": {"method": "POST", "body": body}},
        lambda body: {"body": json.dumps(body)},
        lambda body: {"custom_id": "1", "method": "POST", "url": "/v1/x", "body": body},
        lambda body: {"log": json.dumps({"request_body": json.dumps(body)}) + "\n", "stream": "stdout"},
        lambda body: {"kwargs": {"litellm_params": {"proxy_server_request": {"body": body}}}},
        lambda body: {"http_buffered_trace": {"request": {"body": {"as_string": json.dumps(body)}}}},
        lambda body: {
            "http_buffered_trace": {
                "request": {"body": {"as_bytes": base64.b64encode(json.dumps(body).encode()).decode()}}
            }
        },
        lambda body: b"2026-11-30T05:47:24Z stdout F " + json.dumps({"body": body}).encode(),
        lambda body: b'[2026] "POST /v1 HTTP/1.1" 200 - request_body ' + json.dumps(body).encode() + b"\r\n",
        lambda body: b"\xef\xbb\xbf" + json.dumps(body).encode(),
    ],
)
def test_a_body_is_found_wherever_it_is(body, kind, wrap):
    request = one(wrap(body))
    assert (request.kind, dict(request.body)) == (kind, body)


def test_the_path_decides_before_the_body_does():
    line = {"path": "/v1/messages?beta=true", "body": CHAT}
    assert one(line).kind is RequestKind.MESSAGES


def test_envoys_access_log_with_a_body_from_lua():
    line = {
        "start_time": "2025-11-30T05:47:24.000Z",
        "method": "POST",
        "path": "/v1/chat/completions",
        "request_headers": {"x-session-id": "s1"},
        "request_body": json.dumps(CHAT),
        "response_body": json.dumps({"prompt": "not this"}),
    }
    request = one(line)
    assert dict(request.body) == CHAT
    assert (request.fields.time, request.fields.session) == (1764481644.0, "s1")


def test_envoys_tap():
    body = {"as_string": json.dumps(TEXT), "truncated": False}
    request = one({"http_buffered_trace": {"request": {"headers": TAP_HEADERS, "body": body}}})
    assert (request.kind, request.form, request.fields.tenant) == (RequestKind.COMPLETION, "tap", "blue")


def test_litellms_payload():
    request = one({"standard_logging_object": LITELLM})
    assert request.form == "litellm"
    assert request.body == {
        "model": "m",
        "temperature": 0,
        "tools": [],
        "messages": [{"role": "user", "content": "hi"}],
    }
    assert (request.fields.tenant, request.fields.time) == ("blue", 1764481644.0)


def test_litellm_text_completions_come_as_messages():
    line = {**LITELLM, "call_type": "atext_completion"}
    assert (one(line).kind, one(line).body["prompt"]) == (RequestKind.COMPLETION, "hi")


def test_litellms_spend_log_has_the_body_as_it_was_sent():
    request = one(SPEND_LOG)
    assert dict(request.body) == CHAT
    assert (request.fields.tenant, request.fields.session, request.form) == ("blue", "s", "litellm")


def test_prompts_that_litellm_did_not_log_are_bad_lines():
    line = {**LITELLM, "messages": [{"role": "user", "content": "redacted-by-litellm"}]}
    with pytest.raises(BadLine, match="did not log the prompt"):
        read_line(json.dumps(line).encode())


def test_vllms_lines():
    old = b"INFO 1] Received request chatcmpl-1: prompt: '<s>hi', params: X, prompt_token_ids: [1, 2], x"
    request = one(old)
    assert (request.form, request.token_ids) == ("vllm-received", (1, 2))
    assert request.body["add_special_tokens"] is False
    assert one({"log": old.decode()}).token_ids == (1, 2)
    body = b"DEBUG 1] Request 7 JSON body: " + json.dumps(CHAT).encode()
    assert (one(body).form, one(body).kind) == ("vllm-body", RequestKind.CHAT)
    with pytest.raises(Skipped):
        read_line(b"INFO 1] Received request chatcmpl-1: params: SamplingParams(n=1), lora_request: None.")


def test_a_list_on_one_line():
    assert [request.kind for request in read_line(json.dumps([CHAT, TEXT]).encode())] == [
        RequestKind.CHAT,
        RequestKind.COMPLETION,
    ]


@pytest.mark.parametrize(
    "line",
    [
        {"path": "/v1/embeddings", "body": {"model": "m", "input": "x"}},
        {"model": "bge-embed", "input": ["x"], "path": "/v1/embeddings"},
        {"method": "GET", "path": "/v1/models"},
        {"path": "/metrics"},
        {**LITELLM, "call_type": "aembedding"},
        b"INFO:     Application startup complete.",
    ],
)
def test_other_lines_are_skipped(line):
    with pytest.raises(Skipped):
        read_line(line if isinstance(line, bytes) else json.dumps(line).encode())


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (json.dumps(CHAT).encode()[:-5], "cut off"),
        (json.dumps({"request_body": json.dumps(CHAT)[:-5]}).encode(), "cut off"),
        (b'text {"messages": [', "cut off"),
        (b'{"hello": "world"}', "without a request"),
        (b"[" * 100_000, "."),
        (b"\xff\xfe\x00 nothing that anybody could read as a log line {at all}", "neither JSON"),
    ],
)
def test_bad_lines_say_why(line, reason):
    with pytest.raises(BadLine, match=reason):
        read_line(line)


def test_blank_lines_hold_nothing():
    assert read_line(b"  \r\n") == []


@given(
    st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda text: f'{{"body": {text}'.encode()))
)
def test_nothing_else_is_ever_raised(line):
    with contextlib.suppress(BadLine, Skipped):
        read_line(line)


KEYS = [
    *("messages", "prompt", "input", "model", "body", "request", "headers", "metadata", "log", "path"),
    *("call_type", "model_parameters", "proxy_server_request", "prompt_token_ids", "time", "key"),
]
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(KEYS),
            inner,
            max_size=5,
        ),
    ),
    max_leaves=20,
)


@given(
    st.dictionaries(
        st.sampled_from(["messages", "prompt", "input", "body", "call_type", "request_id"]), VALUES
    )
)
def test_odd_objects_are_read_or_refused(value):
    with contextlib.suppress(BadLine, Skipped):
        read_line(json.dumps(value).encode())
