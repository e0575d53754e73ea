"""Normalization of request bodies: prompts that mean the same become the same tokens.

Opt-in, because it changes what the client wrote. Deterministic and idempotent; it works on the bytes of the
body and touches only

- prompt texts (`normalize_text`): those of system, developer, user and tool messages, completion prompts,
  instructions, tool results. What the assistant said stays as it is: the engine may hold the KV of exactly
  those tokens from when it generated them. Token ids stay as they are;
- tool definitions (`normalize_tools`).

Everything else keeps its bytes, whatever its spelling.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Self

from extproc.prompt.normalize_text import Counts, TextRules, normalize_text
from extproc.prompt.normalize_tools import tool_edits
from extproc.protocol.json_edit import Edit, JsonEditError, JsonKind, JsonValue, apply_edits, parse_document
from extproc.protocol.openai import RequestKind

_TEXT_PARTS = frozenset({"text", "input_text"})
_BATCH = re.compile(rb'\[[ \t\n\r]*"')


class NormalizationMode(StrEnum):
    """Whether bodies are changed, or only looked at."""

    DISABLED = "disabled"
    DRY_RUN = "dry-run"
    APPLY = "apply"


@dataclass(frozen=True, slots=True)
class NormalizationRules:
    """What is normalized, and up to which size of a body (bytes)."""

    text: TextRules = field(default_factory=TextRules)
    tool_key_order: bool = True
    max_body_bytes: int = 8 << 20


class Normalized(NamedTuple):
    """The result. `skipped`: why nothing was tried (it labels metrics); `body` is then as it came."""

    body: bytes
    counts: Counts
    skipped: str | None = None

    @classmethod
    def untouched(cls, body: bytes, why: str) -> Self:
        """The body as it came, and why."""
        return cls(body, Counts(), why)


class _Text(NamedTuple):
    """A prompt text in the body; see `normalize_text` for the flags."""

    value: JsonValue
    has_header: bool = True
    open_end: bool = False


class _StoppedError(Exception):
    """It was told to stop."""


def normalize(
    kind: RequestKind,
    body: bytes,
    rules: NormalizationRules,
    stop: Callable[[], bool] = lambda: False,
) -> Normalized:
    """Normalize one body that is JSON to the engines. Never raises for what a body contains.

    `stop` is asked now and then whether to give up, from whichever thread this runs in.
    """

    def check() -> None:
        if stop():
            raise _StoppedError

    if len(body) > rules.max_body_bytes:
        return Normalized.untouched(body, "too-large")
    counts = Counts()
    try:
        edits = find_edits(kind, body, rules, counts, check)
    except JsonEditError:
        return Normalized.untouched(body, "not-editable")
    except _StoppedError:
        return Normalized.untouched(body, "budget")
    return Normalized(apply_edits(body, edits) if edits else body, counts)


def find_edits(
    kind: RequestKind,
    body: bytes,
    rules: NormalizationRules,
    counts: Counts,
    check: Callable[[], None] = lambda: None,
) -> list[Edit]:
    """The edits that normalize a body. Adds what they change to `counts`.

    `check` is called now and then; what it raises ends the work.

    Raises:
        JsonEditError: the body cannot be edited in place.
    """
    root = parse_document(body)
    edits = []
    for found in _texts(kind, root):
        check()
        text = found.value.text()
        if text:
            normal = normalize_text(
                text, rules.text, counts, has_header=found.has_header, open_end=found.open_end
            )
            if normal != text:
                edits.append(found.value.replaced_by(normal))
    for tools in _tool_lists(kind, root):
        edits += tool_edits(tools, rules.text, counts, key_order=rules.tool_key_order, check=check)
    return edits


def _texts(kind: RequestKind, root: JsonValue) -> Iterator[_Text]:
    body = root.body
    match kind:
        case RequestKind.COMPLETION:
            prompt = root.get("prompt")
            if prompt is not None:
                # Arrays of token ids can be long, and hold no text.
                is_batch = _BATCH.match(body, prompt.start) is not None
                prompts = prompt.elements() if is_batch else [prompt]
                yield from (_Text(one, open_end=True) for one in prompts)
        case RequestKind.CHAT:
            yield from _chat_texts(root)
        case RequestKind.RESPONSES:
            yield from _content(root.get("instructions"))
            given = root.get("input")
            if given is not None and given.kind is JsonKind.STRING:
                yield _Text(given)
            elif given is not None:
                for item in given.elements():
                    yield from _response_item(item)
        case RequestKind.MESSAGES:
            yield from _content(root.get("system"))
            for message in _list(root, "messages"):
                yield from _message(message)


def _chat_texts(root: JsonValue) -> Iterator[_Text]:
    messages = _list(root, "messages")
    flag = root.get("continue_final_message")
    continued = flag is not None and flag.raw == b"true"
    for position, message in enumerate(messages):
        texts = _message(message)
        if continued and position == len(messages) - 1:
            texts = (text._replace(open_end=True) for text in texts)
        yield from texts


def _message(message: JsonValue) -> Iterator[_Text]:
    if _word(message, "role") != "assistant":
        yield from _content(message.get("content"))


def _response_item(item: JsonValue) -> Iterator[_Text]:
    kind = _word(item, "type")
    if kind in (None, "message"):
        yield from _message(item)
    elif kind == "function_call_output":
        yield from _content(item.get("output"))


def _content(content: JsonValue | None) -> Iterator[_Text]:
    """Texts of a message's content: a string, or parts. Parts of tool results have contents of their own."""
    if content is None:
        return
    if content.kind is JsonKind.STRING:
        yield _Text(content)
        return
    parts = content.elements()
    for position, part in enumerate(parts):
        first, last = position == 0, position == len(parts) - 1
        kind = _word(part, "type")
        if part.kind is JsonKind.STRING:
            yield _Text(part, has_header=first, open_end=not last)
        elif kind in _TEXT_PARTS and (text := part.get("text")) is not None:
            yield _Text(text, has_header=first, open_end=not last)
        elif kind == "tool_result":
            yield from _content(part.get("content"))


def _tool_lists(kind: RequestKind, root: JsonValue) -> Iterator[JsonValue]:
    if kind is RequestKind.COMPLETION:
        return
    tools = root.get("tools")
    if tools is not None:
        yield tools
    if kind is RequestKind.CHAT:
        for message in _list(root, "messages"):
            if _word(message, "role") == "developer" and (own := message.get("tools")) is not None:
                yield own


def _list(value: JsonValue, key: str) -> list[JsonValue]:
    found = value.get(key)
    return [] if found is None else found.elements()


def _word(value: JsonValue, key: str) -> str | None:
    found = value.get(key)
    return None if found is None else found.text()
