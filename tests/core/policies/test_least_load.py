from random import Random

from extproc.core.cost import CostSettings
from extproc.core.policies import LeastLoad
from tests.support.core import candidate, request, worker


def test_least_queued_prefill_then_fewest_requests():
    candidates = [
        candidate(0, queued=50.0, active=1),
        candidate(1, queued=0.0, active=3),
        candidate(2, queued=0.0, active=2),
    ]
    ordered, _ = LeastLoad(CostSettings()).order(request(), candidates, Random(0))
    assert [c.worker for c in ordered] == [worker(2), worker(1), worker(0)]


def test_pitfall_55_all_equal_does_not_mean_the_first():
    candidates = [candidate(n) for n in range(3)]
    firsts = {
        LeastLoad(CostSettings()).order(request(), candidates, Random(seed))[0][0].worker
        for seed in range(30)
    }
    assert len(firsts) == 3
