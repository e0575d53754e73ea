"""`warmroute check`: finds what is wrong with a setup by looking at the real engines.

Each check yields findings; a failed one says what to do. Besides reading, it sends one small completion,
twice, to each worker (its prompt is random, so it evicts next to nothing), because only a real request proves
that KV events arrive and that cached tokens are reported.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any

import aiohttp
import msgspec

from extproc.adapters.kv_subscriber import KvSource, KvSubscriber
from extproc.core.errors import ProtocolError
from extproc.core.hashing import prompt_chain, token_array
from extproc.core.kv_index import KvIndex
from extproc.core.namespace import Namespace
from extproc.core.types import EngineMetrics, KvEvent, Member, WorkerId
from extproc.prompt.encoder import PromptEncoder
from extproc.prompt.errors import Unsupported
from extproc.protocol.engine_metrics import parse_engine_metrics
from extproc.protocol.model_cards import ModelCard, parse_model_cards
from extproc.protocol.openai import InferenceRequest, parse_request

_TIMEOUT_S = 30.0
_EVENT_WAIT_S = 5.0
_POLL_S = 0.05
_PROBE_BLOCKS = 3
_PROBE_TOKEN_RANGE = (5, 250)  # in every vocabulary, and special in few


class Status(StrEnum):
    """How a check came out. Only `FAIL` makes the command fail."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result: what was looked at, how it is, and what to do about it."""

    subject: str
    check: str
    status: Status
    detail: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the configuration says about the workers of one pool."""

    names: tuple[str, ...]
    block_size: int | None
    encoder: PromptEncoder | None
    model_revision: str = ""


_SAMPLES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("chat", {"messages": [{"role": "user", "content": "Hello, world!"}]}),
    (
        "chat of several turns",
        {
            "messages": [
                {"role": "system", "content": "You are terse.\n  Keep   spaces."},
                {"role": "user", "content": "What is 2+2? Größe ☀️ 東京"},
                {"role": "assistant", "content": "4"},
                {"role": "user", "content": "And 1234567890 * 3.5e-9?"},
            ]
        },
    ),
    ("text", {"prompt": "def f(x):\n    return x**2  # ünï\n\nNaïve café — 12 345"}),
)


class Doctor:
    """Examines one worker after another.

    Args:
        rng: makes probes that no cache holds.
        clock: monotonic seconds.
    """

    def __init__(self, rng: Random, clock: Callable[[], float] = time.monotonic) -> None:
        self._rng = rng
        self._clock = clock

    async def examine(
        self, member: Member, sources: Sequence[KvSource], expected: Expectation
    ) -> AsyncIterator[Finding]:
        """Findings about one member, as they come."""
        who = member.endpoint
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with aiohttp.ClientSession(f"http://{who}", timeout=timeout) as session:
            problem = await self._reach(session)
            if problem is not None:
                yield Finding(
                    who, "reachable", Status.FAIL, problem,
                    "check that the engine runs, and that this machine and Envoy may connect to it",
                )  # fmt: skip
                return
            yield Finding(who, "reachable", Status.OK, "/health answers")
            cards, finding = await self._models(session, who, expected)
            yield finding
            engines, finding = await self._metrics(session, who, expected)
            yield finding
            if not cards:
                return
            model = next((card.id for card in cards if card.parent is None), cards[0].id)
            if expected.encoder is not None:
                async for found in self._tokens(session, who, model, expected.encoder):
                    yield found
            async for found in self._probe(session, member, sources, model, engines, expected):
                yield found

    # --- the checks ----------------------------------------------------------------------------------

    async def _reach(self, session: aiohttp.ClientSession) -> str | None:
        try:
            async with session.get("/health") as reply:
                return None if reply.status == 200 else f"/health answers {reply.status}"
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"cannot connect: {error or type(error).__name__}"

    async def _models(
        self, session: aiohttp.ClientSession, who: str, expected: Expectation
    ) -> tuple[tuple[ModelCard, ...], Finding]:
        try:
            async with session.get("/v1/models") as reply:
                cards = parse_model_cards(await reply.read())
        except (aiohttp.ClientError, TimeoutError, ProtocolError) as error:
            return (), Finding(
                who, "models", Status.FAIL, f"/v1/models: {error}", "is this an OpenAI-compatible engine?"
            )
        base = [card.id for card in cards if card.parent is None]
        unknown = [name for name in base if expected.names and name not in expected.names]
        if unknown:
            return cards, Finding(
                who, "models", Status.FAIL,
                f"serves {', '.join(base)}; the configuration names {', '.join(expected.names)}",
                "put the engine's --served-model-name into `model.names`: a name that is not there is taken "
                "for an adapter, and never hits",
            )  # fmt: skip
        return cards, Finding(who, "models", Status.OK, ", ".join(card.id for card in cards))

    async def _metrics(
        self, session: aiohttp.ClientSession, who: str, expected: Expectation
    ) -> tuple[dict[int, EngineMetrics], Finding]:
        try:
            async with session.get("/metrics") as reply:
                engines = parse_engine_metrics(await reply.text())
        except (aiohttp.ClientError, TimeoutError, ProtocolError, UnicodeDecodeError) as error:
            return {}, Finding(
                who, "metrics", Status.WARN, f"/metrics: {error}",
                "without metrics the load of other clients and the block size are not seen",
            )  # fmt: skip
        sizes = {engine.block_size for engine in engines.values()} - {None}
        if not engines or not sizes:
            return engines, Finding(
                who, "metrics", Status.WARN, "the page has no vllm:cache_config_info",
                "set `block_size` of the pool, or use a vLLM that reports it",
            )  # fmt: skip
        size = sizes.pop()
        if expected.block_size is not None and size != expected.block_size:
            return engines, Finding(
                who, "metrics", Status.WARN,
                f"block size {size}, the configuration says {expected.block_size}",
                "the engine's value is used; remove `block_size` from the configuration",
            )  # fmt: skip
        return engines, Finding(who, "metrics", Status.OK, f"block size {size} tokens")

    async def _tokens(
        self, session: aiohttp.ClientSession, who: str, model: str, encoder: PromptEncoder
    ) -> AsyncIterator[Finding]:
        compared = 0
        for name, sample in _SAMPLES:
            try:
                ours = list(encoder.encode(_request(model, sample)).prompts[0])
            except Unsupported as problem:
                yield Finding(
                    who, "token ids", Status.WARN, f"{name}: not rendered here ({problem})",
                    "such requests are routed by load; `worker_tokenize` can ask the engine instead",
                )  # fmt: skip
                continue
            theirs = await _tokenize(session, {"model": model, **sample})
            if theirs is None:
                yield Finding(
                    who, "token ids", Status.WARN, "the engine's /tokenize does not answer",
                    "token ids could not be compared; check that `model.path` is what the engine serves",
                )  # fmt: skip
                return
            compared += 1
            if ours != theirs:
                yield Finding(
                    who, "token ids", Status.FAIL, f"{name}: {_difference(ours, theirs)}",
                    "`model.path`, `chat_template` and `template_kwargs` must be what the engine was started "
                    "with: with other ids no prefix is ever found",
                )  # fmt: skip
                return
        if compared:
            yield Finding(who, "token ids", Status.OK, f"equal to the engine's on {compared} samples")

    async def _probe(
        self,
        session: aiohttp.ClientSession,
        member: Member,
        sources: Sequence[KvSource],
        model: str,
        engines: dict[int, EngineMetrics],
        expected: Expectation,
    ) -> AsyncIterator[Finding]:
        who = member.endpoint
        size = next((e.block_size for e in engines.values() if e.block_size), expected.block_size) or 16
        prompt = [self._rng.randint(*_PROBE_TOKEN_RANGE) for _ in range(_PROBE_BLOCKS * size + 1)]
        index = KvIndex()
        trust: dict[WorkerId, str] = {}
        for worker in member.workers():
            index.add_worker(worker, expected.model_revision, "check")

        def on_events(worker: WorkerId, events: Sequence[KvEvent]) -> None:
            for event in events:
                index.apply(worker, event)

        def on_trust(worker: WorkerId, trusted: bool, cause: str) -> None:
            trust[worker] = "" if trusted else cause

        subscriber = KvSubscriber(
            on_events=on_events, on_reset=index.clear, on_trust=on_trust, clock=self._clock
        )
        try:
            subscriber.set_sources(sources)
            await self._until(lambda: len(trust) == len(sources), _EVENT_WAIT_S)
            usages = [await _complete(session, model, prompt) for _ in range(2)]
            yield _cached_tokens(who, usages, size)
            if not sources:
                yield Finding(
                    who, "KV events", Status.WARN, "switched off in the configuration",
                    "without them a prefix is only known while its request is in flight",
                )  # fmt: skip
                return
            seed = Namespace(expected.model_revision, "check").seed
            hashes = prompt_chain(token_array(prompt), size, seed)
            arrived = await self._until(lambda: bool(index.match(hashes)), _EVENT_WAIT_S)
        finally:
            await subscriber.close()
        yield _events(who, sources, size, index, arrived=arrived)
        if arrived:
            yield _replay(who, trust)

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        deadline = self._clock() + timeout_s
        while not condition():
            if self._clock() > deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True


def _request(model: str, sample: dict[str, Any]) -> InferenceRequest:
    path = "/v1/completions" if "prompt" in sample else "/v1/chat/completions"
    parsed = parse_request("POST", path, {}, msgspec.json.encode({"model": model, **sample}))
    if not isinstance(parsed, InferenceRequest):
        raise TypeError(f"the sample for {path} is not an inference request")
    return parsed


async def _tokenize(session: aiohttp.ClientSession, body: dict[str, Any]) -> list[int] | None:
    try:
        async with session.post("/tokenize", json=body) as reply:
            if reply.status != 200:
                return None
            tokens: list[int] = (await reply.json())["tokens"]
            return tokens
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError):
        return None


async def _complete(session: aiohttp.ClientSession, model: str, prompt: list[int]) -> dict[str, Any] | str:
    """The usage of a one-token completion, or why there is none."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    try:
        async with session.post("/v1/completions", json=body) as reply:
            if reply.status != 200:
                return f"/v1/completions answers {reply.status}: {(await reply.text())[:200]}"
            usage: dict[str, Any] = (await reply.json())["usage"]
            return usage
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
        return f"/v1/completions: {error or type(error).__name__}"


