import json
import random
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.prompt.encoder import PromptEncoder
from extproc.prompt.normalize import NormalizationRules, normalize
from extproc.prompt.normalize_text import Rule, TextRules
from extproc.prompt.tiny import tiny_model_path
from extproc.protocol.openai import RequestKind, parse_request
from tests.support.engine_ids import KINDS, request_body

RULES = NormalizationRules(TextRules(fragment_tag="doc", volatile_lines=("Date:",)))
DIRTY = "Date: 1\r\nCafe\u0301 \r\n<doc>2</doc><doc>1</doc>"
CLEAN = "Café\n<doc>1</doc><doc>2</doc>\nDate: 1"
OPEN = "Date: 1\nCafé\n<doc>1</doc><doc>2</doc>"  # its end may be followed by something
PART = {"type": "text", "text": DIRTY}
KIND = {"chat": RequestKind.CHAT, "completion": RequestKind.COMPLETION}
PATHS = {
    RequestKind.CHAT: "/v1/chat/completions",
    RequestKind.COMPLETION: "/v1/completions",
    RequestKind.RESPONSES: "/v1/responses",
    RequestKind.MESSAGES: "/v1/messages",
}


def normal(kind, document, rules=RULES):
    result = normalize(kind, json.dumps(document).encode(), rules)
    assert result.skipped is None
    return json.loads(result.body)


def messages(*given):
    return {"messages": list(given)}


def said(role, content):
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        (
            RequestKind.CHAT,
            messages(*(said(role, DIRTY) for role in ("system", "developer", "user", "tool"))),
            messages(*(said(role, CLEAN) for role in ("system", "developer", "user", "tool"))),
        ),
        (RequestKind.CHAT, messages(said("user", [PART])), messages(said("user", [{**PART, "text": CLEAN}]))),
        (
            RequestKind.CHAT,
            messages(said("user", [PART, PART])),
            messages(
                said("user", [{**PART, "text": OPEN}, {**PART, "text": OPEN}])  # only the first has a header
            ),
        ),
        (
            RequestKind.CHAT,
            messages(said("user", DIRTY)) | {"continue_final_message": True},
            messages(said("user", OPEN)) | {"continue_final_message": True},
        ),
        (RequestKind.COMPLETION, {"prompt": DIRTY}, {"prompt": OPEN}),
        (RequestKind.COMPLETION, {"prompt": [DIRTY, "x "]}, {"prompt": [OPEN, "x "]}),
        (
            RequestKind.RESPONSES,
            {"instructions": DIRTY, "input": DIRTY},
            {"instructions": CLEAN, "input": CLEAN},
        ),
        (
            RequestKind.RESPONSES,
            {
                "input": [
                    said("user", [{"type": "input_text", "text": DIRTY}]),
                    {"type": "message", "role": "system", "content": DIRTY},
                    {"type": "function_call_output", "call_id": "c", "output": DIRTY},
                ]
            },
            {
                "input": [
                    said("user", [{"type": "input_text", "text": CLEAN}]),
                    {"type": "message", "role": "system", "content": CLEAN},
                    {"type": "function_call_output", "call_id": "c", "output": CLEAN},
                ]
            },
        ),
        (
            RequestKind.MESSAGES,
            {
                "system": [PART],
                **messages(said("user", [{"type": "tool_result", "tool_use_id": "t", "content": [PART]}])),
            },
            {
                "system": [{**PART, "text": CLEAN}],
                **messages(
                    said(
                        "user",
                        [{"type": "tool_result", "tool_use_id": "t", "content": [{**PART, "text": CLEAN}]}],
                    )
                ),
            },
        ),
        (RequestKind.MESSAGES, {"system": DIRTY}, {"system": CLEAN}),
    ],
)
def test_prompt_texts_of_every_kind_of_request(kind, before, after):
    assert normal(kind, before) == after


