"""One line of a log to the requests in it, whatever wrote the log. Shapes are recognised line by line.

Understood, also inside one another:

- a request body as clients send it (chat and text completions, Responses, Anthropic Messages);
- an object that holds one under `request`, `body`, `request_body` and the like, as an object or as JSON text,
  perhaps with headers and a path beside it: gateways' logs, OpenAI batch files, Envoy's JSON access log with
  the body from Lua or ext_proc metadata, Envoy's tap filter, Docker's and Kubernetes' log files;
- LiteLLM's standard logging payload and its spend log rows;
- vLLM's request log (`vllm_log`), and any text line that ends in a JSON object.
"""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from extproc.analysis.log_fields import Fields, header_map, read_fields
from extproc.analysis.vllm_log import VllmEntry, read_vllm_line
from extproc.protocol.openai import PATHS, BadRequest, RequestKind, decode_json

_DEPTH = 6
_INNER = (
    *("request", "body", "request_body", "requestBody", "req", "payload", "proxy_server_request"),
    *("standard_logging_object", "kwargs", "litellm_params", "http_buffered_trace", "json", "data"),
    *("http_request", "log", "message", "input", "params", "event", "jsonPayload", "textPayload"),
)
_LITELLM_KINDS = {
    "completion": RequestKind.CHAT,
    "text_completion": RequestKind.COMPLETION,
    "responses": RequestKind.RESPONSES,
    "anthropic_messages": RequestKind.MESSAGES,
}
_TEXT_JSON = re.compile(r"\{")
_LARGEST_PREFIX = 16  # opening braces tried in a text line


class Skipped(Exception):  # noqa: N818  # nothing is wrong with the line
    """The line is no generation request: another endpoint, a health check, an answer."""


