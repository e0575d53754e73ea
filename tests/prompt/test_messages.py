import pytest

from extproc.prompt import messages as module
from extproc.prompt.errors import Unsupported
from extproc.prompt.messages import conversation, has_media, parsed_arguments
from tests.support.prompt_cases import assistant, call, system, text, tool_result, user


def one(message, content_format="string", **options):
    (result,) = conversation([message], content_format, **options)
    return result


def test_parts_are_joined_for_templates_that_print_text():
    assert one(user([text("a"), text(""), text("b")])) == {"role": "user", "content": "a\nb"}
    assert one({"role": "user"}) == {"role": "user", "content": ""}


def test_parts_are_kept_for_templates_that_loop():
    parts = [text("a", cache_control={"x": 1}), text(""), "plain", {"type": "tool_reference", "name": "f"}]
    assert one(user(parts), "openai")["content"] == [
        {"type": "text", "text": "a", "cache_control": {"x": 1}},
        {"type": "text", "text": ""},
        {"type": "text", "text": "plain"},
        {"type": "tool_reference", "name": "f"},
    ]


def test_tool_results_are_text_in_both_formats():
    for content_format in ("string", "openai"):
        assert one(tool_result("c", [text("a"), text("b")]), content_format)["content"] == "a\nb"
    reference = [{"type": "tool_reference", "name": "f"}]
    assert one(tool_result("c", reference), "openai")["content"] == reference


def test_tool_calls_are_rebuilt_in_the_engines_key_order():
    message = assistant(None, tool_calls=[{"x": 1, **call("c", "f", '{"b": 1, "a": 2}')}])
    (built,) = one(message)["tool_calls"]
    assert list(built) == ["id", "function", "type", "x"]
    assert list(built["function"]) == ["arguments", "name"]
    assert list(built["function"]["arguments"]) == ["b", "a"]
    (built,) = one(message, function_keys=("name", "arguments"))["tool_calls"]
    assert list(built["function"]) == ["name", "arguments"]


@pytest.mark.parametrize("given", ["", "nope", "[1]", "5", "null", '{"a":'])
def test_arguments_that_are_no_object_become_an_empty_one(given):
    assert parsed_arguments(given) == {}


def test_reasoning_has_two_names():
    both = {"reasoning": "r", "reasoning_content": "r"}
    assert both.items() <= one(assistant("a", reasoning="r")).items()
    assert both.items() <= one(assistant("a", reasoning_content="r")).items()
    assert both.items() <= one(assistant("a", reasoning="r", reasoning_content="other")).items()
    assert "reasoning" not in one(user("a", reasoning="r"))


def test_the_billing_header_is_dropped_from_systems_only():
    header = "x-anthropic-billing-header: 1"
    assert one(system(f"{header}\nrest"))["content"] == "rest"
    assert one(system([text(header), header, text("s")]))["content"] == "s"
    assert one(system([f"{header}\nplain"]))["content"] == "plain"
    assert one(user(header))["content"] == header


@pytest.mark.parametrize(
    ("messages", "media"),
    [
        ([user("x"), "junk", user([text("x"), "y", {"type": "tool_reference", "name": "f"}])], False),
        ([user([{"type": "image_url", "image_url": {"url": "x"}}])], True),
        ([user([{"type": "text", "text": "x", "image_url": "y"}])], True),
        ([user([{"type": "novel"}])], True),
    ],
)
def test_media_is_noticed(messages, media):
    assert has_media(messages) is media


@pytest.mark.parametrize(
    "part", [{"type": "text", "text": "x", "uuid": "u"}, {"type": "novel", "text": "x"}, {"type": 5}]
)
def test_unknown_parts_are_unsupported(part):
    with pytest.raises(Unsupported):
        one(user([part]))


def test_a_developers_tools_are_rebuilt():
    tool = {"type": "function", "function": {"x": 1, "parameters": {}, "name": "f"}}
    (built,) = one({"role": "developer", "content": "d", "tools": [tool]})["tools"]
    assert list(built) == ["function", "type"]
    assert list(built["function"]) == ["name", "parameters", "x"]
    assert one({"role": "developer", "content": "d"})["tools"] is None


@pytest.mark.parametrize("content_format", ["string", "openai"])
def test_the_short_way_for_plain_messages_gives_what_the_long_one_does(monkeypatch, content_format):
    given = [user("a"), assistant("b"), user(""), assistant(""), user("x-anthropic-billing-header: 1\nq")]
    short = conversation(given, content_format)
    monkeypatch.setattr(module, "_plain_message", lambda *_: None)
    long = conversation(given, content_format)
    assert short == long
    assert [list(one) for one in short] == [list(one) for one in long]


@pytest.mark.parametrize(
    "message", [{"role": ["user"], "content": "x"}, {"role": "user", "name": 1}, ["role", "x"]]
)
def test_what_is_nearly_plain_is_still_judged(message):
    with pytest.raises(Unsupported):
        conversation([message], "string")
