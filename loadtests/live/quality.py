"""Workloads whose requests share prefixes, and a client that plays them and measures what matters.

Dialogues are interleaved: whoever is free takes the turn that has waited longest, and a dialogue's next turn
queues up behind everybody else's. So all chats are alive at once, though only a few requests are in flight,
and what an engine cached for one is old when its next turn comes.
"""

import asyncio
import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from extproc.demo.results import percentile
from extproc.demo.workload import Dialogue, Workload, WorkloadSettings, build
from loadtests.live.http1 import Answer, HttpError, Pool, post_json
from loadtests.live.load import PATH

_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of the workloads, and the tokens one engine can cache."""

    documents: int
    questions: int
    document_words: int
    chats: int
    turns: int
    chat_words: int
    max_tokens: int
    concurrency: int
    cache_tokens: int

    def workload(self, name: str, seed: int) -> Workload:
        """`documents` or `chats` of this size."""
        documents = name == "documents"
        settings = WorkloadSettings(
            documents=self.documents if documents else 0,
            questions=self.questions,
            document_words=self.document_words,
            chats=0 if documents else self.chats,
            turns=self.turns,
            chat_words=self.chat_words,
            max_tokens=self.max_tokens,
            seed=seed,
        )
        return build(settings)


WORKLOADS = ("documents", "chats")
FULL = Shape(24, 10, 3000, 24, 6, 500, 16, 8, 40_000)
"""Documents of about 5,000 tokens, chats that grow to about as many; one engine holds a third of either."""
QUICK = Shape(6, 5, 700, 6, 4, 120, 8, 4, 2_600)


@dataclass(slots=True)
class Run:
    """One workload through one target. TTFT in milliseconds."""

    ttft_ms: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    failures: list[str] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def cached_share(self) -> float | None:
        """Prompt tokens found in a cache, of all."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    def ttft(self, share: float) -> float | None:
        """A percentile of the time to first token."""
        return percentile(self.ttft_ms, share)


async def play(
    address: str, model: str, workload: Workload, concurrency: int, on_request: Callable[[], None]
) -> Run:
    """Play the workload once, `concurrency` requests at a time."""
    run = Run()
    due = deque(_Conversation(dialogue, model) for dialogue in workload.dialogues)
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with Pool(address) as pool:

        async def user() -> None:
            while due:
                conversation = due.popleft()
                try:
                    async with asyncio.timeout(_TIMEOUT_S):
                        answer = await post_json(pool, PATH, conversation.body())
                    conversation.answered(answer, run)
                except (OSError, HttpError, TimeoutError, ValueError) as error:
                    run.failures.append(f"{conversation.name}: {type(error).__name__}: {error}")
                    continue
                finally:
                    on_request()
                if not conversation.over:
                    due.append(conversation)

        # A user that finds nothing due ends; whoever has the last turns goes on alone.
        await asyncio.gather(*(user() for _ in range(concurrency)))
    run.wall_s = loop.time() - began
    return run


class _Conversation:
    """A dialogue and its history so far."""

    def __init__(self, dialogue: Dialogue, model: str) -> None:
        self.name = dialogue.name
        self._model = model
        self._max_tokens = dialogue.max_tokens
        self._messages = [{"role": "system", "content": dialogue.system}]
        self._questions = deque(dialogue.questions)

    @property
    def over(self) -> bool:
        """Nothing left to ask."""
        return not self._questions

    def body(self) -> bytes:
        """The next request; its question joins the history."""
        self._messages.append({"role": "user", "content": self._questions.popleft()})
        body = {
            "model": self._model,
            "messages": self._messages,
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(body).encode()

    def answered(self, answer: Answer, run: Run) -> None:
        """Book what came; the answer joins the history.

        Raises:
            ValueError: an error status, or a stream without usage.
        """
        if answer.status != 200:
            raise ValueError(f"HTTP {answer.status}: {answer.body[:200]!r}")
        text, prompt, cached = read_stream(answer.body)
        run.ttft_ms.append((answer.first_at - answer.sent_at) * 1000.0)
        run.prompt_tokens += prompt
        run.cached_tokens += cached
        self._messages.append({"role": "assistant", "content": text})


def read_stream(body: bytes) -> tuple[str, int, int]:
    """Text, prompt tokens and cached tokens of a streamed chat answer.

    Raises:
        ValueError: it has no usage.
    """
    text: list[str] = []
    usage = None
    for line in body.splitlines():
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            text += [
                choice["delta"]["content"]
                for choice in event.get("choices", ())
                if choice.get("delta", {}).get("content")
            ]
            usage = event.get("usage") or usage
    if usage is None:
        raise ValueError(f"the stream has no usage: {body[-200:]!r}")
    details = usage.get("prompt_tokens_details") or {}
    return "".join(text), int(usage["prompt_tokens"]), int(details.get("cached_tokens") or 0)
