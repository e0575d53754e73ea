"""Logged requests to token ids, with what the analysis needs beside them. The part that runs in processes."""

import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import xxhash

from extproc.analysis.breakers import Anchors, anchors_of
from extproc.analysis.log_lines import BadLine, LoggedRequest, Skipped, read_line
from extproc.prompt.encoder import PromptEncoder
from extproc.prompt.errors import Unsupported
from extproc.protocol.openai import InferenceRequest, RequestKind

_MASKED = re.compile(r"\b(?=\w*\d)\w{4,}(?:-\w+)*\b|\d+")
_TEMPLATE_TEXT = 240  # characters of the system text that name its template


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, tokenized. `tokens` are the bytes of 4-byte ids.

    `namespace` is what must be equal for KV to be shared: model (or adapter) and cache salt.
    """

    tokens: bytes
    namespace: str
    model: str
    anchors: Anchors
    form: str
    template: str
    tenant: str | None = None
    session: str | None = None
    traffic_class: str | None = None
    time: float | None = None


@dataclass(frozen=True, slots=True)
class LineResult:
    """What became of one line: prompts, or why there are none."""

    number: int
    prompts: tuple[Prompt, ...] = ()
    skipped: bool = False
    bad: str | None = None
    unsupported: str | None = None


class LogClock:
    """Local time for chat templates that print the date: the logged time of the request at hand."""

    def __init__(self) -> None:
        self.now: float | None = None

    def __call__(self) -> datetime:
        """The request's time; the day zero of the log's clock if the log does not say."""
        return datetime.fromtimestamp(self.now or 0.0, UTC)


class PromptReader:
    """Log lines to prompts, with one encoder.

    Args:
        encoder: made with `clock`.
        clock: set to each request's time.
        custom: see `read_line`.
    """

    def __init__(self, encoder: PromptEncoder, clock: LogClock, custom: Mapping[str, str]) -> None:
        self._encoder = encoder
        self._clock = clock
        self._custom = custom

    def read(self, number: int, line: bytes) -> LineResult:
        """One line, whatever it holds; `number` is reported back."""
        try:
            requests = read_line(line, self._custom)
        except Skipped:
            return LineResult(number, skipped=True)
        except BadLine as problem:
            return LineResult(number, bad=str(problem))
        if not requests:
            return LineResult(number, skipped=True)
        prompts: list[Prompt] = []
        for request in requests:
            try:
                prompts += self._prompts(request)
            except Unsupported as problem:
                return LineResult(number, tuple(prompts), unsupported=problem.reason)
            except Exception as error:
                return LineResult(number, tuple(prompts), bad=f"cannot be encoded ({type(error).__name__})")
        return LineResult(number, tuple(prompts))

    def _prompts(self, request: LoggedRequest) -> list[Prompt]:
        body = request.body
        self._clock.now = request.fields.time
        if request.token_ids is not None:
            arrays: tuple[array[int], ...] = (array("I", request.token_ids),)
        else:
            model = _text(body.get("model"))
            arrays = self._encoder.encode(
                InferenceRequest(kind=request.kind, model=model, body=dict(body), size=0)
            ).prompts
        model = _text(body.get("model")) or "(not said)"
        salt = _text(body.get("cache_salt"))
        fields = request.fields
        template = fields.template or template_of(request.kind, body)
        out: list[Prompt] = []
        for ids in arrays:
            tokens = ids.tobytes()
            out.append(
                Prompt(
                    tokens,
                    model if salt is None else f"{model}\0{salt}",
                    model,
                    anchors_of(tokens),
                    request.form,
                    template,
                    fields.tenant,
                    fields.session,
                    fields.traffic_class,
                    fields.time,
                )
            )
        return out


def template_of(kind: RequestKind, body: Mapping[str, Any]) -> str:
    """A short name for the prompt's template: equal where system text is equal but for numbers and ids.

    The name is a hash: it tells nothing of the text.
    """
    text = _system_text(kind, body)
    tools = body.get("tools")
    count = len(tools) if isinstance(tools, list) else 0
    if not text:
        return "no system text" if not count else f"no system text, {count} tools"
    masked = _MASKED.sub("#", text[:_TEMPLATE_TEXT]).encode("utf-8", "surrogatepass")
    digest = xxhash.xxh3_64_hexdigest(masked)[:6]
    return f"system {digest}" if not count else f"system {digest}, {count} tools"


def _system_text(kind: RequestKind, body: Mapping[str, Any]) -> str:
    if kind is RequestKind.COMPLETION:
        return ""
    if kind is RequestKind.RESPONSES:
        return _plain(body.get("instructions"))
    if kind is RequestKind.MESSAGES:
        return _plain(body.get("system"))
    messages = body.get("messages")
    first = messages[0] if isinstance(messages, list) and messages else None
    if isinstance(first, dict) and first.get("role") in ("system", "developer"):
        return _plain(first.get("content"))
    return ""


def _plain(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return ""


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
