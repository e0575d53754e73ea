"""`warmroute check`: finds what is wrong with a setup by looking at the real engines.

Each check yields findings; a failed one says what to do. Besides reading, it sends one small completion,
twice, to each worker: see `doctor_probe`.
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import aiohttp
import msgspec

from extproc.adapters.doctor_findings import Finding, Status
from extproc.adapters.doctor_probe import probe
from extproc.adapters.doctor_ranks import check_ranks
from extproc.adapters.engine_key import REFUSALS, EngineKey, headers_for, refusal
from extproc.adapters.http_errors import in_words
from extproc.adapters.kv_stream import KvSource
from extproc.core.errors import ProtocolError
from extproc.core.types import EngineMetrics, Member
from extproc.prompt.encoder import PromptEncoder
from extproc.prompt.errors import Unsupported
from extproc.protocol.engine_metrics import parse_engine_metrics
from extproc.protocol.model_cards import ModelCard, parse_model_cards
from extproc.protocol.openai import InferenceRequest, parse_request

_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the configuration says about the workers of one pool."""

    names: tuple[str, ...]
    block_size: int | None
    encoder: PromptEncoder | None
    model_revision: str = ""
    key: EngineKey | None = None


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


def _not_rendered(problem: str) -> str:
    """What to do where the model's files do not tell how prompts are rendered."""
    if problem == "no-chat-template":
        return (
            "is the model's chat_template.jinja or .json missing in `model.path`, or does the engine run "
            "with --chat-template (`chat_template`)? Until then such requests are routed by load"
        )
    return "such requests are routed by load; `worker_tokenize` can ask the engine instead"


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
        self, member: Member, sources: Sequence[KvSource] | None, expected: Expectation
    ) -> AsyncIterator[Finding]:
        """Findings about one member, as they come.

        Args:
            member: whom to look at.
            sources: where its KV events come from; empty: they are switched off; None: not to be examined.
            expected: what the configuration says of it.
        """
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
            ranks = check_ranks(member, engines)
            if ranks is not None:
                yield ranks
            if not cards:
                return
            model = next((card.id for card in cards if card.parent is None), cards[0].id)
            if expected.encoder is not None:
                async for found in self._tokens(session, who, model, expected.encoder):
                    yield found
            told = next((engine.block_size for engine in engines.values() if engine.block_size), None)
            async for found in probe(
                session,
                member,
                sources,
                model,
                told=told,
                configured=expected.block_size,
                model_revision=expected.model_revision,
                key=expected.key,
                rng=self._rng,
                clock=self._clock,
            ):
                yield found

    # --- the checks ----------------------------------------------------------------------------------

    async def _reach(self, session: aiohttp.ClientSession) -> str | None:
        try:
            async with session.get("/health") as reply:
                return None if reply.status == 200 else f"/health answers {reply.status}"
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"cannot connect: {in_words(error)}"

    async def _models(
        self, session: aiohttp.ClientSession, who: str, expected: Expectation
    ) -> tuple[tuple[ModelCard, ...], Finding]:
        try:
            headers = headers_for(expected.key, "/v1/models")
            async with session.get("/v1/models", headers=headers, allow_redirects=False) as reply:
                if reply.status in REFUSALS:
                    why = refusal(reply.status, expected.key)
                    return (), Finding(who, "models", Status.FAIL, why.text, why.advice)
                reply.raise_for_status()
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
            async with session.get("/metrics", raise_for_status=True) as reply:
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
                    _not_rendered(str(problem)),
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


def _difference(ours: list[int], theirs: list[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if at is None:
        return f"{len(ours)} ids here, {len(theirs)} at the engine; the shorter is a prefix of the longer"
    return f"differs from the engine's at position {at}: {ours[at]} here, {theirs[at]} there"
