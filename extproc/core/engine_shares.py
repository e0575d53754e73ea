"""Who takes an engine's time: shares that one prefix, all warm requests and prefill have taken of it lately.

    share = sum over requests of work * exp(-age / MEMORY_S) / MEMORY_S
    work  = prefill + output * (per_sequence + per_1k_context * (prompt + output / 2) / 1000)

Work is what a request adds to the time its engine needs: computing its uncovered tokens, and what it adds to
each decode step (see `extproc.core.step_model`), over its expected output; it is booked when the request is
routed. The prefill of a copy (a warm request on a worker that has yet to compute its prefix) is not counted:
the copy is there to take more of them. A share of s means that whatever else runs there takes 1 / (1 - s)
times as long because of it.

What is "one prefix"? The longest prefix of a request that any worker holds, exactly to its last block, and
only if it is at least half of the prompt (`warm`). So a common system prompt does not make one prefix of
requests that differ later: as soon as a session has a history of its own, that is its longest prefix, and
where what is shared is the smaller part of the prompt, what has to be computed decides and nothing ties the
request to a worker. Requests of which a shared part is all there is to reuse are one prefix, however they go
on: each of them is cheaper on the workers that hold it, and they are what can monopolise one.

How busy an engine is: the work of all its requests, summed in the same way; at first over the time since the
first of them.

A request of which nobody holds half is cold. Milliseconds; shares are of one engine's time.
"""

import math
from collections.abc import Mapping, Sequence

from extproc.core.types import Candidate, Decision, ShareFacts, WorkerId

MEMORY_S = 10.0
MAX_PREFIXES = 1024  # per worker
WARM_PART = 0.5
_SPAN_MS = MEMORY_S * 1000.0
_SHORTEST_S = 1.0  # the first request alone does not make an engine busy
_LONG_S = 10.0 * MEMORY_S


class _Faded:
    """A sum that forgets."""

    __slots__ = ("_at", "_sum")

    def __init__(self) -> None:
        self._sum = 0.0
        self._at = 0.0

    def add(self, value: float, now: float) -> None:
        self._sum = self.at(now) + value
        self._at = now

    def at(self, now: float) -> float:
        passed_s = now - self._at
        return self._sum if passed_s <= 0.0 or not self._sum else self._sum * math.exp(-passed_s / MEMORY_S)


class _Engine:
    __slots__ = ("began", "cold_prefill", "prefixes", "warm", "work")

    def __init__(self, began: float) -> None:
        self.began = began
        self.work = _Faded()
        self.cold_prefill = _Faded()
        self.warm = _Faded()
        self.prefixes: dict[int, _Faded] = {}