class BadLine(Exception):  # noqa: N818  # the line may be fine for whoever wrote it
    """No request can be read from the line; the message says why, and holds none of its text."""


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request of a log.

    `form` names the shape it was found in. `token_ids` are given by engines that log them: then `body` may
    lack the prompt. Lines of different `vllm` forms describe the same requests.
    """

    kind: RequestKind
    body: Mapping[str, Any]
    fields: Fields
    form: str
    token_ids: tuple[int, ...] | None = None


def read_line(line: bytes, custom: Mapping[str, str] | None = None) -> list[LoggedRequest]:
    """The requests of one line; empty for a blank one.

    Args:
        line: with or without its line end.
        custom: names of a field (`tenant`, `session`, `class`, `time`, `template`) to its dotted path in the
            line's object, where the usual names do not find it.

    Raises:
        Skipped: there is none, and that is fine.
        BadLine: there is none that can be read.
    """
    line = line.strip().removeprefix(b"\xef\xbb\xbf")
    if not line:
        return []
    if line[:1] in (b"{", b"["):
        try:
            value = decode_json(line)
        except BadRequest:
            value = None
        except RecursionError:
            raise BadLine("nested too deeply") from None
        if isinstance(value, dict):
            return [_from_object(value, custom or {})]
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            return [_from_object(item, custom or {}) for item in value]
        if line[:1] == b"{":
            raise BadLine("not valid JSON (cut off?)")
    return [_from_text(line.decode("utf-8", "replace"), custom or {})]


def _from_text(line: str, custom: Mapping[str, str]) -> LoggedRequest:
    entry = read_vllm_line(line)
    if entry is not None:
        return _from_vllm(entry)
    for number, match in enumerate(_TEXT_JSON.finditer(line)):
        if number == _LARGEST_PREFIX:
            break
        try:
            value = decode_json(line[match.start() :].encode())
        except (BadRequest, RecursionError):
            continue
        if isinstance(value, dict):
            return _from_object(value, custom)
    if '"messages"' in line or '"prompt"' in line:
        raise BadLine("a request in text that is not valid JSON (cut off?)")
    if _TEXT_JSON.search(line) is None or len(line) < 40:
        raise Skipped
    raise BadLine("neither JSON nor a log line with a request in it")


def _from_vllm(entry: VllmEntry) -> LoggedRequest:
    if entry.body is not None:
        kind = kind_of(entry.body, None)
        if kind is None:
            raise Skipped
        return LoggedRequest(kind, entry.body, read_fields([entry.body], {}), "vllm-body")
    if entry.token_ids is None and entry.prompt is None:
        raise Skipped
    body: dict[str, Any] = {} if entry.prompt is None else {"prompt": entry.prompt}
    # A rendered prompt already has the special tokens its template writes.
    if entry.request_id.startswith("chatcmpl"):
        body["add_special_tokens"] = False
    return LoggedRequest(
        RequestKind.COMPLETION, body, read_fields([{}], {}), f"vllm-{entry.form}", entry.token_ids
    )


def _from_object(value: dict[str, Any], custom: Mapping[str, str]) -> LoggedRequest:
    levels: list[dict[str, Any]] = []
    problems: list[str] = []
    found = _find(value, levels, problems)
    if found is None:
        if problems:
            raise BadLine(problems[0])
        raise Skipped if _is_other(levels) else BadLine("an object without a request in it")
    kind, body, form, ids = found
    return LoggedRequest(kind, body, read_fields([*levels, body], custom), form, ids)


_Found = tuple[RequestKind, Mapping[str, Any], str, tuple[int, ...] | None]


def _find(value: dict[str, Any], levels: list[dict[str, Any]], problems: list[str]) -> _Found | None:
    """The request body in an object; `levels` becomes the objects on the way to it, outermost first."""
    for reader in (_litellm, _plain):
        found = reader(value, levels)
        if found is not None:
            return found
    if len(levels) >= _DEPTH:
        return None
    levels.append(value)
    for inner, form in _inner(value, problems):
        if isinstance(inner, VllmEntry):
            request = _from_vllm(inner)
            return request.kind, request.body, request.form, request.token_ids
        found = _find(inner, levels, problems)
        if found is not None:
            shown = form if found[2] == "body" or form == "tap" else found[2]
            return found[0], found[1], shown, found[3]
        del levels[levels.index(value) + 1 :]
    return None


def _inner(value: Mapping[str, Any], problems: list[str]) -> Iterator[tuple[dict[str, Any] | VllmEntry, Any]]:
    for key in _INNER:
        item = value.get(key)
        form = "tap" if key == "http_buffered_trace" else "wrapped"
        if isinstance(item, dict):
            text = _tapped_text(item)
            if text is None:
                yield item, form
                continue
            item = text
        if isinstance(item, str) and item not in ("", "-"):
            entry = read_vllm_line(item)
            if entry is not None:
                yield entry, "vllm"
                continue
            start = item.find("{")
            if start < 0:
                continue
            decoded = _decoded(key, item[start:], problems)
            if decoded is not None:
                yield decoded, form


def _decoded(key: str, text: str, problems: list[str]) -> dict[str, Any] | None:
    try:
        value = decode_json(text.encode("utf-8", "surrogatepass"))
    except BadRequest:
        if '"messages"' in text or '"prompt"' in text or '"input"' in text:
            problems.append(f"the body in {key!r} is not valid JSON (cut off?)")
        return None
    except RecursionError:
        problems.append("nested too deeply")
        return None
    return value if isinstance(value, dict) else None


def _tapped_text(body: Mapping[str, Any]) -> str | None:
    """The text of a body as Envoy's tap filter writes it."""
    text = body.get("as_string")
    if isinstance(text, str):
        return text
    data = body.get("as_bytes")
    if not isinstance(data, str):
        return None
    try:
        return base64.b64decode(data).decode("utf-8", "replace")
    except (binascii.Error, ValueError):
        return ""


