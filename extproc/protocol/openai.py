"""What a request to an OpenAI-style (or Anthropic-style) server asks for: bytes in, `InferenceRequest` out.

Only what routing needs is interpreted; whether the rest is valid is the engine's business. A request that is
none of ours, or that we cannot read, is `LoadOnly`: it is routed by load. Only a body that no server could
read (no JSON object on an inference path) is refused, in the error shape OpenAI clients expect.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from extproc.core.errors import WarmrouteError
from extproc.protocol.body_limits import DEFAULT_LIMITS, BodyLimits, gunzip, has_more_values
from extproc.protocol.json_edit import JsonEditError, parse_document
from extproc.protocol.multipart import form_field
from extproc.protocol.names import shown

MOST_SEQUENCES = 16_384
"""More sequences than this are counted as so many; vLLM refuses a larger `n` (its VLLM_MAX_N_SEQUENCES)."""

_MOST = (1 << 31) - 1
_MOST_QUOTES = 1 << 20

COMPLETION_DEFAULT_MAX_TOKENS = 16  # what /v1/completions generates when the request does not say


class RequestKind(StrEnum):
    """The inference endpoints whose prompts we can read."""

    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSES = "responses"
    MESSAGES = "messages"


PATHS: Mapping[str, RequestKind] = {
    "/v1/chat/completions": RequestKind.CHAT,
    "/v1/completions": RequestKind.COMPLETION,
    "/v1/responses": RequestKind.RESPONSES,
    "/v1/messages": RequestKind.MESSAGES,
}

_OUTPUT_LIMIT_KEYS: Mapping[RequestKind, tuple[str, ...]] = {
    RequestKind.CHAT: ("max_completion_tokens", "max_tokens"),
    RequestKind.COMPLETION: ("max_tokens",),
    RequestKind.RESPONSES: ("max_output_tokens",),
    RequestKind.MESSAGES: ("max_tokens",),
}


class BadRequest(WarmrouteError):  # noqa: N818  # named for the HTTP status it becomes
    """The request cannot be served by any engine. Carries the fields of OpenAI's error object."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> bytes:
        """The JSON error body."""
        error = {
            "message": self.message,
            "type": "invalid_request_error",
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})