class EngineShares:
    """Shares of all engines. See the module."""

    def __init__(self) -> None:
        self._engines: dict[WorkerId, _Engine] = {}
        self._cold: dict[str, _Faded] = {}

    def book(self, decision: Decision, now: float) -> None:
        """A request has been routed."""
        chosen, facts = decision.chosen, decision.chosen.shares
        prefill_ms, work_ms = chosen.cost.prefill_ms, work_of(chosen)
        copies = facts.warm and chosen.cached_tokens + chosen.offloaded_tokens < WARM_PART * (
            decision.request.prompt_tokens
        )
        if copies:
            work_ms -= prefill_ms
        engine = self._engines.get(chosen.worker)
        if engine is None:
            engine = self._engines[chosen.worker] = _Engine(now)
        engine.work.add(work_ms, now)
        if facts.warm:
            engine.warm.add(work_ms, now)
        elif facts.warm is not None:
            engine.cold_prefill.add(prefill_ms, now)
            self._cold.setdefault(decision.request.pool, _Faded()).add(work_ms, now)
        if facts.prefix is not None:
            faded = engine.prefixes.pop(facts.prefix, None) or _Faded()
            if len(engine.prefixes) >= MAX_PREFIXES:
                del engine.prefixes[next(iter(engine.prefixes))]
            engine.prefixes[facts.prefix] = faded
            faded.add(work_ms, now)

    def cold_prefill(self, worker: WorkerId, now: float) -> float:
        """Of the worker's time, what the prefill of cold requests has taken."""
        engine = self._engines.get(worker)
        return 0.0 if engine is None else engine.cold_prefill.at(now) / _SPAN_MS

    def warm(self, worker: WorkerId, now: float) -> float:
        """Of the worker's time, what warm requests have taken."""
        engine = self._engines.get(worker)
        return 0.0 if engine is None else engine.warm.at(now) / _SPAN_MS

    def prefix(self, worker: WorkerId, prefix: int | None, now: float) -> float:
        """Of the worker's time, what requests with this prefix have taken."""
        engine = self._engines.get(worker)
        faded = None if engine is None or prefix is None else engine.prefixes.get(prefix)
        return 0.0 if faded is None else faded.at(now) / _SPAN_MS

    def of(self, worker: WorkerId, kind: ShareFacts, now: float, *, cold_only: bool) -> ShareFacts:
        """All three for a request of this kind, in one look."""
        engine = self._engines.get(worker)
        if engine is None:
            return ShareFacts(kind.warm, kind.prefix, 0.0, 0.0, 0.0, kind.cold_demand, cold_only)
        warm, prefix = kind.warm, kind.prefix
        faded = None if prefix is None else engine.prefixes.get(prefix)
        return tuple.__new__(
            ShareFacts,
            (
                warm,
                prefix,
                0.0 if faded is None else faded.at(now) / _SPAN_MS,
                engine.warm.at(now) / _SPAN_MS,
                engine.cold_prefill.at(now) / _SPAN_MS,
                kind.cold_demand,
                cold_only,
            ),
        )

    def cold(self, pool: str, now: float) -> float:
        """Time that cold requests of a pool have taken, in engines."""
        faded = self._cold.get(pool)
        return 0.0 if faded is None else faded.at(now) / _SPAN_MS

    def utilization(self, worker: WorkerId, now: float) -> float:
        """Share of the worker's time that requests have taken, 0 to 1."""
        engine = self._engines.get(worker)
        if engine is None:
            return 0.0
        since = now - engine.began
        span_ms = _SPAN_MS
        if since < _LONG_S:
            span_ms *= 1.0 - math.exp(-max(_SHORTEST_S, since) / MEMORY_S)
        return min(1.0, engine.work.at(now) / span_ms)

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone."""
        self._engines.pop(worker, None)


def work_of(candidate: Candidate) -> float:
    """What a request would add to the time the candidate's engine needs."""
    if candidate.priced is None:
        return candidate.cost.prefill_ms
    request, step = candidate.priced.request, candidate.priced.worker.step
    context = request.prompt_tokens + request.expected_output / 2
    per_token = step.per_sequence_ms + step.per_1k_context_ms * context / 1000.0
    return candidate.cost.prefill_ms + request.sequences * request.expected_output * per_token


def kind_of(
    prompt_tokens: int,
    held: Mapping[WorkerId, int],
    sizes: Mapping[WorkerId, int],
    chains: Mapping[int, Sequence[Sequence[int]]],
    cold_demand: float = 0.0,
) -> ShareFacts:
    """What is the same for all workers: whether the request is warm, and what its prefix is.

    Args:
        prompt_tokens: of all prompts.
        held: tokens of them that each worker holds, in any tier.
        sizes: tokens per block, by worker.
        chains: block hashes of each prompt, by block size; empty: not known, routed by load.
        cold_demand: time that cold requests take, mean of the workers.
    """
    if not chains:
        return ShareFacts(cold_demand=cold_demand)
    longest = max(held, key=held.__getitem__) if held else None
    if longest is None or held[longest] < WARM_PART * prompt_tokens:
        return ShareFacts(warm=False, cold_demand=cold_demand)
    prompts = chains.get(sizes[longest], ())
    # A batch is several prefixes: it counts as warm, and as none of them.
    one = prompts[0] if len(prompts) == 1 else ()
    last = held[longest] // sizes[longest] - 1
    prefix = one[last] if 0 <= last < len(one) else None
    return ShareFacts(warm=True, prefix=prefix, cold_demand=cold_demand)
