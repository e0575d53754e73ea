"""`kv-affinity`: always follow the cache. The naive baseline."""

from collections.abc import Sequence
from random import Random

from extproc.core.policies.base import Policy, warmth
from extproc.core.types import Candidate, Reason, RoutingRequest


class KvAffinity(Policy):
    """The longest predicted hit goes first, whatever else is going on there.

    Formula: order by cached + offloaded tokens, descending; ties at random.
    Inputs: predicted hits. Defaults: none. It herds: everything that shares a prefix goes to one worker.
    """

    name = "kv-affinity"

    def order(
        self, request: RoutingRequest, candidates: Sequence[Candidate], rng: Random
    ) -> tuple[list[Candidate], Reason]:
        """See the class."""
        shuffled = rng.sample(list(candidates), len(candidates))
        shuffled.sort(key=lambda c: -(c.cached_tokens + c.offloaded_tokens))
        return shuffled, warmth(request, shuffled[0])
