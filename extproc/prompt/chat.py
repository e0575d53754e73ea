"""What a chat template is asked to render, whatever API it was asked through."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from extproc.prompt.errors import Unsupported

REASONING_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})
UNSET = (None, "auto")  # template arguments that count as not given

# Arguments of transformers' apply_chat_template: the engine would not pass them to the template as variables.
_RESERVED = frozenset(
    {
        "chat_template",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


@dataclass(frozen=True, slots=True)
class ChatInput:
    """One conversation in chat-completions form.

    `tools` are as the template sees them. `variables` are for the template only: those it does not take are
    dropped. `function_keys` is the order of keys in the function of a tool call.
    """

    messages: list[Any]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, str]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    function_keys: tuple[str, str] = ("arguments", "name")


def flag(body: Mapping[str, Any], key: str, default: bool) -> bool:
    """A boolean field of the request.

    Raises:
        Unsupported: it is there and not a boolean (the engine converts some words and numbers).
    """
    value = body.get(key, default)
    if not isinstance(value, bool):
        raise Unsupported("field-type", f"{key} is not a boolean")
    return value


def template_variables(template_kwargs: Any, effort: Any) -> dict[str, Any]:
    """Variables from `chat_template_kwargs` and the reasoning effort, which turns thinking on or off.

    Raises:
        Unsupported: a name the engine refuses or takes for something else, or an unknown effort.
    """
    if template_kwargs is None:
        template_kwargs = {}
    if not isinstance(template_kwargs, dict) or not _RESERVED.isdisjoint(template_kwargs):
        raise Unsupported("template-kwargs")
    variables = {
        key: value
        for key, value in template_kwargs.items()
        if value not in UNSET and key not in ("add_generation_prompt", "continue_final_message")
    }
    if effort is not None:
        if effort not in REASONING_EFFORTS:
            raise Unsupported("field-type", "unknown reasoning effort")
        variables["reasoning_effort"] = effort
        if "enable_thinking" not in template_kwargs:
            variables["enable_thinking"] = effort != "none"
    return variables


def from_chat_request(body: Mapping[str, Any], tools: list[dict[str, Any]] | None) -> ChatInput:
    """A `/v1/chat/completions` body."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Unsupported("message-shape", "messages is not a list with something in it")
    if body.get("chat_template") is not None:
        raise Unsupported("request-template", "the engine uses it only if told to trust requests")
    documents = body.get("documents")
    if documents is not None and not (
        isinstance(documents, list)
        and all(
            isinstance(document, dict) and all(isinstance(value, str) for value in document.values())
            for document in documents
        )
    ):
        raise Unsupported("field-type", "documents is not a list of objects with text values")
    return ChatInput(
        messages=messages,
        tools=tools,
        documents=documents,
        add_generation_prompt=flag(body, "add_generation_prompt", default=True),
        continue_final_message=flag(body, "continue_final_message", default=False),
        add_special_tokens=flag(body, "add_special_tokens", default=False),
        variables=template_variables(body.get("chat_template_kwargs"), body.get("reasoning_effort")),
    )