@pytest.mark.parametrize(
    ("kind", "document"),
    [
        (RequestKind.CHAT, messages(said("assistant", DIRTY), said("assistant", [PART]))),
        (
            RequestKind.CHAT,
            messages({"role": "assistant", "tool_calls": [{"function": {"arguments": DIRTY}}]}),
        ),
        (RequestKind.CHAT, {"user": DIRTY, "metadata": {"content": DIRTY}, "stop": [DIRTY], "prompt": DIRTY}),
        (RequestKind.CHAT, messages(said("user", [{"type": "image_url", "image_url": {"url": DIRTY}}]))),
        (RequestKind.CHAT, messages({"role": "user", "name": DIRTY, "content": None})),
        (
            RequestKind.COMPLETION,
            {"prompt": [13, 10, 32], "suffix": DIRTY, "messages": [said("user", DIRTY)]},
        ),
        (RequestKind.COMPLETION, {"prompt": [[13, 10], [32]], "tools": [{"b": 1, "a": 2}]}),
        (
            RequestKind.RESPONSES,
            {
                "input": [
                    said("assistant", DIRTY),
                    {"type": "reasoning", "summary": [PART]},
                    {"type": "function_call", "arguments": DIRTY},
                ]
            },
        ),
        (RequestKind.MESSAGES, messages(said("assistant", [PART, {"type": "thinking", "thinking": DIRTY}]))),
        (RequestKind.CHAT, {"messages": DIRTY, "tools": DIRTY}),
        (RequestKind.CHAT, [said("user", DIRTY)]),
    ],
)
def test_everything_else_keeps_its_bytes(kind, document):
    for body in (json.dumps(document).encode(), json.dumps(document, ensure_ascii=False, indent=1).encode()):
        assert normalize(kind, body, RULES) == (body, {}, None)


@pytest.mark.parametrize("kind", [RequestKind.CHAT, RequestKind.RESPONSES, RequestKind.MESSAGES])
def test_tools_lose_the_order_of_their_keys(kind):
    assert list(normal(kind, {"tools": [{"b": 1, "a": 2}]})["tools"][0]) == ["a", "b"]
    off = NormalizationRules(tool_key_order=False)
    assert list(normal(kind, {"tools": [{"b": 1, "a": 2}]}, off)["tools"][0]) == ["b", "a"]


def test_tools_of_a_developer_message_are_tools():
    body = messages({"role": "developer", "content": "x", "tools": [{"b": 1, "a": 2}]})
    assert list(normal(RequestKind.CHAT, body)["messages"][0]["tools"][0]) == ["a", "b"]
    body = messages({"role": "user", "content": "x", "tools": [{"b": 1, "a": 2}]})
    assert list(normal(RequestKind.CHAT, body)["messages"][0]["tools"][0]) == ["b", "a"]


def test_only_the_bytes_of_changed_places_change():
    body = (
        rb'{"seed" : 123456789012345678901234567890, "temperature":1.50,"temperature":1.5e0,'
        rb' "x":"\u00e9\/", "messages":[ {"content":"old \r\n","role":"user"} ],'
        rb'"messages" : [{"role":"user", "content" : "a\u0020\r\nb\u00e9" , "n":1E2}]}'
    )
    expected = body.replace(rb'"a\u0020\r\nb\u00e9"', '"a\\nbé"'.encode())
    result = normalize(RequestKind.CHAT, body, RULES)
    assert result.body == expected
    assert result.counts == {Rule.LINE_ENDS: 1, Rule.TRAILING_SPACES: 1}


def test_of_equal_keys_the_one_that_counts_is_normalized():
    body = b'{"prompt":"a \\n","prompt":"b \\n"}'
    assert normalize(RequestKind.COMPLETION, body, RULES).body == b'{"prompt":"a \\n","prompt":"b\\n"}'


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"prompt":"a \\n"', b"\xff\xfe{", '{"prompt":1}'.encode("utf-16")]
)
def test_what_cannot_be_read_passes_unchanged(body):
    assert normalize(RequestKind.COMPLETION, body, RULES) == (body, {}, "not-editable")


def test_what_is_too_large_passes_unchanged():
    body = json.dumps({"prompt": "a \n"}).encode()
    limit = len(body)
    assert normalize(RequestKind.COMPLETION, body, NormalizationRules(max_body_bytes=limit)).body != body
    small = NormalizationRules(max_body_bytes=limit - 1)
    assert normalize(RequestKind.COMPLETION, body, small) == (body, {}, "too-large")


@pytest.mark.parametrize(
    "document", [messages(*[said("user", "x \n")] * 5), {"tools": [{"b": {"c": [1]}, "a": 2}]}]
)
def test_it_can_be_told_to_stop(document):
    body = json.dumps(document).encode()
    asked = []

    def stop():
        asked.append(1)
        return len(asked) == 3

    assert normalize(RequestKind.CHAT, body, RULES, stop) == (body, {}, "budget")
    assert len(asked) == 3


