import pytest

from extproc.prompt.anthropic import from_messages_request
from extproc.prompt.errors import Unsupported
from tests.support.prompt_cases import assistant, system, text, user


def read(body, *, merge_systems=False, with_tools=True, effort="none"):
    return from_messages_request(
        body, with_tools=with_tools, merge_systems=merge_systems, disabled_effort=lambda: effort
    )


def test_later_systems_are_merged_where_the_template_wants_it():
    body = {"system": "a", "messages": [user("q"), system("b"), system([text("c")]), user("r")]}
    assert [m["content"] for m in read(body).messages] == ["a", "q", "b", "c", "r"]
    assert [m["content"] for m in read(body, merge_systems=True).messages] == ["abc", "q", "r"]


def test_headers_that_change_with_every_request_are_dropped():
    header = "x-anthropic-billing-header: 1"
    body = {
        "system": [text(header), text("a")],
        "messages": [system(header), system([text(header)]), user("q")],
    }
    assert [m["content"] for m in read(body).messages] == ["a", "q"]


def test_tool_results_come_before_the_rest_of_their_turn():
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("x"), text("y")]}
    messages = read({"messages": [user([text("and"), result])]}).messages
    assert messages == [
        {"role": "tool", "tool_call_id": "t", "content": "x\ny"},
        {"role": "user", "content": "and"},
    ]
    assert len(read({"messages": [user([result])]}).messages) == 1


def test_thinking_and_tool_use():
    blocks = [
        {"type": "thinking", "thinking": "a"},
        {"type": "thinking", "thinking": "b"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "tool_use", "id": "t", "name": "f", "input": {"z": 1}},
    ]
    (message,) = read({"messages": [assistant(blocks)]}).messages
    assert message["reasoning"] == "ab"
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"z": 1}'}
    assert "content" not in message


def test_tools_get_the_type_they_lack():
    tool = {"name": "f", "input_schema": {"properties": {}}, "cache_control": {}}
    chat = read({"messages": [user("q")], "tools": [tool]})
    assert chat.tools[0]["function"]["parameters"] == {"properties": {}, "type": "object"}
    assert read({"messages": [user("q")], "tools": []}).tools == []
    assert read({"messages": [user("q")], "tools": [tool]}, with_tools=False).tools is None


def test_effort_and_disabled_thinking():
    body = {"messages": [user("q")], "output_config": {"effort": "high"}}
    assert read(body).variables["reasoning_effort"] == "high"
    body["thinking"] = {"type": "disabled"}
    assert read(body, effort="low").variables["reasoning_effort"] == "low"
    body["thinking"] = {"type": "adaptive"}
    assert read(body).variables["reasoning_effort"] == "high"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "message-shape"),
        ({"messages": []}, "message-shape"),
        ({"messages": ["x"]}, "message-shape"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "message-shape"),
        ({"messages": [user(None)]}, "message-shape"),
        ({"messages": [user([text(5)])]}, "message-shape"),
        ({"messages": [user([{"type": "document"}])]}, "message-shape"),
        ({"messages": [assistant([{"type": "tool_result", "content": "x"}])]}, "message-shape"),
        ({"messages": [assistant([{"type": "tool_use", "name": "f", "input": {}}])]}, "message-shape"),
        (
            {"messages": [assistant([{"type": "tool_use", "id": "t", "name": "f", "input": 5}])]},
            "message-shape",
        ),
        ({"messages": [system([{"type": "tool_removal"}])]}, "tool-shape"),
        ({"messages": [user("q")], "tools": [{"name": "f"}]}, "tool-shape"),
        ({"messages": [user("q")], "tools": 5}, "tool-shape"),
        ({"messages": [user("q")], "output_config": {"effort": "none"}}, "field-type"),
    ],
)
def test_what_is_not_rendered_here_is_unsupported(body, reason):
    with pytest.raises(Unsupported) as caught:
        read(body)
    assert caught.value.reason == reason
