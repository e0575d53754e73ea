from random import Random

import pytest

from extproc.core.chooser import Chooser
from extproc.core.policies import POLICIES, KvAffinity, LeastLoad, Policy, RoundRobin
from extproc.core.rollout import Mode
from extproc.core.tenancy import EVERYTHING
from extproc.core.tenant_shares import TenantShares
from extproc.core.types import Reason
from tests.core.test_router import PROMPT, make_router
from tests.support.core import COSTS, candidate, request, stored, worker


class Broken(Policy):
    """Fails at every request."""

    name = "broken"

    def order(self, request, candidates, rng):
        raise ZeroDivisionError


def chooser_of(policy=LeastLoad, *, others=(), shadow=(), **fields):
    return Chooser(
        policy(COSTS),
        Random(3),
        others=[other(COSTS) for other in others],
        shadow=[one(COSTS) for one in shadow],
        tenant_shares=TenantShares(EVERYTHING),
        **fields,
    )


def choose(chooser, ask, candidates):
    return chooser.choose(ask, candidates, chooser.draw())


EQUAL = [candidate(n) for n in range(4)]


@pytest.mark.parametrize("policy", POLICIES.values())
def test_every_candidate_is_ordered_once(policy):
    choice = choose(chooser_of(policy), request(PROMPT), EQUAL)
    assert sorted(c.worker for c in choice.ordered) == [c.worker for c in EQUAL]
    assert choice.policy == policy.name


def test_ties_are_broken_by_chance_that_can_be_had_again():
    chooser = chooser_of()
    choices = [choose(chooser, request(), EQUAL) for _ in range(40)]
    assert {choice.ordered[0].worker for choice in choices} == {worker(n) for n in range(4)}
    for choice in choices:
        again, reason = LeastLoad(COSTS).order(request(), EQUAL, Random(choice.tie_seed))
        assert (again, reason) == (choice.ordered, choice.reason)


def test_the_last_word_changes_what_is_acted_on_and_not_what_shadows_say():
    heard = []

    def backwards(ordered, reason):
        heard.append((list(ordered), reason))
        return ordered[::-1]

    steered = chooser_of(shadow=(LeastLoad,), last_word=backwards)
    plain = choose(chooser_of(shadow=(LeastLoad,)), request(), EQUAL)
    choice = choose(steered, request(), EQUAL)
    assert heard == [(plain.ordered, plain.reason)]
    assert choice.ordered == plain.ordered[::-1]
    assert choice.shadow == plain.shadow
    assert choice.shadow[0].chosen == plain.ordered[0]


def test_where_another_policy_acts_in_shadow_mode_ours_looks_on():
    busy, idle = candidate(0, active=9), candidate(1)
    chooser = chooser_of(others=(RoundRobin,))
    ask = request(mode=Mode.SHADOW, policy="round-robin")
    for _ in range(2):
        (ours,) = choose(chooser, ask, [busy, idle]).shadow
        assert (ours.policy, ours.chosen) == ("least-load", idle)
    assert choose(chooser, request(mode=Mode.SHADOW), [busy, idle]).shadow == ()
    assert choose(chooser, request(policy="round-robin"), [busy, idle]).shadow == ()


def test_a_policy_that_fails_is_heard_of_only_where_it_acts():
    choice = choose(chooser_of(shadow=(Broken,)), request(), EQUAL)
    assert choice.shadow == ()
    assert choice.reason is Reason.LOAD_ONLY
    with pytest.raises(ZeroDivisionError):
        choose(chooser_of(Broken), request(), EQUAL)


def test_a_shadow_is_recorded_and_never_acted_on():
    def run(**fields):
        router = make_router(3, **fields)
        router.on_kv_events(worker(1), [stored(PROMPT)], 0.0)
        return [router.schedule(request(PROMPT, request_id=str(n)), 1.0 + n) for n in range(30)]

    alone, watched = run(), run(shadow=(KvAffinity, Broken, RoundRobin))
    assert [d.chosen.worker for d in alone] == [d.chosen.worker for d in watched]
    assert alone[0].shadow == ()
    assert [choice.policy for choice in watched[0].shadow] == ["kv-affinity", "round-robin"]
    assert all(d.shadow[0].chosen.worker == worker(1) for d in watched)
    assert len({d.shadow[1].chosen.worker for d in watched}) == 3


def test_a_request_may_ask_for_a_policy_where_that_is_allowed():
    router = make_router(2, others=(RoundRobin,))
    assert router.schedule(request(PROMPT, policy="round-robin"), 1.0).policy == "round-robin"
    assert router.schedule(request(PROMPT, policy="unheard-of"), 1.0).policy == "token-load"
    assert make_router(2).schedule(request(PROMPT, policy="round-robin"), 1.0).policy == "token-load"
