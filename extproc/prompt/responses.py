"""`/v1/responses` to chat form, as the engine does it (for models without a renderer of their own).

Items of one assistant turn (reasoning, text, function calls) are merged into one message. Unlike chat, the
rendered text is encoded with special tokens added. History kept on the engine (`previous_response_id`) is
not known here.
"""

from collections.abc import Mapping
from typing import Any

from extproc.prompt.chat import ChatInput, template_variables
from extproc.prompt.errors import Unsupported
from extproc.prompt.tools import function_definition

Message = dict[str, Any]

_UNKNOWABLE = ("previous_response_id", "previous_input_messages", "prompt")
_UNFINISHED = ("in_progress", "incomplete")


def from_responses_request(body: Mapping[str, Any], *, with_tools: bool) -> ChatInput:
    """A `/v1/responses` body.

    Raises:
        Unsupported: items, tools or options that are not rendered here.
    """
    if any(body.get(key) is not None for key in _UNKNOWABLE):
        raise Unsupported("stored-history")
    if body.get("truncation", "disabled") != "disabled":
        raise Unsupported("truncation")
    messages: list[Message] = []
    instructions = body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise Unsupported("message-shape", "instructions is not text")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        messages.extend(_messages(given))
    else:
        raise Unsupported("message-shape", "input is neither text nor a list")
    continued = _is_unfinished(given)
    reasoning = body.get("reasoning") or {}
    if not isinstance(reasoning, dict):
        raise Unsupported("field-type", "reasoning is not an object")
    return ChatInput(
        messages=messages,
        tools=_tools(body.get("tools")) if with_tools else None,
        add_generation_prompt=not continued,
        continue_final_message=continued,
        add_special_tokens=True,
        variables=template_variables(body.get("chat_template_kwargs"), reasoning.get("effort")),
        function_keys=("name", "arguments"),
    )


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and tool.get("type") == "function" for tool in tools
    ):
        raise Unsupported("tool-shape", "only function tools are rendered here")
    return [{"type": "function", "function": function_definition(tool)} for tool in tools]


def _is_unfinished(given: Any) -> bool:
    if not isinstance(given, list) or not given:
        return False
    last = given[-1]
    return last.get("type", "message") in ("message", "reasoning") and last.get("status") in _UNFINISHED


def _messages(items: list[Any]) -> list[Message]:
    messages: list[Message] = []
    for item in items:
        if not isinstance(item, dict):
            raise Unsupported("message-shape", "an input item is not an object")
        previous = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        kind = item.get("type", "message")
        if kind == "function_call":
            _add_call(messages, previous, item)
        elif kind == "function_call_output":
            output, call_id = item.get("output"), item.get("call_id")
            if not isinstance(output, str | list) or not isinstance(call_id, str):
                raise Unsupported("message-shape", "function_call_output")
            messages.append({"role": "tool", "content": output, "tool_call_id": call_id})
        elif kind == "reasoning":
            _set_or_append(messages, previous, "reasoning", _reasoning_text(item))
        elif kind == "message" and item.get("role") == "assistant":
            _set_or_append(messages, previous, "content", _assistant_text(item))
        elif kind == "message" and item.get("role") in ("user", "system", "developer"):
            messages.append(item)
        else:
            raise Unsupported("message-shape", "an input item of this type")
    return messages


def _set_or_append(messages: list[Message], previous: Message | None, key: str, text: str) -> None:
    if previous is not None and previous.get(key) is None:
        previous[key] = text
    else:
        messages.append({"role": "assistant", key: text})


def _add_call(messages: list[Message], previous: Message | None, item: Mapping[str, Any]) -> None:
    call_id, name, arguments = (item.get(key) for key in ("call_id", "name", "arguments"))
    if not (isinstance(call_id, str) and isinstance(name, str) and isinstance(arguments, str)):
        raise Unsupported("message-shape", "function_call")
    if item.get("namespace"):
        raise Unsupported("tool-shape", "a namespaced tool")
    call = {"id": call_id, "function": {"name": name, "arguments": arguments}, "type": "function"}
    if previous is None:
        messages.append({"role": "assistant", "tool_calls": [call]})
    else:
        previous.setdefault("tool_calls", []).append(call)


def _reasoning_text(item: Mapping[str, Any]) -> str:
    if item.get("encrypted_content") or not isinstance(item.get("summary"), list):
        raise Unsupported("message-shape", "reasoning")
    parts = item.get("content") or item["summary"]
    if not parts:
        return ""
    if not isinstance(parts, list) or not isinstance(parts[0], dict):
        raise Unsupported("message-shape", "reasoning")
    text = parts[0].get("text")
    if not isinstance(text, str):
        raise Unsupported("message-shape", "reasoning")
    return text


def _assistant_text(item: Mapping[str, Any]) -> str:
    """The engine keeps only the first part of an assistant's message."""
    content = item.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content or not isinstance(content[0], dict):
        raise Unsupported("message-shape", "an assistant item without text")
    text = content[0].get("text")
    if not isinstance(text, str):
        raise Unsupported("message-shape", "an assistant item without text")
    return text
