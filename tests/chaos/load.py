"""Traffic while something goes wrong: clients that ask one thing after the other, and what became of each."""

import asyncio
import itertools
import json
import os
import random
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import aiohttp

from extproc.demo.workload import prose

if TYPE_CHECKING:
    from tests.chaos.stack import ChaosStack

CLIENTS = 6
DOCUMENTS = 15
DEADLINE_S = 60.0
PATH = "/v1/chat/completions"

_LOADS = itertools.count()  # stacks are shared, and no request may be taken for one of an earlier test

SCALE = float(os.environ.get("WARMROUTE_CHAOS_SCALE", "0.1"))


def scaled(count: int) -> int:
    """`count` as the whole suite has it, or the part of it that `WARMROUTE_CHAOS_SCALE` asks for."""
    return max(1, round(count * SCALE))


def documents(rng: random.Random) -> list[str]:
    """What is asked about; about 350 tokens each."""
    return [prose(rng, 250) for _ in range(DOCUMENTS)]


def question(
    about: str, rng: random.Random, *, stream: bool, max_tokens: int, padding: int = 0
) -> dict[str, Any]:
    """A request body, longer by `padding` than it need be."""
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"{about} Question {rng.random()}"}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    if padding:
        body["padding"] = " " * padding
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


@dataclass
class Sent:
    """One request as its client saw it. `began`: headers of a good answer came."""

    request_id: str
    stream: bool
    started: float
    ended: float = float("inf")
    status: int | None = None
    began: bool = False
    complete: bool = False
    why: str = ""


class Load:
    """So many clients ask until the block is left; then what is open is answered to its end."""

    def __init__(
        self,
        stack: "ChaosStack",
        *,
        clients: int = CLIENTS,
        max_tokens: int = 25,
        seed: int = 0,
        padding: int = 0,
    ) -> None:
        self._stack = stack
        self._clients = clients
        self._max_tokens = max_tokens
        self._seed = seed
        self._padding = padding
        self._name = next(_LOADS)
        self._stop = False
        self._tasks: list[asyncio.Task[None]] = []
        self.sent: list[Sent] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(self._clients)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop = True
        if kind is not None:
            for task in self._tasks:
                task.cancel()
        done = await asyncio.gather(*self._tasks, return_exceptions=True)
        if kind is None:
            for result in done:
                if result is not None:
                    raise result

    @property
    def answered(self) -> int:
        """Requests that have ended well."""
        return sum(sent.complete for sent in self.sent)

    async def more(self, answers: int, deadline_s: float = DEADLINE_S) -> None:
        """Wait until so many requests that are sent from now on have been answered."""
        begin, end = len(self.sent), time.monotonic() + deadline_s
        while sum(sent.complete for sent in self.sent[begin:]) < answers:
            assert time.monotonic() < end, f"no traffic; the last: {self.sent[-self._clients :]}"
            await asyncio.sleep(0.01)

    async def _client(self, number: int) -> None:
        rng = random.Random(f"{self._seed} {number}")
        while not self._stop:
            sent = await self._ask(rng, f"load-{self._name}-{number}-{rng.getrandbits(60):x}")
            if not sent.complete:
                await asyncio.sleep(0.02)  # as clients do: not again at once

    async def _ask(self, rng: random.Random, request_id: str) -> Sent:
        stream = rng.random() < 0.5
        sent = Sent(request_id, stream, time.monotonic())
        self.sent.append(sent)
        about = rng.choice(self._stack.documents)
        body = question(about, rng, stream=stream, max_tokens=self._max_tokens, padding=self._padding)
        headers = {"content-type": "application/json", "x-request-id": request_id}
        try:
            async with self._stack.session.post(PATH, data=json.dumps(body), headers=headers) as reply:
                sent.status = reply.status
                sent.began = reply.status == 200
                raw = await reply.read()
            sent.complete = sent.began and (not stream or raw.endswith(b"data: [DONE]\n\n"))
            sent.why = "" if sent.complete else raw[-200:].decode(errors="replace")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            sent.why = repr(error)
        sent.ended = time.monotonic()
        return sent
