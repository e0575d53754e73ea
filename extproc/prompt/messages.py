"""Chat messages and tools as the engine hands them to a chat template.

The engine validates a request, rebuilds parts of it (so keys change order) and flattens content. We repeat
that for the shapes it is known to accept; any other shape is `Unsupported`, because guessing costs a wrong
prefix while load-only routing costs little.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from extproc.prompt.content_format import ContentFormat
from extproc.prompt.errors import Unsupported

Message = dict[str, Any]

# Where the text of each kind of text part is.
_TEXT_KEY = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_MEDIA_KEYS = frozenset(
    {
        "audio_embeds",
        "audio_url",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "input_image",
        "prompt_embeds",
        "video_embeds",
        "video_url",
    }
)
# Keys of text parts that the engine knows; it passes unknown ones on to the template.
_KNOWN_PART_KEYS = frozenset(
    {*_TEXT_KEY.values(), "closed", "data", "file", "name", "prompt_cache_breakpoint", "type", "uuid"}
)
_BILLING_HEADER = "x-anthropic-billing-header"


def conversation(
    messages: Sequence[Any],
    content_format: ContentFormat,
    function_keys: Sequence[str] = ("arguments", "name"),
) -> list[Message]:
    """Request messages in the form the template sees. `function_keys`: their order in a tool call.

    Raises:
        Unsupported: `multimodal`, or `message-shape` for anything the engine would refuse or we do not know.
    """
    return [
        _plain_message(message, content_format) or _message(message, content_format, function_keys)
        for message in messages
    ]


def has_media(messages: Sequence[Any]) -> bool:
    """Whether any content part is something other than text."""
    parts = (
        part
        for message in messages
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, dict)
    )
    return any(
        not _MEDIA_KEYS.isdisjoint(part)
        or (part.get("type", "text") not in _TEXT_KEY and part.get("type") != "tool_reference")
        for part in parts
    )


def _message(message: Any, content_format: ContentFormat, function_keys: Sequence[str]) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Unsupported("message-shape", "a message needs a role")
    role = message["role"]
    if "content" in message and message["content"] is None and role not in ("assistant", "function"):
        raise Unsupported("message-shape", f"null content in a message of role {role}")
    out: Message = {"role": role, "content": _content(message.get("content"), content_format, role)}
    if role == "assistant":
        out.update(_assistant_fields(message, function_keys))
    elif role == "tool":
        if "tool_call_id" in message:
            out["tool_call_id"] = message["tool_call_id"]
        out["content"] = _tool_content(out["content"])
    for key in ("name", "task"):
        value = message.get(key)
        if isinstance(value, str):
            out[key] = value
        elif value is not None:
            raise Unsupported("message-shape", f"{key} is not a string")
    if role == "developer":
        out["tools"] = _developer_tools(message.get("tools"))
    return out


def _plain_message(message: Any, content_format: ContentFormat) -> Message | None:
    """The short way for what most messages are: a user's or the model's text and nothing else."""
    if type(message) is not dict or len(message) != 2:
        return None
    role, content = message.get("role"), message.get("content")
    if type(content) is not str or role not in ("user", "assistant"):
        return None
    return {"role": role, "content": [_text(content)] if content_format == "openai" else content}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _assistant_fields(message: Message, function_keys: Sequence[str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise Unsupported("message-shape", "tool_calls is not a list")
        if calls:  # templates take an empty list for a call
            out["tool_calls"] = [_tool_call(call, function_keys) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        out["reasoning"] = out["reasoning_content"] = reasoning
    return out


def _content(content: Any, content_format: ContentFormat, role: str) -> Any:
    if content is None:
        parts: list[Any] = []
    elif isinstance(content, str):
        parts = [_text(content)]
    elif isinstance(content, list):
        parts = content
    else:
        raise Unsupported("message-shape", "content is neither text nor a list")
    if role == "system":
        parts = [stripped for part in parts if (stripped := _without_billing_header(part)) is not None]
    if content_format == "openai":
        return [wrapped for part in parts if (wrapped := _wrapped(part)) is not None]
    return "\n".join(text for part in parts if (text := _part_text(part)))


def _without_billing_header(part: Any) -> Any:
    """A system part without the line some clients put first and change with every request."""
    text = part if isinstance(part, str) else None
    if isinstance(part, dict) and part.get("type") == "text":
        text = part.get("text")
    if not (isinstance(text, str) and text.startswith(_BILLING_HEADER)):
        return part
    rest = text.partition("\n")[2]
    if not rest:
        return None
    return rest if isinstance(part, str) else {**part, "text": rest}


def _part_text(part: Any) -> str | None:
    """The text of one content part; None for a part the engine skips."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise Unsupported("message-shape", "a content part is neither text nor an object")
    if not _MEDIA_KEYS.isdisjoint(part):
        raise Unsupported("multimodal")
    kind = part.get("type")
    if kind == "tool_reference" and isinstance(part.get("name"), str):
        return str(part["name"])
    if kind not in _TEXT_KEY or "uuid" in part:
        raise Unsupported("multimodal" if isinstance(kind, str) else "message-shape", "unknown content part")
    text = part.get(_TEXT_KEY[kind])
    if not isinstance(text, str):
        raise Unsupported("message-shape", f"a part of type {kind} without text")
    return text


def _wrapped(part: Any) -> dict[str, Any] | None:
    text = _part_text(part)
    if text is None:
        return None
    if isinstance(part, str):
        return _text(text)
    if part["type"] == "tool_reference":
        return {"type": "tool_reference", "name": text}
    extra = {key: value for key, value in part.items() if key not in _KNOWN_PART_KEYS}
    return {"type": "text", "text": text, **extra}


def _tool_content(content: Any) -> Any:
    """Most templates only print strings for tool results, so texts are joined for them."""
    if not isinstance(content, list) or any(part["type"] != "text" for part in content):
        return content
    return "\n".join(part["text"] for part in content)


def _reordered(value: Mapping[str, Any], first: Sequence[str]) -> dict[str, Any]:
    """Declared keys in the order the engine declares them, then the others as they came."""
    return {
        **{key: value[key] for key in first if key in value},
        **{key: item for key, item in value.items() if key not in first},
    }


def _tool_call(call: Any, function_keys: Sequence[str]) -> dict[str, Any]:
    if not (
        isinstance(call, dict)
        and isinstance(call.get("id"), str)
        and call.get("type") == "function"
        and isinstance(call.get("function"), dict)
    ):
        raise Unsupported("message-shape", "a tool call needs id, type 'function' and function")
    function = call["function"]
    arguments = function.get("arguments")
    if not isinstance(function.get("name"), str) or not isinstance(arguments, str):
        raise Unsupported("message-shape", "a tool call's function needs a name and arguments as text")
    out = _reordered(call, ("id", "function", "type"))
    out["function"] = {
        **_reordered(function, function_keys),
        "arguments": parsed_arguments(arguments),
    }
    return out


def parsed_arguments(text: str) -> dict[str, Any]:
    """Templates want an object; whatever else the text holds becomes an empty one."""
    try:
        value = json.loads(text) if text else None
    except ValueError:
        value = None
    except RecursionError:
        raise Unsupported("too-deep") from None
    return value if isinstance(value, dict) else {}


def _developer_tools(tools: Any) -> Any:
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in tools
    ):
        raise Unsupported("message-shape", "tools of a developer message")
    return [
        {
            **(ordered := _reordered(tool, ("function", "type"))),
            "function": _reordered(ordered["function"], ("name", "description", "parameters", "strict")),
        }
        for tool in tools
    ]