@dataclass(frozen=True, slots=True)
class LoadOnly:
    """Route by load alone. `reason` is one of a few fixed words (it labels metrics)."""

    reason: str
    model: str | None = None


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One generation request. `body` is the parsed JSON object with its keys in wire order: never change it.

    `sequences` is how many sequences the engine will run (prompts times `n`); `plain` is the body without its
    content encoding and `size` its length in bytes; `max_output_tokens` is per sequence. `reads_cache`: false
    where the engine computes the whole prompt whatever it has cached of it.
    """

    kind: RequestKind
    model: str | None
    body: dict[str, Any]
    size: int
    max_output_tokens: int | None = None
    stream: bool = False
    cache_salt: str | None = None
    sequences: int = 1
    prompt_cache_key: str | None = None
    user: str | None = None
    priority: int | None = None
    reads_cache: bool = True
    plain: bytes = field(default=b"", repr=False, compare=False)


def parse_request(
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: bytes,
    limits: BodyLimits = DEFAULT_LIMITS,
) -> InferenceRequest | LoadOnly:
    """Read one request, within `limits`. `headers` have lower-case names; `path` may carry a query string.

    Raises:
        BadRequest: the path is an inference endpoint and the body is not a JSON object.
    """
    kind = PATHS.get(path.partition("?")[0])
    if method != "POST":
        return LoadOnly("method")
    if kind is None:
        return LoadOnly("path", _model_of(body, headers.get("content-type", "")))
    plain = _plain(headers, body, limits)
    if not plain:  # what an empty body means is for the engine to say
        return LoadOnly("content-encoding" if plain is None else "no-body")
    document = _document(plain, limits)
    if isinstance(document, LoadOnly):
        return document
    excess = _excess(kind, document, limits)
    if excess is not None:
        return LoadOnly(excess, _name(document.get("model")))
    return _describe(kind, document, plain)


def parse_plain(kind: RequestKind, plain: bytes) -> InferenceRequest:
    """The request again whose `plain` body this is: it was read once, and every limit was kept then.

    Raises:
        BadRequest, RecursionError: it was not.
    """
    document = decode_json(plain)
    if not isinstance(document, dict):
        raise BadRequest(400, "The request body must be a JSON object.", code="invalid_json")
    return _describe(kind, document, plain)


def _plain(headers: Mapping[str, str], body: bytes, limits: BodyLimits) -> bytes | None:
    """The body without its content encoding; None where it cannot be had."""
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return body
    return gunzip(body, limits.read_bytes) if encoding in ("gzip", "x-gzip") else None


def _document(body: bytes, limits: BodyLimits) -> dict[str, Any] | LoadOnly:
    if len(body) > limits.read_bytes:
        return LoadOnly("body-too-long", _model_of(body))
    if has_more_values(body, limits.json_values):
        return LoadOnly("json-too-many-values", _model_of(body))
    try:
        document = decode_json(body)
    except RecursionError:
        return LoadOnly("json-too-deep")
    if not isinstance(document, dict):
        raise BadRequest(400, "The request body must be a JSON object.", code="invalid_json")
    return document


def decode_json(body: bytes) -> Any:
    """Decode as the engine does, with Python's `json`: last duplicate wins, NaN and lone surrogates pass.

    msgspec agrees with it on whatever it accepts (tested), and is several times faster.

    Raises:
        BadRequest: not JSON for either; the message says where, and never echoes the body.
        RecursionError: nested too deeply for either.
    """
    try:
        return msgspec.json.decode(body)
    except msgspec.MsgspecError:
        pass
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise BadRequest(400, f"The request body is not valid JSON ({where}).", code="invalid_json") from None
    except ValueError:  # not UTF-8, or an integer of thousands of digits
        raise BadRequest(400, "The request body is not valid JSON.", code="invalid_json") from None


def _describe(kind: RequestKind, body: dict[str, Any], plain: bytes) -> InferenceRequest:
    limit = None
    for key in _OUTPUT_LIMIT_KEYS[kind]:
        limit = _integer(body.get(key))
        if limit is not None:
            break
    sequences = _integer(body.get("n")) or 1
    user = _name(body.get("user"))
    if kind is RequestKind.COMPLETION:
        sequences *= _prompt_count(body.get("prompt"))
        if "max_tokens" not in body:
            limit = COMPLETION_DEFAULT_MAX_TOKENS
    elif kind is RequestKind.MESSAGES and isinstance(body.get("metadata"), dict):
        user = _name(body["metadata"].get("user_id"))
    return InferenceRequest(
        kind=kind,
        model=_name(body.get("model")),
        body=body,
        size=len(plain),
        plain=plain,
        max_output_tokens=limit,
        stream=body.get("stream") is True,
        cache_salt=_text(body.get("cache_salt")),
        sequences=max(1, min(sequences, MOST_SEQUENCES)),
        prompt_cache_key=_name(body.get("prompt_cache_key")),
        user=user,
        priority=_integer(body.get("priority")),
        reads_cache=not _wants_prompt_logprobs(kind, body),
    )


def _wants_prompt_logprobs(kind: RequestKind, body: Mapping[str, Any]) -> bool:
    """Whether logprobs of the prompt's own tokens are asked for: cached blocks have none.

    An echo has those of its prompt, too: always in a chat, else if logprobs are asked for.
    """
    if kind not in (RequestKind.CHAT, RequestKind.COMPLETION):
        return False
    if body.get("prompt_logprobs") is not None:
        return True
    return body.get("echo") is True and (kind is RequestKind.CHAT or body.get("logprobs") is not None)


def _excess(kind: RequestKind, body: Mapping[str, Any], limits: BodyLimits) -> str | None:
    """Why there is more in a body than is looked at; None: there is not."""
    if kind is RequestKind.COMPLETION:
        return "too-many-prompts" if _prompt_count(body.get("prompt")) > limits.prompts else None
    conversation = body.get("input" if kind is RequestKind.RESPONSES else "messages")
    too_many = isinstance(conversation, list) and len(conversation) > limits.messages
    return "too-many-messages" if too_many else None


def _prompt_count(prompt: object) -> int:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return len(prompt)
    return 1


def _integer(value: object) -> int | None:
    """An integer, within 32 bits: engines refuse what is beyond, and nothing here should have to count it."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return max(-_MOST, min(value, _MOST))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _name(value: object) -> str | None:
    """A text that names something, as it is logged."""
    text = _text(value)
    return None if text is None else shown(text)


def _model_of(body: bytes, content_type: str = "") -> str | None:
    """The `model` field of a body we otherwise do not read, if it has one and is quickly found."""
    form = form_field(content_type, body, "model")  # audio is uploaded so
    if form is not None:
        return _name(form)
    if body.count(b'"') > _MOST_QUOTES:
        return None
    try:
        model = parse_document(body).get("model") if body else None
        return None if model is None else _name(model.text())
    except JsonEditError:
        return None
