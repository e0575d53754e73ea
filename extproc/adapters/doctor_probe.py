"""The doctor's probe: a small completion, sent twice, and what its engine says of it.

Only a real request proves that KV events arrive, from the engine that served it, and that cached tokens are
reported. Its prompt is random, so no cache holds it, and it evicts next to nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from random import Random
from typing import Any

import aiohttp

from extproc.adapters.doctor_findings import Finding, Status
from extproc.adapters.engine_key import EngineKey, headers_for
from extproc.adapters.kv_stream import KvSource
from extproc.adapters.kv_subscriber import KvSubscriber
from extproc.adapters.routing_service import DP_RANK_HEADER
from extproc.core.hashing import prompt_chain, token_array
from extproc.core.kv_index import KvIndex
from extproc.core.namespace import Namespace
from extproc.core.types import KvEvent, Member, WorkerId

_COMPLETIONS = "/v1/completions"
_EVENT_WAIT_S = 5.0
_TRUST_WAIT_S = 2.0
_POLL_S = 0.05
_PROBE_BLOCKS = 3
_USUAL_BLOCK_SIZE = 16  # vLLM's default on GPUs
_PROBE_TOKEN_RANGE = (5, 250)  # in every vocabulary, and special in few


async def probe(
    session: aiohttp.ClientSession,
    member: Member,
    sources: Sequence[KvSource] | None,
    model: str,
    *,
    told: int | None,
    configured: int | None,
    model_revision: str,
    key: EngineKey | None,
    rng: Random,
    clock: Callable[[], float],
) -> AsyncIterator[Finding]:
    """A request, twice, and what its engine says of it.

    Args:
        session: of the member's HTTP server.
        member: whom to look at.
        sources: where its KV events come from; empty: they are switched off; None: not to be examined.
        model: a name it serves.
        told: block size on its metrics page.
        configured: block size in the configuration.
        model_revision: of the pool.
        key: of the pool's engines; None: they ask for none.
        rng: makes a prompt that no cache holds.
        clock: monotonic seconds.
    """
    who = member.endpoint
    listener = _Listener(member, model_revision)
    subscriber = KvSubscriber(
        on_events=listener.on_events,
        on_reset=listener.index.clear,
        on_trust=listener.on_trust,
        clock=clock,
    )
    try:
        try:
            subscriber.set_sources(sources or ())
        except OSError as error:
            yield Finding(
                who, "KV events", Status.FAIL, str(error),
                "correct `kv_events.endpoint`; with `bind`, is the port in use (by `warmroute serve`)?",
            )  # fmt: skip
            sources = None
        await _until(clock, lambda: len(listener.causes) == len(sources or ()), _EVENT_WAIT_S)
        size = told or configured or _USUAL_BLOCK_SIZE
        prompt = [rng.randint(*_PROBE_TOKEN_RANGE) for _ in range(_PROBE_BLOCKS * size + 1)]
        # With several ranks, the same one must be asked again.
        headers = {DP_RANK_HEADER: "0"} if member.dp_size > 1 else {}
        headers |= headers_for(key, _COMPLETIONS)
        usages = [await _complete(session, model, prompt, headers) for _ in range(2)]
        yield _cached_tokens(who, usages, size)
        if sources is None:
            return
        if not sources:
            yield Finding(
                who, "KV events", Status.WARN, "switched off in the configuration",
                "without them a prefix is only known while its request is in flight",
            )  # fmt: skip
            return
        arrived = await _until(clock, lambda: listener.knows(prompt), _EVENT_WAIT_S)
        if arrived:
            # The end of a replay may be confirmed a little after the events of the probe.
            await _until(clock, lambda: not any(listener.causes.values()), _TRUST_WAIT_S)
    finally:
        await subscriber.close()
    yield _events(who, sources, told, listener.block_size(), arrived=arrived)
    if arrived:
        yield _replay(who, listener.causes)


async def _until(clock: Callable[[], float], condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = clock() + timeout_s
    while not condition():
        if clock() > deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True


class _Listener:
    """What the events of one member say, while it is probed. `causes`: why events are incomplete, or ""."""

    def __init__(self, member: Member, model_revision: str) -> None:
        self.index = KvIndex()
        self.causes: dict[WorkerId, str] = {}
        self._workers = member.workers()
        self._seed = Namespace(model_revision, "check").seed
        for worker in self._workers:
            self.index.add_worker(worker, model_revision, "check")

    def on_events(self, worker: WorkerId, events: Sequence[KvEvent]) -> None:
        for event in events:
            self.index.apply(worker, event)

    def on_trust(self, worker: WorkerId, trusted: bool, cause: str) -> None:
        self.causes[worker] = "" if trusted else cause

    def block_size(self) -> int | None:
        """Tokens per block, as events tell."""
        return next((size for worker in self._workers if (size := self.index.block_size(worker))), None)

    def knows(self, prompt: list[int]) -> bool:
        size = self.block_size()
        return size is not None and bool(
            self.index.match(prompt_chain(token_array(prompt), size, self._seed))
        )


async def _complete(
    session: aiohttp.ClientSession, model: str, prompt: list[int], headers: dict[str, str]
) -> dict[str, Any] | str:
    """The usage of a one-token completion, or why there is none."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    try:
        async with session.post(_COMPLETIONS, json=body, headers=headers, allow_redirects=False) as reply:
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


def _events(
    who: str, sources: Sequence[KvSource], told: int | None, seen: int | None, *, arrived: bool
) -> Finding:
    """`told` and `seen`: block sizes on the metrics page and in events; None: not known."""
    check = "KV events"
    where = ", ".join(source.endpoint for source in sources)
    if told and seen and told != seen:
        return Finding(
            who, check, Status.FAIL, f"blocks have {seen} tokens in events from {where}, {told} in metrics",
            "the events seem to come from another engine: check `kv_events.endpoint` and ports",
        )  # fmt: skip
    if arrived:
        return Finding(who, check, Status.OK, f"arrive from {where}")
    if seen:
        return Finding(
            who, check, Status.FAIL, f"events arrive from {where}, but not about a request just served here",
            "they seem to come from another engine: check `kv_events.endpoint` and ports",
        )  # fmt: skip
    return Finding(
        who, check, Status.FAIL, f"none arrived from {where} for a request just served",
        "start the engine with --kv-events-config (enable_kv_cache_events, publisher zmq), compare its "
        "endpoint with `kv_events.endpoint`, and check that the port is open",
    )  # fmt: skip


def _replay(who: str, causes_by_worker: Mapping[WorkerId, str]) -> Finding:
    causes = sorted({cause for cause in causes_by_worker.values() if cause})
    if causes:
        return Finding(
            who, "replay", Status.WARN, "; ".join(causes),
            "set replay_endpoint in the engine's --kv-events-config and `kv_events.replay` here, so that "
            "nothing is missed after a restart of either",
        )  # fmt: skip
    return Finding(who, "replay", Status.OK, "every event since the engine's start is known")
