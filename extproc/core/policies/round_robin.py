"""`round-robin`: the control."""

from collections.abc import Sequence
from random import Random

from extproc.core.cost import CostSettings
from extproc.core.policies.base import Policy
from extproc.core.types import Candidate, Reason, RoutingRequest


class RoundRobin(Policy):
    """Each request goes to the next worker.

    Formula: candidates rotated by a counter. Inputs: membership order only. Defaults: none.
    """

    name = "round-robin"

    def __init__(self, settings: CostSettings) -> None:
        super().__init__(settings)
        self._next = 0

    def order(
        self, request: RoutingRequest, candidates: Sequence[Candidate], rng: Random
    ) -> tuple[list[Candidate], Reason]:
        """See the class."""
        del request, rng
        start = self._next % len(candidates)
        self._next += 1
        return [*candidates[start:], *candidates[:start]], Reason.ROUND_ROBIN
