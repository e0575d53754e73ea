import gzip
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.protocol import openai
from extproc.protocol.body_limits import BodyLimits
from extproc.protocol.openai import (
    MOST_SEQUENCES,
    BadRequest,
    InferenceRequest,
    LoadOnly,
    RequestKind,
    decode_json,
    parse_request,
)

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def post(path, body, headers=None):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_request("POST", path, headers or {}, data)


def test_chat_fields():
    request = post(
        "/v1/chat/completions?trace=1",
        {
            **CHAT,
            "max_tokens": 5,
            "max_completion_tokens": 7,
            "stream": True,
            "n": 3,
            "cache_salt": "s",
            "prompt_cache_key": "k",
            "user": "u",
            "priority": -1,
        },
    )
    assert isinstance(request, InferenceRequest)
    assert request.kind is RequestKind.CHAT
    assert request.model == "m"
    assert request.max_output_tokens == 7
    assert request.stream
    assert request.sequences == 3
    assert (request.cache_salt, request.prompt_cache_key, request.user, request.priority) == (
        "s",
        "k",
        "u",
        -1,
    )


def test_pitfall_25_chat_without_prompt_is_read():
    request = post("/v1/chat/completions", CHAT)
    assert isinstance(request, InferenceRequest)
    assert request.body == CHAT


@pytest.mark.parametrize(
    ("prompt", "sequences"),
    [("a", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2), ([], 1), (None, 1)],
)
def test_pitfall_21_all_shapes_of_a_completion_prompt_are_read(prompt, sequences):
    request = post("/v1/completions", {"prompt": prompt, "n": 2})
    assert isinstance(request, InferenceRequest)
    assert request.sequences == 2 * sequences
    assert request.max_output_tokens == 16


def test_a_completion_that_asks_for_no_limit_has_none():
    assert post("/v1/completions", {"prompt": "x", "max_tokens": None}).max_output_tokens is None


def test_responses_and_messages_name_their_limits():
    assert post("/v1/responses", {"input": "x", "max_output_tokens": 9}).max_output_tokens == 9
    request = post("/v1/messages", {"messages": [], "max_tokens": 8, "metadata": {"user_id": "u"}})
    assert (request.max_output_tokens, request.user) == (8, "u")


@pytest.mark.parametrize(
    ("path", "fields", "reads"),
    [
        ("/v1/completions", {}, True),
        ("/v1/completions", {"logprobs": 1}, True),
        ("/v1/completions", {"echo": True}, True),
        ("/v1/completions", {"echo": True, "logprobs": None}, True),
        ("/v1/completions", {"echo": False, "logprobs": 1}, True),
        ("/v1/completions", {"echo": True, "logprobs": 0}, False),
        ("/v1/completions", {"prompt_logprobs": 0}, False),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2}, True),
        ("/v1/chat/completions", {"prompt_logprobs": None}, True),
        ("/v1/chat/completions", {"prompt_logprobs": 1}, False),
        ("/v1/chat/completions", {"echo": True}, False),
        ("/v1/responses", {"prompt_logprobs": 1}, True),
    ],
)
def test_what_needs_logprobs_of_its_prompt_reads_no_cache(path, fields, reads):
    request = post(path, {"prompt": "x", "messages": [], "input": "x", **fields})
    assert isinstance(request, InferenceRequest)
    assert request.reads_cache is reads


@pytest.mark.parametrize("value", [True, "7", 1.5, None])
def test_limits_that_are_no_integers_are_unknown(value):
    assert post("/v1/chat/completions", {**CHAT, "max_tokens": value, "n": value}).max_output_tokens is None


@pytest.mark.parametrize(
    "path",
    [
        "/v1/embeddings",
        "/tokenize",
        "/v1/messages/count_tokens",
        "/v1/chat/completions/",
        "/anything",
        "",
        "*",
    ],
)
def test_pitfall_26_other_paths_are_routed_by_load(path):
    assert post(path, {"model": "m", "input": "x"}) == LoadOnly("path", "m")
    assert post(path, b"\xff\x00 not json") == LoadOnly("path")
    assert post(path, b"[1]") == LoadOnly("path")
    assert post(path, b"") == LoadOnly("path")
    assert post(path, b'{"model": 5}') == LoadOnly("path")


