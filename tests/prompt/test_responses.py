import pytest

from extproc.prompt.errors import Unsupported
from extproc.prompt.responses import from_responses_request
from tests.support.prompt_cases import assistant, user


def read(body, with_tools=True):
    return from_responses_request(body, with_tools=with_tools)


def test_text_is_a_user_message_encoded_with_special_tokens():
    chat = read({"input": "hi", "instructions": "be brief"})
    assert chat.messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert chat.add_special_tokens


def test_the_items_of_one_turn_become_one_message():
    items = [
        user("q"),
        {"type": "reasoning", "summary": [], "content": [{"text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        assistant("b"),
        assistant("c"),
    ]
    messages = read({"input": items}).messages
    assert [message["role"] for message in messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "assistant",
    ]
    assert (messages[1]["reasoning"], messages[1]["content"]) == ("hm", "a")
    assert [entry["id"] for entry in messages[1]["tool_calls"]] == ["1", "2"]
    assert "tool_calls" not in items[2]


@pytest.mark.parametrize("status", ["in_progress", "incomplete"])
def test_an_unfinished_last_message_is_continued(status):
    chat = read({"input": [user("q"), assistant("a", status=status)]})
    assert chat.continue_final_message
    assert not chat.add_generation_prompt


def test_empty_reasoning_is_empty_text():
    assert read({"input": [{"type": "reasoning", "summary": []}]}).messages[0]["reasoning"] == ""


REASONING = {"type": "reasoning", "summary": []}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "message-shape"),
        ({"input": 5}, "message-shape"),
        ({"input": ["x"]}, "message-shape"),
        ({"input": "x", "instructions": 5}, "message-shape"),
        ({"input": "x", "previous_response_id": "r"}, "stored-history"),
        ({"input": "x", "prompt": {"id": "p"}}, "stored-history"),
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": "x", "reasoning": "high"}, "field-type"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tool-shape"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "message-shape"),
        ({"input": [{"role": "critic", "content": "x"}]}, "message-shape"),
        ({"input": [{**REASONING, "encrypted_content": "x"}]}, "message-shape"),
        ({"input": [{"type": "reasoning"}]}, "message-shape"),
        ({"input": [{**REASONING, "content": [5]}]}, "message-shape"),
        ({"input": [{**REASONING, "content": [{"text": 5}]}]}, "message-shape"),
        ({"input": [{**CALL, "arguments": {}}]}, "message-shape"),
        ({"input": [{**CALL, "namespace": "n"}]}, "tool-shape"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "message-shape"),
        ({"input": [assistant([])]}, "message-shape"),
        ({"input": [assistant([{"type": "refusal", "refusal": "no"}])]}, "message-shape"),
    ],
)
def test_what_is_not_rendered_here_is_unsupported(body, reason):
    with pytest.raises(Unsupported) as caught:
        read(body)
    assert caught.value.reason == reason
