"""Token usage out of engine responses, JSON or SSE, split anywhere. No I/O; the bytes are only read.

Three APIs, three vocabularies; `Usage` speaks one, in which `prompt_tokens` includes cached ones:

| API | prompt | of it cached | output |
|---|---|---|---|
| completions, chat | `prompt_tokens` | `prompt_tokens_details.cached_tokens` | `completion_tokens` |
| responses | `input_tokens` | `input_tokens_details.cached_tokens` | `output_tokens` |
| Anthropic messages | `input_tokens` + cache reads and writes | `cache_read_input_tokens` | `output_tokens` |

Streamed, usage comes in the last chunk (`usage`), in `response.completed` (`response.usage`), or in two
parts, `message_start` (`message.usage`) and `message_delta` (`usage`); a later part overrides an earlier one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

MAX_JSON_BYTES = 8 << 20
"""Longer JSON answers (large embeddings) are not searched."""
MAX_EVENT_BYTES = 1 << 20
"""Longer SSE events are skipped."""

_KEYS = (
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "input_tokens",
    "output_tokens",
    "input_cached_tokens",
    "cache_read_input_tokens",
    "cache_creation_input_tokens",
)
_INPUT_KEYS = _KEYS[3:4] + _KEYS[5:]
_MARK = b'"usage"'


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one exchange. None: the engine did not say."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None


def normalize(fields: Mapping[str, object]) -> Usage | None:
    """Usage from flat fields, None if there is none.

    The names are those of the module's table, with the cached tokens of the details objects flattened to
    `cached_tokens` and, for the responses API, `input_cached_tokens`.
    """
    number = {key: value for key in _KEYS if (value := _count(fields.get(key))) is not None}
    prompt, cached = number.get("prompt_tokens"), number.get("cached_tokens")
    output = number.get("completion_tokens", number.get("output_tokens"))
    if prompt is None and (prompt := number.get("input_tokens")) is not None:
        cached = number.get("input_cached_tokens")
        if cached is None and (cached := number.get("cache_read_input_tokens")) is not None:
            prompt += cached
        prompt += number.get("cache_creation_input_tokens", 0)
    if prompt is None and output is None:
        return None
    return Usage(prompt, cached, output)


def _count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 0 <= value < 2**53 else None


class UsageReader:
    """Feed it a response as it passes; ask for `usage` at any time, and finally `finish`.

    Args:
        content_type: the response's; None makes the first byte decide (`{` is JSON).
    """

    def __init__(self, content_type: str | None = None) -> None:
        kind = (content_type or "").partition(";")[0].strip().lower()
        self._sse: bool | None = None if not kind else kind == "text/event-stream"
        self._json: list[bytes] = []
        self._size = 0
        self._rest = b""  # an unfinished line
        self._skipping = False  # in a line that is too long
        self._event: list[bytes] = []
        self._event_bytes = 0
        self._fields: dict[str, object] = {}

    @property
    def usage(self) -> Usage | None:
        """What has been said so far."""
        return normalize(self._fields)

    def feed(self, data: bytes) -> None:
        """The next bytes of the body."""
        if self._sse is None:
            start = data.lstrip()
            if not start:
                return
            self._sse = not start.startswith(b"{")
        if self._sse:
            self._feed_sse(data)
        else:
            self._size += len(data)
            if self._size <= MAX_JSON_BYTES:
                self._json.append(data)
            else:
                self._json.clear()

    def finish(self) -> Usage | None:
        """The end of the body: what the response said in all."""
        if self._sse:
            self._line(self._rest)
            self._dispatch()
            self._rest = b""
        elif self._json:
            self._parse(b"".join(self._json))
            self._json.clear()
        return self.usage

    def _feed_sse(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if self._skipping:
                self._skipping = False
            else:
                self._line(line)
        if len(self._rest) > MAX_EVENT_BYTES:
            self._rest, self._skipping = b"", True

    def _line(self, line: bytes) -> None:
        line = line.removesuffix(b"\r")
        if not line:
            self._dispatch()
        elif line.startswith(b"data:"):
            self._event_bytes += len(line)
            if self._event_bytes <= MAX_EVENT_BYTES:
                self._event.append(line[5:])
            else:
                self._event.clear()

    def _dispatch(self) -> None:
        event, self._event, self._event_bytes = b"\n".join(self._event), [], 0
        self._parse(event)

    def _parse(self, document: bytes) -> None:
        if _MARK not in document:
            return
        try:
            parsed = msgspec.json.decode(document)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        if isinstance(parsed, dict):
            for holder in (parsed, parsed.get("response"), parsed.get("message")):
                if isinstance(holder, dict) and isinstance(usage := holder.get("usage"), dict):
                    self._merge(usage)

    def _merge(self, usage: Mapping[str, object]) -> None:
        flat = {key: value for key in _KEYS if (value := usage.get(key)) is not None}
        for details, key in (
            ("prompt_tokens_details", "cached_tokens"),
            ("input_tokens_details", "input_cached_tokens"),
        ):
            if isinstance(inner := usage.get(details), dict) and inner.get("cached_tokens") is not None:
                flat[key] = inner["cached_tokens"]
        if "input_tokens" in flat:  # a new account of the prompt: its parts belong together
            for key in _INPUT_KEYS:
                self._fields.pop(key, None)
        self._fields.update(flat)
