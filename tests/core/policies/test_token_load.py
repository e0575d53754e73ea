from collections import Counter
from random import Random

from extproc.core.cost import CostSettings
from extproc.core.policies import TokenLoad
from extproc.core.types import CostBreakdown, Reason
from tests.support.core import candidate, request, worker

POLICY = TokenLoad(CostSettings())
ASK = request(range(200))


def cost(total):
    return CostBreakdown(0.0, total, 0.0, 0.0)


def order(*candidates, seed=1):
    ordered, reason = POLICY.order(ASK, candidates, Random(seed))
    return [c.worker for c in ordered], reason


def test_the_cheapest_goes_first_and_all_are_ordered():
    ordered, _ = order(
        candidate(0, cost=cost(300.0)), candidate(1, cost=cost(100.0)), candidate(2, cost=cost(200.0))
    )
    assert ordered == [worker(1), worker(2), worker(0)]


def test_equal_candidates_are_chosen_by_chance_not_by_position():
    counts = Counter(
        POLICY.order(ASK, [candidate(n) for n in range(4)], Random(seed))[0][0].worker for seed in range(400)
    )
    assert set(counts) == {worker(n) for n in range(4)}
    assert max(counts.values()) < 150


def test_among_nearly_equal_ones_the_longer_hit_wins():
    warm = candidate(0, cached=160, uncovered=40, cost=cost(100.5))
    for seed in range(10):
        ordered, _ = order(candidate(1, cost=cost(100.0)), warm, seed=seed)
        assert ordered[0] == worker(0)


def test_reasons():
    assert order(candidate(0, cached=192, uncovered=8))[1] is Reason.WARM_EXACT
    assert order(candidate(0, cached=64, uncovered=136))[1] is Reason.WARM_PARTIAL
    assert order(candidate(0))[1] is Reason.COLD_IDLE
    assert order(candidate(0, active=2))[1] is Reason.COLD_BUSY
    assert POLICY.order(request(), [candidate(0)], Random(0))[1] is Reason.LOAD_ONLY


def test_the_same_seed_gives_the_same_order():
    candidates = [candidate(n) for n in range(8)]
    assert order(*candidates, seed=5) == order(*candidates, seed=5)
