"""Anthropic's `/v1/messages` to chat form, as the engine does it.

The engine turns such a request into a chat completion first; so do we, and the same conversation sent
through either API gives the same tokens wherever the engine's conversion does.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from extproc.prompt.chat import ChatInput, template_variables
from extproc.prompt.errors import Unsupported
from extproc.prompt.tools import function_definition

Message = dict[str, Any]

_BILLING_HEADER = "x-anthropic-billing-header"
_ANYWHERE = frozenset({"text", "thinking", "redacted_thinking", "tool_use"})
_KINDS = {"user": _ANYWHERE | {"tool_result"}, "assistant": _ANYWHERE}
_EFFORTS = frozenset({"low", "medium", "high", "xhigh", "max"})


def from_messages_request(
    body: Mapping[str, Any],
    *,
    with_tools: bool,
    merge_systems: bool,
    disabled_effort: Callable[[], str],
) -> ChatInput:
    """A `/v1/messages` body.

    `merge_systems`: later system messages go into the first one. `disabled_effort`: the reasoning effort that
    stands for "thinking disabled" with this template.

    Raises:
        Unsupported: blocks or options that are not rendered here.
    """
    given = body.get("messages")
    if not isinstance(given, list):
        raise Unsupported("message-shape", "messages is not a list")
    messages: list[Message] = []
    systems = _system_texts(body.get("system"))
    if merge_systems:
        systems += [_inline_system(message) for message in given if _role(message) == "system"]
    if any(systems):
        messages.append({"role": "system", "content": "".join(systems)})
    for message in given:
        if _role(message) != "system":
            _append_turn(messages, message)
        elif not merge_systems and (text := _inline_system(message)):
            messages.append({"role": "system", "content": text})
    if not messages:
        raise Unsupported("message-shape", "no message has content")
    return ChatInput(
        messages=messages,
        tools=_tools(body.get("tools")) if with_tools else None,
        variables=template_variables(body.get("chat_template_kwargs"), _effort(body, disabled_effort)),
    )


def _effort(body: Mapping[str, Any], disabled_effort: Callable[[], str]) -> str | None:
    thinking, output = body.get("thinking"), body.get("output_config")
    effort: str | None = None
    if isinstance(output, dict) and output.get("effort") is not None:
        effort = output["effort"]
        if effort not in _EFFORTS:
            raise Unsupported("field-type", "output_config.effort")
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        effort = disabled_effort()
    return effort


def _role(message: Any) -> str:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise Unsupported("message-shape", "an unknown role")
    return str(role)


def _blocks(content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, list) or not all(
        isinstance(block, dict) and isinstance(block.get("type"), str) for block in content
    ):
        raise Unsupported("message-shape", "content is neither text nor a list of blocks")
    return content


def _texts(blocks: list[dict[str, Any]]) -> list[str]:
    """Non-empty texts of system blocks, without the header that some clients change with every request."""
    if any(block["type"] in ("tool_addition", "tool_removal") for block in blocks):
        raise Unsupported("tool-shape", "tools that change during the conversation")
    texts = [_block_text(block) for block in blocks if block["type"] == "text"]
    return [text for text in texts if text and not text.startswith(_BILLING_HEADER)]


def _block_text(block: Mapping[str, Any], key: str = "text") -> str:
    text = block.get(key)
    if text is not None and not isinstance(text, str):
        raise Unsupported("message-shape", f"{key} of a block is not text")
    return text or ""


def _system_texts(system: Any) -> list[str]:
    if system is None or isinstance(system, str):
        return [system] if system else []
    return _texts(_blocks(system))


def _inline_system(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return "" if content.startswith(_BILLING_HEADER) else content
    return "".join(_texts(_blocks(content)))


def _append_turn(messages: list[Message], message: Mapping[str, Any]) -> None:
    role, content = message["role"], message.get("content")
    out: Message = {"role": role}
    if isinstance(content, str):
        out["content"] = content
    else:
        _convert_blocks(out, messages, _blocks(content))
    if role == "assistant" or "content" in out:
        messages.append(out)


def _convert_blocks(out: Message, messages: list[Message], blocks: list[dict[str, Any]]) -> None:
    """Fill one chat message; tool results become messages of their own, before it."""
    kinds = {block["type"] for block in blocks}
    if "image" in kinds:
        raise Unsupported("multimodal")
    if kinds - _KINDS[out["role"]]:
        raise Unsupported("message-shape", "a block of this type here")
    by_kind = {kind: [block for block in blocks if block["type"] == kind] for kind in kinds}
    messages.extend(_tool_result(block) for block in by_kind.get("tool_result", ()))
    thoughts = [block for block in by_kind.get("thinking", ()) if block.get("thinking") is not None]
    if thoughts:
        out["reasoning"] = "".join(_block_text(block, "thinking") for block in thoughts)
    if calls := [_tool_call(block) for block in by_kind.get("tool_use", ())]:
        out["tool_calls"] = calls
    if texts := [text for block in by_kind.get("text", ()) if (text := _block_text(block))]:
        parts = [{"type": "text", "text": text} for text in texts]
        out["content"] = texts[0] if len(texts) == 1 else parts


def _tool_call(block: Mapping[str, Any]) -> dict[str, Any]:
    call_id, name, given = block.get("id"), block.get("name"), block.get("input")
    if not (call_id and isinstance(call_id, str) and isinstance(name, str)):
        raise Unsupported("message-shape", "tool_use needs an id and a name")
    if given is not None and not isinstance(given, dict):
        raise Unsupported("message-shape", "tool_use.input is not an object")
    function = {"name": name, "arguments": json.dumps(given or {})}
    return {"id": call_id, "type": "function", "function": function}


def _tool_result(block: Mapping[str, Any]) -> Message:
    content = block.get("content")
    if content is None or isinstance(content, str):
        text = content or ""
    else:
        items = _blocks(content)
        if any(item["type"] != "text" for item in items):
            raise Unsupported("multimodal", "a tool result that is not text")
        text = "\n".join(_block_text(item) for item in items)
    call_id = block.get("tool_use_id") or ""
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise Unsupported("tool-shape", "tools is not a list")
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    schema = tool.get("input_schema") if isinstance(tool, dict) else None
    if not isinstance(schema, dict):
        raise Unsupported("tool-shape", "a tool needs an input_schema")
    if "type" not in schema:
        schema = {**schema, "type": "object"}
    return {"type": "function", "function": function_definition({**tool, "parameters": schema})}
