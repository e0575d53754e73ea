"""Which candidate a request gets, by the policy that acts, the bounds of its tenant and the last word.

Others look on. Each sees the same candidates and the same chance, so what differs is the policy alone; and
none of them affects the request, whatever it does.
"""

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import NamedTuple, TypeAlias

from extproc.core.policies.base import Needs, Policy
from extproc.core.rollout import Mode
from extproc.core.tenant_shares import NOBODY, LeftOut, TenantShares
from extproc.core.types import Candidate, PolicyInputs, Reason, RoutingRequest, ShadowChoice

_TIE_BITS = 32

LastWord: TypeAlias = Callable[[list[Candidate], Reason], list[Candidate]]
"""Given the order that was found and why its first is first, the order to go by: all of them, each once."""


def as_ordered(ordered: list[Candidate], reason: Reason) -> list[Candidate]:
    """The order that was found."""
    del reason
    return ordered


class Choice(NamedTuple):
    """The candidates in the order to go by, and all it takes to find that order again.

    Attributes:
        ordered: all candidates, the best first.
        reason: why the first is first.
        policy: name of the policy that acted.
        tie_seed: the chance it was given.
        inputs: its own state, as far as it was used.
        shadow: what the others would have chosen.
    """

    ordered: list[Candidate]
    reason: Reason
    policy: str
    tie_seed: int
    inputs: PolicyInputs
    shadow: tuple[ShadowChoice, ...]


class Chooser:
    """All policies.

    Args:
        policy: acts, unless a request names another.
        others: policies a request may ask for by name.
        shadow: policies that are asked as well.
        rng: the only randomness, for ties.
        tenant_shares: where a tenant's cold requests may go; only read.
        last_word: may change the order that was found.
    """

    def __init__(
        self,
        policy: Policy,
        rng: Random,
        *,
        others: Iterable[Policy] = (),
        shadow: Iterable[Policy] = (),
        tenant_shares: TenantShares,
        last_word: LastWord = as_ordered,
    ) -> None:
        self.policy = policy
        self._others = {other.name: other for other in others}
        self._shadow = tuple(shadow)
        self._rng = rng
        self._ties = Random(0)  # noqa: S311 - breaks ties, guards nothing
        self._tenant_shares = tenant_shares
        self._last_word = last_word

    def draw(self) -> int:
        """The chance of the next choice."""
        return self._rng.getrandbits(_TIE_BITS)

    def takes_shortlist(self, request: RoutingRequest) -> bool:
        """Whether all policies that are asked about a request are content with a shortlist.

        Where the gateway chooses, every worker is priced: it may be any of them.
        """
        asked = (self._acting(request), *self._shadow, *self._onlooker(request))
        return request.mode is not Mode.OBSERVE and all(one.needs is Needs.SHORTLIST for one in asked)

    def choose(
        self,
        request: RoutingRequest,
        candidates: Sequence[Candidate],
        tie_seed: int,
        left_out: LeftOut = NOBODY,
    ) -> Choice:
        """Order `candidates`, of which there is at least one. A policy nobody knows by name is ours.

        Args:
            request: what they are candidates for.
            candidates: all workers that may serve it, or a shortlist.
            tie_seed: what was drawn for this choice.
            left_out: who is not on the shortlist.
        """
        policy = self._acting(request)
        ordered, reason = policy.order(request, candidates, self._chance(tie_seed))
        ordered, reason = self._tenant_shares.bounded(request, ordered, reason, left_out)
        ordered = self._last_word(ordered, reason)
        shadow = self._shadows(request, candidates, tie_seed)
        return Choice(ordered, reason, policy.name, tie_seed, policy.inputs(request), shadow)

    def _acting(self, request: RoutingRequest) -> Policy:
        return self.policy if request.policy is None else self._others.get(request.policy, self.policy)

    def _onlooker(self, request: RoutingRequest) -> tuple[Policy, ...]:
        """Ours, where a rollout lets another one act."""
        looks_on = request.mode is Mode.SHADOW and self._acting(request) is not self.policy
        return (self.policy,) if looks_on else ()

    def _shadows(
        self, request: RoutingRequest, candidates: Sequence[Candidate], tie_seed: int
    ) -> tuple[ShadowChoice, ...]:
        """What others would choose: those configured, and ours where a rollout lets another one act."""
        choices = []
        for policy in (*self._shadow, *self._onlooker(request)):
            try:
                ordered, reason = policy.order(request, candidates, self._chance(tie_seed))
                choices.append(ShadowChoice(policy.name, ordered[0], reason, policy.inputs(request)))
            except Exception:  # noqa: S112 - a shadow never affects the request, whatever it does
                continue
        return tuple(choices)

    def _chance(self, seed: int) -> Random:
        """The chance of one decision: it can be had again. The same generator each time, begun anew."""
        self._ties.seed(seed)
        return self._ties