def _cached_tokens(who: str, usages: Sequence[dict[str, Any] | str], size: int) -> Finding:
    check = "cached tokens"
    for usage in usages:
        if isinstance(usage, str):
            return Finding(who, check, Status.FAIL, usage, "the engine must answer /v1/completions")
    last = usages[-1]
    details = last.get("prompt_tokens_details") if isinstance(last, dict) else None
    if not isinstance(details, dict) or details.get("cached_tokens") is None:
        return Finding(
            who, check, Status.WARN, "the engine does not report them",
            "start it with --enable-prompt-tokens-details, or predictions cannot be audited",
        )  # fmt: skip
    cached = details["cached_tokens"]
    if cached < size:
        return Finding(
            who, check, Status.FAIL, "a repeated prompt was computed again",
            "prefix caching is off: start the engine with --enable-prefix-caching",
        )  # fmt: skip
    return Finding(who, check, Status.OK, f"reported; a repeated prompt hit {cached} tokens")


def _events(who: str, sources: Sequence[KvSource], size: int, index: KvIndex, *, arrived: bool) -> Finding:
    check = "KV events"
    where = ", ".join(source.endpoint for source in sources)
    if arrived:
        return Finding(who, check, Status.OK, f"arrive from {where}")
    told = {index.block_size(source.worker) for source in sources} - {None}
    if told and told != {size}:
        return Finding(
            who, check, Status.FAIL, f"blocks have {told.pop()} tokens in events, {size} in metrics",
            "predictions follow the events; check the engine's --block-size",
        )  # fmt: skip
    if told:
        return Finding(
            who, check, Status.FAIL, f"events arrive from {where}, but not about a request just served here",
            "they seem to come from another engine: check `kv_events.endpoint` and ports",
        )  # fmt: skip
    return Finding(
        who, check, Status.FAIL, f"none arrived from {where} for a request just served",
        "start the engine with --kv-events-config (enable_kv_cache_events, publisher zmq), compare its "
        "endpoint with `kv_events.endpoint`, and check that the port is open",
    )  # fmt: skip


def _replay(who: str, trust: dict[WorkerId, str]) -> Finding:
    causes = sorted({cause for cause in trust.values() if cause})
    if causes:
        return Finding(
            who, "replay", Status.WARN, "; ".join(causes),
            "set replay_endpoint in the engine's --kv-events-config and `kv_events.replay` here, so that "
            "nothing is missed after a restart of either",
        )  # fmt: skip
    return Finding(who, "replay", Status.OK, "every event since the engine's start is known")


def _difference(ours: list[int], theirs: list[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if at is None:
        return f"{len(ours)} ids here, {len(theirs)} at the engine; the shorter is a prefix of the longer"
    return f"differs from the engine's at position {at}: {ours[at]} here, {theirs[at]} there"
