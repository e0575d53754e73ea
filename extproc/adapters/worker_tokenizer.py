"""Asks a worker for the token ids of a request that cannot be rendered here.

`render` uses the engine's `/render` endpoints: every kind of request, exactly (vLLM 0.32 with
`--enable-scale-out`, or a `vllm launch render` process). `tokenize` uses `/tokenize`, which every version
has, for conversations and single texts whose options it can express.
"""

import asyncio
from array import array
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Literal

import aiohttp
import msgspec

from extproc.adapters.engine_key import REFUSALS, EngineKey, headers_for
from extproc.core.errors import WarmrouteError
from extproc.prompt.chat import template_variables
from extproc.prompt.encoder import EncodedPrompt
from extproc.prompt.errors import Unsupported
from extproc.protocol.openai import PATHS, InferenceRequest, RequestKind

_PATH_OF = {kind: path for path, kind in PATHS.items()}

# Fields of a chat request that /tokenize understands, and those that change ids and that it does not.
_TOKENIZE_CHAT_FIELDS = (
    "model",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
)
_NOT_FOR_TOKENIZE = (
    "chat_template",
    "documents",
    "kv_transfer_params",
    "suffix",
    "prompt_embeds",
    "truncate_prompt_tokens",
)


_MOST_BYTES = 16 << 20  # two million token ids


class WorkerTokenizerError(WarmrouteError):
    """No worker gave token ids; the message says why."""


class WorkerTokenizer:
    """Token ids from a worker.

    Args:
        session: used for the requests; its owner closes it.
        base_url: gives a ready worker's URL (`http://ip:port`), or None when there is none.
        style: which of the engine's endpoints to use.
        key: of the engines of the pool whose worker `base_url` gives; None: they ask for none.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base_url: Callable[[], str | None],
        style: Literal["tokenize", "render"] = "tokenize",
        key: EngineKey | None = None,
    ) -> None:
        self._session = session
        self._base_url = base_url
        self._style = style
        self._key = key

    async def encode(self, request: InferenceRequest, *, timeout_s: float) -> EncodedPrompt:
        """The request's token ids.

        Raises:
            WorkerTokenizerError: no worker, no such endpoint, or the worker refused.
            TimeoutError: no answer in time.
        """
        path, body = self._question(request)
        base = self._base_url()
        if base is None:
            raise WorkerTokenizerError("no worker is ready")
        try:
            async with asyncio.timeout(timeout_s):
                answer = msgspec.json.decode(await self._answer(base, path, body))
        except (aiohttp.ClientError, ValueError, RecursionError) as error:
            raise WorkerTokenizerError(f"{base}{path}: {type(error).__name__}") from None
        return _prompts(answer)

    async def _answer(self, base: str, path: str, body: dict[str, Any]) -> bytes:
        headers = headers_for(self._key, path)
        status, answer = await self._post(base + path, body, headers)
        if status in REFUSALS and self._key is not None and await self._key.renewed(headers):
            status, answer = await self._post(base + path, body, self._key.headers(path))
        if status != HTTPStatus.OK:
            raise WorkerTokenizerError(f"{base}{path} answered {status}")
        return answer

    async def _post(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, bytes]:
        """Status, and what was answered if it is 200."""
        async with self._session.post(url, json=body, headers=headers, allow_redirects=False) as response:
            status = response.status
            return status, await _read(response) if status == HTTPStatus.OK else b""

    def _question(self, request: InferenceRequest) -> tuple[str, dict[str, Any]]:
        body = request.body
        if self._style == "render":
            return _PATH_OF[request.kind] + "/render", body
        if any(body.get(key) is not None for key in _NOT_FOR_TOKENIZE):
            raise WorkerTokenizerError("/tokenize cannot express this request")
        if request.kind is RequestKind.CHAT:
            question = {key: body[key] for key in _TOKENIZE_CHAT_FIELDS if key in body}
            try:
                question["chat_template_kwargs"] = template_variables(
                    body.get("chat_template_kwargs"), body.get("reasoning_effort")
                )
            except Unsupported as problem:
                raise WorkerTokenizerError(str(problem)) from None
            return "/tokenize", question
        if request.kind is RequestKind.COMPLETION and isinstance(body.get("prompt"), str):
            keys = ("model", "prompt", "add_special_tokens")
            return "/tokenize", {key: body[key] for key in keys if key in body}
        raise WorkerTokenizerError(f"/tokenize does not take {request.kind.value} requests like this")


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > _MOST_BYTES:
            raise WorkerTokenizerError(f"the answer is longer than {_MOST_BYTES} bytes")
    return bytes(body)


def _prompts(answer: Any) -> EncodedPrompt:
    """Ids from any of the answers: `tokens`, `token_ids`, or a list of objects with `token_ids`."""
    entries = answer if isinstance(answer, list) else [answer]
    try:
        lists = [entry["tokens"] if "tokens" in entry else entry["token_ids"] for entry in entries]
        prompts = tuple(array("I", ids) for ids in lists)
    except (KeyError, TypeError, OverflowError):
        raise WorkerTokenizerError("the answer holds no token ids") from None
    if not prompts or not all(prompts):
        raise WorkerTokenizerError("the answer holds no token ids")
    return EncodedPrompt(prompts)
