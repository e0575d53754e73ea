"""`round-robin`: the control."""

from collections.abc import Sequence
from random import Random

from extproc.core.cost import CostSettings
from extproc.core.policies.base import Policy
from extproc.core.types import Candidate, PolicyInputs, Reason, RoutingRequest


class RoundRobin(Policy):
    """Each request goes to the next worker.

    Formula: the candidate at position `turn mod workers` goes first, the others follow as on a ring.
    Inputs: membership order, and `turn`, which counts the policy's requests from 0. Defaults: none.
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

    def inputs(self, request: RoutingRequest) -> PolicyInputs:
        """`turn`, as the last request found it."""
        del request
        return (("turn", self._next - 1),)
