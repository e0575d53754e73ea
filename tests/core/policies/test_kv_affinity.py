from random import Random

from extproc.core.cost import CostSettings
from extproc.core.policies import KvAffinity
from extproc.core.types import CostBreakdown, Reason
from tests.support.core import candidate, request, worker

ASK = request(range(200))


def order(*candidates, seed=1):
    ordered, reason = KvAffinity(CostSettings()).order(ASK, candidates, Random(seed))
    return [c.worker for c in ordered], reason


def test_the_longest_hit_wins_whatever_it_costs():
    dear = candidate(0, cached=160, uncovered=40, active=50, cost=CostBreakdown(1e6, 40.0, 0.0, 0.0))
    ordered, reason = order(candidate(1, cached=16, uncovered=184), dear, candidate(2))
    assert ordered == [worker(0), worker(1), worker(2)]
    assert reason is Reason.WARM_PARTIAL


def test_without_hits_chance_decides():
    firsts = {order(candidate(0), candidate(1), candidate(2), seed=seed)[0][0] for seed in range(30)}
    assert len(firsts) == 3
