"""`prefix-affinity`: follow the prefix while its worker's load is within bounds."""

import math
from collections.abc import Sequence
from random import Random

from extproc.core.policies.base import Policy, warmth
from extproc.core.types import Candidate, Reason, RoutingRequest

LOAD_BOUND = 1.25


class PrefixAffinity(Policy):
    """The longest predicted hit goes first, among workers that do not have too many of our requests.

    Formula: workers with fewer than `ceil(1.25 * (active + 1) / workers)` active requests first, ordered by
    cached + offloaded tokens (descending), then by active requests, then by chance; the others follow in the
    same order.
    Inputs: predicted hits, which need no KV events (see `extproc.core.assumed_cache`), and active requests.
    Defaults: bound 1.25.
    """

    name = "prefix-affinity"

    def order(
        self, request: RoutingRequest, candidates: Sequence[Candidate], rng: Random
    ) -> tuple[list[Candidate], Reason]:
        """See the class."""
        bound = math.ceil(LOAD_BOUND * (sum(c.active for c in candidates) + 1) / len(candidates))
        ordered = rng.sample(list(candidates), len(candidates))
        ordered.sort(key=lambda c: (c.active >= bound, -(c.cached_tokens + c.offloaded_tokens), c.active))
        return ordered, warmth(request, ordered[0])
