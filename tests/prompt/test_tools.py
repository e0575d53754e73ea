import pytest

from extproc.prompt.errors import Unsupported
from extproc.prompt.tools import function_definition, tools_for_template


def test_known_keys_in_order_missing_ones_null_unknown_ones_gone():
    (tool,) = tools_for_template(
        [{"x": 1, "function": {"parameters": {"z": 1, "a": 2}, "name": "f", "y": 2}}]
    )
    assert list(tool) == ["type", "function"]
    assert list(tool["function"].items()) == [
        ("name", "f"),
        ("description", None),
        ("parameters", {"z": 1, "a": 2}),
    ]
    assert list(tool["function"]["parameters"]) == ["z", "a"]


def test_strict_and_deferred_appear_only_when_given():
    (tool,) = tools_for_template([{"defer_loading": False, "function": {"name": "f", "strict": False}}])
    assert tool["defer_loading"] is False
    assert tool["function"]["defer_loading"] is False
    assert tool["function"]["strict"] is False
    assert (
        function_definition({"name": "f", "defer_loading": True}, defer_loading=False)["defer_loading"]
        is True
    )


@pytest.mark.parametrize(
    "tool", [5, {}, {"type": "custom"}, {"function": {}}, {"function": {"name": "f", "strict": "yes"}}]
)
def test_other_shapes_are_unsupported(tool):
    with pytest.raises(Unsupported, match="tool-shape"):
        tools_for_template([tool])