def test_an_upload_of_audio_is_routed_to_its_model():
    body = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--b--\r\n'
    form = {"content-type": "multipart/form-data; boundary=b"}
    assert post("/v1/audio/transcriptions", body, form) == LoadOnly("path", "whisper")


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE", "PUT"])
def test_other_methods_are_routed_by_load(method):
    assert parse_request(method, "/v1/chat/completions", {}, b"") == LoadOnly("method")
    assert parse_request(method, "/v1/models", {}, b"") == LoadOnly("method")


@pytest.mark.parametrize(
    "body", [b'{"model":', b'{"secret": "hunter2", }', b'"secret', b"\xff\xfe\xfd", b"{} x"]
)
def test_pitfall_24_malformed_json_is_a_short_400_that_echoes_nothing(body):
    with pytest.raises(BadRequest) as caught:
        post("/v1/chat/completions", body)
    answer = json.loads(caught.value.body())
    assert caught.value.status == 400
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["code"] == "invalid_json"
    assert answer["error"]["type"] == "invalid_request_error"
    assert len(answer["error"]["message"]) < 100
    assert "secret" not in answer["error"]["message"]
    assert "model" not in answer["error"]["message"]


@pytest.mark.parametrize("path", openai.PATHS)
def test_pitfall_19_an_empty_body_is_for_the_engine_to_judge(path):
    assert post(path, b"") == LoadOnly("no-body")
    assert post(path, gzip.compress(b""), {"content-encoding": "gzip"}) == LoadOnly("no-body")


@pytest.mark.parametrize("body", [b"[]", b"5", b'"x"', b"null"])
def test_json_that_is_no_object_is_a_400(body):
    with pytest.raises(BadRequest, match="object"):
        post("/v1/chat/completions", body)


def test_digits_without_end_are_a_400():
    with pytest.raises(BadRequest):
        post("/v1/chat/completions", b'{"a": NaN, "b": ' + b"1" * 5000 + b"}")


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 50_000, b"[" * 9000 + b"]" * 9000])
def test_deep_json_is_routed_by_load(body):
    assert post("/v1/chat/completions", body) == LoadOnly("json-too-deep")


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "GZIP "])
def test_pitfall_34_gzip_is_decoded_for_routing(encoding):
    data = json.dumps(CHAT).encode()
    request = post("/v1/chat/completions", gzip.compress(data), {"content-encoding": encoding})
    assert isinstance(request, InferenceRequest)
    assert request.body == CHAT
    assert request.size == len(data)


def test_pitfall_34_gzip_members_are_joined():
    data = json.dumps(CHAT).encode()
    body = gzip.compress(data[:9]) + gzip.compress(data[9:])
    assert post("/v1/chat/completions", body, {"content-encoding": "gzip"}).body == CHAT


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("zstd", b"(\xb5/\xfd"),
        ("br", b"x"),
        ("gzip, br", gzip.compress(b"{}", mtime=0)),
        ("deflate", zlib.compress(b"{}")),
        ("gzip", b"not gzip"),
        ("gzip", gzip.compress(b"{}", mtime=0)[:-3]),
        ("gzip", gzip.compress(b"{}", mtime=0) + b"junk"),
        ("gzip", b""),
        ("gzip", gzip.compress(b"", mtime=0) * 1000),
    ],
)
def test_pitfall_34_other_encodings_are_routed_by_load(encoding, body):
    assert post("/v1/chat/completions", body, {"content-encoding": encoding}) == LoadOnly("content-encoding")


def within(limits, body, path="/v1/chat/completions", headers=None):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_request("POST", path, headers or {}, data, limits)


def test_pitfall_34_a_bomb_is_routed_by_load():
    zipped = {"content-encoding": "gzip"}
    limits = BodyLimits(read_bytes=1000)
    bomb = gzip.compress(b" " * 1001)
    assert within(limits, bomb, headers=zipped) == LoadOnly("content-encoding")
    fits = gzip.compress(b"{}" + b" " * 998)
    assert isinstance(within(limits, fits, headers=zipped), InferenceRequest)


