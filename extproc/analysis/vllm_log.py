"""vLLM's own request log (`--enable-log-requests`), in the forms it has had.

Up to 0.11: `Received request ID: prompt: '…', params: …, prompt_token_ids: […], …`. Since then, at level
DEBUG, `Request ID details: prompt: …, prompt_token_ids: […], …` and `Request ID JSON body: {…}`; the line
that is left at level INFO has no prompt. With `--max-log-len` prompts are cut off, which cannot be seen here.
"""

import ast
import re
from dataclasses import dataclass
from typing import Any

from extproc.protocol.openai import BadRequest, decode_json

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_ENTRY = re.compile(r"(?:Received request|Request) (?P<id>\S+?)(?P<form>:| details:| JSON body:) ")
_PROMPT = re.compile(r"prompt: (?P<prompt>None|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")")
_IDS = re.compile(r"prompt_token_ids: \[(?P<ids>[\d, ]*)\]")


@dataclass(frozen=True, slots=True)
class VllmEntry:
    """One entry. `form`: `received`, `details` or `body`. Of the others what the form has."""

    request_id: str
    form: str
    body: dict[str, Any] | None = None
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None


def read_vllm_line(line: str) -> VllmEntry | None:
    """The entry in a line of vLLM's output; None for any other line (also one that is cut off)."""
    match = _ENTRY.search(line, 0, 400)
    if match is None:
        return None
    rest = line[match.end() :]
    if "\x1b" in rest:
        rest = _ANSI.sub("", rest)
    name = match["id"]
    if match["form"] == " JSON body:":
        try:
            body = decode_json(rest.strip().encode("utf-8", "surrogatepass"))
        except (BadRequest, RecursionError):
            return None
        return VllmEntry(name, "body", body) if isinstance(body, dict) else None
    form = "details" if match["form"] == " details:" else "received"
    prompt = _PROMPT.match(rest)
    ids = _IDS.search(rest, prompt.end() if prompt else 0)
    text: str | None = None
    if prompt is not None and prompt["prompt"] != "None":
        try:
            text = str(ast.literal_eval(prompt["prompt"]))
        except (ValueError, SyntaxError, MemoryError):
            return None
    numbers = None if ids is None or not ids["ids"].strip() else tuple(map(int, ids["ids"].split(",")))
    return VllmEntry(name, form, None, text, numbers)
