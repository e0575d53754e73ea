"""`least-load`: balance, blind to the cache."""

from collections.abc import Sequence
from random import Random

from extproc.core.policies.base import Policy, warmth
from extproc.core.types import Candidate, Reason, RoutingRequest


class LeastLoad(Policy):
    """The worker with the least work of ours goes first.

    Formula: order by (queued prefill tokens, active requests), ties at random.
    Inputs: the load ledger. Defaults: none.
    """

    name = "least-load"

    def order(
        self, request: RoutingRequest, candidates: Sequence[Candidate], rng: Random
    ) -> tuple[list[Candidate], Reason]:
        """See the class."""
        shuffled = rng.sample(list(candidates), len(candidates))
        shuffled.sort(key=lambda c: (c.queued_prefill_tokens, c.active))
        return shuffled, warmth(request, shuffled[0])
