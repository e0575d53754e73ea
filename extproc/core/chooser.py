"""Which candidate a request gets, by the policy that acts, the bounds of its tenant and the last word.

Others look on. Each sees the same candidates and the same chance, so what differs is the policy alone; and
none of them affects the request, whatever it does.
"""

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import NamedTuple, TypeAlias

from extproc.core.policies.base import Policy
from extproc.core.rollout import Mode
from extproc.core.tenant_shares import TenantShares
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
        self._tenant_shares = tenant_shares
        self._last_word = last_word

    def choose(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Choice:
        """Order `candidates`, of which there is at least one. A policy nobody knows by name is ours."""
        policy = self.policy if request.policy is None else self._others.get(request.policy, self.policy)
        tie_seed = self._rng.getrandbits(_TIE_BITS)
        ordered, reason = policy.order(request, candidates, _chance(tie_seed))
        ordered, reason = self._tenant_shares.bounded(request, ordered, reason)
        ordered = self._last_word(ordered, reason)
        shadow = self._shadows(request, candidates, tie_seed, policy)
        return Choice(ordered, reason, policy.name, tie_seed, policy.inputs(request), shadow)

    def _shadows(
        self, request: RoutingRequest, candidates: Sequence[Candidate], tie_seed: int, acting: Policy
    ) -> tuple[ShadowChoice, ...]:
        """What others would choose: those configured, and ours where a rollout lets another one act."""
        choices = []
        ours = (self.policy,) if request.mode is Mode.SHADOW and acting is not self.policy else ()
        for policy in (*self._shadow, *ours):
            try:
                ordered, reason = policy.order(request, candidates, _chance(tie_seed))
                choices.append(ShadowChoice(policy.name, ordered[0], reason, policy.inputs(request)))
            except Exception:  # noqa: S112 - a shadow never affects the request, whatever it does
                continue
        return tuple(choices)


def _chance(seed: int) -> Random:
    """The chance of one decision: it can be had again."""
    return Random(seed)  # noqa: S311 - breaks ties, guards nothing
