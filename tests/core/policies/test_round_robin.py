from random import Random

from extproc.core.cost import CostSettings
from extproc.core.policies import RoundRobin
from extproc.core.types import Reason
from tests.support.core import candidate, request, worker


def test_each_request_goes_to_the_next_worker():
    policy = RoundRobin(CostSettings())
    candidates = [candidate(n) for n in range(3)]
    picks = [policy.order(request(), candidates, Random(0))[0][0].worker for _ in range(6)]
    assert picks == [worker(n) for n in (0, 1, 2, 0, 1, 2)]


def test_it_survives_a_shrinking_fleet_and_names_its_reason():
    policy = RoundRobin(CostSettings())
    for count in (3, 2, 1, 3):
        ordered, reason = policy.order(request(), [candidate(n) for n in range(count)], Random(0))
        assert len(ordered) == count
        assert reason is Reason.ROUND_ROBIN
