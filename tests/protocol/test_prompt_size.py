import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.protocol.openai import parse_request
from extproc.protocol.prompt_size import MEDIA_TOKENS, estimated_tokens, estimated_unread

BASE64 = "A" * 1_000_000
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TEXT = {"type": "text", "text": "what is it? " * 100}


def estimate(path, body):
    return estimated_tokens(parse_request("POST", path, {}, json.dumps(body).encode()))


def said(part, role="user", content="content"):
    return {"role": role, content: [TEXT, part]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [said({"type": "image_url", "image_url": {"url": BASE64}})]}),
        (CHAT, {"messages": [said({"type": "image_url", "image_url": {"url": "https://e.org/a.png"}})]}),
        (CHAT, {"messages": [said({"type": "input_audio", "input_audio": {"data": BASE64, "format": "w"}})]}),
        (CHAT, {"messages": [said({"type": "image_embeds", "image_embeds": {"a": BASE64, "b": BASE64}})]}),
        (MESSAGES, {"messages": [said({"type": "image", "source": {"type": "base64", "data": BASE64}})]}),
        (
            MESSAGES,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", **said({"type": "image", "x": BASE64})}],
                    }
                ]
            },
        ),
        (RESPONSES, {"input": [said({"type": "input_image", "image_url": BASE64})]}),
        (RESPONSES, {"input": [said({"type": "input_image", "image_url": BASE64}, "tool", "output")]}),
    ],
)
def test_an_image_is_about_a_thousand_tokens_however_long_it_is_written(path, body):
    assert estimate(path, body) == pytest.approx(300 + MEDIA_TOKENS, abs=50)


def test_text_is_four_bytes_to_a_token():
    assert estimate(CHAT, {"messages": [{"role": "user", "content": "x" * 40_000}]}) == pytest.approx(
        10_000, rel=0.01
    )
    assert estimate("/v1/completions", {"prompt": "x" * 40_000}) == pytest.approx(10_000, rel=0.01)
    assert estimate("/v1/completions", {"prompt_embeds": [BASE64, BASE64]}) == pytest.approx(
        2 * MEDIA_TOKENS, abs=20
    )


@pytest.mark.parametrize(
    ("content_type", "is_text", "tokens"),
    [
        ("application/json", True, 1 << 18),
        ("", True, 1 << 18),
        ("application/json", False, 1 << 10),
        ("multipart/form-data; boundary=x", True, 1 << 10),
        ("Audio/wav", True, 1 << 10),
    ],
)
def test_uploads_and_what_is_longer_than_text_are_no_text(content_type, is_text, tokens):
    assert estimated_unread(1 << 20, content_type, is_text=is_text) == tokens


JSON = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda x: st.lists(x) | st.dictionaries(st.sampled_from(["type", "content", "text", "url"]), x),
)


def test_no_more_media_are_counted_than_engines_take():
    body = {"messages": [{"role": "user", "content": [{"type": "image_url"}]}] * 9_000}
    assert estimate(CHAT, body) < 2_000 * MEDIA_TOKENS
    body = {"messages": [{"role": "user", "content": [{"type": "image_url"}] * 90_000}]}
    assert estimate(CHAT, body) < 2_000 * MEDIA_TOKENS


@given(st.sampled_from([CHAT, MESSAGES, RESPONSES]), JSON)
def test_whatever_is_there_has_an_estimate(path, content):
    body = {"messages": [{"role": "user", "content": content}, content], "input": content}
    assert estimate(path, body) >= 0
