"""`token-load`: the default. The cheapest worker, in predicted milliseconds."""

from collections.abc import Sequence
from random import Random

from extproc.core.cost import TIE_SHARE
from extproc.core.policies.base import Needs, Policy, warmth
from extproc.core.share_bounds import bounded
from extproc.core.types import Candidate, Reason, RoutingRequest


class TokenLoad(Policy):
    """The lowest total of queue, uncovered prefill, decode impact and KV risk goes first.

    Formula: order by `CostBreakdown.total_ms` (see `extproc.core.cost`). Candidates whose total lies
    within `max(tie_ms, 2 %)` of the best are equally good; among them the longest predicted hit goes
    first, then fewest active requests, then chance.

    Warmth is bounded: a warm worker is denied when the first token there is predicted to come more than
    `max_extra_ttft_ms` after that on the best cold worker, or when its queue is longer than
    `max_warm_wait_ms` and a cold worker would answer sooner. The best of the others is taken then. Requests
    expected to generate `long_output_tokens` or more may have bounds of their own.

    Workers are kept for others by `extproc.core.share_bounds`: those of a cold pool for cold requests, part
    of each for what is not of one hot prefix; and cold requests do not queue for others' sake. Who is denied
    by it comes last.

    Inputs: the four cost terms, and shares of the workers' time. Defaults: `tie_ms` 1, `max_extra_ttft_ms`
    20,000, `max_warm_wait_ms` 60,000, the same for long generations (`long_output_tokens` 512): a safety net,
    for bounds tighter than a few prefills make an overloaded fleet copy prefixes instead of serving them;
    `cold_share` 0.5, `max_cold_slowdown` 1.25, `max_prefix_share` 0.5.
    """

    name = "token-load"
    needs = Needs.SHORTLIST

    def order(
        self, request: RoutingRequest, candidates: Sequence[Candidate], rng: Random
    ) -> tuple[list[Candidate], Reason]:
        """See the class."""
        ordered = rng.sample(list(candidates), len(candidates))
        ordered.sort(key=lambda c: c.cost.total_ms)
        best = ordered[0].cost.total_ms
        limit = best + max(self._settings.tie_ms, TIE_SHARE * best)
        equal = sum(1 for c in ordered if c.cost.total_ms <= limit)
        if equal > 1:
            ordered[:equal] = sorted(
                ordered[:equal], key=lambda c: (-c.cached_tokens - c.offloaded_tokens, c.active)
            )
        return bounded(*self._bounded(request, ordered), self._settings)

    def _bounded(self, request: RoutingRequest, ordered: list[Candidate]) -> tuple[list[Candidate], Reason]:
        """`ordered` with warm candidates that are not worth their wait behind all others."""
        colds = [c.cost.ttft_ms for c in ordered if not _is_warm(c)]
        if not colds or not _is_warm(ordered[0]):
            return ordered, warmth(request, ordered[0])
        cold = min(colds)
        priced = ordered[0].priced
        length = 0.0 if priced is None else priced.request.expected_output
        max_extra_ttft_ms, max_warm_wait_ms = self._settings.warm_bounds(length)

        def denied(c: Candidate) -> bool:
            if not _is_warm(c):
                return False
            extra = c.cost.ttft_ms - cold
            return extra > max_extra_ttft_ms or (extra > 0.0 and c.cost.queue_ms > max_warm_wait_ms)

        if not denied(ordered[0]):
            return ordered, warmth(request, ordered[0])
        ordered = [c for c in ordered if not denied(c)] + [c for c in ordered if denied(c)]
        return ordered, Reason.WARM_DENIED_WAIT


def _is_warm(candidate: Candidate) -> bool:
    return candidate.cached_tokens + candidate.offloaded_tokens > 0