# --- over whole requests ---------------------------------------------------------------------------------


PIECES = st.sampled_from(
    [
        "\r\n",
        "\r",
        " \n",
        "é",
        "e\u0301",
        "Date: 1\n",
        "<doc>é</doc>",
        "<doc>1</doc>",
        "\n\n",
        "²",
        "word",
        "\ud800",
    ]
)
TEXTS = st.lists(PIECES, max_size=8).map("".join)
PARTS = st.lists(st.builds(lambda text: {"type": "text", "text": text}, TEXTS), max_size=3)
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "developer"])
SCHEMAS = st.recursive(
    st.dictionaries(st.sampled_from(["type", "description", "title"]), TEXTS, max_size=3),
    lambda inner: st.dictionaries(
        st.sampled_from(["properties", "items", "default"]),
        st.dictionaries(st.sampled_from("bca"), inner, max_size=3),
        max_size=2,
    ),
    max_leaves=6,
)
CHATS = st.fixed_dictionaries(
    {
        "messages": st.lists(
            st.fixed_dictionaries({"role": ROLES, "content": TEXTS | PARTS}), min_size=1, max_size=4
        ),
        "tools": st.lists(SCHEMAS, max_size=2),
        "seed": st.sampled_from([12345678901234567890123, 1.5]),
        "user": TEXTS,
    }
)


@given(CHATS, st.booleans())
def test_a_whole_body_is_normalized_once_and_for_all(document, ascii_only):
    body = json.dumps(document, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    once = normalize(RequestKind.CHAT, body, RULES)
    assert once.skipped is None
    assert normalize(RequestKind.CHAT, once.body, RULES) == (once.body, {}, None)
    assert (once.body != body) == bool(once.counts)


@given(CHATS)
def test_numbers_keep_their_digits(document):
    def digits(of):
        return sorted(character for character in of if unicodedata.category(character)[0] == "N")

    body = json.dumps(document, ensure_ascii=False)
    changed = normalize(RequestKind.CHAT, body.encode("utf-8", "surrogatepass"), RULES).body
    assert digits(json.dumps(json.loads(changed), ensure_ascii=False)) == digits(body)


@pytest.fixture(scope="module")
def encoder():
    return PromptEncoder.load(tiny_model_path())


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_that_needs_nothing_is_the_same_object_or_still_understood(encoder, kind):
    """Every prompt case of the suite survives: it is tokenized before and after, or neither."""
    path, cases = KINDS[kind]
    changed = 0
    for case in cases.values():
        body = json.dumps(request_body(kind, case)).encode()
        before = parse_request("POST", path, {}, body)
        result = normalize(before.kind, body, RULES)
        changed += result.body != body
        after = parse_request("POST", path, {}, result.body)
        assert outcome(encoder, before) == outcome(encoder, after)
        assert normalize(before.kind, result.body, RULES) == (result.body, {}, None)
    assert changed < len(cases)


def outcome(encoder, request):
    try:
        return len(encoder.encode(request).prompts)
    except Exception as error:
        return str(error)


def test_twins_become_the_same_tokens(encoder):
    rng = random.Random(7)
    schema = {
        "type": "object",
        "properties": {name: {"type": "string"} for name in "abcdef"},
        "required": ["a"],
    }

    def twin(newline):
        properties = dict(rng.sample(list(schema["properties"].items()), 6))
        parameters = dict(rng.sample(list((schema | {"properties": properties}).items()), 3))
        function = {"name": "look_up", "description": f"Looks{newline}up.", "parameters": parameters}
        text = f"A document.{newline}{newline}With lines{' ' * rng.randint(0, 2)}{newline}end."
        tools = [dict(rng.sample([("type", "function"), ("function", function)], 2))]
        return json.dumps({"messages": [said("system", text), said("user", "Q?")], "tools": tools}).encode()

    def ids(body):
        return list(encoder.encode(parse_request("POST", PATHS[RequestKind.CHAT], {}, body)).prompts[0])

    one, two = twin("\r\n"), twin("\n")
    assert ids(one) != ids(two)
    one, two = (normalize(RequestKind.CHAT, body, RULES).body for body in (one, two))
    assert ids(one) == ids(two)
