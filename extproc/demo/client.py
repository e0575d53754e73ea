"""Drives the workload through Envoy as ordinary OpenAI clients would, and measures what they see."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from extproc.demo.results import PolicyResult
from extproc.demo.workload import Dialogue, Workload

_TIMEOUT_S = 120.0


class Client:
    """Plays dialogues against one base URL, `concurrency` at a time.

    Args:
        url: base URL of the gateway.
        model: served model name.
        concurrency: dialogues in progress at once (closed loop).
        on_request: called after every finished request.
    """

    def __init__(self, url: str, model: str, concurrency: int, on_request: Callable[[], None]) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._model = model
        self._concurrency = concurrency
        self._on_request = on_request

    async def run(self, workload: Workload, policy: str) -> PolicyResult:
        """Play the whole workload once."""
        result = PolicyResult(policy)
        queue = list(reversed(workload.dialogues))
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        started = time.monotonic()
        async with aiohttp.ClientSession(timeout=timeout) as session:

            async def user() -> None:
                while queue:
                    await self._dialogue(session, queue.pop(), result)

            async with asyncio.TaskGroup() as group:
                for _ in range(self._concurrency):
                    group.create_task(user())
        result.wall_s = time.monotonic() - started
        return result

    async def _dialogue(
        self, session: aiohttp.ClientSession, dialogue: Dialogue, result: PolicyResult
    ) -> None:
        messages = [{"role": "system", "content": dialogue.system}]
        for question in dialogue.questions:
            messages.append({"role": "user", "content": question})
            body = {
                "model": self._model,
                "messages": messages,
                "max_tokens": dialogue.max_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            result.requests += 1
            try:
                answer = await self._ask(session, body, result)
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
                result.failures.append(f"{dialogue.name}: {type(error).__name__}: {error}")
                return
            finally:
                self._on_request()
            messages.append({"role": "assistant", "content": answer})

    async def _ask(
        self, session: aiohttp.ClientSession, body: dict[str, object], result: PolicyResult
    ) -> str:
        started = time.monotonic()
        first: float | None = None
        text: list[str] = []
        usage: dict[str, Any] | None = None
        async with session.post(self._url, data=msgspec.json.encode(body), headers=_JSON) as reply:
            if reply.status != 200:
                raise ValueError(f"HTTP {reply.status}: {(await reply.text())[:200]}")
            async for line in reply.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = msgspec.json.decode(line[6:])
                for choice in event.get("choices", ()):
                    content = choice.get("delta", {}).get("content")
                    if content:
                        first = first or time.monotonic()
                        text.append(content)
                usage = event.get("usage") or usage
        if first is None or usage is None:
            raise ValueError("the stream ended without an answer and its usage")
        result.ttft_ms.append((first - started) * 1000.0)
        result.prompt_tokens += usage["prompt_tokens"]
        result.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return "".join(text)


_JSON = {"content-type": "application/json"}