def _litellm(value: dict[str, Any], levels: list[dict[str, Any]]) -> _Found | None:
    call_type = value.get("call_type")
    if not isinstance(call_type, str) or not ("model_parameters" in value or "request_id" in value):
        return None
    name = call_type.removeprefix("a") if call_type != "anthropic_messages" else call_type
    kind = _LITELLM_KINDS.get(name)
    if kind is None:
        levels.append(value)
        raise Skipped
    sent = _sent(value.get("proxy_server_request"))
    if sent is not None and (sent_kind := kind_of(sent, None)) is not None:
        levels.append(value)
        return sent_kind, sent, "litellm", None
    content = value.get("messages")
    if isinstance(content, str) and content.startswith(("[", "{")):
        try:
            content = decode_json(content.encode())
        except (BadRequest, RecursionError):
            raise BadLine("LiteLLM's messages are not valid JSON (cut off?)") from None
    if (
        not content
        or content == [{"role": "user", "content": "redacted-by-litellm"}]
        or (isinstance(content, str) and "redacted" in content)
    ):
        raise BadLine("LiteLLM did not log the prompt (message logging is off)")
    parameters = value.get("model_parameters")
    body = dict(parameters) if isinstance(parameters, dict) else {}
    body["model"] = value.get("model_group") or value.get("model")
    levels.append(value)
    if kind is RequestKind.COMPLETION:
        body["prompt"] = _prompt_of(content)
    elif kind is RequestKind.RESPONSES:
        body["input"] = content
    else:
        body["messages"] = [{"role": "user", "content": content}] if isinstance(content, str) else content
    return kind, body, "litellm", None


def _sent(request: Any) -> dict[str, Any] | None:
    """The body as the client sent it to LiteLLM, where that is logged."""
    if isinstance(request, str) and request.startswith("{"):
        try:
            request = decode_json(request.encode())
        except (BadRequest, RecursionError):
            return None
    if not isinstance(request, dict):
        return None
    body = request.get("body")
    return body if isinstance(body, dict) else request


def _prompt_of(content: Any) -> Any:
    if isinstance(content, list) and content and isinstance(content[0], dict):
        return content[0].get("content")
    return content


def _plain(value: dict[str, Any], levels: list[dict[str, Any]]) -> _Found | None:
    kind = kind_of(value, _path(levels))
    ids = value.get("prompt_token_ids")
    if kind is None:
        return None
    given = tuple(ids) if isinstance(ids, list) and all(type(item) is int for item in ids) else None
    return kind, value, "body", given


def _path(levels: list[dict[str, Any]]) -> str | None:
    for level in reversed(levels):
        for key in ("path", "url", "uri", "endpoint", "request_path", ":path"):
            path = level.get(key)
            if isinstance(path, str) and "/" in path:
                return path
        headers = header_map(level)
        if ":path" in headers:
            return headers[":path"]
    return None


def kind_of(body: Mapping[str, Any], path: str | None) -> RequestKind | None:
    """Which API a body belongs to; None if it is no generation request.

    Raises:
        Skipped: the path says it is another endpoint's.
    """
    if path is not None:
        bare = path.partition("?")[0].rstrip("/")
        kind = next((kind for suffix, kind in PATHS.items() if bare.endswith(suffix)), None)
        if kind is None and bare.endswith("/chat/completions"):
            kind = RequestKind.CHAT
        if kind is not None and _has_prompt(body, kind):
            return kind
        if bare.endswith(("/embeddings", "/rerank", "/score", "/models", "/tokenize", "/health", "/metrics")):
            raise Skipped
    if isinstance(body.get("messages"), list):
        anthropic = "anthropic_version" in body or isinstance(body.get("system"), str | list)
        return RequestKind.MESSAGES if anthropic else RequestKind.CHAT
    if _has_prompt(body, RequestKind.COMPLETION) and not isinstance(body.get("prompt"), dict):
        return RequestKind.COMPLETION
    given = body.get("input")
    embeds = "encoding_format" in body or "dimensions" in body or "embed" in str(body.get("model"))
    if isinstance(given, str | list) and given and "model" in body and not embeds:
        return RequestKind.RESPONSES
    return None


_PROMPT_KEY: Mapping[RequestKind, str] = {
    RequestKind.CHAT: "messages",
    RequestKind.MESSAGES: "messages",
    RequestKind.COMPLETION: "prompt",
    RequestKind.RESPONSES: "input",
}


def _has_prompt(body: Mapping[str, Any], kind: RequestKind) -> bool:
    return bool(body.get(_PROMPT_KEY[kind]))


def _is_other(levels: list[dict[str, Any]]) -> bool:
    """Whether an object without a request is an access log line of something else."""
    if not levels:
        return False
    first = levels[0]
    method = first.get("method") or first.get("request_method") or header_map(first).get(":method")
    if isinstance(method, str) and method.upper() != "POST":
        return True
    path = _path(levels)
    return path is not None and not any(path.partition("?")[0].endswith(known) for known in PATHS)
