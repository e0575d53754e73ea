"""Tool definitions as the engine hands them to a chat template."""

from collections.abc import Sequence
from typing import Any

from extproc.prompt.errors import Unsupported


def tools_for_template(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """The request's tools as the engine dumps them: known keys, in its order, missing values null.

    Raises:
        Unsupported: `tool-shape`.
    """
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise Unsupported("tool-shape", "a tool must be of type 'function'")
    defer = tool.get("defer_loading")
    out = {"type": "function", "function": function_definition(tool.get("function"), defer)}
    if defer is not None:
        out["defer_loading"] = defer
    return out


def function_definition(function: Any, defer_loading: Any = None) -> dict[str, Any]:
    """One function as the engine dumps it."""
    if not isinstance(function, dict):
        raise Unsupported("tool-shape", "a tool needs a function")
    expected = (("name", str), ("description", str), ("parameters", dict), ("strict", bool))
    for key, kind in expected:
        value = function.get(key)
        if not (isinstance(value, kind) or (value is None and key != "name")):
            raise Unsupported("tool-shape", f"function.{key} has the wrong type")
    out = {key: function.get(key) for key in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        out["strict"] = function["strict"]
    own = function.get("defer_loading")
    defer_loading = own if own is not None else defer_loading
    if defer_loading is not None:
        if not isinstance(defer_loading, bool):
            raise Unsupported("tool-shape", "defer_loading is not a boolean")
        out["defer_loading"] = defer_loading
    return out
