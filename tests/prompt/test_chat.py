import pytest

from extproc.prompt.chat import flag, from_chat_request, template_variables
from extproc.prompt.errors import Unsupported

MESSAGES = [{"role": "user", "content": "q"}]


def test_defaults_of_the_engine():
    chat = from_chat_request({"messages": MESSAGES}, None)
    assert chat.add_generation_prompt
    assert not chat.continue_final_message
    assert not chat.add_special_tokens
    assert chat.variables == {}


def test_effort_turns_thinking_on_or_off_unless_told():
    assert template_variables(None, "none") == {"reasoning_effort": "none", "enable_thinking": False}
    assert template_variables({}, "low") == {"reasoning_effort": "low", "enable_thinking": True}
    given = {"enable_thinking": True}
    assert template_variables(given, "none") == {"reasoning_effort": "none", "enable_thinking": True}
    # Given as null, it is not passed on, yet it counts as told.
    assert template_variables({"enable_thinking": None}, "none") == {"reasoning_effort": "none"}


def test_null_auto_and_the_engines_own_arguments_are_not_variables():
    given = {"a": None, "b": "auto", "c": 0, "add_generation_prompt": False, "continue_final_message": True}
    assert template_variables(given, None) == {"c": 0}


@pytest.mark.parametrize("name", ["tools", "documents", "messages", "chat_template", "tokenize", "self"])
def test_reserved_names_are_unsupported(name):
    with pytest.raises(Unsupported, match="template-kwargs"):
        template_variables({name: 1}, None)


def test_flags_are_booleans():
    assert flag({"a": False}, "a", default=True) is False
    assert flag({}, "a", default=True) is True
    with pytest.raises(Unsupported):
        flag({"a": None}, "a", default=True)