def test_what_is_more_than_the_limits_is_routed_by_load_to_its_model():
    limits = BodyLimits(read_bytes=2000, json_values=100, messages=2, prompts=2)
    chat, completion = "/v1/chat/completions", "/v1/completions"
    long = {"prompt": "x" * 2000, "model": "m"}
    assert within(limits, long, completion) == LoadOnly("body-too-long", "m")
    many = {"prompt": list(range(101)), "model": "m"}
    assert within(limits, many, completion) == LoadOnly("json-too-many-values", "m")
    prompts = {"prompt": ["a"] * 3, "model": "m"}
    assert within(limits, prompts, completion) == LoadOnly("too-many-prompts", "m")
    messages = [{"role": "user", "content": "a"}] * 3
    assert within(limits, {"messages": messages, "model": "m"}, chat) == LoadOnly("too-many-messages", "m")
    assert within(limits, {"input": messages, "model": "m"}, "/v1/responses") == LoadOnly(
        "too-many-messages", "m"
    )
    fits = {"messages": messages[:2], "model": "m"}
    assert isinstance(within(limits, fits, chat), InferenceRequest)


def test_names_are_cut_and_fit_for_a_log():
    body = json.dumps({"model": "m" * 5000, "user": "\ud800u", "prompt": "a"}).encode()
    parsed = post("/v1/completions", body)
    assert parsed.model == "m" * 256
    assert parsed.user == "?u"
    assert post("/v1/completions", {"prompt": "a", "model": "m\x1b[2J"}).model == "m?[2J"
    assert post("/v1/embeddings", body) == LoadOnly("path", "m" * 256)


def test_a_model_is_not_looked_for_among_a_million_texts():
    body = b'{"a":[' + b'"",' * (1 << 19) + b'""],"model":"m"}'
    assert post("/v1/embeddings", body) == LoadOnly("path", None)


def test_pitfall_23_keys_stay_in_wire_order():
    body = b'{"tools":[{"z":0,"a":{"y":1,"b":2}}],"model":"m"}'
    assert json.dumps(post("/v1/chat/completions", body).body, separators=(",", ":")).encode() == body


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b'{"a":1e999}',
        b'{"a":"\\ud800"}',
        b'\xef\xbb\xbf{"a":1}',
        b'{"a":1,"a":2}',
    ],
)
def test_what_python_reads_we_read(body):
    assert repr(decode_json(body)) == repr(json.loads(body))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(JSON, st.booleans())
def test_decoding_agrees_with_python(value, ascii_only):
    body = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert repr(decode_json(body)) == repr(json.loads(body))


@given(st.binary(max_size=40) | st.text(alphabet='{}[]",:1.eE-\\ud8 ntf', max_size=20).map(str.encode))
def test_decoding_refuses_exactly_what_python_refuses(body):
    try:
        expected = repr(json.loads(body))
    except ValueError:
        with pytest.raises(BadRequest):
            decode_json(body)
    else:
        assert repr(decode_json(body)) == expected


@pytest.mark.parametrize(("path", "kind"), openai.PATHS.items())
@pytest.mark.parametrize("headers", [{}, {"content-encoding": "gzip"}])
def test_a_request_is_read_again_from_its_plain_body(path, kind, headers):
    fields = {"model": "m", "n": 2, "stream": True, "max_tokens": 7, "user": "u", "priority": 3}
    body = json.dumps({**fields, "prompt": ["a", "b"], "messages": [], "input": "q"}).encode()
    request = parse_request("POST", path, headers, gzip.compress(body) if headers else body)
    assert request.plain == body
    assert "plain" not in repr(request)
    assert openai.parse_plain(kind, request.plain) == request


@pytest.mark.parametrize("body", [b"[]", b"{", b""])
def test_what_is_no_request_is_none_when_it_is_read_again(body):
    with pytest.raises(BadRequest):
        openai.parse_plain(openai.RequestKind.CHAT, body)


@given(st.text(), st.text(), st.binary(max_size=60))
def test_nothing_else_escapes(method, path, body):
    assert isinstance(parse_request(method, path, {"content-encoding": path}, body), LoadOnly)


@pytest.mark.parametrize("huge", [10**9, 10**22, 10**400])
def test_numbers_that_no_engine_takes_stay_countable(huge):
    body = {"model": "m", "prompt": ["a", "b"], "n": huge, "max_tokens": huge, "priority": -huge}
    parsed = parse_request("POST", "/v1/completions", {}, json.dumps(body).encode())
    assert parsed.sequences == MOST_SEQUENCES
    assert parsed.max_output_tokens < 1 << 31
    assert parsed.priority > -(1 << 31)
