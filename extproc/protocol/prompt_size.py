"""About how many tokens a prompt has whose ids are not known: for requests that are routed by load.

Text is four bytes to a token. What stands for an image, a sound or a video is no text: its base64 would count
as hundreds of thousands of tokens, and as minutes of work, where engines make about a thousand of it.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from extproc.protocol.openai import InferenceRequest, RequestKind

BYTES_PER_TOKEN = 4
MEDIA_TOKENS = 1024
"""Of one image, sound or video: an image of a megapixel is 256 tokens to some models, and 1,300 to others."""
BYTES_PER_MEDIA_TOKEN = 1024
"""Of uploads, and of bodies longer than any prompt that is text."""

MOST_MEDIA = 1000
"""More of one request are not looked for: vLLM takes 999 of a kind unless it is told otherwise."""

_MOST_DEPTH = 4
_TEXT_TYPES = frozenset(
    {
        "input_text",
        "output_text",
        "reasoning_text",
        "redacted_thinking",
        "refusal",
        "search_result",
        "summary_text",
        "text",
        "thinking",
        "tool_reference",
        "tool_result",
        "tool_use",
    }
)


def estimated_tokens(request: InferenceRequest) -> int:
    """Prompt tokens of a request, over all its prompts."""
    count = characters = 0
    for size in islice(_media(request.kind, request.body), MOST_MEDIA):
        count += 1
        characters += size
    return max(0, request.size - characters) // BYTES_PER_TOKEN + count * MEDIA_TOKENS


def estimated_unread(size: int, content_type: str, *, is_text: bool) -> int:
    """The same for a body of `size` bytes that is not read; `is_text` false: it is too long for text."""
    kind = content_type.partition("/")[0].strip().lower()
    if not is_text or kind in ("multipart", "audio", "image", "video"):
        return size // BYTES_PER_MEDIA_TOKEN
    return size // BYTES_PER_TOKEN


def _media(kind: RequestKind, body: Mapping[str, Any]) -> Iterator[int]:
    """Characters of each thing in a prompt that is no text."""
    if kind is RequestKind.COMPLETION:
        embeds = body.get("prompt_embeds")
        for one in embeds if isinstance(embeds, list) else [embeds]:
            if isinstance(one, str):
                yield len(one)
        return
    turns = body.get("input" if kind is RequestKind.RESPONSES else "messages")
    for turn in turns if isinstance(turns, list) else ():
        if isinstance(turn, dict):
            yield from _in_parts(turn.get("content"), _MOST_DEPTH)
            if kind is RequestKind.RESPONSES:
                yield from _in_parts(turn.get("output"), _MOST_DEPTH)


def _in_parts(content: Any, depth: int) -> Iterator[int]:
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, dict):
            continue
        kind = part.get("type", "text")
        if not isinstance(kind, str) or kind not in _TEXT_TYPES:
            yield _characters(part, _MOST_DEPTH)
        elif depth > 0:
            yield from _in_parts(part.get("content"), depth - 1)


def _characters(value: Any, depth: int) -> int:
    if isinstance(value, str):
        return len(value)
    if depth > 0 and isinstance(value, dict):
        return sum(_characters(inner, depth - 1) for inner in value.values())
    return 0
