"""Bounds that keep workers for others: the cold pool, a prefix's share of a worker, and the cold share.

Applied by a policy to the order it has made. Nothing is refused: a worker that is denied comes last.

**Cold pool.** A worker of the cold pool serves cold requests only. A warm request goes there only if nobody
else is ready; a cold one may go to any worker, and `cold-pool` says that it went there.

**Cold requests do not starve.** The cheapest worker for a prompt that has to be computed is the one that has
the fewest sequences to delay. Beside a flood that is one and the same for all cold requests, and they would
queue there while the others prefill nothing. So a cold request goes to the cheapest worker among those with

    ttft_ms <= max_cold_slowdown * the lowest ttft_ms of all + COLD_SLACK_MS
    and cold_prefill < cold_share                                [time that is kept for it is left there]

unless there is none.

**Full.** For a warm request (see `extproc.core.engine_shares`) a worker is full when

    prefix_share >= max_prefix_share                             [its prefix has had enough of that worker]
    or warm_share >= 1 - min(cold_share, cold_demand)            [the rest of the time is for cold requests]

cold_demand being what cold requests have asked for lately, per worker: nothing is kept for what does not
come.

**Where else.** If the best worker is full, others are looked at that are not, and that are not busier than it
by more than what it takes to compute the prompt: `queue_ms <= the full one's queue_ms + the highest
prefill_ms of all`. Among them those that hold as much of the prefix as the full one, to half of it, go first,
then the cheapest: so while one copy of a prefix is on its way (it holds the prefix, and its queue is that
copy) no second one is made, and a worker that is busy with other things gets none. If there is nobody,
nothing is denied: moving a prefix to a worker that is no better off would only make the work more.

Defaults: `max_prefix_share` 0.5: because of one prefix, everything else on its worker takes at most twice as
long. `cold_share` 0.5, `max_cold_slowdown` 1.25, `COLD_SLACK_MS` 25.
"""

from collections.abc import Sequence

from extproc.core.cost import CostSettings
from extproc.core.types import Candidate, Reason

COLD_SLACK_MS = 25.0
_MOST = 0.5


def bounded(
    ordered: Sequence[Candidate], reason: Reason, settings: CostSettings
) -> tuple[list[Candidate], Reason]:
    """`ordered`, the best first, with those that may not take the request behind; and why the first is."""
    order = list(ordered)
    first = order[0]
    if not first.shares.warm:
        if first.shares.warm is not None:
            order = _soon(order, settings)
        cold = order[0].shares.cold_only and first.shares.warm is not None
        return order, Reason.COLD_POOL if cold else reason
    pool = [c for c in order if c.shares.cold_only]
    if len(pool) == len(order):
        return order, reason
    order = [c for c in order if not c.shares.cold_only]
    first = order[0]
    others = _elsewhere(first, order, settings) if is_full(first, settings) else []
    if not others:
        return order + pool, reason
    full = [c for c in order if is_full(c, settings)]
    rest = [c for c in order if c not in others and c not in full]
    return [*others, *rest, *full, *pool], Reason.WARM_DENIED_SHARE


def is_full(candidate: Candidate, settings: CostSettings) -> bool:
    """Whether a warm request may take no more of this worker."""
    facts = candidate.shares
    kept = min(settings.cold_share, facts.cold_demand)
    had_enough = settings.max_prefix_share < 1.0 and facts.prefix_share >= settings.max_prefix_share
    return had_enough or (kept > 0.0 and facts.warm_share >= 1.0 - kept)


def _soon(order: list[Candidate], settings: CostSettings) -> list[Candidate]:
    """`order` of a cold request, with those behind that would make it wait for others' sake."""
    latest = settings.max_cold_slowdown * min(c.cost.ttft_ms for c in order) + COLD_SLACK_MS
    if order[0].cost.ttft_ms <= latest:
        return order
    # A stable sort: without anybody who is both, the order stays as it is.
    return sorted(
        order, key=lambda c: c.cost.ttft_ms > latest or c.shares.cold_prefill >= settings.cold_share
    )


def _elsewhere(first: Candidate, order: Sequence[Candidate], settings: CostSettings) -> list[Candidate]:
    """Workers that may take what `first` may not, the best first."""
    copy_ms = max(c.cost.prefill_ms for c in order)
    latest = first.cost.queue_ms + copy_ms
    able = [c for c in order if not is_full(c, settings) and c.cost.queue_ms <= latest]
    held = _MOST * _held(first)
    return sorted(able, key=lambda c: _held(c) <= 0 or _held(c) < held)


def _held(candidate: Candidate) -> int:
    return candidate.cached_tokens + candidate.offloaded_tokens
