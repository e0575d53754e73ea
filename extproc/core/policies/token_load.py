"""`token-load`: the default. The cheapest worker, in predicted milliseconds."""

from collections.abc import Sequence
from random import Random

from extproc.core.policies.base import Policy, warmth
from extproc.core.types import Candidate, Reason, RoutingRequest

_TIE_SHARE = 0.02


class TokenLoad(Policy):
    """The lowest total of queue, uncovered prefill, decode impact and KV risk goes first.

    Formula: order by `CostBreakdown.total_ms` (see `extproc.core.cost`). Candidates whose total lies
    within `max(tie_ms, 2 %)` of the best are equally good; among them the longest predicted hit goes
    first, then fewest active requests, then chance.
    Inputs: the four cost terms. Defaults: `tie_ms` 1.
    """

    name = "token-load"

    def order(
        self, request: RoutingRequest, candidates: Sequence[Candidate], rng: Random
    ) -> tuple[list[Candidate], Reason]:
        """See the class."""
        ordered = rng.sample(list(candidates), len(candidates))
        ordered.sort(key=lambda c: c.cost.total_ms)
        best = ordered[0].cost.total_ms
        limit = best + max(self._settings.tie_ms, _TIE_SHARE * best)
        equal = sum(1 for c in ordered if c.cost.total_ms <= limit)
        if equal > 1:
            ordered[:equal] = sorted(
                ordered[:equal], key=lambda c: (-c.cached_tokens - c.offloaded_tokens, c.active)
            )
        return ordered, warmth(request, ordered[0])
